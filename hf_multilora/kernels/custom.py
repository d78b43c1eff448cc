"""The custom ops that compiled forwards call, and what decides about the kernels.

Planes are allocated in the ops: safe in a graph, and no state that Inductor cannot see.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from . import groups, launch

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


@torch.library.custom_op("hf_multilora::shrink", mutates_args=())
def shrink(
    x: Tensor,
    data: Tensor,
    meta: Tensor,
    row_slots: Tensor,
    rows: int,
    site: int,
    widths: Sequence[int],
    slot_elems: int,
    max_rank: int,
    row_starts: Tensor | None = None,
) -> Tensor:
    """x A^T as `expand_` takes it; empty where that does it all."""
    return x.new_empty(0, dtype=torch.float32)


@shrink.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(0, dtype=torch.float32)


@torch.library.custom_op("hf_multilora::expand_", mutates_args=("ys",))
def expand_(
    ys: Sequence[Tensor],
    x: Tensor,
    h: Tensor,
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
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
    """`reference.lora_linear` in place on each y `[..., N_i]`, on any device; h is what `shrink` made of x."""
    k = x.shape[-1]
    n = x.numel() // k
    if n == 0 or rows == 0:
        return
    layers = tuple(parts_of(site, widths, outputs))
    targets, source = [y.reshape(n, -1) for y in ys], unit_stride(x.reshape(n, k))
    if runs_triton(ys[0], data):
        targets = [unit_stride(target) for target in targets]
        with torch.cuda.device(x.device):
            elems = groups.plane_elems(n, rows, k, layers, max_rank, source, data)
            planes = torch.empty(elems, dtype=torch.float32, device=x.device)
            tensors = (data, meta, floats, row_slots, planes, rows, layers)
            groups.linear(targets, source, *tensors, slot_elems, max_rank, _recipes, row_starts)
        for y, target in zip(ys, targets, strict=True):
            if target.data_ptr() != y.data_ptr():
                y.copy_(target.view(y.shape))
        return
    for y, target, (first, columns) in zip(ys, targets, layers, strict=True):
        arena = (data, meta, floats, row_slots, rows, first)
        out = reference.lora_linear(target, source, *arena, columns, slot_elems, zero_off, None, row_starts)
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
        with torch.cuda.device(y.device):
            planes = torch.empty(n * max_rank, dtype=torch.float32, device=y.device)
            tensors = (data, meta, floats, row_slots, planes, rows, site)
            launch.embed(target, source, *tensors, width, slot_elems, max_rank, _recipes, row_starts)
        if target.data_ptr() != y.data_ptr():
            y.copy_(target.view(y.shape))
        return
    arena = (data, meta, floats, row_slots, rows, site)
    out = reference.lora_embedding(target, source, *arena, width, slot_elems, zero_off, None, row_starts)
    y.copy_(out.view(y.shape))


@embedding.register_fake
def _(*args: Any) -> None:
    return None
