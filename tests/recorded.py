"""CUDA graphs without CUDA: operations are recorded with the tensors they used, and done again on the same tensors.

As a graph does, a recording holds addresses and numbers: whatever Python decided is decided for good, inputs that are
other tensors are not seen, and an operation that reads a result on the host is an error while recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hf_multilora.generation.kept_caches import Kept
from hf_multilora.kernels import reference

_recording: list[Recording] = []


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Recording(TorchDispatchMode):
    """What was done inside of it; `replay` does it again, `undo` takes back what it wrote to older tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[tuple[Callable[..., Any], Any, Any, list[torch.Tensor]]] = []
        self._made: dict[int, torch.UntypedStorage] = {}  # kept alive: an address is not used twice
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if func._schema.is_mutable:
            for tensor in _tensors((args, kwargs)):
                self._save(tensor)
        return self.note(func, args, kwargs)

    def note(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = func(*args, **kwargs)
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        new = []
        for tensor in _tensors(output):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self._made[storage.data_ptr()] = storage
                new.append(tensor)
        self.nodes.append((func, args, kwargs, new))
        return output

    def _save(self, tensor: torch.Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._made and address not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[address] = (whole, whole.clone())

    def undo(self) -> None:
        for whole, copy in self._before.values():
            whole.copy_(copy)

    def replay(self) -> None:
        with torch.inference_mode():  # it may have been recorded under it
            for func, args, kwargs, outputs in self.nodes:
                found = func(*args, **kwargs)
                if outputs:
                    for old, new in zip(outputs, _tensors(found), strict=True):
                        old.copy_(new)


class Recorder:
    """In the place of graphs.CudaRecorder."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.recorded = 0

    def warm(self, fn: Callable[[], Any]) -> Any:
        return fn()

    def record(self, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        recording = Recording()
        _recording.append(recording)
        try:
            with recording:
                output = fn()
        finally:
            _recording.pop()
            recording.undo()
        return recording.replay, output

    def synchronize(self) -> None:
        pass


@contextmanager
def emulated() -> Iterator[None]:
    """What a recording needs: the ops count as one kernel each, and its own references to a cache's tensors as none.

    (The ops' plain torch path looks at slots on the host, which the kernels do not.)
    """
    names = ("lora_linear", "lora_embedding")
    before = {name: getattr(reference, name) for name in names}

    def kernel(fn: Callable[..., Any]) -> Callable[..., Any]:
        def uncached(*args: Any, **kwargs: Any) -> Any:
            args = tuple(None if isinstance(arg, dict) else arg for arg in args)
            output = fn(*args, **{name: value for name, value in kwargs.items() if name != "cache"})
            return output.clone()  # never y itself, as of a site that no row's adapter has

        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                if _recording:
                    return _recording[-1].note(uncached, args, kwargs)
                return uncached(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(reference, name, kernel(before[name]))
        patch.setattr(Kept, "free", lambda kept: kept.user is None or kept.user() is None)
        yield
