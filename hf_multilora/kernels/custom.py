"""The custom ops that compiled forwards call, and what decides about the kernels.

Buffers are allocated in the ops: safe in a graph, and no state that Inductor cannot see. `delta` and `join_` are a
pair: while a graph is captured, the first lets the kernels run on a stream of their own, beside the base layers, and
the second brings the streams together. Between them nobody may read or free what these kernels use, hence `join_`
takes it all.

Inductor keeps compiled graphs on disk, and knows ops by their names alone: an op whose arguments change needs another
name.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

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


@functools.cache
def _side_stream(device: torch.device, counters: int) -> torch.cuda.Stream:
    """A model's, which its counters stand for: two models may be captured at a time, and not into one graph."""
    return torch.cuda.Stream(device)


def start_delta(x: Tensor, arena: Any, rows: Any, site: int, widths: Sequence[int], y: torch.dtype) -> Tensor:
    """Deltas of `x [..., K]` as fp32 `[n, sum of the widths]`, beside what comes next where that is being captured."""
    k = x.shape[-1]
    n = x.numel() // k
    d = torch.empty(n, sum(widths), dtype=torch.float32, device=x.device)
    beside: Any = nullcontext()
    if torch.cuda.is_current_stream_capturing():
        side = _side_stream(x.device, arena.counters.data_ptr())
        side.wait_stream(torch.cuda.current_stream(x.device))
        beside = torch.cuda.stream(side)
    with torch.cuda.device(x.device), beside:
        # Allocated on the stream that uses them (a copy of x, planes): the other one might hand their memory out
        # again before these kernels have run.
        source = unit_stride(x.reshape(n, k))
        call = launch.describe(n, k, widths, x.dtype, y, arena, rows)
        planes = torch.empty(launch.plane_elems(call), dtype=torch.float32, device=x.device)
        launch.delta(d, widths, source, y, arena, rows, planes, site)
    return d


def join(counters: Tensor) -> None:
    """What comes next on the current stream waits for the `start_delta` of the model that these counters belong to."""
    if torch.cuda.is_current_stream_capturing():
        device = counters.device
        torch.cuda.current_stream(device).wait_stream(_side_stream(device, counters.data_ptr()))


# x is not written. Said to be, it makes the compiler keep the base layers, which read x, behind this op: by its data
# alone it could come last, and nothing would run beside anything.
@torch.library.custom_op("hf_multilora::delta", mutates_args=("x",))
def delta(
    x: Tensor,
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
    counters: Tensor,
    row_slots: Tensor,
    rows: int,
    site: int,
    widths: Sequence[int],
    slot_elems: int,
    max_rank: int,
) -> Tensor:
    """What the adapters add to the outputs of layers that read `x [..., K]`: fp32 `[..., sum of the widths]`.

    -0.0 where they add nothing. Not to be read before `join_`.
    """
    arena = launch.Arena(data, meta, floats, counters, slot_elems, max_rank)
    d = start_delta(x, arena, launch.Rows(row_slots, None, rows), site, widths, x.dtype)
    return d.view(*x.shape[:-1], d.shape[1])


@delta.register_fake
def _(x: Tensor, data: Tensor, meta: Tensor, floats: Tensor, counters: Tensor, *args: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(args[3]), dtype=torch.float32)


@torch.library.custom_op("hf_multilora::join_", mutates_args=("d",))
def join_(d: Tensor, x: Tensor, ys: Sequence[Tensor], counters: Tensor) -> None:
    """From here on `d` may be read; x is what it was made from, ys what the base layers made of x meanwhile."""
    join(counters)


@join_.register_fake
def _(*args: Any) -> None:
    return None


@torch.library.custom_op("hf_multilora::expand_", mutates_args=("ys",))
def expand_(
    ys: Sequence[Tensor],
    x: Tensor,
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
    counters: Tensor,
    row_slots: Tensor,
    rows: int,
    site: int,
    widths: Sequence[int],
    outputs: Sequence[int],
    slot_elems: int,
    zero_off: int,
    max_rank: int,
    row_starts: Tensor | None = None,
) -> None:
    """`reference.lora_linear` in place on each y `[..., N_i]`, on any device."""
    k = x.shape[-1]
    n = x.numel() // k
    if n == 0 or rows == 0:
        return
    targets, source = [y.reshape(n, -1) for y in ys], unit_stride(x.reshape(n, k))
    if runs_triton(ys[0], data):
        targets = [unit_stride(target) for target in targets]
        arena = launch.Arena(data, meta, floats, counters, slot_elems, max_rank)
        row_map = launch.Rows(row_slots, row_starts, rows)
        with torch.cuda.device(x.device):
            call = launch.describe(n, k, widths, x.dtype, ys[0].dtype, arena, row_map)
            planes = torch.empty(launch.plane_elems(call), dtype=torch.float32, device=x.device)
            launch.linear(slices_of(targets, widths), source, arena, row_map, planes, site, _recipes)
        for y, target in zip(ys, targets, strict=True):
            if target.data_ptr() != y.data_ptr():
                y.copy_(target.view(y.shape))
        return
    for y, target, (first, columns) in zip(ys, targets, parts_of(site, widths, outputs), strict=True):
        where = (data, meta, floats, row_slots.view(-1)[:rows], rows, first)
        out = reference.lora_linear(target, source, *where, columns, slot_elems, zero_off, None, row_starts)
        y.copy_(out.view(y.shape))


@expand_.register_fake
def _(*args: Any) -> None:
    return None


@torch.library.custom_op("hf_multilora::embedding", mutates_args=("y",))
def embedding(
    y: Tensor,
    ids: Tensor,
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
    counters: Tensor,
    row_slots: Tensor,
    rows: int,
    site: int,
    slot_elems: int,
    zero_off: int,
    max_rank: int,
    row_starts: Tensor | None = None,
) -> None:
    """`reference.lora_embedding` in place on y `[..., width]`, on any device."""
    n, width = ids.numel(), y.shape[-1]
    if n == 0 or rows == 0:
        return
    target, source = y.reshape(n, width), ids.reshape(n).contiguous()
    if runs_triton(y, data):
        target = unit_stride(target)
        arena = launch.Arena(data, meta, floats, counters, slot_elems, max_rank)
        with torch.cuda.device(y.device):
            planes = torch.empty(n * max_rank, dtype=torch.float32, device=y.device)
            row_map = launch.Rows(row_slots, row_starts, rows)
            launch.embed(target, source, arena, row_map, planes, site, _recipes)
        if target.data_ptr() != y.data_ptr():
            y.copy_(target.view(y.shape))
        return
    where = (data, meta, floats, row_slots.view(-1)[:rows], rows, site)
    out = reference.lora_embedding(target, source, *where, width, slot_elems, zero_off, None, row_starts)
    y.copy_(out.view(y.shape))


@embedding.register_fake
def _(*args: Any) -> None:
    return None
