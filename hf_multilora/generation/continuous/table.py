"""Slots of the tokens of a batch, on their way to the device.

transformers copies one int32 tensor of small inputs to the device before each forward, from buffers and to buffers at
fixed addresses (two of each in asynchronous batching). Some of its lines are reserved for the values of logits
processors. The slots travel in further lines of that part: the tokens' first, then those of the tokens with logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...kernels.segments import row_table_array, table_size

_ALIGN = 32


class Lanes(NamedTuple):
    """Where the two maps lie in the reserved lines, in int32 elements.

    Attributes:
        tokens, kept: how many tokens each map is for, padding included.
        adapters: number of slots where the maps are row tables (CUDA), None where they are slots alone.
    """

    tokens: int
    kept: int
    adapters: int | None

    def _size(self, count: int) -> int:
        return count if self.adapters is None else table_size(count, self.adapters)

    @property
    def second(self) -> int:
        return -(-self._size(self.tokens) // _ALIGN) * _ALIGN

    @property
    def size(self) -> int:
        return self.second + self._size(self.kept)

    def lines(self) -> int:
        """Lines of at least `tokens` elements that have room for both maps."""
        return -(-self.size // self.tokens)

    def write(self, slots: np.ndarray[Any, Any], kept: np.ndarray[Any, Any], lines: torch.Tensor) -> None:
        """Write the slots of the tokens, and of those with logits, into the reserved lines `[lines, columns]`."""
        flat = np.empty(self.size, dtype=np.int32)
        for start, part in ((0, slots), (self.second, kept)):
            values = part if self.adapters is None else row_table_array(part, self.adapters)
            flat[start : start + len(values)] = values
        flat[self._size(self.tokens) : self.second] = -1
        lines.reshape(-1)[: self.size].copy_(torch.from_numpy(flat))

    def views(self, lines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both maps, as `RowState.tensor`, in lines of which a forward was given the first columns `[lines, n]`."""
        parts = []
        for start, count in ((0, self.tokens), (self.second, self.kept)):
            size, offset = self._size(count), lines.storage_offset() + start
            shape = (size,) if self.adapters is None else (1, size)
            parts.append(lines.as_strided(shape, (1,) * len(shape), offset))
        return parts[0], parts[1]


def slots_of(rows: Sequence[tuple[int, int, int]], lanes: Lanes) -> np.ndarray[Any, Any]:
    """Slots `[tokens]`, -1 for padding, from (slot, tokens before its adapter is active, tokens) of each request."""
    slots = np.full(lanes.tokens, -1, dtype=np.int32)
    at = 0
    for slot, before, count in rows:
        slots[at + before : at + count] = slot
        at += count
    return slots
