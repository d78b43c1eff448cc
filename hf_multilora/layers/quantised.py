"""What the structure of a layer says: whether it is a linear one, and whether its weight is kept as the numbers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import nn

from ..adapters.base import is_plain


def acts_as_linear(layer: nn.Module) -> bool:
    """Whether a layer of no registered class is a linear one: quantisers have classes of their own.

    It says in_features and out_features, holds tensors itself, has no linear layer inside, and is called with one x.
    """
    sizes = [layer.__dict__.get(name) for name in ("in_features", "out_features")]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        return False
    if any(hasattr(inner, "in_features") for inner in layer.modules() if inner is not layer):
        return False
    if next(own_tensors(layer), None) is None:
        return False
    try:
        parameters = list(inspect.signature(layer.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(required) == 1


def is_quantised(layer: nn.Module) -> bool:
    """Whether a layer keeps its weight in another form than the numbers themselves."""
    weight: torch.Tensor | None = layer._parameters.get("weight")
    if weight is None:
        weight = layer._buffers.get("weight")
    if weight is None:
        return hasattr(layer, "W_q") or any(not _numbers(tensor) for tensor in own_tensors(layer))
    return not _numbers(weight)


def _numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds the numbers themselves; of an offloaded one only the dtype says so."""
    return tensor.is_floating_point() and tensor.element_size() > 1 if tensor.is_meta else is_plain(tensor)


def own_tensors(layer: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers of the layer itself."""
    for tensors in (layer._parameters, layer._buffers):
        yield from (tensor for tensor in tensors.values() if tensor is not None)
