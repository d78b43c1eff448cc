"""LoRA on routed experts: `y[p] += (x[xr(p)] · A[s, e]ᵀ) · Bt[s, e]`, in place, for pairs p of a token and an expert.

    s = row_slots[tokens[p] // per_row], e = experts[p], xr(p) = x_rows[p], or p where there are none
    h[p, i, j]  = sum over k of x[xr(p), k] · A_i[s, e][j, k]               x [any, K], A_i[s, e] [rank, K]
    y[p, first_i + STEP · c] += sum over j of h[p, i, j] · Bt_i[s, e][j, c]         Bt_i[s, e] [rank, width_i]
    planes of h: fp32 [split, pairs, projections, max_rank], added up in order

for each projection i of a call: gate and up together, side by side (STEP 1) or interleaved (STEP 2), or down. The sum
is fp32 and y is rounded once; y is not written where there is no slot, no such expert (sentinels of expert
parallelism) or no factors. The torch definition is `reference_experts.lora_experts`.

- `shrink_pairs`, `expand_pairs` (decode): one program per pair, multiply and sum; nothing is sorted.
- `shrink_buckets`, `expand_buckets` (prefill): tiles of pairs of one slot and expert, `tl.dot`; x is read once for
  gate and up. `bucket` makes the tiles, once for both calls of a layer.

Which pair of kernels, and all sizes, follow from shapes alone: so does a pair's order of sums, and a captured graph
serves every mix. Where up's A is gate's own (one A for both in the checkpoint), it is shrunk once. Stacks of experts
pass 2**31 elements: addresses are int64 up to the first element of one expert's factor, and int32 inside. The header's
strides between experts are whole rows, which is what lets the compiler load 16 bytes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning
from .expand import _dot as _expand_dot
from .expand import _rows_of, _summed
from .launch import Arena, Rows
from .lookup import minus_zeros, pick, table_entry
from .shrink import _dot as _shrink_dot
from .shrink import _factor_tile, _transposed

# Decode shrink by pairs of the call: (up to, bytes of a row of A that a program reads, of these at a time).
SHRINK_PAIRS = ((512, 1024, 512), (1 << 62, 2048, 512))
MAX_SPLIT = 16
# Decode expand, by largest rank (up to): (bytes of a row of Bt that a program reads, largest rank at once).
EXPAND_PAIRS = ((16, 512, 16), (1 << 62, 256, 32))
# Pairs of a tile, by how many a bucket has if all slots and experts are named alike (up to).
TILES = ((24, 16), (48, 32), (1 << 62, 64))
# Prefill shrink by kind of dot: (elements of K at a time, largest rank at once, stages).
SHRINK_BUCKETS = {"native": (128, 64, 4), "tf32": (64, 64, 3), "ieee": (32, 32, 2)}
# Prefill expand by kind of dot: (columns, largest rank at once, blocks of columns for one program).
EXPAND_BUCKETS = {"split": (128, 64, 4), "tf32": (64, 16, 4), "ieee": (64, 16, 4)}

_DYNAMIC = ["meta_stride", "pairs", "per_row", "tiles", "n_experts", "site0", "site1"]
_INDICES = ["x_rows_ptr", "tokens_ptr", "experts_ptr", "order_ptr", "table_ptr", "row_slots_ptr"]
_UNALIGNED = [*_INDICES, "h_ptr", "meta_ptr"]


class Buckets(NamedTuple):
    """Pairs by slot and expert, for one layer: `order` int64 [pairs], place -> pair; `table` int32 [3, tiles]: slot *
    n_experts + expert (-1: a spare tile), first place, pairs; `tile`: largest number of pairs of a tile."""

    order: Tensor
    table: Tensor
    tile: int


def bucket(
    tokens: Tensor, experts: Tensor, row_slots: Tensor, rows: int, n_tokens: int, n_experts: int, adapters: int
) -> Buckets:
    """Sort pairs by slot and expert and cut them into tiles, on their device and without waiting for it."""
    pairs, count = tokens.numel(), adapters * n_experts
    tile = next(size for most, size in TILES if pairs <= most * min(adapters, rows) * n_experts)
    slots = row_slots.view(-1)[:rows][tokens // (n_tokens // rows)]
    named = (slots >= 0) & (experts >= 0) & (experts < n_experts)
    keys, order = (slots * n_experts + experts).masked_fill(~named, count).int().sort(stable=True)
    every = torch.arange(count + 1, dtype=torch.int32, device=keys.device)
    bounds = torch.searchsorted(keys, every, out_int32=True)
    tiles_of = (bounds[1:] - bounds[:-1] + tile - 1) // tile
    ends = tiles_of.cumsum(0, dtype=torch.int32)
    number = torch.arange(pairs // tile + min(pairs, count), dtype=torch.int32, device=keys.device)
    key = torch.searchsorted(ends, number, right=True, out_int32=True)
    safe = key.clamp(max=count - 1)
    start = bounds[safe] + (number - ends[safe] + tiles_of[safe]) * tile
    size = (bounds[safe + 1] - start).clamp(max=tile)
    return Buckets(order, torch.stack((key.masked_fill(key == count, -1), start, size)), tile)


@triton.jit
def _slot_of(p, tokens_ptr, experts_ptr, row_slots_ptr, per_row, n_experts):
    """(slot, expert, whether the pair has both)."""
    e = tl.load(experts_ptr + p).to(tl.int64)
    slot = tl.load(row_slots_ptr + tl.load(tokens_ptr + p) // per_row)
    return slot, e, (slot >= 0) & (e >= 0) & (e < n_experts)


@triton.jit
def _factor(data_ptr, slot, slot_elems, entry, which, e, ALIGN: tl.constexpr):
    """Address of one expert's A (0) or Bt (1)."""
    offset = slot.to(tl.int64) * slot_elems + tl.load(entry + which) + e * tl.load(entry + 3 + which)
    return data_ptr + tl.multiple_of(offset, ALIGN)


@triton.jit
def _shared(first, second):
    """Whether both projections have the same A."""
    return (tl.load(first) == tl.load(second)) & (tl.load(first + 2) == tl.load(second + 2))


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def shrink_pairs(
    x_ptr, x_rows_ptr, tokens_ptr, experts_ptr, order_ptr, table_ptr, row_slots_ptr, h_ptr, data_ptr, meta_ptr,
    slot_elems, meta_stride, pairs, per_row, tiles, n_experts, site0, site1, K, x_stride,
    GATHER: tl.constexpr, PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr, ALIGN: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One pair, one chunk of K, one projection. Grid [pairs, split, projections]."""
    p = tl.program_id(0)
    s = tl.program_id(1)
    i = tl.program_id(2)
    slot, e, named = _slot_of(p, tokens_ptr, experts_ptr, row_slots_ptr, per_row, n_experts)
    if not named:
        return
    entry = table_entry(meta_ptr, meta_stride, slot, pick(i, site0, site1, 0, 0, PROJECTIONS))
    rank = tl.load(entry + 2).to(tl.int32)
    if PROJECTIONS > 1:
        shared = _shared(table_entry(meta_ptr, meta_stride, slot, site0), entry)
        rank = tl.where(shared & (i > 0), 0, rank)
    if rank == 0:
        return
    a_ptr = _factor(data_ptr, slot, slot_elems, entry, 0, e, ALIGN)
    x_row = p.to(tl.int64)
    if GATHER:
        x_row = tl.load(x_rows_ptr + p).to(tl.int64)
    x_row = x_ptr + x_row * x_stride
    h_row = h_ptr + ((s.to(tl.int64) * pairs + p) * PROJECTIONS + i) * MAX_RANK
    for r0 in range(0, rank, BLOCK_R):
        acc = tl.zeros([BLOCK_R, BLOCK_K], dtype=tl.float32)
        for step in tl.static_range(0, CHUNK, BLOCK_K):
            k = s * CHUNK + step + tl.arange(0, BLOCK_K)
            a = _factor_tile(a_ptr, r0, s * CHUNK + step, rank, K, BLOCK_R, BLOCK_K)
            acc += a.to(tl.float32) * tl.load(x_row + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        r = r0 + tl.arange(0, BLOCK_R)
        tl.store(h_row + r, tl.sum(acc, axis=1), mask=r < rank)


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def expand_pairs(
    y_ptr, tokens_ptr, experts_ptr, order_ptr, table_ptr, row_slots_ptr, h_ptr, data_ptr, meta_ptr,
    slot_elems, meta_stride, pairs, per_row, tiles, n_experts, site0, site1, first0, first1, w0, w1, y_stride,
    PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr, ALIGN: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr,
    SPLIT_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One pair, BLOCK_N columns of one projection. Grid [pairs, blocks of the wider projection, projections]."""
    p = tl.program_id(0)
    i = tl.program_id(2)
    width = pick(i, w0, w1, 0, 0, PROJECTIONS)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot, e, named = _slot_of(p, tokens_ptr, experts_ptr, row_slots_ptr, per_row, n_experts)
    if not named:
        return
    entry = table_entry(meta_ptr, meta_stride, slot, pick(i, site0, site1, 0, 0, PROJECTIONS))
    rank = tl.load(entry + 2).to(tl.int32)
    if rank == 0:
        return
    source = i
    if PROJECTIONS > 1:
        source = tl.where(_shared(table_entry(meta_ptr, meta_stride, slot, site0), entry), 0, i)
    b_ptr = _factor(data_ptr, slot, slot_elems, entry, 1, e, ALIGN)
    y_row = y_ptr + p.to(tl.int64) * y_stride + pick(i, first0, first1, 0, 0, PROJECTIONS) + STEP * c
    y = tl.load(y_row, mask=c < width, other=0.0)
    s = tl.arange(0, SPLIT_PAD)
    h_planes = h_ptr + ((s.to(tl.int64) * pairs + p) * PROJECTIONS + source)[:, None] * MAX_RANK
    delta = minus_zeros([BLOCK_N])
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        b = _rows_of(b_ptr, r, c, rank, width)
        h = tl.load(h_planes + r[None, :], mask=(s[:, None] < SPLIT) & (r[None, :] < rank), other=0.0)
        delta += tl.sum(tl.sum(h, axis=0)[:, None] * b.to(tl.float32), axis=0)
    tl.store(y_row, (y.to(tl.float32) + delta).to(y_ptr.dtype.element_ty), mask=c < width)


@triton.jit
def _tile(tile, table_ptr, tiles, n_experts, BLOCK_M: tl.constexpr):
    """(slot, expert, first place, [BLOCK_M, 1] which of the places behind it are the tile's) of a tile in use."""
    key = tl.load(table_ptr + tile)
    start = tl.load(table_ptr + tiles + tile)
    mask = tl.arange(0, BLOCK_M)[:, None] < tl.load(table_ptr + 2 * tiles + tile)
    return key // n_experts, (key % n_experts).to(tl.int64), start.to(tl.int64), mask


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def shrink_buckets(
    x_ptr, x_rows_ptr, tokens_ptr, experts_ptr, order_ptr, table_ptr, row_slots_ptr, h_ptr, data_ptr, meta_ptr,
    slot_elems, meta_stride, pairs, per_row, tiles, n_experts, site0, site1, K, x_stride,
    GATHER: tl.constexpr, PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr, ALIGN: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """A tile of pairs of one slot and expert, one chunk of K, all projections. Grid [tiles, split]."""
    tile = tl.program_id(0)
    s = tl.program_id(1)
    if tl.load(table_ptr + tile) < 0:
        return
    slot, e, start, m_mask = _tile(tile, table_ptr, tiles, n_experts, BLOCK_M)
    entry0 = table_entry(meta_ptr, meta_stride, slot, site0)
    rank0 = tl.load(entry0 + 2).to(tl.int32)
    a0 = _factor(data_ptr, slot, slot_elems, entry0, 0, e, ALIGN)
    a1, rank1 = a0, rank0 - rank0
    if PROJECTIONS > 1:
        entry1 = table_entry(meta_ptr, meta_stride, slot, site1)
        rank1 = tl.where(_shared(entry0, entry1), 0, tl.load(entry1 + 2).to(tl.int32))
        a1 = _factor(data_ptr, slot, slot_elems, entry1, 0, e, ALIGN)
    m = tl.arange(0, BLOCK_M)[:, None]
    x_row = tl.load(order_ptr + start + m, mask=m_mask, other=0).to(tl.int64)
    if GATHER:
        x_row = tl.load(x_rows_ptr + x_row, mask=m_mask, other=0).to(tl.int64)
    x_rows = x_ptr + x_row * x_stride
    k_start = s * CHUNK
    k_stop = tl.minimum(K, k_start + CHUNK)
    for r0 in range(0, tl.maximum(rank0, rank1), BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        acc0 = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        acc1 = acc0
        for k0 in tl.range(k_start, k_stop, BLOCK_K, num_stages=STAGES):
            k = k0 + tl.arange(0, BLOCK_K)
            x = tl.load(x_rows + k[None, :], mask=m_mask & (k[None, :] < K), other=0.0)
            acc0 = _shrink_dot(x, _transposed(a0, r, k, rank0, K), acc0, DOT)
            if PROJECTIONS > 1:
                acc1 = _shrink_dot(x, _transposed(a1, r, k, rank1, K), acc1, DOT)
        # Read again: kept from above, it would take registers that the products need.
        p = tl.load(order_ptr + start + m, mask=m_mask, other=0).to(tl.int64)
        h_rows = h_ptr + (s.to(tl.int64) * pairs + p) * (PROJECTIONS * MAX_RANK)
        tl.store(h_rows + r[None, :], acc0, mask=m_mask & (r[None, :] < rank0))
        if PROJECTIONS > 1:
            tl.store(h_rows + MAX_RANK + r[None, :], acc1, mask=m_mask & (r[None, :] < rank1))


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def expand_buckets(
    y_ptr, tokens_ptr, experts_ptr, order_ptr, table_ptr, row_slots_ptr, h_ptr, data_ptr, meta_ptr,
    slot_elems, meta_stride, pairs, per_row, tiles, n_experts, site0, site1, first0, first1, w0, w1, y_stride,
    PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr, ALIGN: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr,
    SPLIT_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile, BLOCKS blocks of BLOCK_N columns of one projection. Grid [tiles, spans of columns, projections]."""
    tile = tl.program_id(0)
    i = tl.program_id(2)
    if tl.load(table_ptr + tile) < 0:
        return
    slot, e, start, m_mask = _tile(tile, table_ptr, tiles, n_experts, BLOCK_M)
    width = pick(i, w0, w1, 0, 0, PROJECTIONS)
    entry = table_entry(meta_ptr, meta_stride, slot, pick(i, site0, site1, 0, 0, PROJECTIONS))
    rank = tl.load(entry + 2).to(tl.int32)
    if rank == 0:
        return
    source = i
    if PROJECTIONS > 1:
        source = tl.where(_shared(table_entry(meta_ptr, meta_stride, slot, site0), entry), 0, i)
    b_ptr = _factor(data_ptr, slot, slot_elems, entry, 1, e, ALIGN)
    m = tl.arange(0, BLOCK_M)[:, None]
    p = tl.load(order_ptr + start + m, mask=m_mask, other=0).to(tl.int64)
    y_rows = y_ptr + p * y_stride + pick(i, first0, first1, 0, 0, PROJECTIONS)
    plane = tl.cast(pairs, tl.int64) * PROJECTIONS * MAX_RANK
    h_rows = h_ptr + (p * PROJECTIONS + source) * MAX_RANK
    h_first = _summed(h_rows, tl.arange(0, BLOCK_R), rank, m_mask, plane, SPLIT)
    c_first = tl.program_id(1) * (BLOCKS * BLOCK_N)
    for block in range(0, BLOCKS):
        c = c_first + block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = m_mask & (c[None, :] < width)
        y = tl.load(y_rows + STEP * c[None, :], mask=mask, other=0.0)
        b = _rows_of(b_ptr, tl.arange(0, BLOCK_R), c, rank, width)
        acc = _expand_dot(h_first, b, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32), DOT)
        if MAX_RANK > BLOCK_R:
            for r0 in tl.range(BLOCK_R, rank, BLOCK_R, num_stages=1):
                r = r0 + tl.arange(0, BLOCK_R)
                h = _summed(h_rows, r, rank, m_mask, plane, SPLIT)
                acc = _expand_dot(h, _rows_of(b_ptr, r, c, rank, width), acc, DOT)
        tl.store(y_rows + STEP * c[None, :], (y.to(tl.float32) + acc).to(y_ptr.dtype.element_ty), mask=mask)


Launch = tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]  # kernel, grid, arguments, compile options


def _common(
    planes: Tensor, tokens: Tensor, experts: Tensor, arena: Arena, rows: Rows, n_tokens: int, sites: Sequence[int],
    n_experts: int, buckets: Buckets | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments that both kernels of a pair have in the same place."""
    order, table, tiles = (tokens, tokens, 0) if buckets is None else (*buckets[:2], buckets.table.shape[1])
    return (
        tokens, experts, order, table, rows.slots, planes, arena.data, arena.meta, arena.slot_elems,
        arena.meta.stride(0), tokens.numel(), n_tokens // rows.rows, tiles, n_experts, sites[0], sites[-1],
    )  # fmt: skip


def prepare_shrink(
    x: Tensor, x_rows: Tensor | None, tokens: Tensor, experts: Tensor, arena: Arena, rows: Rows, n_tokens: int,
    sites: Sequence[int], n_experts: int, buckets: Buckets | None,
) -> tuple[Tensor, Launch]:  # fmt: skip
    """Planes of h `[split, pairs, projections, max_rank]`, and the launch that fills them."""
    pairs, k, count = tokens.numel(), x.shape[1], len(sites)
    size, rank, dot = arena.data.itemsize, arena.max_rank, tuning._shrink_dot(x.dtype, arena.data.dtype)
    if buckets is not None:
        block_m, grid, least = buckets.tile, buckets.table.shape[1], 16
        block_k, block_r, stages = SHRINK_BUCKETS[dot]
        chunk = -(-k // min(-(-tuning.PREFILL_PROGRAMS // max(1, pairs // block_m)), MAX_SPLIT))
    else:
        block_m, grid, least, block_r, stages = 1, pairs, 1, 16, 1
        chunk, block_k = next(row[1:] for row in SHRINK_PAIRS if pairs <= row[0])
        block_k = min(block_k // size, max(16, triton.next_power_of_2(k)))
        chunk = max(chunk // size, -(-k // MAX_SPLIT))
    chunk = -(-chunk // block_k) * block_k
    split = -(-k // chunk)
    planes = torch.empty((split, pairs, count, rank), dtype=torch.float32, device=x.device)
    args: tuple[Any, ...] = (x, tokens if x_rows is None else x_rows)
    args += _common(planes, tokens, experts, arena, rows, n_tokens, sites, n_experts, buckets)
    args += (k, x.stride(0), x_rows is not None, count, rank, math.gcd(64 // size, k), chunk, block_m, block_k)
    args += (max(least, min(block_r, triton.next_power_of_2(rank))), stages, dot)
    kernel, programs = (shrink_pairs, count) if buckets is None else (shrink_buckets, 1)
    return planes, (kernel, (grid, split, programs), args, {"num_warps": 4})


def prepare_expand(
    y: Tensor, planes: Tensor, tokens: Tensor, experts: Tensor, arena: Arena, rows: Rows, n_tokens: int,
    projections: Sequence[tuple[int, int, int, int]], n_experts: int, buckets: Buckets | None,
) -> Launch:  # fmt: skip
    """The launch that adds the sum of planes `[split, pairs, projections, max_rank]`, times Bt."""
    sites, firsts, steps, widths = zip(*projections, projections[-1], strict=True)
    if len(projections) > 2 or len(set(steps)) > 1:
        raise ValueError(f"projections {tuple(projections)}: one or two are served at once, of one step")
    size, (split, pairs, count, rank) = arena.data.itemsize, planes.shape
    dot = tuning._expand_dot(y.dtype, arena.data.dtype)
    if buckets is not None:
        block_m, grid, least, warps = buckets.tile, buckets.table.shape[1], 16, 4
        block_n, block_r, blocks = EXPAND_BUCKETS[dot]
        if steps[0] > 1:  # columns that are not side by side take more registers for their addresses
            block_n //= 2
    else:
        block_m, grid, least, warps, blocks = 1, pairs, 1, 1, 1
        block_n, block_r = next(row[1:] for row in EXPAND_PAIRS if rank <= row[0])
        block_n //= size
    args: tuple[Any, ...] = (y,)
    args += _common(planes, tokens, experts, arena, rows, n_tokens, sites, n_experts, buckets)
    args += (firsts[0], firsts[1], widths[0], widths[1], y.stride(0), count, rank, math.gcd(64 // size, *widths))
    args += (steps[0], split, triton.next_power_of_2(split), block_m, block_n)
    args += (max(least, min(block_r, triton.next_power_of_2(rank))), blocks, dot)
    spans = -(-max(widths) // (block_n * blocks))
    return (expand_pairs if buckets is None else expand_buckets, (grid, spans, count), args, {"num_warps": warps})


def buckets_of(
    tokens: Tensor, experts: Tensor, arena: Arena, rows: Rows, n_tokens: int, n_experts: int, known: Buckets | None
) -> Buckets | None:
    """The buckets of a call, those that are known where there are any; None where rows are short."""
    if n_tokens // rows.rows < tuning.TILE_TOKENS:
        return None
    return known or bucket(tokens, experts, rows.slots, rows.rows, n_tokens, n_experts, arena.meta.shape[0])


def run(launch: Launch) -> None:
    kernel, grid, args, options = launch
    kernel[grid](*args, **options)


def launch_experts(
    y: Tensor, x: Tensor, x_rows: Tensor | None, tokens: Tensor, experts: Tensor, arena: Arena, rows: Rows,
    n_tokens: int, projections: Sequence[tuple[int, int, int, int]], n_experts: int, buckets: Buckets | None = None,
) -> Buckets | None:  # fmt: skip
    """Add every pair's delta to `y [S, N]`, in place. Arguments as for `reference_experts.lora_experts`.

    y and x have unit stride along their columns; x_rows, tokens and experts are contiguous, int32 or int64. `buckets`:
    of the same pairs, if there are any yet.

    Returns:
        The buckets, for the layer's next call; None where rows are short, which needs none.
    """
    if tokens.numel() == 0 or rows.rows == 0:
        return buckets
    buckets = buckets_of(tokens, experts, arena, rows, n_tokens, n_experts, buckets)
    call = (tokens, experts, arena, rows, n_tokens)
    planes, shrink = prepare_shrink(x, x_rows, *call, [site for site, *_ in projections], n_experts, buckets)
    run(shrink)
    run(prepare_expand(y, planes, *call, projections, n_experts, buckets))
    return buckets
