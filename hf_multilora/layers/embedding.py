"""Wrapper of embeddings: nn.Embedding and subclasses that look one id tensor up (Gemma's scaled ones among them)."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import RoutingError
from ..routing import Unrouted
from .base import LoraLayer
from .registry import register_layer


@register_layer(nn.Embedding)
class LoraEmbedding(LoraLayer):
    """y = base(ids) + s * A^T[ids] B^T, with A and B of each row's adapter.

    Args:
        ids: `[rows, tokens]`; `[1, tokens]` (position ids that all rows share) gives every row a copy of its own.

    Returns:
        `[rows, tokens, width]`.
    """

    kind = "embedding"

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
        y = self.base_layer.forward(ids)
        routing = self._routing
        state = routing.state
        if state is None:
            return y
        if isinstance(state, Unrouted):
            raise state.error(self._path)
        if not torch.compiler.is_compiling() and self._sites.isdisjoint(state.touched):
            return y
        if ids.dim() != 2:
            if not routing.uniform:
                raise RoutingError(f"{self._path}: ids of shape {tuple(ids.shape)} cannot be mapped to rows.")
        elif ids.shape[0] == 1 and not routing.uniform:
            ids = ids.expand(routing.rows, -1).contiguous()
            y = y.expand(routing.rows, -1, -1).contiguous()
        return self._delta(y, ids, False)
