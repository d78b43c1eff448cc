"""Block sizes, as data. They depend on the shape of a call and the arena's largest rank, never on who is in the batch.

Sources: decode moves each adapter's factors once, so its sizes are chosen to have a few megabytes of 16-byte loads in
flight over all multiprocessors; prefill moves x and y once. Figures in bytes are for an H200 (132 multiprocessors).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# From this many tokens a row on, tiles and tl.dot; below, one program per token.
TILE_TOKENS = 16
MAX_SPLIT = 32
# Programs that fill the machine twice over: K is split, or columns are cut finer, until there are this many.
DECODE_PROGRAMS = 512
PREFILL_PROGRAMS = 256

# Decode shrink by tokens in the call: (up to, bytes of a row of A that a program reads, of these at a time, warps).
SHRINK_ROWS = ((4, 256, 256, 4), (64, 512, 512, 4), (256, 1024, 512, 4), (1 << 62, 2048, 512, 4))
# Decode expand: bytes of a row of Bt that a program reads (the most that still makes DECODE_PROGRAMS), warps.
EXPAND_ROWS = ((1024, 2), (512, 1), (256, 1), (128, 1))
# Prefill shrink, by kind of dot: (largest tile of tokens, elements of K at a time, largest rank at once, stages,
# warps).
SHRINK_TILES = {"native": (32, 128, 64, 4, 4), "tf32": (32, 64, 64, 3, 4), "ieee": (32, 32, 32, 2, 4)}
# Prefill expand: (largest tile of tokens, columns, largest rank at once, warps).
EXPAND_TILES = {"split": (64, 128, 16, 4), "tf32": (32, 128, 16, 4), "ieee": (32, 64, 32, 4)}


@dataclass(frozen=True)
class ShrinkTiling:
    tiles: bool
    split: int
    chunk: int
    block_m: int
    block_k: int
    block_r: int
    stages: int
    warps: int
    dot: str


@dataclass(frozen=True)
class ExpandTiling:
    tiles: bool
    block_m: int
    block_n: int
    block_r: int
    stages: int
    warps: int
    dot: str


def shrink_tiling(n: int, rows: int, k: int, max_rank: int, x: torch.dtype, data: torch.dtype) -> ShrinkTiling:
    """Sizes of the shrink of `n` tokens in `rows` rows over K = `k`."""
    per_row = n // rows
    if per_row < TILE_TOKENS:
        chunk, block_k, warps = next(row[1:] for row in SHRINK_ROWS if n <= row[0])
        chunk, block_k = chunk // data.itemsize, block_k // data.itemsize
        chunk = max(chunk, _round_up(-(-k // MAX_SPLIT), block_k))
        return ShrinkTiling(False, -(-k // chunk), chunk, 1, block_k, _rank_block(max_rank, 16, 1), 1, warps, "")
    dot = _shrink_dot(x, data)
    block_m, block_k, block_r, stages, warps = SHRINK_TILES[dot]
    block_m = min(block_m, _power_of_2(per_row))
    programs = rows * -(-per_row // block_m)
    split = min(8, -(-PREFILL_PROGRAMS // programs))
    chunk = _round_up(-(-k // split), block_k)
    return ShrinkTiling(
        True, -(-k // chunk), chunk, block_m, block_k, _rank_block(max_rank, block_r, 16), stages, warps, dot
    )


def expand_tiling(n: int, rows: int, width: int, max_rank: int, y: torch.dtype, data: torch.dtype) -> ExpandTiling:
    """Sizes of the expand of `n` tokens in `rows` rows into slices of at most `width` columns."""
    per_row = n // rows
    if per_row < TILE_TOKENS:
        sizes = [(size // data.itemsize, warps) for size, warps in EXPAND_ROWS]
        block_n, warps = next((s for s in sizes if n * -(-width // s[0]) >= DECODE_PROGRAMS), sizes[-1])
        return ExpandTiling(False, 1, block_n, _rank_block(max_rank, 16, 1), 1, warps, "")
    dot = _expand_dot(y, data)
    block_m, block_n, block_r, warps = EXPAND_TILES[dot]
    block_m = min(block_m, _power_of_2(per_row))
    return ExpandTiling(True, block_m, block_n, _rank_block(max_rank, block_r, 16), 1, warps, dot)


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
