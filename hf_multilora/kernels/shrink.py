"""Shrink: `h[t] = x[t] · A[slot(t)]ᵀ`, in fp32, for every slice of a group of layers that read the same x.

    planes[s, t, i, j] = sum over k in chunk s of x[t, k] · A_i[j, k]       x [n, K], A_i [rank, K]
    planes: fp32 [split, n, slices, max_rank]; expand adds the planes up, in order

No zero fill and no sums by atomics: expand reads exactly what was written here, i.e. `j < rank` of rows with an
adapter. A row without one, or whose adapter did not train the slice, leaves at once, as do tokens before their row's
start. The true rank bounds every loop.

Three kernels, chosen by the shape of the call, never by who is in it:
- `shrink_rows` (decode, few rows for each slot): one program per token, multiply and sum;
- `shrink_segments` (decode, many rows for each slot): one program per tile of rows that share a slot, `tl.dot`. Here
  planes are [1 + split, tiles, slices, TILE, max_rank], and the last program of a tile sums them into the first one,
  in order; an atomic counter, which it puts back to 0, says who is the last;
- `shrink_tiles` (prefill): tiles of one row's tokens, `tl.dot`; x is read once for all slices.

Addresses are int64 up to the first element of a tile or a factor, and int32 inside (rank * K and BLOCK_M * stride are
below 2**31).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .lookup import META, factor_start, let_next_begin, sharing_slice, table_entry, wait_for_input
from .segments import TILE
from .tuning import ShrinkTiling

_DYNAMIC = ["site", "n", "blocks", "tiles", "capacity", "meta_stride"]
_UNALIGNED = ["row_slots_ptr", "row_starts_ptr", "meta_ptr", "h_ptr", "counters_ptr"]
_TILE = tl.constexpr(TILE)


@triton.jit
def _entry(first, i, N_SLICES: tl.constexpr):
    """(offset of A, rank, whether nothing is to be shrunk: there is no A, or a lower slice stores the same)."""
    a_off = tl.load(first + META * i)
    rank = tl.load(first + META * i + 2).to(tl.int32)
    # Offsets are never negative; asking makes the two loads leave together instead of one after the other.
    nothing = (rank == 0) | (a_off < 0)
    if N_SLICES > 1:
        nothing |= sharing_slice(first, i, a_off, rank, N_SLICES) != i
    return a_off, rank, nothing


@triton.jit
def _factor_tile(a_ptr, r0, k0, rank, K, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """A[r0:, k0:] as [BLOCK_R, BLOCK_K], 0 beyond rank and K."""
    r = r0 + tl.arange(0, BLOCK_R)
    k = k0 + tl.arange(0, BLOCK_K)
    return tl.load(a_ptr + r[:, None] * K + k[None, :], mask=(r[:, None] < rank) & (k[None, :] < K), other=0.0)


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def shrink_rows(
    x_ptr,
    row_slots_ptr,
    row_starts_ptr,
    h_ptr,
    site,
    data_ptr,
    meta_ptr,
    counters_ptr,
    slot_elems,
    meta_stride,
    n,
    per_row,
    blocks,
    tiles,
    capacity,
    K,
    x_stride,
    MAX_RANK: tl.constexpr,
    N_SLICES: tl.constexpr,
    ALIGN: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    STARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, one chunk of K, one slice. Grid [n, split, slices]."""
    t = tl.program_id(0)
    s = tl.program_id(1)
    i = tl.program_id(2)
    let_next_begin(PDL)
    row = t // per_row
    slot = tl.load(row_slots_ptr + row)
    idle = slot < 0
    if STARTS:
        idle |= t - row * per_row < tl.load(row_starts_ptr + row)
    if idle:
        wait_for_input(PDL)
        return
    first = table_entry(meta_ptr, meta_stride, slot, site)
    a_off, rank, nothing = _entry(first, i, N_SLICES)
    if nothing:
        wait_for_input(PDL)
        return
    a_ptr = factor_start(data_ptr, slot, slot_elems, a_off, ALIGN)
    x_row = x_ptr + t.to(tl.int64) * x_stride
    h_row = h_ptr + ((s.to(tl.int64) * n + t) * N_SLICES + i) * MAX_RANK
    k_start = s * CHUNK
    # The first factors are on their way while the kernel in front still writes x.
    a = _factor_tile(a_ptr, 0, k_start, rank, K, BLOCK_R, BLOCK_K)
    wait_for_input(PDL)
    for r0 in range(0, rank, BLOCK_R):
        if r0 > 0:
            a = _factor_tile(a_ptr, r0, k_start, rank, K, BLOCK_R, BLOCK_K)
        k = k_start + tl.arange(0, BLOCK_K)
        acc = a.to(tl.float32) * tl.load(x_row + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        for step in tl.static_range(BLOCK_K, CHUNK, BLOCK_K):
            k = k_start + step + tl.arange(0, BLOCK_K)
            more = _factor_tile(a_ptr, r0, k_start + step, rank, K, BLOCK_R, BLOCK_K)
            acc += more.to(tl.float32) * tl.load(x_row + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        r = r0 + tl.arange(0, BLOCK_R)
        tl.store(h_row + r, tl.sum(acc, axis=1), mask=r < rank)


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def shrink_segments(
    x_ptr,
    row_slots_ptr,
    row_starts_ptr,
    h_ptr,
    site,
    data_ptr,
    meta_ptr,
    counters_ptr,
    slot_elems,
    meta_stride,
    n,
    per_row,
    blocks,
    tiles,
    capacity,
    K,
    x_stride,
    MAX_RANK: tl.constexpr,
    N_SLICES: tl.constexpr,
    ALIGN: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    STARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of rows that share a slot, one chunk of K, one slice. Grid [tiles in use at most, split, slices]."""
    tile = tl.program_id(0)
    s = tl.program_id(1)
    i = tl.program_id(2)
    let_next_begin(PDL)
    slot = tl.load(row_slots_ptr + capacity + tile)
    if slot < 0:
        wait_for_input(PDL)
        return
    m = tl.arange(0, _TILE)
    t = tl.load(row_slots_ptr + capacity + tiles + tile * _TILE + m)
    live = (t >= 0) & (t < n)
    first = table_entry(meta_ptr, meta_stride, slot, site)
    a_off, rank, nothing = _entry(first, i, N_SLICES)
    wait_for_input(PDL)
    if nothing:
        return
    a_ptr = factor_start(data_ptr, slot, slot_elems, a_off, ALIGN)
    x_rows = x_ptr + t[:, None].to(tl.int64) * x_stride
    used = tl.num_programs(0)
    h_tile = h_ptr + (tile.to(tl.int64) * N_SLICES + i) * (_TILE * MAX_RANK) + m[:, None] * MAX_RANK
    plane = used.to(tl.int64) * (N_SLICES * _TILE * MAX_RANK)
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        acc = tl.zeros([_TILE, BLOCK_R], dtype=tl.float32)
        for step in tl.range(0, CHUNK, BLOCK_K, num_stages=STAGES):
            k = s * CHUNK + step + tl.arange(0, BLOCK_K)
            x = tl.load(x_rows + k[None, :], mask=live[:, None] & (k[None, :] < K), other=0.0)
            a = tl.load(a_ptr + r[None, :] * K + k[:, None], mask=(r[None, :] < rank) & (k[:, None] < K), other=0.0)
            acc = tl.dot(x, a, acc)
        tl.store(h_tile + (s + 1) * plane + r[None, :], acc, mask=live[:, None] & (r[None, :] < rank))
    tl.debug_barrier()
    counter = counters_ptr + tile * N_SLICES + i
    if tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1:
        tl.debug_barrier()
        for r0 in range(0, rank, BLOCK_R):
            r = r0 + tl.arange(0, BLOCK_R)
            mask = live[:, None] & (r[None, :] < rank)
            h = tl.load(h_tile + plane + r[None, :], mask=mask, other=0.0)
            for p in range(2, SPLIT + 1):
                h += tl.load(h_tile + p * plane + r[None, :], mask=mask, other=0.0)
            tl.store(h_tile + r[None, :], h, mask=mask)
        tl.atomic_xchg(counter, 0)


@triton.jit
def _dot(x, a, acc, DOT: tl.constexpr):
    if DOT == "native":
        return tl.dot(x, a, acc)
    elif DOT == "tf32":
        # bf16 and fp16 are both exact in tf32.
        return tl.dot(x.to(tl.float32), a.to(tl.float32), acc, input_precision="tf32")
    else:
        return tl.dot(x.to(tl.float32), a.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def _slice_factor(first, i, data_ptr, slot, slot_elems, ALIGN: tl.constexpr, N_SLICES: tl.constexpr):
    """(address of A, its rank) of slice `i`; rank 0 where there is none, or a lower slice stores the same."""
    a_off = tl.load(first + META * i)
    rank = tl.load(first + META * i + 2).to(tl.int32)
    if N_SLICES > 1:
        rank = tl.where(sharing_slice(first, i, a_off, rank, N_SLICES) == i, rank, 0)
    return factor_start(data_ptr, slot, slot_elems, a_off, ALIGN), rank


@triton.jit
def _transposed(a_ptr, r, k, rank, K):
    """A[r, k]ᵀ, 0 beyond rank and K."""
    return tl.load(a_ptr + r[None, :] * K + k[:, None], mask=(r[None, :] < rank) & (k[:, None] < K), other=0.0)


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def shrink_tiles(
    x_ptr,
    row_slots_ptr,
    row_starts_ptr,
    h_ptr,
    site,
    data_ptr,
    meta_ptr,
    counters_ptr,
    slot_elems,
    meta_stride,
    n,
    per_row,
    blocks,
    tiles,
    capacity,
    K,
    x_stride,
    MAX_RANK: tl.constexpr,
    N_SLICES: tl.constexpr,
    ALIGN: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    STARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_M tokens of one row, one chunk of K, all slices. Grid [rows * blocks, split, 1]."""
    let_next_begin(PDL)
    row = tl.program_id(0) // blocks
    s = tl.program_id(1)
    m_start = (tl.program_id(0) % blocks) * BLOCK_M
    slot = tl.load(row_slots_ptr + row)
    idle = slot < 0
    if STARTS:
        idle |= m_start + BLOCK_M <= tl.load(row_starts_ptr + row)
    if idle:
        wait_for_input(PDL)
        return
    first = table_entry(meta_ptr, meta_stride, slot, site)
    a0, rank0 = _slice_factor(first, 0, data_ptr, slot, slot_elems, ALIGN, N_SLICES)
    none = rank0 - rank0
    a1, rank1, a2, rank2, a3, rank3 = a0, none, a0, none, a0, none
    if N_SLICES > 1:
        a1, rank1 = _slice_factor(first, 1, data_ptr, slot, slot_elems, ALIGN, N_SLICES)
    if N_SLICES > 2:
        a2, rank2 = _slice_factor(first, 2, data_ptr, slot, slot_elems, ALIGN, N_SLICES)
    if N_SLICES > 3:
        a3, rank3 = _slice_factor(first, 3, data_ptr, slot, slot_elems, ALIGN, N_SLICES)
    m = tl.arange(0, BLOCK_M)
    m_mask = m[:, None] < per_row - m_start
    t = row.to(tl.int64) * per_row + m_start
    x_rows = x_ptr + t * x_stride + m[:, None] * x_stride
    h_rows = h_ptr + (s.to(tl.int64) * n + t) * (N_SLICES * MAX_RANK) + m[:, None] * (N_SLICES * MAX_RANK)
    k_start = s * CHUNK
    k_stop = tl.minimum(K, k_start + CHUNK)
    wait_for_input(PDL)
    for r0 in range(0, tl.maximum(tl.maximum(rank0, rank1), tl.maximum(rank2, rank3)), BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        acc0 = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        acc1, acc2, acc3 = acc0, acc0, acc0
        for k0 in tl.range(k_start, k_stop, BLOCK_K, num_stages=STAGES):
            k = k0 + tl.arange(0, BLOCK_K)
            x = tl.load(x_rows + k[None, :], mask=m_mask & (k[None, :] < K), other=0.0)
            acc0 = _dot(x, _transposed(a0, r, k, rank0, K), acc0, DOT)
            if N_SLICES > 1:
                acc1 = _dot(x, _transposed(a1, r, k, rank1, K), acc1, DOT)
            if N_SLICES > 2:
                acc2 = _dot(x, _transposed(a2, r, k, rank2, K), acc2, DOT)
            if N_SLICES > 3:
                acc3 = _dot(x, _transposed(a3, r, k, rank3, K), acc3, DOT)
        tl.store(h_rows + r[None, :], acc0, mask=m_mask & (r[None, :] < rank0))
        if N_SLICES > 1:
            tl.store(h_rows + MAX_RANK + r[None, :], acc1, mask=m_mask & (r[None, :] < rank1))
        if N_SLICES > 2:
            tl.store(h_rows + 2 * MAX_RANK + r[None, :], acc2, mask=m_mask & (r[None, :] < rank2))
        if N_SLICES > 3:
            tl.store(h_rows + 3 * MAX_RANK + r[None, :], acc3, mask=m_mask & (r[None, :] < rank3))


_KERNELS = {"rows": shrink_rows, "segments": shrink_segments, "tiles": shrink_tiles}


def plane_elems(n: int, slices: int, max_rank: int, tiling: ShrinkTiling) -> int:
    """fp32 elements of the planes."""
    if tiling.kind == "segments":
        return (1 + tiling.split) * tiling.tiles * slices * TILE * max_rank
    return tiling.split * n * slices * max_rank


def prepare(
    x: Tensor,
    row_slots: Tensor,
    row_starts: Tensor | None,
    planes: Tensor,
    data: Tensor,
    meta: Tensor,
    counters: Tensor,
    rows: int,
    site: int,
    slices: int,
    slot_elems: int,
    max_rank: int,
    tiling: ShrinkTiling,
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """The launch of one shrink: kernel, grid, arguments in order, compile options.

    x `[n, K]` with unit stride along K; planes: fp32, at least `plane_elems` elements; counters: int32 zeros, at least
    `tiles * slices` of them (segments). The first five arguments are those that change from call to call or from layer
    to layer. Where there are no row_starts, a pointer that is not read takes their place.
    """
    n, k = x.shape
    per_row = n // rows
    blocks = -(-per_row // tiling.block_m)
    args = (
        x,
        row_slots,
        row_slots if row_starts is None else row_starts,
        planes,
        site,
        data,
        meta,
        counters,
        slot_elems,
        meta.stride(0),
        n,
        per_row,
        blocks,
        tiling.table_tiles,
        tiling.capacity,
        k,
        x.stride(0),
        max_rank,
        slices,
        64 // data.dtype.itemsize,
        tiling.split,
        tiling.chunk,
        tiling.block_m,
        tiling.block_k,
        tiling.block_r,
        tiling.stages,
        tiling.dot,
        row_starts is not None,
        tiling.pdl,
    )
    grid = {
        "rows": (n, tiling.split, slices),
        "segments": (tiling.tiles, tiling.split, slices),
        "tiles": (rows * blocks, tiling.split, 1),
    }[tiling.kind]
    options = {"num_warps": tiling.warps} | ({"launch_pdl": True} if tiling.pdl else {})
    return _KERNELS[tiling.kind], grid, args, options
