"""Whole modules per row: what an adapter saved of a module replaces the base's for its own rows.

The module runs once more on the whole batch with the adapter's tensors in place of its own, and the adapter's rows are
selected from the result: the batch's shape, and with it every bit of a row, is the same whoever its neighbours are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import ModelError, RoutingError
from ..packed import PackedState
from ..parallel import whole
from ..rows import RowState, Saved
from .base import LoraLayer


def rows_of(state: RowState, slot: int, y: torch.Tensor, place: int = 1) -> torch.Tensor:
    """bool mask of the rows of a slot, shaped to broadcast over `y` `[rows, ...]` or `[rows * k, ...]`.

    Args:
        place: the dimension of a packed `y` `[1, ...]` that counts its tokens.
    """
    mask = state.tensor.view(-1)[: state.rows] == slot  # it may be longer: tables for kernels follow
    if state.packed and y.shape[0] == 1:
        return mask.view(*[1] * place, -1, *[1] * (y.dim() - 1 - place))
    if y.shape[0] != state.rows:
        mask = mask.repeat_interleave(y.shape[0] // state.rows)
    return mask.view(-1, *[1] * (y.dim() - 1))


def widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """`tensor` with its last dimension filled up with -inf: labels or tokens that it does not have."""
    return F.pad(tensor, (0, width - tensor.shape[-1]), value=float("-inf")) if tensor.shape[-1] < width else tensor


def select(state: RowState, slot: int, own: torch.Tensor, y: torch.Tensor, place: int = 1) -> torch.Tensor:
    """`own` for the rows of a slot, `y` for the others; the narrower of the two is widened."""
    width = max(own.shape[-1], y.shape[-1])
    own, y = widened(own, width), widened(y, width)
    return torch.where(rows_of(state, slot, y, place), own.to(y.dtype), y)


def run_with(module: nn.Module, saved: Saved, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The module's forward with an adapter's tensors in place of its own."""
    return torch.func.functional_call(_apart(whole(module)), dict(saved.parameters), args, dict(kwargs))


def _apart(module: nn.Module) -> nn.Module:
    """A twin whose parameters can be exchanged; the module itself where they are in a plain dict.

    compressed-tensors keeps a module's tensors in a mapping of its own: what is set there is copied into the base's
    tensor, for good.
    """
    if all(type(inner._parameters) in (dict, OrderedDict) for inner in module.modules()):
        return module
    twin: nn.Module = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__)
    forward = twin.__dict__.get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is module:
        twin.__dict__["forward"] = MethodType(forward.__func__, twin)
    elif forward is not None:
        raise ModelError(
            f"A {type(module).__name__} has a forward of its own, and keeps its tensors in a "
            f"{type(module._parameters).__name__}: adapters that save it whole cannot be served."
        )
    twin.__dict__["_parameters"] = dict(module._parameters.items())
    twin.__dict__["_buffers"] = dict(module._buffers.items())
    twin.__dict__["_modules"] = {
        name: None if child is None else _apart(child) for name, child in module._modules.items()
    }
    return twin


class SavedLayer(LoraLayer):
    """Wrapper of a module that adapters save whole and that carries no LoRA: norms, say, or convolutions.

    It is put in when the first adapter that saves the module is registered.
    """

    kind = "saved"
    _place = 0  # the dimension that counts packed tokens, once it is known

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y = self.base_layer.forward(*args, **kwargs)
        routing = self._routing
        if torch.compiler.is_dynamo_compiling():
            routing.serving(self._path)
            return y
        state = routing.state
        if isinstance(state, RowState):
            return self._own(y, args, kwargs, state)
        return y if state is None else state.serve(lambda: self._served(y, args, kwargs), y, self._path)

    def _served(self, y: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        state = self._routing.state
        return self._own(y, args, kwargs, state) if isinstance(state, RowState) else y

    def _own(self, y: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: RowState) -> Any:
        if isinstance(state, PackedState) and not self._place:
            self._learn(y, state)
        if self._path not in state.saved:
            return y
        if not isinstance(y, torch.Tensor):
            raise RoutingError(f"{self._path} is saved whole by an adapter, but returns a {type(y).__name__}.")
        state = self._fitted(state, y.shape, y.dim() == 2)
        place = 1
        if isinstance(state, PackedState) and y.dim() > 3 and y.shape[0] == 1:
            places = state.places(y.shape)
            if len(places) > 1 and self._place not in places:
                raise RoutingError(
                    f"{self._path}: heads and packed tokens are both {state.rows}, so that {tuple(y.shape)} does not "
                    "show which is which. Try again in another batch."
                )
            place = self._place if self._place in places else places[0]
        for saved in state.saved[self._path]:
            y = select(state, saved.slot, run_with(self.base_layer, saved, args, kwargs), y, place)
        return y

    def _learn(self, y: Any, state: PackedState) -> None:
        """Norms of single heads see tokens before or behind the heads. Where their numbers are the same, what other
        batches have shown decides."""
        if isinstance(y, torch.Tensor) and y.dim() > 3 and y.shape[0] == 1 and state.rows > 1:
            places = state.places(y.shape)
            if len(places) == 1:
                self.__dict__["_place"] = places[0]
