"""Layer type -> wrapper, filled by a decorator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from torch import nn

if TYPE_CHECKING:
    from .base import LoraLayer

W = TypeVar("W", bound="type[LoraLayer]")

_WRAPPERS: dict[type[nn.Module], type[LoraLayer]] = {}


def register_layer(*layer_types: type[nn.Module]) -> Callable[[W], W]:
    """Register a wrapper (a subclass of `LoraLayer`) for layer classes and their subclasses.

    The nearest class in the layer's MRO that has a wrapper decides, so a layer class of one's own may override what
    its parent class gets. Models that are enabled already are not changed.

    Example:
        >>> from torch import nn
        >>> from hf_multilora.layers.linear import LoraLinear
        >>> class Doubled(nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> @register_layer(Doubled)
        ... class LoraDoubled(LoraLinear):
        ...     scale = 2.0
        >>> wrapper_for(Doubled).__name__
        'LoraDoubled'
    """

    def add(wrapper: W) -> W:
        for layer_type in layer_types:
            _WRAPPERS[layer_type] = wrapper
        return wrapper

    return add


def wrapper_for(layer_type: type[nn.Module]) -> type[LoraLayer] | None:
    """The wrapper class for a layer class, or None where the class is not one that carries adapters."""
    return next((_WRAPPERS[cls] for cls in layer_type.__mro__ if cls in _WRAPPERS), None)
