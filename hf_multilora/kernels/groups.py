"""Launches for a group of linear layers that read one x: at present one pair of launches for each layer's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import launch

Parts = Sequence[tuple[int, tuple[int, ...]]]


def plane_elems(n: int, rows: int, k: int, layers: Parts, max_rank: int, x: Tensor, data: Tensor) -> int:
    """fp32 elements that the planes of one call take; the layers use them in turn."""
    return max(launch.plane_elems(n, rows, k, len(widths), max_rank, x.dtype, data.dtype) for _, widths in layers)


def linear(
    ys: Sequence[Tensor],
    x: Tensor,
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
    row_slots: Tensor,
    planes: Tensor,
    rows: int,
    layers: Parts,
    slot_elems: int,
    max_rank: int,
    recipes: dict[Any, Any],
    row_starts: Tensor | None = None,
) -> tuple[Any, ...] | None:
    """Shrink and expand, each `y [n, N_i]` in place; returns one recipe for each, None where one could not be made."""
    made = []
    for y, (site, widths) in zip(ys, layers, strict=True):
        arena = (data, meta, floats, row_slots, planes, rows, site)
        made.append(launch.linear(y, x, *arena, widths, slot_elems, max_rank, recipes, row_starts))
    return None if None in made else tuple(made)


def run(
    recipes: Sequence[Any],
    ys: Sequence[Tensor],
    layers: Parts,
    stream: int,
    x: int,
    row_slots: int,
    row_starts: int,
    planes: int,
) -> None:
    """The same from recipes; all but `ys` are addresses."""
    for recipe, y, (site, _) in zip(recipes, ys, layers, strict=True):
        recipe.first(stream, x, row_slots, row_starts, planes, site)
        recipe.second(stream, y.data_ptr(), row_slots, row_starts, planes, site)
