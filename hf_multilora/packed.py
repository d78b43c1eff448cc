"""The tokens of a packed batch: `[1, tokens]`, requests one after the other (continuous batching).

Each token is a row of one token, so that wrappers and kernels need no more than a slot for each. The slots come in
buffers at fixed addresses, written before the forward: a captured one reads what lies there when it runs again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from .errors import RoutingError
from .rows import RowState, Saved


class PackedState(RowState):
    """Slots of the tokens of one packed batch.

    Args:
        tensor: int32, a row table `[1, size]` of the tokens on CUDA, else their slots `[tokens]`.
        tokens: their number, padding included.
        touched, saved, adapters: as for `RowState`.
        memo: what kernels keep, where it is still right from the last batch.
        kept: the same for the tokens whose logits are computed; None where these are all of them.
    """

    packed = True

    __slots__ = ("kept",)

    def __init__(
        self,
        tensor: torch.Tensor,
        tokens: int,
        touched: Collection[int],
        adapters: int,
        saved: Mapping[str, Sequence[Saved]] | None = None,
        kept: PackedState | None = None,
        memo: dict[Any, Any] | None = None,
    ) -> None:
        self.slots = ()
        self.adapters = adapters
        self.rows = tokens
        self.touched = touched
        self.uniform = self.same = False
        self.saved = saved or {}
        self.plain = not self.saved
        self.starts = None
        self.tokens = 0
        self.tensor = tensor
        self.memo = {} if memo is None else memo
        self.kept = kept
        self._streams = []
        self._filled = {}

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Whoever writes the buffers has ordered the stream of the forward behind that."""

    def for_layer(self, behind: bool) -> RowState:
        return self.kept if behind and self.kept is not None else self

    def for_shape(self, shape: torch.Size, flat: bool, tokens: int, where: str) -> RowState:
        """This state, where a dimension counts its tokens.

        Raises:
            RoutingError: none does.
        """
        if self.places(shape):
            return self
        raise RoutingError(
            f"{where}: an input of shape {tuple(shape)} does not show which of the {self.rows} packed tokens it "
            "belongs to. Adapters on this layer are served by generate() only."
        )

    def places(self, shape: torch.Size) -> list[int]:
        """Dimensions that may count tokens: `[1, tokens, ...]`, `[tokens, ...]`, `[1, heads, tokens, width]`."""
        if shape[0] != 1:
            return [0] if shape[0] == self.rows else []
        last = 2 if len(shape) == 4 else 1  # heads come first in some models
        return [d for d in range(1, min(last + 1, len(shape))) if shape[d] == self.rows]
