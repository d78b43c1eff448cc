"""Shrink and expand launched one by one, for what comes between them; prepared launches as in `launch`.

recipe of a shrink    (stream, x, row_slots, row_starts, planes, site)
recipe of an expand   (stream, y0, y1, y2, y3, row_slots, row_starts, h, site)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import expand, launch, shrink
from .launch import Arena, Rows
from .segments import TILE
from .tuning import ShrinkTiling, expand_tiling, shrink_tiling

_SHRINK, _EXPAND = tuple(range(5)), tuple(range(8))


class Halves:
    """Both halves of one call.

    Args:
        op: whose arena, workspace and in_features it is.
        x: `[n, K]`, unit stride along K.
        y: dtype of the outputs.
        rows: of the call.
    """

    def __init__(self, op: Any, x: Tensor, y: torch.dtype, rows: Rows) -> None:
        self._op, self._x, self._y, self._rows = op, x, y, rows
        self._tiling: ShrinkTiling | None = None

    def shrink(self, site: int, slices: int, rank: int) -> Tensor:
        """x·Aᵀ of the slices from `site` on, fp32 `[rows of h, rank]`; what no row needs is not written.

        The order of its rows follows from the call's shape, so that it is the same on all ranks.
        """
        op, x, rows = self._op, self._x, self._rows
        arena: Arena = op.arena._replace(max_rank=rank)
        # No dependent launches: what is in front of expand is no kernel of ours.
        call = launch.describe(x.shape[0], x.shape[1], (1,) * slices, x.dtype, self._y, arena, rows)
        self._tiling = tiling = dataclasses.replace(shrink_tiling(call), pdl=False)
        # Not the workspace's: a compiled call may be recorded in a CUDA graph, which has memory of its own.
        elems = shrink.plane_elems(x.shape[0], slices, rank, tiling)
        planes = torch.empty(elems, dtype=torch.float32, device=x.device)
        aligned = launch.key_of([], x, arena, rows)
        key = None if aligned is None else ("shrink", aligned, slices, self._y)
        recipe = op.workspace.recipes.get(key)
        if recipe is not None:
            slots, starts = _addresses(rows)
            recipe(_stream(x), x.data_ptr(), slots, starts, planes.data_ptr(), site)
        else:
            common = (rows.slots, rows.starts, planes, arena.data, arena.meta, arena.counters)
            sizes = (rows.rows, site, slices, arena.slot_elems, rank, tiling)
            prepared = shrink.prepare(x, *common, *sizes)
            launch.run_all([(prepared, _SHRINK)], key, op.workspace.recipes)
        if tiling.kind == "segments":  # the first plane has the sums
            count = tiling.tiles * slices * TILE
            return planes[: count * rank].view(count, rank)
        count = x.shape[0] * slices
        split = planes[: tiling.split * count * rank].view(tiling.split, count, rank)
        return split[0] if tiling.split == 1 else split.sum(0)

    def expand(self, ys: Sequence[Tensor], h: Tensor, site: int, rank: int) -> None:
        """Add h·Bt, gains and shifts of the slices from `site` on to ys `[n, width]` with unit stride along columns.

        h: as `shrink` left it, with `rank` columns.
        """
        op, x, rows = self._op, self._x, self._rows
        assert self._tiling is not None, "shrink comes first"
        arena: Arena = op.arena._replace(max_rank=rank)
        aligned = launch.key_of(ys, ys[0], arena, rows)
        key = None if aligned is None else ("expand", aligned, x.shape[1], x.dtype)
        recipe = op.workspace.recipes.get(key)
        if recipe is not None:
            slots, starts = _addresses(rows)
            pointers = [y.data_ptr() for y in ys] + [ys[0].data_ptr()] * (4 - len(ys))
            recipe(_stream(x), *pointers, slots, starts, h.data_ptr(), site)
            return
        call = launch.describe(x.shape[0], x.shape[1], [y.shape[1] for y in ys], x.dtype, self._y, arena, rows)
        call = dataclasses.replace(call, pdl=False)
        common = (rows.slots, rows.starts, h, arena.data, arena.meta, rows.rows, site, arena.floats)
        sizes = (arena.slot_elems, rank, dataclasses.replace(self._tiling, split=1), expand_tiling(call))
        launch.run_all([(expand.prepare(ys, *common, *sizes), _EXPAND)], key, op.workspace.recipes)


def _addresses(rows: Rows) -> tuple[int, int]:
    slots = rows.slots.data_ptr()
    return slots, slots if rows.starts is None else rows.starts.data_ptr()


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream
