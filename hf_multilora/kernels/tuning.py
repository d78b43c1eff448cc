"""Which kernels serve a call, and their block sizes, as data.

Both follow from the shape of a call, the arena's largest rank and its number of slots, never from who is in the batch:
else a row's bits would depend on its neighbours. Block sizes come from a rule; where a table (`table`) has tuned ones
for a shape, they replace the rule's. Nothing that changes the order of sums may depend on the `widths` of a call: a
neighbour decides whether a layer is served in a group or alone, and that must not change one bit of a row.

Sources: decode moves each adapter's factors once, so its sizes are chosen to have a few megabytes of 16-byte loads in
flight over all multiprocessors; prefill moves x and y once. Figures in bytes are for an H200 (132 multiprocessors).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import table
from .segments import TILE, tile_count
from .table import LOW_RANK, MAX_SPLIT

# From this many tokens a row on, tiles and tl.dot; below, one program per token or per tile of rows.
TILE_TOKENS = 16
# Rows that share slots are served together from this many rows, and this many for each slot, on.
SEGMENT_ROWS, SEGMENT_ROWS_A_SLOT = 8, 2
# Tokens that segments serve at most (packed prompts, a row for each token), and deltas beside the base layer.
MAX_SEGMENT_TOKENS = 16384
MAX_DELTA_TOKENS = 4096
# Programs that fill the machine: K is split until there are this many.
PREFILL_PROGRAMS = 128
# What the stages of a pipeline may take of a multiprocessor's memory.
SHARED_BYTES = 200_000
# Slices of the largest group: sizes that change sums are made for it, also where a layer is alone.
MAX_SLICES = 4

# Decode shrink by tokens in the call: (up to, bytes of a row of A that a program reads, of these at a time, warps).
SHRINK_ROWS = ((256, 1024, 512, 4), (1 << 62, 2048, 512, 4))
# Decode expand, by largest rank (up to): (bytes of a row of Bt that a program reads, largest rank at once, warps). The
# same for all widths: threads' layout decides in which order planes are added.
EXPAND_ROWS = ((LOW_RANK, table.WARP_BYTES, 16, 1), (1 << 62, table.WARP_BYTES // 2, 32, 1))
# Segments, by largest rank (up to): (elements of K for a program, at a time, stages, warps).
SHRINK_SEGMENTS = ((32, 256, 256, 2, 4), (1 << 62, 512, 128, 3, 4))
# Segments, by largest rank and widest slice (up to): (columns, stages, warps); the largest rank at once for all, as it
# orders the sums.
EXPAND_SEGMENTS = ((32, 8192, 256, 1, 4), (32, 1 << 62, 128, 1, 4), (1 << 62, 1 << 62, 128, 2, 4))
EXPAND_SEGMENTS_RANK = 32
# Prefill shrink, by kind of dot: (largest tile of tokens, elements of K at a time, largest rank at once, stages,
# warps).
SHRINK_TILES = {"native": (64, 128, 64, 4, 4), "tf32": (32, 64, 64, 3, 4), "ieee": (32, 32, 32, 2, 4)}
# Prefill expand: (largest tile of tokens, columns, largest rank at once, steps, warps).
EXPAND_TILES = {"split": (64, 128, 64, 8, 4), "tf32": (32, 128, 16, 4, 4), "ieee": (32, 64, 16, 4, 4)}
# The same for "split" and ranks up to LOW_RANK, by tokens in the call (up to).
EXPAND_TILES_LOW = ((4095, 32, 128, 16, 4, 4), (1 << 62, 32, 128, 16, 8, 4))

# What a search tries, the last field changing first; `search_space` leaves out what cannot run, or would spill.
SPACE: dict[str, dict[str, tuple[int, ...]]] = {
    "shrink_rows": {"chunk": (512, 256, 1024, 2048), "block_k": (256, 512, 1024), "warps": (4, 2, 8)},
    "shrink_segments": {"chunk": (512, 256, 1024, 2048), "block_k": (256, 128), "stages": (2, 4), "warps": (4, 2)},
    "shrink_tiles": {"block_m": (64, 32, 128), "block_k": (128, 64), "stages": (4, 3), "warps": (4, 8)},
    "expand_rows": {"block_n": (256, 512, 1024)},
    "expand_segments": {"block_n": (256, 128, 64), "stages": (1, 2), "warps": (4, 2)},
    "expand_tiles": {"block_n": (128, 256, 64), "steps": (8, 1, 4), "warps": (4, 8)},
}
# Elements of a tile for one thread: more do not fit its registers, and fewer leave too little in flight.
MAX_ELEMENTS, MIN_ELEMENTS = 128, 32
# Steps of the unrolled loop over a chunk.
MAX_UNROLLED = 4


@dataclass(frozen=True)
class Call:
    """The shape of one call of a group of layers.

    Args:
        n, rows: tokens, in so many rows of one length.
        k, widths: in_features, and columns of each slice.
        max_rank, adapters: the arena's largest rank and its number of slots.
        x, y, data: dtypes of input, output and factors.
        capacity: of the row table, None where there are the rows' slots alone.
        starts: whether rows may begin late; which kernels serve a call does not depend on it.
        pdl: whether the device knows dependent launches.
    """

    n: int
    rows: int
    k: int
    widths: tuple[int, ...]
    max_rank: int
    adapters: int
    x: torch.dtype
    y: torch.dtype
    data: torch.dtype
    capacity: int | None = None
    starts: bool = False
    pdl: bool = False


@dataclass(frozen=True)
class ShrinkTiling:
    """`tiles`: tiles of rows of this call at most; `table_tiles`, `capacity`: of the row table (segments)."""

    kind: str  # "rows" | "segments" | "tiles"
    split: int
    chunk: int
    block_m: int
    block_k: int
    block_r: int
    stages: int
    warps: int
    dot: str
    pdl: bool = False
    tiles: int = 0
    table_tiles: int = 0
    capacity: int = 0


@dataclass(frozen=True)
class ExpandTiling:
    block_m: int
    block_n: int
    block_r: int
    stages: int
    warps: int
    dot: str
    steps: int = 1  # blocks of columns that one program does one after the other (tiles)


def kind_of(call: Call) -> str:
    """Which pair of kernels serves a call."""
    per_row = call.n // call.rows
    if per_row >= TILE_TOKENS:
        return "tiles"
    many = MAX_SEGMENT_TOKENS >= call.n >= max(SEGMENT_ROWS, SEGMENT_ROWS_A_SLOT * call.adapters)
    halves = call.x == call.data and call.data.itemsize == 2
    if per_row == 1 and many and halves and call.capacity is not None:
        return "segments"
    return "rows"


def is_decode(n: int, rows: int) -> bool:
    """Whether deltas of this shape are small enough to be made beside the base layer and added later."""
    return n // rows < TILE_TOKENS and n <= MAX_DELTA_TOKENS


def shrink_tiling(call: Call) -> ShrinkTiling:
    """Sizes of the shrink: tuned ones, or those of the rule."""
    tiling = shrink_rule(call)
    return with_sizes(tiling, call, _tuned(f"shrink_{tiling.kind}", call))


def expand_tiling(call: Call) -> ExpandTiling:
    """Sizes of the expand that goes with it."""
    return with_sizes(expand_rule(call), call, _tuned(f"expand_{kind_of(call)}", call))


def _tuned(kernel: str, call: Call) -> table.Sizes | None:
    # Tables are timed with one dtype; products of mixed ones take other paths, and far more registers.
    if not call.x == call.y == call.data:
        return None
    return table.lookup(kernel, call.n, call.k, call.widths, call.max_rank, call.data)


def with_sizes(tiling: Any, call: Call, sizes: Mapping[str, int] | None) -> Any:
    """A tiling of this call with some sizes replaced, and what follows from them."""
    if not sizes:
        return tiling
    tiling = dataclasses.replace(tiling, **sizes)
    if "block_m" in sizes:
        tiling = dataclasses.replace(tiling, block_m=min(tiling.block_m, _power_of_2(call.n // call.rows)))
    if isinstance(tiling, ShrinkTiling):
        chunk = _round_up(tiling.chunk, tiling.block_k)
        tiling = dataclasses.replace(tiling, chunk=chunk, split=-(-call.k // chunk))
    return tiling


def call_of(shape: Mapping[str, Any]) -> Call:
    """The call that a search times for a shape of a table, which here says rows and adapters, too."""
    dtype = getattr(torch, shape["dtype"])
    sizes = (shape["n"], shape["rows"], shape["k"], tuple(shape["widths"]), shape["max_rank"], shape["adapters"])
    return Call(*sizes, dtype, dtype, dtype, capacity=shape["rows"])


def search_space(kernel: str, **shape: Any) -> list[table.Sizes]:
    """What a search tries for a kernel and a shape: {}, the rule's sizes, then others, in one order for every n."""
    call, op = call_of(shape), kernel.split("_")[0]
    tiling = shrink_rule(call) if op == "shrink" else expand_rule(call)
    found: list[table.Sizes] = [{}]
    seen = {tiling}
    for values in itertools.product(*SPACE[kernel].values()):
        sizes = dict(zip(SPACE[kernel], values, strict=True))
        candidate = with_sizes(tiling, call, sizes)
        if candidate not in seen and _fits(kernel, call, candidate, sizes):
            seen.add(candidate)
            found.append(sizes)
    return found


def _fits(kernel: str, call: Call, tiling: Any, sizes: table.Sizes) -> bool:
    threads, size = 32 * tiling.warps, call.data.itemsize
    if isinstance(tiling, ExpandTiling):
        if kernel == "expand_rows" and call.max_rank > LOW_RANK:
            return False
        if tiling.block_n * tiling.steps > _power_of_2(max(call.widths)):
            return False
        if kernel == "expand_segments" and tiling.stages > 1 and tiling.block_r >= call.max_rank:
            return False  # one round: nothing to overlap
        height = {"expand_rows": tiling.block_r, "expand_tiles": tiling.block_m}.get(kernel, TILE)
        least = 0 if kernel == "expand_segments" else MIN_ELEMENTS
        held = 2 * height if kernel == "expand_tiles" else height  # y of the next step, too
        most = max(held, tiling.block_r) * tiling.block_n
        return least * threads <= height * tiling.block_n and most <= MAX_ELEMENTS * threads
    if tiling.split > MAX_SPLIT or sizes.get("chunk", tiling.chunk) != tiling.chunk:
        return False
    if kernel == "shrink_rows":
        elements = tiling.block_k * tiling.block_r
        few = tiling.chunk > MAX_UNROLLED * tiling.block_k or elements < MIN_ELEMENTS * threads
        held = elements if tiling.chunk == tiling.block_k else 2 * elements  # the sums and the next step's
        return not few and held <= MAX_ELEMENTS * threads
    height, slices = (TILE, 1) if kernel == "shrink_segments" else (tiling.block_m, MAX_SLICES)
    if tiling.chunk // tiling.block_k < tiling.stages - 1:
        return False
    tiles = (height * tiling.block_k, tiling.block_k * tiling.block_r, slices * height * tiling.block_r)
    shared = tiling.stages * tiling.block_k * (height + slices * tiling.block_r) * size
    return max(tiles) <= MAX_ELEMENTS * threads and shared <= SHARED_BYTES


def shrink_rule(call: Call) -> ShrinkTiling:
    """Sizes of the shrink for any shape."""
    kind, size = kind_of(call), call.data.itemsize
    if kind == "rows":
        chunk, block_k, warps = next(row[1:] for row in SHRINK_ROWS if call.n <= row[0])
        chunk, block_k = chunk // size, block_k // size
        chunk = max(chunk, _round_up(-(-call.k // MAX_SPLIT), block_k))
        block_r = _rank_block(call.max_rank, 16, 1)
        return ShrinkTiling(kind, -(-call.k // chunk), chunk, 1, block_k, block_r, 1, warps, "", call.pdl)
    if kind == "segments":
        assert call.capacity is not None
        chunk, block_k, stages, warps = next(row[1:] for row in SHRINK_SEGMENTS if call.max_rank <= row[0])
        chunk = max(chunk, _round_up(-(-call.k // MAX_SPLIT), block_k))
        tiles = (tile_count(call.n, call.adapters), tile_count(call.capacity, call.adapters), call.capacity)
        split, block_r = -(-call.k // chunk), _rank_block(call.max_rank, 64, 16)
        return ShrinkTiling(kind, split, chunk, 1, block_k, block_r, stages, warps, "native", call.pdl, *tiles)
    dot, per_row = _shrink_dot(call.x, call.data), call.n // call.rows
    block_m, block_k, block_r, stages, warps = SHRINK_TILES[dot]
    block_m, block_r = min(block_m, _power_of_2(per_row)), _rank_block(call.max_rank, block_r, 16)
    while stages * block_k * (block_m + block_r * MAX_SLICES) * size > SHARED_BYTES and block_k > 32:
        block_k //= 2
    programs = call.rows * -(-per_row // block_m)
    split = min(8, -(-PREFILL_PROGRAMS // programs))
    chunk = _round_up(-(-call.k // split), block_k)
    return ShrinkTiling(kind, -(-call.k // chunk), chunk, block_m, block_k, block_r, stages, warps, dot, call.pdl)


def expand_rule(call: Call) -> ExpandTiling:
    """Sizes of the expand for any shape."""
    kind, n = kind_of(call), call.n
    if kind == "rows":
        size, block_r, warps = next(row[1:] for row in EXPAND_ROWS if call.max_rank <= row[0])
        return ExpandTiling(1, size // call.data.itemsize, _rank_block(call.max_rank, block_r, 1), 1, warps, "")
    dot = _expand_dot(call.y, call.data)
    if kind == "segments":
        width, rank = max(call.widths), call.max_rank
        block_n, stages, warps = next(x[2:] for x in EXPAND_SEGMENTS if rank <= x[0] and width <= x[1])
        return ExpandTiling(1, block_n, _rank_block(rank, EXPAND_SEGMENTS_RANK, 16), stages, warps, dot)
    block_m, block_n, block_r, steps, warps = EXPAND_TILES[dot]
    if dot == "split" and call.max_rank <= LOW_RANK:
        block_m, block_n, block_r, steps, warps = next(row[1:] for row in EXPAND_TILES_LOW if n <= row[0])
    block_m = min(block_m, _power_of_2(n // call.rows))
    return ExpandTiling(block_m, block_n, _rank_block(call.max_rank, block_r, 16), 1, warps, dot, steps)


def _shrink_dot(x: torch.dtype, data: torch.dtype) -> str:
    if torch.float32 in (x, data):
        return "ieee"
    return "native" if x == data else "tf32"


def _expand_dot(y: torch.dtype, data: torch.dtype) -> str:
    if data == torch.float32:
        return "ieee"
    return "split" if data == torch.bfloat16 and y != torch.float32 else "tf32"


def _rank_block(max_rank: int, largest: int, smallest: int) -> int:
    return max(smallest, min(largest, _power_of_2(max_rank)))


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
