"""Wrapper of routers that make their logits themselves: a bare weight, and a choice of experts after the product."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import ModelError
from ..rows import RowState
from .base import LoraLayer


class LoraRouter(LoraLayer):
    """The base's forward with `logits = x W^T + s * (x A^T) B^T` in it: what follows sees the adapter's logits.

    Raises:
        ModelError: the base makes its logits otherwise than by one F.linear with its weight.
    """

    kind = "linear"
    _rare = True

    @classmethod
    def dimensions(cls, base: nn.Module) -> tuple[int, int]:
        out, inside = base.weight.shape  # type: ignore[misc]
        return int(inside), int(out)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state: Any = self._routing.state
        if state is None:
            return self.base_layer.forward(*args, **kwargs)
        if is_dynamo_compiling():
            if not self._routing.serving(self._path) or not self._routing.rare:
                return self.base_layer.forward(*args, **kwargs)
            return self._through(args, kwargs)
        if not isinstance(state, RowState):
            y = self.base_layer.forward(*args, **kwargs)
            return state.serve(lambda: self.forward(*args, **kwargs), y, self._path)
        if self._sites.isdisjoint(state.touched):
            return self.base_layer.forward(*args, **kwargs)
        return self._through(args, kwargs)

    def _through(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = _Logits(self)
        with watch:
            output = self.base_layer.forward(*args, **kwargs)
        if watch.seen != 1:
            raise ModelError(
                f"{self._path}: {type(self.base_layer).__name__} makes its logits otherwise than by one product with "
                "its weight, so that adapters on it cannot be served."
            )
        return output

    def _check_flat(self, shape: torch.Size) -> None:
        state = self._routing.state
        if isinstance(state, RowState):
            self._flat(state, shape)

    def _run(self, y: torch.Tensor, x: torch.Tensor, *args: Any) -> torch.Tensor:
        out: torch.Tensor = self._op((y,), x, *args)[0]
        return out


class _Logits(TorchFunctionMode):
    """Adds the deltas to the one product with the router's weight, in whatever dtype the router computes it."""

    def __init__(self, layer: LoraRouter) -> None:
        super().__init__()
        self.layer = layer
        self.seen = 0
        self._shape = layer.base_layer.weight.shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if func is F.linear and len(args) > 1 and args[1].shape == self._shape:
            self.seen += 1
            x = args[0]
            if x.dim() == 2 and not is_dynamo_compiling():  # a graph must not depend on this batch's rows
                self.layer._check_flat(x.shape)
            return self.layer._adapted(y, x, x.dim() == 2)
        return y
