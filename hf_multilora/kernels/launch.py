"""Launches: the ordinary ones, and prepared ones that cost a few microseconds of host time.

Triton's `kernel[grid](...)` binds, specialises and looks up at every call, some 50 us. A *recipe* is both launches of
a call (`driver`) with everything bound that does not change: it is right only for pointers that are aligned as those
it was made with (16 bytes), and for the same shapes, dtypes and device; those it is looked up by.

    recipe(stream, x, row_slots, row_starts, planes, site, y0, y1, y2, y3)

with the addresses of tensors; four slices of y, any address for those that there are not, and for row_starts where the
kernels were made without.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from . import driver, embedding, expand, shrink
from . import finish as finish_op
from .driver import Launch
from .segments import capacity_of
from .tuning import Call, ExpandTiling, ShrinkTiling, expand_tiling, kind_of, shrink_tiling

logger = logging.get_logger(__name__)

# Shapes whose launches are kept by one workspace: prompts come in ever new lengths.
_MAX_RECIPES = 1024

# Which of a recipe's values the leading arguments of each kernel are: x (or ids), row_slots, row_starts, planes and
# the site; the ys in place of x.
_FIRST = (0, 1, 2, 3, 4)
_SECOND = (5, 6, 7, 8, 1, 2, 3, 4)


class Arena(NamedTuple):
    """What every launch of one model reads: the slots, and counters that are 0 between launches."""

    data: Tensor
    meta: Tensor
    floats: Tensor
    counters: Tensor
    slot_elems: int
    max_rank: int


class Rows(NamedTuple):
    """Which slots the rows name: int32, a row table where it has two dimensions; int32 starts; their number."""

    slots: Tensor
    starts: Tensor | None
    rows: int


@functools.cache
def _knows_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def describe(n: int, k: int, widths: Sequence[int], x: torch.dtype, y: torch.dtype, arena: Arena, rows: Rows) -> Call:
    """The shape of a call, as tuning wants it."""
    data, adapters = arena.data, arena.meta.shape[0]
    capacity = capacity_of(rows.slots.numel(), adapters) if rows.slots.dim() == 2 else None
    pdl, starts = _knows_pdl(data.device), rows.starts is not None
    shape = (n, rows.rows, k, tuple(widths), arena.max_rank, adapters)
    return Call(*shape, x, y, data.dtype, capacity, starts, pdl)


def tilings(call: Call) -> tuple[ShrinkTiling, ExpandTiling]:
    return shrink_tiling(call), expand_tiling(call)


def plane_elems(call: Call) -> int:
    """fp32 elements that the planes of one linear call take."""
    return shrink.plane_elems(call.n, len(call.widths), call.max_rank, shrink_tiling(call))


def linear(
    ys: Sequence[Tensor], x: Tensor, arena: Arena, rows: Rows, planes: Tensor, site: int, recipes: dict[Any, Launch]
) -> Launch | None:
    """Shrink and expand: each slice's `y [n, width]` in place, `x [n, K]`, all with unit stride along columns.

    Returns the recipe for calls of the same shape, which it looks up in `recipes` and keeps there; None where there
    cannot be one (x or y not aligned to 16 bytes, the interpreter, an unknown launcher).
    """
    key = key_of(ys, x, arena, rows)
    recipe = recipes.get(key) if key else None
    if recipe is not None:
        _run_recipe(recipe, ys, x, rows, planes, site)
        return recipe
    call = describe(x.shape[0], x.shape[1], [y.shape[1] for y in ys], x.dtype, ys[0].dtype, arena, rows)
    first, second = _prepared(call, ys, x, arena, rows, planes, site)
    return run_all([(first, _FIRST), (second, _SECOND)], key, recipes)


def delta(
    d: Tensor, widths: Sequence[int], x: Tensor, y: torch.dtype, arena: Arena, rows: Rows, planes: Tensor, site: int
) -> None:
    """Shrink and expand into `d`, fp32 `[n, sum of the widths]`, whose every element is written; see expand.py.

    No dependent launches: programs that wait would hold the multiprocessors that the base layers beside them need.
    """
    call = describe(x.shape[0], x.shape[1], widths, x.dtype, y, arena, rows)
    call = dataclasses.replace(call, pdl=False)
    for kernel, grid, args, options in _prepared(call, d.split(list(widths), 1), x, arena, rows, planes, site, True):
        kernel[grid](*args, **options)


def finish(ys: Sequence[Tensor], d: Tensor, arena: Arena, rows: Rows, site: int) -> None:
    """Add what `delta` made, and gains and shifts, in place."""
    shape = (arena.data, arena.meta, rows.rows, site, arena.floats, arena.slot_elems)
    kernel, grid, args, options = finish_op.prepare(ys, rows.slots, d, *shape)
    kernel[grid](*args, **options)


def _prepared(
    call: Call,
    ys: Sequence[Tensor],
    x: Tensor,
    arena: Arena,
    rows: Rows,
    planes: Tensor,
    site: int,
    deltas: bool = False,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    shrinking, expanding = tilings(call)
    common = (rows.slots, rows.starts, planes, arena.data, arena.meta)
    sizes = (arena.slot_elems, arena.max_rank, shrinking)
    first = shrink.prepare(x, *common, arena.counters, rows.rows, site, len(ys), *sizes)
    second = expand.prepare(ys, *common, rows.rows, site, arena.floats, *sizes, expanding, deltas)
    return first, second


def embed(
    y: Tensor, ids: Tensor, arena: Arena, rows: Rows, planes: Tensor, site: int, recipes: dict[Any, Launch]
) -> Launch | None:
    """Gather and expand, `y [n, width]` in place, `ids [n]` contiguous; returns what `linear` does."""
    key = key_of([y], ids, arena, rows)
    recipe = recipes.get(key) if key else None
    if recipe is not None:
        _run_recipe(recipe, [y], ids, rows, planes, site)
        return recipe
    n, common = ids.numel(), (rows.slots, rows.starts, planes, arena.data, arena.meta)
    call = describe(n, 1, [y.shape[1]], y.dtype, y.dtype, arena, Rows(rows.slots.view(-1), rows.starts, rows.rows))
    sizes = (arena.slot_elems, arena.max_rank)
    first = embedding.prepare(ids, *common, rows.rows, site, *sizes)
    one_plane = ShrinkTiling(kind_of(call), 1, 1, 1, 1, 1, 1, 1, "")
    second = expand.prepare([y], *common, rows.rows, site, arena.floats, *sizes, one_plane, expand_tiling(call))
    return run_all([(first, _FIRST), (second, _SECOND)], key, recipes)


def key_of(ys: Sequence[Tensor], x: Tensor, arena: Arena, rows: Rows) -> tuple[Any, ...] | None:
    """Everything that a recipe has bound; None where x or a y is not aligned as a recipe's kernels assume."""
    bits = x.data_ptr()
    for y in ys:
        bits |= y.data_ptr()
    if bits & 15:
        return None
    data, meta = arena.data, arena.meta
    shapes = [x.shape, x.stride(0), x.dtype, rows.rows, rows.starts is None, rows.slots.shape]
    for y in ys:
        shapes += [y.shape, y.stride(0), y.dtype]
    where = (data.data_ptr(), meta.data_ptr(), arena.floats.data_ptr(), arena.counters.data_ptr())
    return (*shapes, *where, data.dtype, data.device, *meta.shape, *arena[4:])


def _run_recipe(recipe: Launch, ys: Sequence[Tensor], x: Tensor, rows: Rows, planes: Tensor, site: int) -> None:
    stream = torch.cuda.current_stream(x.device).cuda_stream
    slots, h = rows.slots.data_ptr(), planes.data_ptr()
    starts = slots if rows.starts is None else rows.starts.data_ptr()
    pointers = [y.data_ptr() for y in ys] + [ys[0].data_ptr()] * (4 - len(ys))
    recipe(stream, x.data_ptr(), slots, starts, h, site, *pointers)


def run_all(
    launches: Sequence[tuple[tuple[Any, ...], tuple[int, ...]]],
    key: tuple[Any, ...] | None,
    recipes: dict[Any, Launch],
) -> Launch | None:
    """Launch kernels one after the other, and keep the recipe of it under `key`, if there can be one.

    Args:
        launches: (kernel, grid, arguments, options) of each, and which of a recipe's values its first arguments are.
    """
    kernels = []
    for (kernel, grid, args, options), varying in launches:
        compiled = kernel[grid](*args, **options)
        if key is not None and compiled is not None:  # the interpreter compiles nothing
            kernels.append(driver.Kernel(compiled, grid, args, varying))
    if not kernels:
        return None
    recipe = driver.prepare(kernels)
    if recipe is None:
        logger.warning_once(
            "Launches cannot be prepared, and cost more host time at each LoRA layer in eager mode: that needs CUDA's "
            "driver 12.4 or later, and kernels that take their parameters as those of Triton 3.6 and 3.7 do."
        )
        return None
    if len(recipes) >= _MAX_RECIPES:
        recipes.clear()
    recipes[key] = recipe
    return recipe
