"""Swaps wrappers in, checks that they are still there, and puts the base layers back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .blocks import replaced
from .errors import ModelError
from .layers import LoraLayer
from .layers.experts import LoraExperts
from .layers.router import LoraRouter
from .layers.saved import SavedLayer
from .routing import Routing
from .survey import Found, walk


def saved_layer(model: nn.Module, path: str, scattered: str) -> Found:
    """A module that an adapter saves whole, with every place it has; `scattered` as of `Found`."""
    module = model.get_submodule(path)
    places = [(parent, name) for _, parent, name, child in walk(model) if child is module]
    return Found(module, SavedLayer, (), places, scattered)


def decompress(model: nn.Module) -> None:
    """What compressed-tensors has put off until the model's first forward: unpacking, for which it gives every layer
    new dictionaries of parameters. Wrappers share those dictionaries, so it has to come before them."""
    hook = getattr(model, "ct_decompress_hook", None)
    run = model._forward_pre_hooks.get(getattr(hook, "id", -1))
    if run is not None:
        run(model, ())


def swap_in(found: dict[str, Found], routing_of: Callable[[str], Routing]) -> dict[str, LoraLayer]:
    """Put a wrapper in the place of every layer of `found`; `routing_of` says what the one of a path reads."""
    wrappers = {}
    for path, item in found.items():
        wrappers[path] = wrapper = item.wrapper.wrap(item.module, path, routing_of(path), item.scattered)
        for parent, name in item.places:
            setattr(parent, name, wrapper)
    return wrappers


def check_intact(
    paths: Iterable[str], found: dict[str, Found], wrappers: dict[str, LoraLayer], wrapped: bool = True
) -> None:
    """Refuse to serve adapters through layers that somebody has replaced since: their part would be missing.

    PEFT's unload() goes down to the base layer itself and puts that in the wrapper's place; the wrapper is put back.

    Args:
        wrapped: let pass what holds the wrapper inside (a PEFT layer around it calls it).

    Raises:
        ModelError: naming the layer and what is there now.
    """
    for path in paths:
        for parent, name in found[path].places:
            around = replaced(parent) if issubclass(found[path].wrapper, (LoraExperts, LoraRouter)) else None
            if around is not None:
                raise ModelError(f"{path}: {around}: adapters on it cannot be served.")
            present = getattr(parent, name, None)
            if present is found[path].module:
                setattr(parent, name, wrappers[path])
            elif present is not wrappers[path] and not (wrapped and _holds(present, wrappers[path])):
                raise ModelError(
                    f"{path} has been replaced by a {type(present).__name__} since enable_multilora, so that adapters "
                    "cannot reach it. Remove what was put there (PEFT layers, for example), or call "
                    "disable_multilora(model) before a change and enable_multilora(model) after it."
                )


def containers(model: nn.Module, paths: Iterable[str]) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, attribute, child) of everything between the model and the layers of these paths."""
    found: dict[tuple[int, str], tuple[nn.Module, str, nn.Module]] = {}
    for path in paths:
        parent = model
        for name in path.split(".")[:-1]:
            child = parent._modules[name]
            assert child is not None
            found[id(parent), name] = (parent, name, child)
            parent = child
    return list(found.values())


def check_containers(chain: Iterable[tuple[nn.Module, str, nn.Module]]) -> None:
    """Raises: ModelError where a block of layers was replaced, and its adapters with it."""
    for parent, name, child in chain:
        if parent._modules.get(name) is not child:
            raise ModelError(
                f"{name!r} of {type(parent).__name__} has been replaced since enable_multilora, so that adapters "
                "cannot reach its layers. Call disable_multilora(model) before a change, and enable it again after."
            )


def _holds(module: Any, wrapper: LoraLayer) -> bool:
    return isinstance(module, nn.Module) and any(inner is wrapper for inner in module.modules())


def swap_out(found: dict[str, Found], wrappers: dict[str, LoraLayer]) -> None:
    """Put every base layer back.

    Raises:
        ModelError: somebody else has replaced a wrapper since; nothing is changed then.
    """
    check_intact(found, found, wrappers, wrapped=False)
    for path, item in found.items():
        base = wrappers[path].unwrap()
        for parent, name in item.places:
            setattr(parent, name, base)


class InstanceGuard:
    """Lets ids reach a forward or generate on the instance (accelerate puts one there), which hides the class's.

    Args:
        model: whose instance it is.
        under: what is called with adapter_ids and adapter_names, and gives the block that what lies there runs in.

    Attributes:
        hidden: what lay on the instance, by name.
    """

    def __init__(self, model: PreTrainedModel, under: Callable[[Any, Any], AbstractContextManager[None]]) -> None:
        self._model, self._under = model, under
        self.hidden: dict[str, Any] = {
            name: model.__dict__[name] for name in ("forward", "generate") if name in model.__dict__
        }
        self._guards = {name: self._guarded(inner) for name, inner in self.hidden.items()}
        model.__dict__.update(self._guards)

    def _guarded(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs.pop("adapter_ids", None)
            names = kwargs.pop("adapter_names", None)
            if ids is None and names is None:
                return inner(*args, **kwargs)
            with self._under(ids, names):
                return inner(*args, **kwargs)

        return call

    def undo(self) -> None:
        """Put back what lay there, unless somebody has replaced it since."""
        for name, guard in self._guards.items():
            if self._model.__dict__.get(name) is guard:
                self._model.__dict__[name] = self.hidden[name]
