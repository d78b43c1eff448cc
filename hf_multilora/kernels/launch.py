"""Launches: the ordinary one, and the prebuilt one that costs a few microseconds of host time.

Triton's `kernel[grid](...)` binds, specialises and looks up at every call, some 50 us. What it ends in is the
compiled kernel's own launcher, `CompiledKernel.run(grid..., stream, function, ..., *args)`, which takes integers for
pointers. A `Recipe` keeps that call with everything bound that does not change: it is right only for pointers that are
aligned as those it was made with (16 bytes), and for the same shapes, dtypes and device; those it is looked up by.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import embedding, expand, shrink
from .tuning import expand_tiling, shrink_tiling

logger = logging.getLogger(__name__)

# Shapes whose launches are kept by one workspace: prompts come in ever new lengths.
_MAX_RECIPES = 1024

# launch(stream, pointer of x or y, of row_slots, of row_starts, of the planes, site). Kernels made without starts read
# none; any pointer will do.
Launch = Callable[[int, int, int, int, int, int], None]
# As many arguments of a kernel as change from call to call or from layer to layer; they come first.
_VARYING = 5


class Recipe:
    """Two prebuilt launches, shrink (or gather) and expand, for one shape of call."""

    __slots__ = ("first", "second")

    def __init__(self, first: Launch, second: Launch) -> None:
        self.first, self.second = first, second


class _Prebuilding:
    """Whether prebuilt launches work with this Triton; tried once, on a launch that may safely run twice."""

    works: bool | None = None


def plane_elems(n: int, rows: int, k: int, slices: int, max_rank: int, x: torch.dtype, data: torch.dtype) -> int:
    """fp32 elements that the planes of one linear call take."""
    return shrink_tiling(n, rows, k, max_rank, x, data).split * n * slices * max_rank


def linear(
    y: Tensor,
    x: Tensor,
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
    row_slots: Tensor,
    planes: Tensor,
    rows: int,
    site: int,
    widths: Sequence[int],
    slot_elems: int,
    max_rank: int,
    recipes: dict[Any, Recipe],
    row_starts: Tensor | None = None,
) -> Recipe | None:
    """Shrink and expand, `y [n, N]` in place, `x [n, K]`, both with unit stride along columns.

    Returns the recipe for calls of the same shape, which it looks up in `recipes` and keeps there; None where there
    cannot be one (x or y not aligned to 16 bytes, the interpreter, an unknown launcher).
    """
    key = _key(y, x, data, meta, floats, rows, widths, slot_elems, max_rank, row_starts is None)
    recipe = recipes.get(key) if key else None
    if recipe is not None:
        _run_recipe(recipe, y, x, row_slots, row_starts, planes, site)
        return recipe
    n, k = x.shape
    shrinking = shrink_tiling(n, rows, k, max_rank, x.dtype, data.dtype)
    expanding = expand_tiling(n, rows, max(widths), max_rank, y.dtype, data.dtype)
    common = (row_slots, row_starts, planes, data, meta, rows, site)
    first = shrink.prepare(x, *common, len(widths), slot_elems, max_rank, shrinking)
    second = expand.prepare(y, *common, floats, widths, slot_elems, max_rank, shrinking.split, expanding)
    return _run(first, second, key, recipes)


def embed(
    y: Tensor,
    ids: Tensor,
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
    row_slots: Tensor,
    planes: Tensor,
    rows: int,
    site: int,
    width: int,
    slot_elems: int,
    max_rank: int,
    recipes: dict[Any, Recipe],
    row_starts: Tensor | None = None,
) -> Recipe | None:
    """Gather and expand, `y [n, width]` in place, `ids [n]` contiguous; returns what `linear` does."""
    key = _key(y, ids, data, meta, floats, rows, (width,), slot_elems, max_rank, row_starts is None)
    recipe = recipes.get(key) if key else None
    if recipe is not None:
        _run_recipe(recipe, y, ids, row_slots, row_starts, planes, site)
        return recipe
    common = (row_slots, row_starts, planes, data, meta, rows, site)
    expanding = expand_tiling(ids.numel(), rows, width, max_rank, y.dtype, data.dtype)
    first = embedding.prepare(ids, *common, slot_elems, max_rank)
    second = expand.prepare(y, *common, floats, (width,), slot_elems, max_rank, 1, expanding)
    return _run(first, second, key, recipes)


def _key(
    y: Tensor,
    x: Tensor,
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
    rows: int,
    widths: Sequence[int],
    slot_elems: int,
    max_rank: int,
    whole_rows: bool,
) -> tuple[Any, ...] | None:
    """Everything that a recipe has bound; None where x or y is not aligned as a recipe's kernels assume."""
    if (x.data_ptr() | y.data_ptr()) & 15:
        return None
    shapes = (x.shape, x.stride(0), x.dtype, y.shape, y.stride(0), y.dtype, rows, whole_rows, *widths)
    arena = (data.data_ptr(), meta.data_ptr(), floats.data_ptr(), meta.stride(0), slot_elems, data.dtype, data.device)
    return (*shapes, *arena, max_rank)


def _run_recipe(
    recipe: Recipe, y: Tensor, x: Tensor, row_slots: Tensor, row_starts: Tensor | None, planes: Tensor, site: int
) -> None:
    stream = torch.cuda.current_stream(y.device).cuda_stream
    slots, h = row_slots.data_ptr(), planes.data_ptr()
    starts = slots if row_starts is None else row_starts.data_ptr()
    recipe.first(stream, x.data_ptr(), slots, starts, h, site)
    recipe.second(stream, y.data_ptr(), slots, starts, h, site)


def _run(
    first: tuple[Any, ...], second: tuple[Any, ...], key: tuple[Any, ...] | None, recipes: dict[Any, Recipe]
) -> Recipe | None:
    launches = []
    for kernel, grid, args, options in (first, second):
        compiled = kernel[grid](*args, **options)
        launch = _prebuild(compiled, grid, args)
        if launch is not None and _Prebuilding.works is None:
            _try_out(launch, args)
        if launch is not None and _Prebuilding.works:
            launches.append(launch)
    if key is None or len(launches) < 2:
        return None
    if len(recipes) >= _MAX_RECIPES:
        recipes.clear()
    recipe = recipes[key] = Recipe(*launches)
    return recipe


def _prebuild(compiled: Any, grid: tuple[int, int, int], args: tuple[Any, ...]) -> Launch | None:
    """A closure over everything that does not change between calls of one shape."""
    run = getattr(compiled, "run", None)
    function = getattr(compiled, "function", None)
    packed = getattr(compiled, "packed_metadata", None)
    if run is None or function is None or packed is None:
        return None
    g0, g1, g2 = grid
    tail = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in args[_VARYING:])

    def launch(stream: int, pointer: int, row_slots: int, row_starts: int, planes: int, site: int) -> None:
        run(
            g0, g1, g2, stream, function, packed, None, None, None, pointer, row_slots, row_starts, planes, site, *tail
        )

    return launch


def _try_out(launch: Launch, args: tuple[Any, ...]) -> None:
    """Run the first kernel once more: it writes the same planes again, so nothing is lost if this works."""
    x, row_slots, row_starts, planes, site = args[:_VARYING]
    stream = torch.cuda.current_stream(x.device).cuda_stream
    try:
        launch(stream, x.data_ptr(), row_slots.data_ptr(), row_starts.data_ptr(), planes.data_ptr(), site)
        _Prebuilding.works = True
    except (TypeError, ValueError, AttributeError, SystemError) as error:
        _Prebuilding.works = False
        logger.warning(
            "Triton's launcher is not the one that prebuilt launches were written for (%s): each LoRA layer costs "
            "about 0.1 ms more host time in eager mode. Triton 3.6 and 3.7 are known to work.",
            error,
        )
