"""Shrink: `h[t] = x[t] · A[slot(t)]ᵀ`, in fp32, for every slice of a layer.

    planes[s, t, i, j] = sum over k in chunk s of x[t, k] · A_i[j, k]       x [n, K], A_i [rank, K]
    planes: fp32 [split, n, slices, max_rank]; expand adds the planes up, in order

No zero fill and no atomics: expand reads exactly what was written here, i.e. `j < rank` of rows with an adapter. A row
without one, or whose adapter did not train the slice, leaves at once, as do tokens before their row's start. The true
rank bounds every loop.

Two kernels, chosen by the shape of the call: one program per token with multiply-and-sum where a row has few tokens
(decode), tiles of one row's tokens with `tl.dot` where it has many (prefill). Addresses are int64 up to the first
element of a tile or a factor, and int32 inside (rank * K and BLOCK_M * stride are below 2**31).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .lookup import META, factor_start, sharing_slice, table_entry
from .tuning import ShrinkTiling

_DYNAMIC = ["site", "n", "blocks", "meta_stride"]
_UNALIGNED = ["row_slots_ptr", "row_starts_ptr", "meta_ptr", "h_ptr"]


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def shrink_rows(
    x_ptr,
    row_slots_ptr,
    row_starts_ptr,
    h_ptr,
    site,
    data_ptr,
    meta_ptr,
    slot_elems,
    meta_stride,
    n,
    per_row,
    blocks,
    K,
    x_stride,
    MAX_RANK: tl.constexpr,
    N_SLICES: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    STARTS: tl.constexpr,
):
    """One token, one chunk of K, one slice. Grid [n, split, slices]."""
    t = tl.program_id(0)
    s = tl.program_id(1)
    i = tl.program_id(2)
    row = t // per_row
    slot = tl.load(row_slots_ptr + row)
    idle = slot < 0
    if STARTS:
        idle |= t - row * per_row < tl.load(row_starts_ptr + row)
    if idle:
        return
    first = table_entry(meta_ptr, meta_stride, slot, site)
    a_off = tl.load(first + META * i)
    rank = tl.load(first + META * i + 2).to(tl.int32)
    # Offsets are never negative; asking makes the two loads leave together instead of one after the other.
    if (rank == 0) | (a_off < 0):
        return
    if N_SLICES > 1 and sharing_slice(first, i, a_off, rank, N_SLICES) != i:
        return
    a_ptr = factor_start(data_ptr, slot, slot_elems, a_off, ALIGN)
    x_row = x_ptr + t.to(tl.int64) * x_stride
    h_row = h_ptr + ((s.to(tl.int64) * n + t) * N_SLICES + i) * MAX_RANK
    k_start = s * CHUNK
    for r0 in tl.range(0, rank, BLOCK_R, num_stages=STAGES):
        r = r0 + tl.arange(0, BLOCK_R)
        acc = tl.zeros([BLOCK_R, BLOCK_K], dtype=tl.float32)
        for step in tl.static_range(0, CHUNK, BLOCK_K):
            k = k_start + step + tl.arange(0, BLOCK_K)
            mask = (r[:, None] < rank) & (k[None, :] < K)
            a = tl.load(a_ptr + r[:, None] * K + k[None, :], mask=mask, other=0.0)
            x = tl.load(x_row + k, mask=k < K, other=0.0)
            acc += a.to(tl.float32) * x.to(tl.float32)[None, :]
        tl.store(h_row + r, tl.sum(acc, axis=1), mask=r < rank)


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def shrink_tiles(
    x_ptr,
    row_slots_ptr,
    row_starts_ptr,
    h_ptr,
    site,
    data_ptr,
    meta_ptr,
    slot_elems,
    meta_stride,
    n,
    per_row,
    blocks,
    K,
    x_stride,
    MAX_RANK: tl.constexpr,
    N_SLICES: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    STARTS: tl.constexpr,
):
    """BLOCK_M tokens of one row, one chunk of K, one slice. Grid [rows * blocks, split, slices]."""
    row = tl.program_id(0) // blocks
    s = tl.program_id(1)
    i = tl.program_id(2)
    m_start = (tl.program_id(0) % blocks) * BLOCK_M
    slot = tl.load(row_slots_ptr + row)
    idle = slot < 0
    if STARTS:
        idle |= m_start + BLOCK_M <= tl.load(row_starts_ptr + row)
    if idle:
        return
    first = table_entry(meta_ptr, meta_stride, slot, site)
    a_off = tl.load(first + META * i)
    rank = tl.load(first + META * i + 2).to(tl.int32)
    # Offsets are never negative; asking makes the two loads leave together instead of one after the other.
    if (rank == 0) | (a_off < 0):
        return
    if N_SLICES > 1 and sharing_slice(first, i, a_off, rank, N_SLICES) != i:
        return
    a_ptr = factor_start(data_ptr, slot, slot_elems, a_off, ALIGN)
    m = tl.arange(0, BLOCK_M)
    m_stop = per_row - m_start
    t = row.to(tl.int64) * per_row + m_start
    x_rows = x_ptr + t * x_stride + m[:, None] * x_stride
    h_rows = h_ptr + ((s.to(tl.int64) * n + t) * N_SLICES + i) * MAX_RANK + m[:, None] * (N_SLICES * MAX_RANK)
    k_start = s * CHUNK
    k_stop = tl.minimum(K, k_start + CHUNK)
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        acc = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for k0 in tl.range(k_start, k_stop, BLOCK_K, num_stages=STAGES):
            k = k0 + tl.arange(0, BLOCK_K)
            x = tl.load(x_rows + k[None, :], mask=(m[:, None] < m_stop) & (k[None, :] < K), other=0.0)
            a_mask = (r[None, :] < rank) & (k[:, None] < K)
            a = tl.load(a_ptr + r[None, :] * K + k[:, None], mask=a_mask, other=0.0)
            if DOT == "native":
                acc = tl.dot(x, a, acc)
            elif DOT == "tf32":
                # bf16 and fp16 are both exact in tf32.
                acc = tl.dot(x.to(tl.float32), a.to(tl.float32), acc, input_precision="tf32")
            else:
                acc = tl.dot(x.to(tl.float32), a.to(tl.float32), acc, input_precision="ieee")
        tl.store(h_rows + r[None, :], acc, mask=(m[:, None] < m_stop) & (r[None, :] < rank))


def prepare(
    x: Tensor,
    row_slots: Tensor,
    row_starts: Tensor | None,
    planes: Tensor,
    data: Tensor,
    meta: Tensor,
    rows: int,
    site: int,
    slices: int,
    slot_elems: int,
    max_rank: int,
    tiling: ShrinkTiling,
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, int]]:
    """The launch of one shrink: kernel, grid, arguments in order, compile options.

    x `[n, K]` with unit stride along K; planes: fp32, at least `split * n * slices * max_rank` elements.
    The first five arguments are those that change from call to call or from layer to layer. Where there are no
    row_starts, a pointer that is not read takes their place.
    """
    n, k = x.shape
    per_row = n // rows
    blocks = -(-per_row // tiling.block_m) if tiling.tiles else 1
    args = (
        x,
        row_slots,
        row_slots if row_starts is None else row_starts,
        planes,
        site,
        data,
        meta,
        slot_elems,
        meta.stride(0),
        n,
        per_row,
        blocks,
        k,
        x.stride(0),
        max_rank,
        slices,
        64 // data.dtype.itemsize,
        tiling.chunk,
        tiling.block_m,
        tiling.block_k,
        tiling.block_r,
        tiling.stages,
        tiling.dot,
        row_starts is not None,
    )
    grid = (rows * blocks if tiling.tiles else n, tiling.split, slices)
    return (shrink_tiles if tiling.tiles else shrink_rows), grid, args, {"num_warps": tiling.warps}
