"""Wrapper of embeddings: nn.Embedding and subclasses that look one id tensor up (Gemma's scaled ones among them)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import RoutingError
from ..rows import RowState
from .base import LoraLayer
from .registry import register_layer
from .saved import run_with, select


@register_layer(nn.Embedding)
class LoraEmbedding(LoraLayer):
    """y = base(ids) + s * A^T[ids] B^T, with A and B of each row's adapter.

    Args:
        ids: `[rows, tokens]`; `[1, tokens]` (position ids that all rows share) gives every row a copy of its own.

    Returns:
        `[rows, tokens, width]`.
    """

    kind = "embedding"
    _rare = True
    extra = 0  # ids beyond the base's table that adapters may own
    positions = True  # whether it may be asked once for positions that all rows share; a table of tokens is not

    @classmethod
    def dimensions(cls, base: nn.Module) -> tuple[int, int]:
        return int(base.num_embeddings), int(base.embedding_dim)  # type: ignore[arg-type]

    @classmethod
    def output_scale(cls, base: nn.Module) -> float:
        scale = getattr(base, "embed_scale", None)
        if scale is None:
            return cls.scale
        if not isinstance(scale, torch.Tensor):
            return cls.scale * float(scale)
        # Gemma casts its scale to the weight's dtype before it multiplies; the adapter's part is scaled alike.
        return cls.scale * float(scale.to(base.weight.dtype))  # type: ignore[arg-type]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        known = self._known(ids)
        y = self.base_layer.forward(known)
        if self._routing.state is None:
            return y
        routing = self._routing
        if (
            torch.compiler.is_dynamo_compiling()
            and self.positions
            and routing.serving(self._path)
            and routing.rare
            and not routing.uniform
        ):
            y, ids = self._spread(y, ids, routing.rows)
        return self._adapted(y, ids, False)

    def _changed(self, y: torch.Tensor, ids: torch.Tensor, flat: bool, state: RowState) -> torch.Tensor:
        if self._sites.isdisjoint(state.touched) and self._path not in state.saved:
            return y
        if not (state.same or state.packed) and ids.dim() != 2:
            raise RoutingError(f"{self._path}: ids of shape {tuple(ids.shape)} cannot be mapped to rows.")
        if self.positions and not (state.same or state.packed):
            y, ids = self._spread(y, ids, state.rows)
        known = self._known(ids)
        return self._replaced(self._delta(y, known, False, state), ids, state)

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids that the base's table has; adapters' own tokens are looked up in theirs."""
        size: Any = self.num_embeddings
        return torch.where(ids < size, ids, 0) if self.extra else ids

    @staticmethod
    def _spread(y: torch.Tensor, ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give every row its own copy of positions `[1, tokens]` that all rows share."""
        if ids.dim() != 2 or ids.shape[0] != 1 or rows == 1:
            return y, ids
        return y.expand(rows, -1, -1).contiguous(), ids.expand(rows, -1).contiguous()

    def _tokens(self, x: torch.Tensor, rows: int) -> int:
        return x.numel() // rows

    def _replaced(self, y: torch.Tensor, ids: torch.Tensor, state: RowState) -> torch.Tensor:
        """`y` with the rows of adapters that saved the table, or some of its rows, looked up in their own."""
        if self._path not in state.saved:
            return y
        state = self._fitted(state, ids.shape, False)
        for saved in state.saved[self._path]:
            own = y
            if saved.parameters:
                table = saved.parameters["weight"]
                # Ids of other rows may lie beyond this table; what they find here is not selected.
                own = run_with(self.base_layer, saved, (ids.clamp(max=table.shape[0] - 1),), {})
            if saved.tokens is not None:
                chosen, vectors = saved.tokens
                match = ids[..., None] == chosen
                scale = self.output_scale(self.base_layer)
                found = vectors[match.int().argmax(-1)].to(own.dtype)
                own = torch.where(match.any(-1, keepdim=True), found if scale == 1.0 else found * scale, own)
            y = select(state, saved.slot, own, y)
        return y
