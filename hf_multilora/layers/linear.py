"""Wrapper of linear layers: nn.Linear, its subclasses, transformers' Conv1D."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from ..routing import RowState
from .base import LoraLayer
from .registry import register_layer
from .saved import run_with, select, widened


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
        return self._adapted(y, x, x.dim() == 2)

    def _run(self, y: torch.Tensor, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return self._op((y,), x, *args)[0]

    def _changed(self, y: torch.Tensor, x: torch.Tensor, flat: bool, state: RowState) -> torch.Tensor:
        return self._replaced(self._delta(y, x, flat, state), x, flat, state)

    def _replaced(self, y: torch.Tensor, x: torch.Tensor, flat: bool, state: RowState) -> torch.Tensor:
        """`y` with the rows of adapters that saved this layer, or some of its rows, computed with their own."""
        if self._path not in state.saved:
            return y
        state = self._fitted(state, x.shape, flat)
        for saved in state.saved[self._path]:
            own = run_with(self.base_layer, saved, (x,), {}) if saved.parameters else y
            if saved.tokens is not None:
                ids, rows = saved.tokens
                bias: Any = getattr(self.base_layer, "bias", None)
                columns = F.linear(x, rows.to(x.dtype), None if bias is None else bias[ids].to(x.dtype))
                own = own.index_copy(-1, ids, columns.to(own.dtype))
            y = select(state, saved.slot, own, y)
        return y


class LoraHead(LoraLinear):
    """An output embedding whose logits have room for adapters' own tokens: `extra` columns more than the base's.

    Columns that are not in a row's vocabulary are -inf.
    """

    extra = 0

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = self.base_layer.forward(x, *args, **kwargs)
        if self._routing.state is None:
            return widened(y, y.shape[-1] + self.extra)
        return widened(self._adapted(y, x, x.dim() == 2), int(self.base_layer.out_features) + self.extra)  # type: ignore[arg-type]

    def _changed(self, y: torch.Tensor, x: torch.Tensor, flat: bool, state: RowState) -> torch.Tensor:
        y = widened(self._delta(y, x, flat, state), y.shape[-1] + self.extra)
        return self._replaced(y, x, flat, state)
