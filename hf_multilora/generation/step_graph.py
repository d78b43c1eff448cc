"""One captured decode step: its buffers, and the way of nested inputs and outputs into and out of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..rows import RowState
from .static_cache import CacheView, NotCapturable

_CACHE = "cache"  # stands for the cache in a specification


def flatten(value: Any, cache: Any, tensors: list[torch.Tensor]) -> Hashable:
    """The specification of a nested value; its tensors are appended to `tensors`.

    Raises:
        NotCapturable: an object that cannot be compared with the next step's.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return torch.Tensor, value.dtype, value.device, tuple(value.shape), value.stride()
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return type(value), value
    if value is cache:
        return _CACHE
    if isinstance(value, dict):
        return type(value), tuple((name, flatten(item, cache, tensors)) for name, item in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(flatten(item, cache, tensors) for item in value)
    raise NotCapturable(f"the step is given, or returns, a {type(value).__name__}")


def unflatten(spec: Any, cache: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The nested value of a specification, with these tensors."""
    if spec is _CACHE:
        return cache
    kind = spec[0]
    if kind is torch.Tensor:
        return next(tensors)
    if issubclass(kind, dict):
        items = {name: unflatten(item, cache, tensors) for name, item in spec[1]}
        return kind(**items) if issubclass(kind, ModelOutput) else kind(items)
    if issubclass(kind, (tuple, list)):
        parts = [unflatten(item, cache, tensors) for item in spec[1]]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    return spec[1]


class Input:
    """A buffer of a graph, in the place of a tensor that differs from step to step.

    Attributes:
        shown: what the step sees; as the tensor, with its strides.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._repeated = [d for d, size in enumerate(tensor.shape) if size > 1 and tensor.stride(d) == 0]
        once = self._once(tensor)
        with torch.inference_mode(False):
            self._buffer = torch.empty_strided(once.shape, once.stride(), dtype=once.dtype, device=once.device)
        self.shown = self._buffer.expand(tensor.shape) if self._repeated else self._buffer

    def _once(self, tensor: torch.Tensor) -> torch.Tensor:
        for d in self._repeated:
            tensor = tensor.narrow(d, 0, 1)
        return tensor

    def fill(self, tensor: torch.Tensor) -> None:
        self._buffer.copy_(self._once(tensor))


class StepGraph:
    """One captured step.

    Attributes:
        inputs, rows: its buffers; `rows` is None for batches without adapters.
        kept, held: the cache's tensors, and others that its launches read, alive as long as the graph.
        replay, outputs: runs it; what a run writes.
        counted: counters when it was captured, and by how much a step advances each.
        verified: whether it has given the bits of an uncaptured step at other counts.
    """

    def __init__(self, inputs: list[Input], rows: RowState | None, kept: Any, held: Any) -> None:
        self.inputs = inputs
        self.rows = rows
        self.kept = kept
        self.held = held
        self.replay: Callable[[], None]
        self.spec: Hashable = None
        self.outputs: list[torch.Tensor] = []
        self.counted: tuple[list[int], list[int]] = ([], [])
        self.verified = False
        self._shown: RowState | None = None

    def fill(self, tensors: Sequence[torch.Tensor], state: RowState | None) -> None:
        for place, tensor in zip(self.inputs, tensors, strict=True):
            place.fill(tensor)
        if self.rows is not None and state is not None and state is not self._shown:
            self.rows.tensor.copy_(state.for_rows(self.rows.rows).tensor)
            self.rows.memo.clear()
            self._shown = state

    def run(self, view: CacheView, cache: Any) -> Any:
        """Replay, and return copies of the outputs: the next replay overwrites them."""
        counts = view.counts()
        self.replay()
        view.count([count + by for count, by in zip(counts, self.counted[1], strict=True)])
        return unflatten(self.spec, cache, iter([output.clone() for output in self.outputs]))
