"""Records what a function does on the device, as a CUDA graph, and finds out beforehand whether it may be recorded.

A graph repeats launches, on the same addresses, with the same numbers. So a function must not read results on the host
(its Python code would decide on old ones), and must read no tensor whose address or meaning changes unnoticed. `Audit`
runs it once and looks; what cannot be captured is refused before the device is asked to.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .static_cache import NotCapturable

_READS_ON_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_aten = torch.ops.aten


class Audit(TorchDispatchMode):
    """Raises where a function does on the host what a graph would not repeat, and notes the tensors that it reads.

    Args:
        known: addresses of the memory that it may read.

    Raises:
        NotCapturable: naming the operation.
    """

    def __init__(self, known: Collection[int]) -> None:
        super().__init__()
        self._known = set(known)
        self._foreign: list[tuple[weakref.ref[torch.Tensor], str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tag in _READS_ON_HOST for tag in func.tags) and not _indexes_by_numbers(func, args):
            raise NotCapturable(f"{func} reads a result on the host")
        for tensor in inputs:
            address = address_of(tensor)
            if address and address not in self._known:
                self._foreign.append((weakref.ref(tensor), str(func)))
        output = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        # A number in host memory may take part in arithmetic; copying it is another matter.
        copies = func in (_aten._to_copy.default, _aten.copy_.default)
        devices = {tensor.device for tensor in (*inputs, *outputs) if tensor.dim() or copies}
        if len(devices) > 1:
            raise NotCapturable(f"{func} copies between {', '.join(sorted(map(str, devices)))}")
        self._known.update(address_of(tensor) for tensor in outputs)
        return output

    def check(self) -> None:
        """To be called when all that the function has made is gone.

        Raises:
            NotCapturable: it has read a tensor that was there before it, and is not known.
        """
        for ref, func in self._foreign:
            tensor = ref()
            if tensor is not None:
                raise NotCapturable(
                    f"{func} reads a tensor of shape {tuple(tensor.shape)} that is neither a weight nor an input"
                )


def _indexes_by_numbers(func: Any, args: Any) -> bool:
    """Indexing has an output of known shape unless a mask selects."""
    if func not in (_aten.index.Tensor, _aten._unsafe_index.Tensor):
        return False
    return not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def address_of(tensor: torch.Tensor) -> int:
    """Where the tensor's memory begins; 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


class Constants(TorchFunctionMode):
    """`torch.tensor(numbers, device=...)` copies from the host, which cannot be captured: each is copied once.

    Warm-up fills the table; while capturing, the copies on the device are copied there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[Any, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.tensor or not args or tree_tensors(args):
            return func(*args, **kwargs)
        key = (repr(args), tuple(sorted((name, str(value)) for name, value in kwargs.items())))
        if key not in self._made:
            with torch.inference_mode(False):
                self._made[key] = func(*args, **kwargs)
        return self._made[key].clone()

    def tensors(self) -> list[torch.Tensor]:
        return list(self._made.values())


def tree_tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class CudaRecorder:
    """Runs and records functions on a stream beside the caller's. All graphs share one pool of memory.

    They may: no two of them run at a time, and their outputs are copied before the next one runs.

    Args:
        device: where the functions compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._recorded: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs of the pool that are alive

    def warm(self, fn: Callable[[], Any]) -> Any:
        """Run `fn` as it will be recorded: what it loads, compiles and reserves at first is there afterwards."""
        with torch.cuda.device(self._device):
            current, stream = torch.cuda.current_stream(), self._side()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    return fn()
            finally:
                current.wait_stream(stream)

    def record(self, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record `fn` without running it.

        Returns:
            tuple: what runs it, on the current stream, and the outputs that each run writes.
        """
        with torch.cuda.device(self._device):
            if self._pool is None or not self._recorded:  # with its last graph a pool ends, for good
                self._pool = torch.cuda.graph_pool_handle()
            current, stream = torch.cuda.current_stream(), self._side()
            stream.wait_stream(current)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with no_collection(), torch.cuda.stream(stream):
                # cuBLAS keeps scratch memory for each stream, until somebody clears it: a graph's must be its pool's.
                _clear_scratch()
                # Other threads may load adapters meanwhile; their calls do not concern this capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = fn()
                    graph.capture_end()
                except BaseException:
                    pool, self._pool = self._pool, None  # it may hold half of a graph
                    self._recorded.clear()
                    with suppress(Exception):
                        graph.capture_end()
                    recover(self._device, pool)
                    raise
            _clear_scratch()
            current.wait_stream(stream)
        self._recorded.add(graph)
        return graph.replay, output

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream


def recover(device: torch.device, pool: Any) -> None:
    """End what a failed capture leaves open in torch, and what would outlast it: allocations that go to its pool, a
    random generator that believes it is captured."""
    with torch.cuda.device(device):
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        with suppress(Exception), warnings.catch_warnings(), torch.cuda.stream(torch.cuda.Stream()):
            warnings.simplefilter("ignore")
            whole = torch.cuda.CUDAGraph()
            whole.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device="cuda")
            whole.capture_end()


def _clear_scratch() -> None:
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


@contextmanager
def no_collection() -> Iterator[None]:
    """No cyclic garbage is collected: what it frees may be what must not be freed during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
