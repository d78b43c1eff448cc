"""LoraLayer: what all wrappers share.

A wrapper takes the place of its base layer in the model and *is* that layer for everyone else: its instance dictionary
starts as a copy of the base layer's, so parameters, buffers, sub-modules and hooks are the base's own dict objects.
state_dict keys, tie_weights, save_pretrained, load_state_dict and isinstance see no difference, and undoing the swap
is one setattr. The base layer itself stays out of the module tree, under `base_layer`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import RoutingError
from ..parallel import Seam, seam_of
from ..routing import Routing
from ..rows import RowState
from .direct import direct
from .hooks import HOOKED, put_hook, take_hook

_OWN = (
    "base_layer",
    "_routing",
    "_sites",
    "_op",
    "_path",
    "_scattered",
    "_group",
    "_place",
    "extra",
    "positions",
    "_rare",
    "_direct",
    "_behind",
    "_seam",
    "_kept",
    "_before",
    "_away",
)


@functools.cache
def _class_for(wrapper: type[Any], layer_type: type[Any]) -> type[Any]:
    return type(f"Lora{layer_type.__name__}", (wrapper, layer_type), {"__module__": wrapper.__module__})


class LoraLayer(nn.Module):
    """Base class of the wrappers; `wrap` makes one."""

    kind: ClassVar[str]
    scale: ClassVar[float] = 1.0  # what the layer multiplies its output by, beyond what `output_scale` finds

    base_layer: nn.Module
    _routing: Routing
    _sites: frozenset[int]
    _op: Any
    _path: str
    _scattered: str  # why its inputs do not begin with rows; empty where they do
    _direct: Callable[[torch.Tensor], torch.Tensor]  # the base's forward
    _seam: Seam | None  # what it took over from a layer whose inputs are split over ranks
    _rare = False  # whether adapters seldom train it: tokens, logits, experts, routers
    _kept: dict[str, Any]  # what accelerate's hook, which is around the wrapper now, had put on the base
    _before: dict[str, Any]  # the base's attributes when it was wrapped
    _behind = False  # whether it lies behind the place where tokens without logits are left out

    @classmethod
    def wrap(cls, base: nn.Module, path: str, routing: Routing, scattered: str = "") -> LoraLayer:
        """Make a wrapper of `base`, of a class that derives from this one and from the base's own class."""
        wrapped: Any = _class_for(cls, type(base))  # type: ignore[arg-type]
        self: LoraLayer = wrapped.__new__(wrapped)
        before = {k: v for k, v in base.__dict__.items() if k not in HOOKED}
        self.__dict__.update(before)
        self.__dict__.update(
            _before=before,
            base_layer=base,
            _routing=routing,
            _sites=frozenset(),
            _op=None,
            _path=path,
            _scattered=scattered,
            _group=None,
            _direct=direct(base),
            _seam=None,
            _kept=take_hook(base),
        )
        if self._kept:
            put_hook(self, self._kept["_hf_hook"])
        self._enter_seam()
        return self

    def _enter_seam(self) -> None:
        """Where ranks sum over what each computes, adapters add their parts before the sum: inside of the forward that
        transformers has put on the layer. That goes to the wrapper, around the wrapper's own."""
        seam = seam_of(self.base_layer)
        if seam is None or not seam.sums:
            return
        base = self.base_layer.__dict__
        del base["forward"]
        if getattr(seam.own, "__func__", None) is not type(self.base_layer).forward:
            base["forward"] = seam.own
        forward = seam.around(MethodType(type(self).forward, self), getattr(self, "_moved", None))
        self.__dict__.update(_seam=seam, forward=forward)

    @classmethod
    def dimensions(cls, base: nn.Module) -> tuple[int, int]:
        """(in, out) of the layer, taken from its attributes: packed weights have other shapes.

        Raises:
            ValueError: the layer does not say.
        """
        raise NotImplementedError

    @classmethod
    def output_scale(cls, base: nn.Module) -> float:
        return cls.scale

    def bind(self, sites: frozenset[int], op: Any) -> None:
        """Connect the wrapper with its sites and the op that adds their deltas."""
        self.__dict__.update(_sites=sites, _op=op, _group=None)

    def get_base_layer(self) -> nn.Module:
        """The base layer. PEFT asks every module with a `base_layer` for it when it removes its own layers."""
        return self.base_layer

    def _shared(self) -> dict[str, Any]:
        """The instance dictionary without what is the wrapper's own, or accelerate's."""
        return {key: value for key, value in self.__dict__.items() if key not in HOOKED and key not in _OWN}

    def unwrap(self) -> nn.Module:
        """The base layer, brought up to date with what was set on the wrapper since (train() and the like)."""
        base = self.base_layer
        self.__dict__["_group"] = None
        # What the base layer has noted of itself in its forward (bitsandbytes' compute dtype, say) stays.
        missing, before = object(), self._before
        changed = {k: v for k, v in self._shared().items() if before.get(k, missing) is not v}
        base.__dict__.update(changed)
        if self._seam is not None:
            base.__dict__["forward"] = self._seam.forward
        hook = self.__dict__.get("_hf_hook")
        if hook is not None and hook is self._kept.get("_hf_hook"):
            base.__dict__.update(self._kept)
        elif hook is not None:
            put_hook(base, hook)
        return base

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the base layer: a part of a model has no slots, and a whole model enables its copy itself."""
        base = self.base_layer
        twin = type(base).__new__(type(base))
        memo[id(self)] = memo[id(base)] = twin
        hooked = {key: value for key, value in base.__dict__.items() if key in HOOKED}
        for key, value in {**self._shared(), **hooked}.items():
            twin.__dict__[key] = copy.deepcopy(value, memo)
        if "_hf_hook" in self.__dict__:
            put_hook(twin, copy.deepcopy(self.__dict__["_hf_hook"], memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.base_layer.__reduce_ex__(protocol)

    def _adapted(self, y: torch.Tensor, x: torch.Tensor, flat: bool) -> torch.Tensor:
        """The base's output `y` for the input `x`, as the rows' adapters change it.

        Args:
            flat: whether the first dimension of `x` may count tokens of a batch that was flattened row by row.
        """
        routing = self._routing
        if torch.compiler.is_dynamo_compiling():
            if not routing.serving(self._path, self._scattered) or (self._rare and not routing.rare):
                return y
            return self._run(y, x, routing.static, routing.compiled_rows(x.shape, flat, self._path))
        state = routing.state
        if isinstance(state, RowState):
            if (
                state.plain
                and x.shape[0] == state.rows
                and not self._scattered
                and not self._sites.isdisjoint(state.touched)
            ):
                return self._run(y, x, state.tensor, state.rows, state.memo)  # what nearly every layer does
            return self._changed(y, x, flat, state)
        return y if state is None else state.serve(lambda: self._adapted(y, x, flat), y, self._path)

    def _changed(self, y: torch.Tensor, x: torch.Tensor, flat: bool, state: RowState) -> torch.Tensor:
        """`y` under a state: deltas first, then what is saved whole."""
        return self._delta(y, x, flat, state)

    def _delta(self, y: torch.Tensor, x: torch.Tensor, flat: bool, state: RowState) -> torch.Tensor:
        if self._sites.isdisjoint(state.touched):
            return y
        if not isinstance(y, torch.Tensor):
            raise RoutingError(f"{self._path} returns a {type(y).__name__}, to which no delta can be added.")
        state = self._fitted(state, x.shape, flat)
        if state.starts is None:
            return self._run(y, x, state.tensor, state.rows, state.memo)
        return self._run(y, x, state.tensor, state.rows, state.memo, state.starts_for(self._tokens(x, state.rows)))

    def _run(self, y: torch.Tensor, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return self._op(y, x, *args)

    def _fitted(self, state: RowState, shape: torch.Size, flat: bool) -> RowState:
        """The state whose rows are those of an input of this shape."""
        state = state.for_layer(self._behind)
        if self._scattered and not state.same:
            raise RoutingError(
                f"{self._path} does not see rows of the batch first ({self._scattered}). It can serve one adapter at "
                "a time: pass one id (a string) for all rows."
            )
        if self._scattered and state.starts is not None:
            raise RoutingError(
                f"{self._path} does not see rows of the batch first ({self._scattered}), so that an aLoRA which is "
                "invoked behind a row's first token cannot be served there. Ask the base model, or another adapter."
            )
        if shape[0] == state.rows:
            return state
        return state.for_shape(shape, flat, self._routing.tokens, self._path)

    def _flat(self, state: RowState, shape: torch.Size) -> RowState:
        """The state for an input `[rows * tokens, ...]` that may be as long as the batch has rows by accident: a layer
        that is given some of the tokens only."""
        tokens = self._routing.tokens
        if tokens and not state.same and shape[0] != state.rows * tokens:
            raise RoutingError(
                f"{self._path}: an input of {shape[0]} tokens is not all of the {state.rows} rows of {tokens} tokens, "
                "so that it does not show which rows it belongs to. This layer can serve one adapter at a time: pass "
                "one id (a string) for all rows."
            )
        return self._fitted(state, shape, True)

    def _tokens(self, x: torch.Tensor, rows: int) -> int:
        """Tokens of each row in `x`."""
        return x.shape[:-1].numel() // rows
