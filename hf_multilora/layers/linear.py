"""Wrapper of linear layers: nn.Linear, its subclasses, transformers' Conv1D."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .base import LoraLayer
from .registry import register_layer


@register_layer(nn.Linear, Conv1D)
class LoraLinear(LoraLayer):
    """y = base(x) + s * (x A^T) B^T, with A and B of each row's adapter.

    Args:
        x: `[rows, ..., in]`, or `[rows * k, in]` where the model flattens the batch row by row.

    Returns:
        `[..., out]`: bit-equal to the base layer's output for rows without an adapter.
    """

    kind = "linear"

    @classmethod
    def dimensions(cls, base: nn.Module) -> tuple[int, int]:
        if isinstance(base, Conv1D):
            return int(base.nx), int(base.nf)
        try:
            return int(base.in_features), int(base.out_features)  # type: ignore[arg-type]
        except AttributeError:
            raise ValueError(f"{type(base).__name__} has no in_features and out_features") from None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = self.base_layer.forward(x, *args, **kwargs)
        if self._routing.state is None:
            return y
        return self._delta(y, x, x.dim() == 2)
