"""Wrapper of embeddings: nn.Embedding and subclasses that look one id tensor up (Gemma's scaled ones among them)."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import RoutingError
from .base import LoraLayer
from .registry import register_layer
from .saved import refuse_compiled, run_with, select


@register_layer(nn.Embedding)
class LoraEmbedding(LoraLayer):
    """y = base(ids) + s * A^T[ids] B^T, with A and B of each row's adapter.

    Args:
        ids: `[rows, tokens]`; `[1, tokens]` (position ids that all rows share) gives every row a copy of its own.

    Returns:
        `[rows, tokens, width]`.
    """

    kind = "embedding"
    extra = 0  # ids beyond the base's table that adapters may own

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
        known = ids if not self.extra else torch.where(ids < self.num_embeddings, ids, 0)
        y = self.base_layer.forward(known)
        routing = self._routing
        if routing.state is None:
            return y
        state = self._state()
        touched = torch.compiler.is_compiling() or not self._sites.isdisjoint(state.touched)  # type: ignore[union-attr]
        if not touched and self._path not in state.saved:  # type: ignore[union-attr]
            return y
        if ids.dim() != 2:
            if not routing.uniform:
                raise RoutingError(f"{self._path}: ids of shape {tuple(ids.shape)} cannot be mapped to rows.")
        elif ids.shape[0] == 1 and not routing.uniform:
            ids, known = (t.expand(routing.rows, -1).contiguous() for t in (ids, known))
            y = y.expand(routing.rows, -1, -1).contiguous()
        return self._replaced(self._delta(y, known, False), ids)

    def _tokens(self, x: torch.Tensor, rows: int) -> int:
        return x.numel() // rows

    def _replaced(self, y: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """`y` with the rows of adapters that saved the table, or some of its rows, looked up in their own."""
        state = self._state()
        if state is None or self._path not in state.saved:
            return y
        refuse_compiled(self._path)
        if ids.shape[0] != state.rows:
            state = state.for_shape(ids.shape, False, self._path)
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
