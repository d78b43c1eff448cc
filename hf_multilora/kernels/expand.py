"""Expand: `y[t] = gain · y[t] + shift + h[t] · Bt[slot(t)]`, for every slice of a layer, into the slice's own columns.

    h[t, j] = planes[0, t, i, j] + planes[1, t, i, j] + ...                 planes: fp32 [split, n, slices, max_rank]
    d[t, c] = sum over j < rank of h[t, j] · Bt_i[j, c]                     Bt_i [rank, width_i]
    y[t, start_i + c] = round(gain_i[c] · y[t, start_i + c] + shift_i[c] + d[t, c])               fp32 [width_i]

The sum is fp32 and y is rounded once. Rows without an adapter, slices that have neither delta nor gain nor shift, and
tokens before their row's start are not written. An absent gain or shift is not read: its masked load yields what
changes no bit (1, -0.0), so that rows without one wait for nothing and branch nowhere.

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

from .lookup import META, factor_start, sharing_slice, slice_columns, table_entry, vector_start
from .tuning import ExpandTiling

_DYNAMIC = ["site", "n", "blocks", "meta_stride"]
_UNALIGNED = ["row_slots_ptr", "row_starts_ptr", "meta_ptr", "h_ptr"]


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def expand_rows(
    y_ptr,
    row_slots_ptr,
    row_starts_ptr,
    h_ptr,
    site,
    data_ptr,
    meta_ptr,
    floats_ptr,
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
    STARTS: tl.constexpr,
):
    """One token, BLOCK_N columns of one slice. Grid [n, blocks of the widest slice, slices]."""
    t = tl.program_id(0)
    i = tl.program_id(2)
    start, width = slice_columns(i, w0, w1, w2, w3, N_SLICES)
    c0 = tl.program_id(1) * BLOCK_N
    if c0 >= width:
        return
    row = t // per_row
    slot = tl.load(row_slots_ptr + row)
    idle = slot < 0
    if STARTS:
        idle |= t - row * per_row < tl.load(row_starts_ptr + row)
    if idle:
        return
    first = table_entry(meta_ptr, meta_stride, slot, site)
    b_off = tl.load(first + META * i + 1)
    rank = tl.load(first + META * i + 2)
    gain_off = tl.load(first + META * i + 3)
    shift_off = tl.load(first + META * i + 4)
    # Offsets are never negative; asking makes the loads leave together instead of one after the other.
    if ((rank | gain_off | shift_off) == 0) | (b_off < 0):
        return
    rank = rank.to(tl.int32)
    src = i
    if N_SLICES > 1:
        src = sharing_slice(first, i, tl.load(first + META * i), rank, N_SLICES)
    b_ptr = factor_start(data_ptr, slot, slot_elems, b_off, ALIGN)
    gain_ptr = vector_start(floats_ptr, slot, slot_elems, gain_off, ALIGN)
    shift_ptr = vector_start(floats_ptr, slot, slot_elems, shift_off, ALIGN)
    c = c0 + tl.arange(0, BLOCK_N)
    y_row = y_ptr + t.to(tl.int64) * y_stride + start
    y = tl.load(y_row + c, mask=c < width)
    gain = tl.load(gain_ptr + c, mask=(c < width) & (gain_off != 0), other=1.0)
    shift = tl.load(shift_ptr + c, mask=(c < width) & (shift_off != 0), other=-0.0)
    s = tl.arange(0, SPLIT_PAD)
    h_planes = h_ptr + ((s.to(tl.int64) * n + t) * N_SLICES + src)[:, None] * MAX_RANK
    acc = tl.zeros([BLOCK_N], dtype=tl.float32)
    for r0 in tl.range(0, rank, BLOCK_R, num_stages=STAGES):
        r = r0 + tl.arange(0, BLOCK_R)
        mask = (r[:, None] < rank) & (c[None, :] < width)
        b = tl.load(b_ptr + r[:, None] * width + c[None, :], mask=mask, other=0.0)
        h = tl.load(h_planes + r[None, :], mask=(s[:, None] < SPLIT) & (r[None, :] < rank), other=0.0)
        acc += tl.sum(tl.sum(h, axis=0)[:, None] * b.to(tl.float32), axis=0)
    out = gain * y.to(tl.float32) + shift + acc
    tl.store(y_row + c, out.to(y_ptr.dtype.element_ty), mask=c < width)


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def expand_tiles(
    y_ptr,
    row_slots_ptr,
    row_starts_ptr,
    h_ptr,
    site,
    data_ptr,
    meta_ptr,
    floats_ptr,
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
    STARTS: tl.constexpr,
):
    """BLOCK_M tokens of one row, BLOCK_N columns of one slice. Grid [rows * blocks, column blocks, slices]."""
    row = tl.program_id(0) // blocks
    i = tl.program_id(2)
    start, width = slice_columns(i, w0, w1, w2, w3, N_SLICES)
    c0 = tl.program_id(1) * BLOCK_N
    if c0 >= width:
        return
    m_start = (tl.program_id(0) % blocks) * BLOCK_M
    m_first = 0
    slot = tl.load(row_slots_ptr + row)
    idle = slot < 0
    if STARTS:
        m_first = tl.load(row_starts_ptr + row)
        idle |= m_start + BLOCK_M <= m_first
    if idle:
        return
    first = table_entry(meta_ptr, meta_stride, slot, site)
    b_off = tl.load(first + META * i + 1)
    rank = tl.load(first + META * i + 2)
    gain_off = tl.load(first + META * i + 3)
    shift_off = tl.load(first + META * i + 4)
    # Offsets are never negative; asking makes the loads leave together instead of one after the other.
    if ((rank | gain_off | shift_off) == 0) | (b_off < 0):
        return
    rank = rank.to(tl.int32)
    src = i
    if N_SLICES > 1:
        src = sharing_slice(first, i, tl.load(first + META * i), rank, N_SLICES)
    b_ptr = factor_start(data_ptr, slot, slot_elems, b_off, ALIGN)
    gain_ptr = vector_start(floats_ptr, slot, slot_elems, gain_off, ALIGN)
    shift_ptr = vector_start(floats_ptr, slot, slot_elems, shift_off, ALIGN)
    m = tl.arange(0, BLOCK_M)
    m_stop = per_row - m_start
    m_mask = m[:, None] < m_stop
    if STARTS:
        m_mask &= m_start + m[:, None] >= m_first
    t = row.to(tl.int64) * per_row + m_start
    c = c0 + tl.arange(0, BLOCK_N)
    y_tile = y_ptr + (t * y_stride + start) + m[:, None] * y_stride + c[None, :]
    y_mask = m_mask & (c[None, :] < width)
    y = tl.load(y_tile, mask=y_mask)
    gain = tl.load(gain_ptr + c, mask=(c < width) & (gain_off != 0), other=1.0)
    shift = tl.load(shift_ptr + c, mask=(c < width) & (shift_off != 0), other=-0.0)
    plane = tl.cast(n, tl.int64) * N_SLICES * MAX_RANK
    h_rows = h_ptr + (t * N_SLICES + src) * MAX_RANK + m[:, None] * (N_SLICES * MAX_RANK)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for r0 in tl.range(0, rank, BLOCK_R, num_stages=STAGES):
        r = r0 + tl.arange(0, BLOCK_R)
        b_mask = (r[:, None] < rank) & (c[None, :] < width)
        b = tl.load(b_ptr + r[:, None] * width + c[None, :], mask=b_mask, other=0.0)
        h_mask = m_mask & (r[None, :] < rank)
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
    out = gain[None, :] * y.to(tl.float32) + shift[None, :] + acc
    tl.store(y_tile, out.to(y_ptr.dtype.element_ty), mask=y_mask)


def prepare(
    y: Tensor,
    row_slots: Tensor,
    row_starts: Tensor | None,
    planes: Tensor,
    data: Tensor,
    meta: Tensor,
    rows: int,
    site: int,
    floats: Tensor,
    widths: Sequence[int],
    slot_elems: int,
    max_rank: int,
    split: int,
    tiling: ExpandTiling,
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, int]]:
    """The launch of one expand: kernel, grid, arguments in order, compile options.

    y `[n, sum(widths)]` with unit stride along its columns, written in place; planes and split as shrink left them.
    The first five arguments are those that change from call to call or from layer to layer. Where there are no
    row_starts, a pointer that is not read takes their place.
    """
    n = y.shape[0]
    per_row = n // rows
    blocks = -(-per_row // tiling.block_m) if tiling.tiles else 1
    args = (
        y,
        row_slots,
        row_slots if row_starts is None else row_starts,
        planes,
        site,
        data,
        meta,
        floats,
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
        row_starts is not None,
    )
    columns = -(-max(widths) // tiling.block_n)
    grid = (rows * blocks if tiling.tiles else n, columns, len(widths))
    return (expand_tiles if tiling.tiles else expand_rows), grid, args, {"num_warps": tiling.warps}
