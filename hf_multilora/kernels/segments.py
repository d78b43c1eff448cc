"""Which rows share an adapter: the table behind the rows' slots that the segment kernels read.

    row table   int32 [1, size], size = capacity + 17 * tiles; the dimension in front tells it from slots alone
                = slots [capacity] | slot of each tile [tiles] | its rows [tiles, TILE]

A tile holds up to TILE rows of one slot (rows of the base model, slot -1, make tiles as well); places without a row
and tiles without rows are -1. `tiles` depends on the capacity and the number of slots alone, so that a captured graph
has room for every mix of its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

TILE = 16


def tile_count(capacity: int, adapters: int) -> int:
    """Tiles that `capacity` rows need at most, whichever of `adapters` slots (or none) each of them names."""
    return min(capacity, adapters + 1 + capacity // TILE)


def table_size(capacity: int, adapters: int) -> int:
    """int32 elements of a row table."""
    return capacity + (1 + TILE) * tile_count(capacity, adapters)


@functools.lru_cache(maxsize=1024)
def capacity_of(size: int, adapters: int) -> int:
    """The capacity of a row table of `size` elements.

    Raises:
        ValueError: no row table has this size.
    """
    low, high = 1, size
    while low < high:
        middle = (low + high) // 2
        if table_size(middle, adapters) < size:
            low = middle + 1
        else:
            high = middle
    if table_size(low, adapters) != size:
        raise ValueError(f"no row table over {adapters} slots has {size} elements")
    return low


def row_table(slots: Sequence[int], adapters: int) -> list[int]:
    """The row table of these rows; its capacity is their number."""
    tiles = tile_count(len(slots), adapters)
    groups: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        groups.setdefault(slot, []).append(row)
    tile_slots, tile_rows = [], []
    for slot, rows in groups.items():
        for first in range(0, len(rows), TILE):
            part = rows[first : first + TILE]
            tile_slots.append(slot)
            tile_rows += part + [-1] * (TILE - len(part))
    spare = tiles - len(tile_slots)
    return [*slots, *tile_slots, *[-1] * spare, *tile_rows, *[-1] * (TILE * spare)]


def row_table_array(slots: np.ndarray[Any, Any], adapters: int) -> np.ndarray[Any, Any]:
    """`row_table` of int32 `[rows]` as int32 `[size]`, for batches of thousands of rows.

    Example:
        >>> row_table_array(np.array([1, -1, 1]), 2).tolist() == row_table([1, -1, 1], 2)
        True
    """
    rows, tiles = len(slots), tile_count(len(slots), adapters)
    _, first, group = np.unique(slots, return_index=True, return_inverse=True)
    age = np.argsort(np.argsort(first))  # groups in the order of their first rows
    group = age[group.reshape(-1)]
    order = np.argsort(group, kind="stable")
    counts = np.bincount(group, minlength=len(first))
    used = -(-counts // TILE)
    within = np.arange(rows) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.full(rows + (1 + TILE) * tiles, -1, dtype=np.int32)
    table[:rows] = slots
    table[rows : rows + used.sum()] = np.repeat(slots[order[np.cumsum(counts) - counts]], used)
    table[rows + tiles + TILE * np.repeat(np.cumsum(used) - used, counts) + within] = order
    return table
