"""The custom ops that compiled forwards call, and what decides about the kernels.

They name a `LinearOp` or `EmbeddingOp` by its key, and find slots, sizes and counters there: as arguments these would
be inputs of the graph, with guards of their own at every layer, evaluated in each step.
Keys are never used twice, so that a graph cannot meet the slots of another model.

Buffers are allocated in the ops: safe in a graph, and no state that Inductor cannot see. `lora_delta` and `lora_join_`
are a pair: while a graph is captured, the kernels run on a stream of their own between them, beside the base layers.
Between them nobody may read or free what these kernels use, hence `lora_join_` takes it all.

Inductor keeps compiled graphs on disk, and knows ops by their names alone: an op whose arguments change needs another
name.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from . import reference

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from . import launch

TRITON_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

_recipes: dict[Any, Any] = {}


def parts_of(site: int, widths: Sequence[int], outputs: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(first site, widths of its slices) of each output.

    Raises:
        ValueError: the outputs are not sums of consecutive widths.
    """
    left = list(widths)
    for output in outputs:
        taken: list[int] = []
        while left and sum(taken) < output:
            taken.append(left.pop(0))
        if sum(taken) != output or not taken:
            raise ValueError(f"outputs {tuple(outputs)} are not made of slices {tuple(widths)}")
        yield site, tuple(taken)
        site += len(taken)
    if left:
        raise ValueError(f"outputs {tuple(outputs)} are not made of slices {tuple(widths)}")


def unit_stride(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def runs_triton(y: Tensor, data: Tensor) -> bool:
    return HAS_TRITON and y.is_cuda and y.dtype in TRITON_DTYPES and data.dtype in TRITON_DTYPES


def slices_of(ys: Sequence[Tensor], widths: Sequence[int]) -> list[Tensor]:
    """The columns of each slice, of outputs `[n, N_i]` that are made of whole slices."""
    left, views = list(widths), []
    for y in ys:
        start = 0
        while start < y.shape[1]:
            width = left.pop(0)
            views.append(y if width == y.shape[1] else y[:, start : start + width])
            start += width
    return views


_ops: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_keys = itertools.count()


def register(op: Any) -> int:
    """The key by which graphs name an op, for as long as it lives."""
    key = next(_keys)
    _ops[key] = op
    return key


def named(key: int) -> Any:
    op = _ops.get(key)
    if op is None:
        raise ModelError("This compiled graph is of a model that is not enabled any more: compile the model again.")
    return op


@functools.cache
def _side_stream(device: torch.device, counters: int) -> torch.cuda.Stream:
    """A model's, which its counters stand for: two models may be captured at a time, and not into one graph."""
    return torch.cuda.Stream(device)


# Where kernels that are launched by `join` branch off, None where `begin` has launched them; of the last `begin` of a
# capture, which may have ended before its `join`.
_forks: dict[torch.cuda.Stream, torch.cuda.Event | None] = {}


def begin(x: Tensor, op: Any, row_slots: Tensor, rows: int) -> Tensor:
    """Start the deltas of `x [..., K]`, fp32 `[n, sum of the widths]`; not to be read before `join`.

    While a graph is captured they are made on a stream of their own. The node that follows first on x goes on where x
    was made, the others some microseconds later, as they wait for another stream. Where one base layer reads x, it
    fills the device, and it is the deltas that have to be first; where several do, there is room later, and a base
    layer is: then the launches come in `join`.
    """
    d = torch.empty(x.numel() // x.shape[-1], op.out_features, dtype=torch.float32, device=x.device)
    if not torch.cuda.is_current_stream_capturing():
        _launch(d, x, op, row_slots, rows)
        return d
    side = _side_stream(x.device, op.counters.data_ptr())
    _forks[side] = torch.cuda.current_stream(x.device).record_event() if len(op.outputs) > 1 else None
    if _forks[side] is None:
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            _launch(d, x, op, row_slots, rows)
    return d


def join(d: Tensor, x: Tensor, op: Any, row_slots: Tensor, rows: int) -> None:
    """What comes next on the current stream waits for what `begin` started; the same arguments, and its result."""
    if not torch.cuda.is_current_stream_capturing():
        return
    side = _side_stream(x.device, op.counters.data_ptr())
    fork = _forks.pop(side)
    if fork is not None:
        side.wait_event(fork)
        with torch.cuda.stream(side):
            _launch(d, x, op, row_slots, rows)
    torch.cuda.current_stream(x.device).wait_stream(side)


def _launch(d: Tensor, x: Tensor, op: Any, row_slots: Tensor, rows: int) -> None:
    n, k = d.shape[0], x.shape[-1]
    with torch.cuda.device(x.device):
        # Allocated on the stream that uses them (a copy of x, planes): the other one might hand their memory out
        # again before these kernels have run.
        source, row_map = unit_stride(x.reshape(n, k)), launch.Rows(row_slots, None, rows)
        call = launch.describe(n, k, op.widths, x.dtype, x.dtype, op.arena, row_map)
        planes = torch.empty(launch.plane_elems(call), dtype=torch.float32, device=x.device)
        launch.delta(d, op.widths, source, x.dtype, op.arena, row_map, planes, op.site)


# x is not written. Said to be, it makes the compiler keep the base layers, which read x, behind this op: by its data
# alone it could come last, and nothing would run beside anything.
@torch.library.custom_op("hf_multilora::lora_delta", mutates_args=("x",))
def delta(x: Tensor, row_slots: Tensor, key: int, rows: int) -> Tensor:
    """What the adapters add to the outputs of layers that read `x [..., K]`: fp32 `[..., sum of the widths]`.

    -0.0 where they add nothing. Not to be read before `lora_join_`.
    """
    op = named(key)
    return begin(x, op, row_slots, rows).view(*x.shape[:-1], op.out_features)


@delta.register_fake
def _(x: Tensor, row_slots: Tensor, key: int, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], named(key).out_features, dtype=torch.float32)


@torch.library.custom_op("hf_multilora::lora_join_", mutates_args=("d",))
def join_(d: Tensor, x: Tensor, ys: Sequence[Tensor], row_slots: Tensor, key: int, rows: int) -> None:
    """From here on `d` may be read; x is what it was made from, ys what the base layers made of x meanwhile."""
    op = named(key)
    join(d.view(-1, op.out_features), x, op, row_slots, rows)


@join_.register_fake
def _(*args: Any) -> None:
    return None


@torch.library.custom_op("hf_multilora::lora_expand_", mutates_args=("ys",))
def expand_(
    ys: Sequence[Tensor], x: Tensor, row_slots: Tensor, key: int, rows: int, row_starts: Tensor | None = None
) -> None:
    """`reference.lora_linear` in place on each y `[..., N_i]`, on any device."""
    op = named(key)
    k = x.shape[-1]
    n = x.numel() // k
    if n == 0 or rows == 0:
        return
    targets, source = [y.reshape(n, -1) for y in ys], unit_stride(x.reshape(n, k))
    if runs_triton(ys[0], op.data):
        targets = [unit_stride(target) for target in targets]
        row_map = launch.Rows(row_slots, row_starts, rows)
        with torch.cuda.device(x.device):
            call = launch.describe(n, k, op.widths, x.dtype, ys[0].dtype, op.arena, row_map)
            planes = torch.empty(launch.plane_elems(call), dtype=torch.float32, device=x.device)
            launch.linear(slices_of(targets, op.widths), source, op.arena, row_map, planes, op.site, _recipes)
        for y, target in zip(ys, targets, strict=True):
            if target.data_ptr() != y.data_ptr():
                y.copy_(target.view(y.shape))
        return
    for y, target, (first, columns) in zip(ys, targets, op.layers, strict=True):
        where = (op.data, op.meta, op.floats, row_slots.view(-1)[:rows], rows, first)
        out = reference.lora_linear(target, source, *where, columns, op.slot_elems, op.zero_off, None, row_starts)
        y.copy_(out.view(y.shape))


@expand_.register_fake
def _(*args: Any) -> None:
    return None


@torch.library.custom_op("hf_multilora::lora_embedding_", mutates_args=("y",))
def embedding(
    y: Tensor, ids: Tensor, row_slots: Tensor, key: int, rows: int, row_starts: Tensor | None = None
) -> None:
    """`reference.lora_embedding` in place on y `[..., width]`, on any device."""
    op = named(key)
    n, width = ids.numel(), y.shape[-1]
    if n == 0 or rows == 0:
        return
    target, source = y.reshape(n, width), ids.reshape(n).contiguous()
    if runs_triton(y, op.data):
        target = unit_stride(target)
        with torch.cuda.device(y.device):
            planes = torch.empty(n * op.max_rank, dtype=torch.float32, device=y.device)
            row_map = launch.Rows(row_slots, row_starts, rows)
            launch.embed(target, source, op.arena, row_map, planes, op.site, _recipes)
        if target.data_ptr() != y.data_ptr():
            y.copy_(target.view(y.shape))
        return
    where = (op.data, op.meta, op.floats, row_slots.view(-1)[:rows], rows, op.site)
    out = reference.lora_embedding(target, source, *where, width, op.slot_elems, op.zero_off, None, row_starts)
    y.copy_(out.view(y.shape))


@embedding.register_fake
def _(*args: Any) -> None:
    return None
