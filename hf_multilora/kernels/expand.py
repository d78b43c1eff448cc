"""Expand: `y[t] += h[t] · Bt[slot(t)]`, for every slice of a layer, into the slice's own columns.

    h[t, j] = planes[0, t, i, j] + planes[1, t, i, j] + ...                 planes: fp32 [split, n, slices, max_rank]
    y[t, start_i + c] = round(y[t, start_i + c] + sum over j < rank of h[t, j] · Bt_i[j, c])      Bt_i [rank, width_i]

The sum is fp32 and y is rounded once. Rows without an adapter, and slices that it did not train, are not written.

`expand_rows` is one program per token (decode); `expand_tiles` takes tiles of one row's tokens with `tl.dot`
(prefill). There h enters the dot without being rounded to the adapters' dtype: for bf16 as hi + lo, two bf16 values
that keep 16 of its 24 bits; where y is fp32, or Bt fp16 (whose range is too small for that), as three tf32 products,
good to 22 bits; for fp32 factors in IEEE arithmetic. Addresses are int64 up to the first element of a tile or of a
factor, and int32 inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .lookup import factor_start, sharing_slice, slice_columns, table_entry
from .tuning import ExpandTiling

_DYNAMIC = ["site", "n", "blocks", "meta_stride"]


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=["row_slots_ptr", "meta_ptr", "h_ptr"])
def expand_rows(
    y_ptr,
    row_slots_ptr,
    h_ptr,
    site,
    data_ptr,
    meta_ptr,
    slot_elems,
    meta_stride,
    n,
    per_row,
    blocks,
    y_stride,
    w0,
    w1,
    w2,
    w3,
    MAX_RANK: tl.constexpr,
    N_SLICES: tl.constexpr,
    ALIGN: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
):
    """One token, BLOCK_N columns of one slice. Grid [n, blocks of the widest slice, slices]."""
    t = tl.program_id(0)
    i = tl.program_id(2)
    start, width = slice_columns(i, w0, w1, w2, w3, N_SLICES)
    c0 = tl.program_id(1) * BLOCK_N
    if c0 >= width:
        return
    slot = tl.load(row_slots_ptr + t // per_row)
    if slot < 0:
        return
    first = table_entry(meta_ptr, meta_stride, slot, site)
    b_off = tl.load(first + 3 * i + 1)
    rank = tl.load(first + 3 * i + 2).to(tl.int32)
    # Offsets are never negative; asking makes the two loads leave together instead of one after the other.
    if (rank == 0) | (b_off < 0):
        return
    src = i
    if N_SLICES > 1:
        src = sharing_slice(first, i, tl.load(first + 3 * i), rank, N_SLICES)
    b_ptr = factor_start(data_ptr, slot, slot_elems, b_off, ALIGN)
    c = c0 + tl.arange(0, BLOCK_N)
    y_row = y_ptr + t.to(tl.int64) * y_stride + start
    y = tl.load(y_row + c, mask=c < width)
    s = tl.arange(0, SPLIT_PAD)
    h_planes = h_ptr + ((s.to(tl.int64) * n + t) * N_SLICES + src)[:, None] * MAX_RANK
    acc = tl.zeros([BLOCK_N], dtype=tl.float32)
    for r0 in tl.range(0, rank, BLOCK_R, num_stages=STAGES):
        r = r0 + tl.arange(0, BLOCK_R)
        mask = (r[:, None] < rank) & (c[None, :] < width)
        b = tl.load(b_ptr + r[:, None] * width + c[None, :], mask=mask, other=0.0)
        h = tl.load(h_planes + r[None, :], mask=(s[:, None] < SPLIT) & (r[None, :] < rank), other=0.0)
        acc += tl.sum(tl.sum(h, axis=0)[:, None] * b.to(tl.float32), axis=0)
    tl.store(y_row + c, (y.to(tl.float32) + acc).to(y_ptr.dtype.element_ty), mask=c < width)


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=["row_slots_ptr", "meta_ptr", "h_ptr"])
def expand_tiles(
    y_ptr,
    row_slots_ptr,
    h_ptr,
    site,
    data_ptr,
    meta_ptr,
    slot_elems,
    meta_stride,
    n,
    per_row,
    blocks,
    y_stride,
    w0,
    w1,
    w2,
    w3,
    MAX_RANK: tl.constexpr,
    N_SLICES: tl.constexpr,
    ALIGN: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
):
    """BLOCK_M tokens of one row, BLOCK_N columns of one slice. Grid [rows * blocks, column blocks, slices]."""
    row = tl.program_id(0) // blocks
    i = tl.program_id(2)
    start, width = slice_columns(i, w0, w1, w2, w3, N_SLICES)
    c0 = tl.program_id(1) * BLOCK_N
    if c0 >= width:
        return
    slot = tl.load(row_slots_ptr + row)
    if slot < 0:
        return
    first = table_entry(meta_ptr, meta_stride, slot, site)
    b_off = tl.load(first + 3 * i + 1)
    rank = tl.load(first + 3 * i + 2).to(tl.int32)
    # Offsets are never negative; asking makes the two loads leave together instead of one after the other.
    if (rank == 0) | (b_off < 0):
        return
    src = i
    if N_SLICES > 1:
        src = sharing_slice(first, i, tl.load(first + 3 * i), rank, N_SLICES)
    b_ptr = factor_start(data_ptr, slot, slot_elems, b_off, ALIGN)
    m_start = (tl.program_id(0) % blocks) * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    m_stop = per_row - m_start
    t = row.to(tl.int64) * per_row + m_start
    c = c0 + tl.arange(0, BLOCK_N)
    y_tile = y_ptr + (t * y_stride + start) + m[:, None] * y_stride + c[None, :]
    y_mask = (m[:, None] < m_stop) & (c[None, :] < width)
    y = tl.load(y_tile, mask=y_mask)
    plane = tl.cast(n, tl.int64) * N_SLICES * MAX_RANK
    h_rows = h_ptr + (t * N_SLICES + src) * MAX_RANK + m[:, None] * (N_SLICES * MAX_RANK)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for r0 in tl.range(0, rank, BLOCK_R, num_stages=STAGES):
        r = r0 + tl.arange(0, BLOCK_R)
        b_mask = (r[:, None] < rank) & (c[None, :] < width)
        b = tl.load(b_ptr + r[:, None] * width + c[None, :], mask=b_mask, other=0.0)
        h_mask = (m[:, None] < m_stop) & (r[None, :] < rank)
        h = tl.load(h_rows + r[None, :], mask=h_mask, other=0.0)
        for s in tl.static_range(1, SPLIT):
            h += tl.load(h_rows + s * plane + r[None, :], mask=h_mask, other=0.0)
        if DOT == "split":
            hi = h.to(b.dtype)
            lo = h - hi.to(tl.float32)
            lo = tl.where(lo == lo, lo, 0.0)  # inf - inf: hi says it all
            acc = tl.dot(hi, b, acc)
            acc = tl.dot(lo.to(b.dtype), b, acc)
        elif DOT == "tf32":
            acc = tl.dot(h, b.to(tl.float32), acc, input_precision="tf32x3")
        else:
            acc = tl.dot(h, b.to(tl.float32), acc, input_precision="ieee")
    tl.store(y_tile, (y.to(tl.float32) + acc).to(y_ptr.dtype.element_ty), mask=y_mask)


def prepare(
    y: Tensor,
    row_slots: Tensor,
    planes: Tensor,
    data: Tensor,
    meta: Tensor,
    rows: int,
    site: int,
    widths: Sequence[int],
    slot_elems: int,
    max_rank: int,
    split: int,
    tiling: ExpandTiling,
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, int]]:
    """The launch of one expand: kernel, grid, arguments in order, compile options.

    y `[n, sum(widths)]` with unit stride along its columns, written in place; planes and split as shrink left them.
    The first four arguments are those that change from call to call or from layer to layer.
    """
    n = y.shape[0]
    per_row = n // rows
    blocks = -(-per_row // tiling.block_m) if tiling.tiles else 1
    args = (
        y,
        row_slots,
        planes,
        site,
        data,
        meta,
        slot_elems,
        meta.stride(0),
        n,
        per_row,
        blocks,
        y.stride(0),
        *widths,
        *[0] * (4 - len(widths)),
        max_rank,
        len(widths),
        64 // data.dtype.itemsize,
        split,
        triton.next_power_of_2(split),
        tiling.block_m,
        tiling.block_n,
        tiling.block_r,
        tiling.stages,
        tiling.dot,
    )
    columns = -(-max(widths) // tiling.block_n)
    grid = (rows * blocks if tiling.tiles else n, columns, len(widths))
    return (expand_tiles if tiling.tiles else expand_rows), grid, args, {"num_warps": tiling.warps}
