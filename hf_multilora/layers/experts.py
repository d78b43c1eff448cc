"""Wrapper of blocks of experts: stacked weights of which each token uses a few.

The base's part is computed with transformers' own products: batched ones where the config names `batched_mm` at that
moment (generate() puts it in place of `grouped_mm` while it decodes), else grouped ones, also for `eager`, whose loop
has no place for a delta. The delta of gate and up comes before the activation, that of down before the router's
weights. A block whose tokens have no adapter on it runs the base's own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from transformers.integrations import moe

from ..blocks import SERVED
from ..errors import ModelError
from ..kernels.experts_op import Pairs
from ..rows import RowState
from .base import LoraLayer
from .saved import run_with, select


class LoraExperts(LoraLayer):
    """y = sum over a token's experts of w * (down + delta)(act((gate_up + delta)(x))).

    Args:
        x: `[tokens, hidden]`, rows of the batch one after the other.
        index: int64 `[tokens, k]`, the experts of each token.
        weights: `[tokens, k]`, their weights.

    Returns:
        `[tokens, hidden]`: tokens of rows without an adapter get the bits of the bare model where that gives a row the
        same bits whatever its neighbours are (`batched_mm`; grouped products do not).

    Raises:
        ModelError: an implementation that has no place for a delta.
    """

    kind = "experts"
    _rare = True
    _away = False  # whether other ranks have some of the experts, which have the number `num_experts` here

    def _enter_seam(self) -> None:
        super()._enter_seam()
        base: Any = self.base_layer
        stacks = [weight for weight in base._parameters.values() if weight is not None and weight.dim() == 3]
        self.__dict__["_away"] = any(len(weight) != base.num_experts for weight in stacks)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        routing = self._routing
        state: Any = routing.state
        if state is None:
            return self._base(args, kwargs)
        if is_dynamo_compiling():
            if not routing.serving(self._path) or (self._rare and not routing.rare):
                return self._base(args, kwargs)
            x = _inputs(args, kwargs)[0]
            return self._mixed(args, kwargs, routing.static, routing.compiled_rows(self._rows_of(x), True, self._path))
        if isinstance(state, RowState):
            return self._own(args, kwargs, state)
        y = self._base(args, kwargs)
        served: torch.Tensor = state.serve(lambda: type(self).forward(self, *args, **kwargs), y, self._path)
        return served

    def _moved(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The forward where tokens were sent to the ranks of their experts, so that they are no rows any more."""
        routing = self._routing
        state: Any = routing.state
        if state is None:
            return self._base(args, kwargs)
        if is_dynamo_compiling():
            adapted = routing.serving(self._path) and routing.rare
        elif isinstance(state, RowState):
            adapted = not self._sites.isdisjoint(state.touched)
        else:
            y = self._base(args, kwargs)
            served: torch.Tensor = state.serve(lambda: self._moved(*args, **kwargs), y, self._path)
            return served
        if adapted:
            raise ModelError(
                f"{self._path}: an adapter of this batch trained experts, and transformers moves tokens between ranks "
                "where they need a gradient. Call the model under torch.no_grad()."
            )
        return self._base(args, kwargs)

    def _base(self, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        y: torch.Tensor = self.base_layer.forward(*args, **kwargs)
        return y

    def _own(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: RowState) -> torch.Tensor:
        saved = state.saved.get(self._path, ())
        adapted = not self._sites.isdisjoint(state.touched)
        if not adapted and not saved:
            return self._base(args, kwargs)
        fitted = self._flat(state, self._rows_of(_inputs(args, kwargs)[0]))
        y = self._mixed(args, kwargs, fitted.tensor, fitted.rows) if adapted else self._base(args, kwargs)
        for own in saved:
            y = self._select(fitted, own.slot, run_with(self.base_layer, own, args, kwargs), y)
        return y

    def _select(self, state: RowState, slot: int, own: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return select(state, slot, own, y)

    def _rows_of(self, x: torch.Tensor) -> torch.Size:
        return x.shape

    def _mixed(self, args: Sequence[Any], kwargs: dict[str, Any], row_slots: torch.Tensor, rows: int) -> torch.Tensor:
        x, *chosen_by = _inputs(args, kwargs)
        index, weights = sorted(chosen_by, key=torch.is_floating_point)  # by keyword they may come in any order
        base: Any = self.base_layer
        how = base.config._experts_implementation or "eager"
        if how not in SERVED:
            raise ModelError(
                f"{self._path}: an adapter of this batch trained experts, and {how!r} has no place for its part. Use "
                "model.set_experts_implementation('grouped_mm'), or leave these adapters out."
            )
        count, chosen = x.shape[0], index.shape[-1]
        experts, scale = index.reshape(-1), weights.reshape(-1)
        biases = base.has_bias
        up_name = "gate_up_proj" if base.has_gate else "up_proj"
        order: torch.Tensor | None = None
        if how == "batched_mm":
            tokens = torch.arange(count, device=x.device).repeat_interleave(chosen)
            picked = experts.clamp(0, base.num_experts - 1)

            def linear(source: torch.Tensor, name: str) -> torch.Tensor:
                bias = getattr(base, f"{name}_bias")[picked] if biases else None
                return moe._batched_linear(source, getattr(base, name)[picked], bias, base.is_transposed)

            source = x.repeat_interleave(chosen, dim=0)
        else:
            experts, order = torch.sort(experts)
            tokens = order // chosen
            source, scale = x[tokens], scale[order]
            edges = torch.arange(1, base.num_experts + 1, device=x.device)
            ends = torch.searchsorted(experts, edges).to(torch.int32)
            picked = experts.clamp(max=base.num_experts - 1) if self._away and biases else experts
            away = (experts >= base.num_experts).unsqueeze(-1) if self._away else None

            def linear(source: torch.Tensor, name: str) -> torch.Tensor:
                bias = getattr(base, f"{name}_bias")[picked] if biases else None
                y = moe._grouped_linear(source, getattr(base, name), ends, bias, base.is_transposed)
                return y if away is None else y.masked_fill(away, 0.0)  # what nobody has computed, not even zeros

        pairs = Pairs(tokens, experts, count, row_slots, rows)
        y = self._op(linear(source, up_name), source, pairs, up=True)
        inner = base._apply_gate(y) if base.has_gate else base.act_fn(y)
        y = self._op(linear(inner, "down_proj"), inner, pairs, up=False)
        if getattr(base, "has_post_expert_norm", False):
            y = base.post_expert_norm(y)
        y = y * scale.unsqueeze(-1)
        if order is not None:
            back = torch.empty_like(order)
            back[order] = torch.arange(order.shape[0], device=order.device)
            y = y[back]
        return y.view(count, chosen, -1).sum(dim=1).to(x.dtype)


class LoraExpertMajor(LoraExperts):
    """Blocks that are given all tokens for each expert, one expert after the other, scaled by the router before.

    Args:
        x: `[experts * tokens, hidden]`.
    """

    def _select(self, state: RowState, slot: int, own: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        experts: Any = self.base_layer.num_experts
        own, y = (t.view(experts, -1, t.shape[-1]).transpose(0, 1) for t in (own, y))
        return select(state, slot, own, y).transpose(0, 1).reshape(-1, y.shape[-1])

    def _rows_of(self, x: torch.Tensor) -> torch.Size:
        return torch.Size((x.shape[0] // self.base_layer.num_experts, *x.shape[1:]))  # type: ignore[operator,arg-type]

    def _mixed(self, args: Sequence[Any], kwargs: dict[str, Any], row_slots: torch.Tensor, rows: int) -> torch.Tensor:
        base: Any = self.base_layer
        x = _inputs(args, kwargs)[0].view(base.gate_up_proj.shape[0], -1, base.hidden_size)
        experts, count, hidden = x.shape
        tokens = torch.arange(count, device=x.device).repeat(experts)
        of = torch.arange(experts, device=x.device).repeat_interleave(count)
        pairs = Pairs(tokens, of, count, row_slots, rows)
        y = torch.bmm(x, base.gate_up_proj).view(experts * count, -1)
        y = self._op(y, x.reshape(-1, hidden), pairs, up=True)
        gate, up = y.view(experts, count, -1).chunk(2, dim=-1)
        inner = up * base.act_fn(gate)
        y = torch.bmm(inner, base.down_proj).view(experts * count, hidden)
        return self._op(y, inner.reshape(experts * count, -1), pairs, up=False)


def _inputs(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a block is called with, in order, whatever its parameters are called."""
    return (*args, *kwargs.values())


def wrapper_of(module: nn.Module) -> type[LoraExperts]:
    return LoraExperts if "is_transposed" in module.__dict__ else LoraExpertMajor
