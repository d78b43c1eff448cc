"""Wrapper of linear layers: nn.Linear, its subclasses, transformers' Conv1D."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from ..parallel import seam_of
from ..rows import RowState
from .base import LoraLayer
from .hooks import HOOKED, only_aligns
from .registry import register_layer
from .saved import run_with, select, widened
from .siblings import Group


@register_layer(nn.Linear, Conv1D)
class LoraLinear(LoraLayer):
    """y = base(x) + s * (x A^T) B^T, with A and B of each row's adapter.

    Args:
        x: `[rows, ..., in]`, or `[rows * k, in]` where the model flattens the batch row by row.

    Returns:
        `[..., out]`: bit-equal to the base layer's output for rows without an adapter.
    """

    kind = "linear"

    _group: Group | None  # the siblings that it is served with, if any
    _place: int  # its own among them

    @classmethod
    def dimensions(cls, base: nn.Module) -> tuple[int, int]:
        if isinstance(base, Conv1D):
            return int(base.nx), int(base.nf)
        try:
            return int(base.in_features), int(base.out_features)  # type: ignore[arg-type]
        except AttributeError:
            raise ValueError(f"{type(base).__name__} has no in_features and out_features") from None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Runs some hundred times in each step: the common cases come first, and as little Python as there can be.
        routing = self._routing
        state: Any = routing.state
        if state is None:
            if args or kwargs or is_dynamo_compiling():
                return self.base_layer.forward(x, *args, **kwargs)
            return self._direct(x)
        group = self._group
        if group is not None:
            stash = routing.open
            if stash is not None and stash.group is group:
                if stash.x is x:
                    y = stash.ys[self._place]
                    if y is not None and (stash.version < 0 or stash.version == x._version) and not (args or kwargs):
                        stash.ys[self._place] = None
                        stash.left -= 1
                        if not stash.left:
                            routing.open = None
                            if not stash.traced:
                                group.proven, group.misses = True, 0
                        return y
                stash.fail()
                group = self._group
        if is_dynamo_compiling():  # unlike is_compiling, false for threads that run beside
            return self._traced(x, args, kwargs)
        if state.plain:
            if self._sites.isdisjoint(state.touched) if group is None else group.sites.isdisjoint(state.touched):
                return self.base_layer.forward(x, *args, **kwargs) if args or kwargs else self._direct(x)
            if not self._scattered:
                if x.shape[0] != state.rows:
                    state = self._fitted(state, x.shape, x.dim() == 2)
                if group is not None and not (args or kwargs):
                    y = group.lead(self._place, x, state)
                    if y is not None:
                        return y
                if routing.overlap:
                    h = self._op.begin(x, state.tensor, state.rows)
                    ys = (self.base_layer.forward(x, *args, **kwargs),)
                    return self._op.end(ys, x, h, state.tensor, state.rows, state.memo)[0]
                ys = (self.base_layer.forward(x, *args, **kwargs) if args or kwargs else self._direct(x),)
                return self._op(ys, x, state.tensor, state.rows, state.memo)[0]
        return self._adapted(self.base_layer.forward(x, *args, **kwargs), x, x.dim() == 2)

    def _traced(self, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The forward inside of a compiled one."""
        routing, group = self._routing, self._group
        if not routing.serving(self._path, self._scattered) or (self._rare and not routing.rare):
            return self.base_layer.forward(x, *args, **kwargs)
        if routing.open is not None:
            routing.open.fail()
        rows = routing.compiled_rows(x.shape, x.dim() == 2, self._path)
        if group is not None and (group.trusted or group.proven) and not (args or kwargs):
            return group.trace(self._place, x, routing.static, rows)
        h = None if routing.vectors else self._op.begin(x, routing.static, rows)
        return self._op.end((self.base_layer.forward(x, *args, **kwargs),), x, h, routing.static, rows)[0]

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


def may_group(wrapper: LoraLayer) -> bool:
    """Whether a wrapper may be served together with siblings: what it computes is LoraLinear's, hooked by nobody."""
    own = ("forward", "_adapted", "_changed", "_delta", "_run", "_traced")
    return (
        isinstance(wrapper, LoraLinear)
        and all(getattr(type(wrapper), name) is getattr(LoraLinear, name) for name in own)
        and not wrapper._scattered
        and (wrapper.base_layer.__dict__.keys().isdisjoint(HOOKED) or _split(wrapper))
        and (wrapper.__dict__.keys().isdisjoint(HOOKED) or only_aligns(wrapper))
    )


def _split(wrapper: LoraLayer) -> bool:
    """Whether all that is on its base layer is transformers' forward of a layer whose outputs are split."""
    hooks = wrapper.base_layer.__dict__.keys() & set(HOOKED)
    return hooks == {"forward"} and seam_of(wrapper.base_layer) is not None
