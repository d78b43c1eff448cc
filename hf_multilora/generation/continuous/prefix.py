"""Whose prefix it is: what is mixed into the hash of cached blocks, so that equal tokens of two adapters differ.

transformers hashes each block of `page_size` tokens together with the hash of the block in front. The first block that
an adapter has had a part in is hashed over the adapter's identity as well, and with it all that follow. Blocks before
that (the base model's own, an aLoRA's before its invocation) are everybody's.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from typing import Any, SupportsIndex


class Seeded(list[int]):
    """Tokens whose block around `start`, when sliced off as a whole, begins with the identity of their adapter.

    Example:
        >>> tokens = Seeded([7, 8, 9, 10], (1, 2), start=2)
        >>> tokens[0:2], tokens[2:4], tokens[2:8], len(tokens)
        ([7, 8], [1, 2, 9, 10], [9, 10], 4)
    """

    def __init__(self, tokens: Sequence[int], identity: tuple[int, ...], start: int) -> None:
        super().__init__(tokens)
        self._identity, self._start = identity, start

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found: Any = super().__getitem__(index)
        if isinstance(index, slice) and index.stop is not None:
            first, stop = index.start or 0, index.stop
            if first <= self._start < stop and len(found) == stop - first:
                return [*self._identity, *found]
        return found


def identity_of(tag: Hashable) -> tuple[int, ...]:
    """int32 numbers that tell the weights of one tag (uid, generation), or of a mix, from all others of the process.

    Example:
        >>> identity_of((3, 5))
        (3, 5)
    """
    numbers: list[int] = []
    for part in tag if isinstance(tag, tuple) else (tag,):
        if isinstance(part, tuple):
            numbers += identity_of(part)
        elif isinstance(part, float):
            numbers += struct.unpack("=2i", struct.pack("=d", part))
        else:
            numbers.append(int(part))
    return tuple(numbers)
