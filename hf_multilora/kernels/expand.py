"""Expand: `y[t] = gain · y[t] + shift + h[t] · Bt[slot(t)]`, for every slice of a group, each into its own columns.

    h[t, j] = planes[0, t, i, j] + planes[1, t, i, j] + ...                 planes: as shrink leaves them
    d[t, c] = sum over j < rank of h[t, j] · Bt_i[j, c]                     Bt_i [rank, width_i]
    y_i[t, c] = round(gain_i[c] · y_i[t, c] + shift_i[c] + d[t, c])         y_i: the slice's columns; fp32 [width_i]

The sum is fp32 and y is rounded once. Rows without an adapter, slices that have neither delta nor gain nor shift, and
tokens before their row's start are not written. An absent gain or shift is not read: its masked load yields what
changes no bit (1, -0.0), so that rows without one wait for nothing and branch nowhere.

With DELTA the kernel can run beside the base layer, whose y is not there yet: it writes d alone, into an fp32 buffer
[n, sum of the widths]. Where there is no delta it writes -0.0, which added to any number leaves its bits. `finish`
does the rest of the formula from there, to the same bits; so does `y + d` in a compiled forward.

`expand_rows` is one program per token and `expand_segments` one per tile of rows that share a slot (decode);
`expand_tiles` takes tiles of one row's tokens (prefill). In the latter two h enters `tl.dot` without being rounded to
the adapters' dtype: for bf16 as hi + lo, two bf16 values that keep 16 of its 24 bits; where y is fp32, or Bt fp16
(whose range is too small for that), as three tf32 products, good to 22 bits; for fp32 factors in IEEE arithmetic.
Addresses are int64 up to the first element of a tile or of a factor, and int32 inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .lookup import (
    META,
    factor_start,
    gain_and_shift,
    let_next_begin,
    minus_zeros,
    pick,
    pick_pointer,
    sharing_slice,
    table_entry,
    wait_for_input,
)
from .segments import TILE
from .table import LOW_RANK
from .tuning import ExpandTiling, ShrinkTiling

_DYNAMIC = ["site", "n", "blocks", "tiles", "capacity", "meta_stride"]
_UNALIGNED = ["row_slots_ptr", "row_starts_ptr", "meta_ptr", "h_ptr"]
_TILE = tl.constexpr(TILE)
_LOW_RANK = tl.constexpr(LOW_RANK)


@triton.jit
def _entry(first, i):
    """(offset of Bt, rank, offset of gain, offset of shift, whether there is none of them) of slice `i`."""
    b_off = tl.load(first + META * i + 1)
    rank = tl.load(first + META * i + 2)
    gain_off = tl.load(first + META * i + 3)
    shift_off = tl.load(first + META * i + 4)
    # Offsets are never negative; asking makes the loads leave together instead of one after the other.
    nothing = ((rank | gain_off | shift_off) == 0) | (b_off < 0)
    return b_off, rank, gain_off, shift_off, nothing


@triton.jit
def _rows_of(b_ptr, r, c, rank, width):
    """Bt[r, c], 0 beyond rank and width."""
    return tl.load(b_ptr + r[:, None] * width + c[None, :], mask=(r[:, None] < rank) & (c[None, :] < width), other=0.0)


@triton.jit
def _source(first, i, rank, N_SLICES: tl.constexpr):
    """The slice whose shrink serves slice `i`."""
    src = i
    if N_SLICES > 1:
        src = sharing_slice(first, i, tl.load(first + META * i), rank, N_SLICES)
    return src


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def expand_rows(
    y0_ptr,
    y1_ptr,
    y2_ptr,
    y3_ptr,
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
    tiles,
    capacity,
    s0,
    s1,
    s2,
    s3,
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
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    DELTA: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, BLOCK_N columns of one slice. Grid [n, blocks of the widest slice, slices]."""
    t = tl.program_id(0)
    i = tl.program_id(2)
    let_next_begin(PDL)
    width = pick(i, w0, w1, w2, w3, N_SLICES)
    c0 = tl.program_id(1) * BLOCK_N
    if c0 >= width:
        wait_for_input(PDL)
        return
    c = c0 + tl.arange(0, BLOCK_N)
    y_ptr = pick_pointer(i, y0_ptr, y1_ptr, y2_ptr, y3_ptr, N_SLICES, ALIGNED)
    y_row = y_ptr + t.to(tl.int64) * pick(i, s0, s1, s2, s3, N_SLICES)
    row = t // per_row
    slot = tl.load(row_slots_ptr + row)
    idle = slot < 0
    if STARTS:
        idle |= t - row * per_row < tl.load(row_starts_ptr + row)
    if idle:
        wait_for_input(PDL)
        if DELTA:
            tl.store(y_row + c, minus_zeros([BLOCK_N]), mask=c < width)
        return
    first = table_entry(meta_ptr, meta_stride, slot, site)
    b_off, rank, gain_off, shift_off, nothing = _entry(first, i)
    if nothing & (not DELTA):
        wait_for_input(PDL)
        return
    rank = rank.to(tl.int32)
    src = _source(first, i, rank, N_SLICES)
    b_ptr = factor_start(data_ptr, slot, slot_elems, b_off, ALIGN)
    gain, shift = gain_and_shift(floats_ptr, slot, slot_elems, gain_off, shift_off, c, width, ALIGN, DELTA)
    s = tl.arange(0, SPLIT_PAD)
    r = tl.arange(0, BLOCK_R)
    # The first factors are on their way while shrink still runs.
    b = _rows_of(b_ptr, r, c, rank, width)
    wait_for_input(PDL)
    acc = minus_zeros([BLOCK_N])
    if not DELTA:
        acc = gain * tl.load(y_row + c, mask=c < width, other=0.0).to(tl.float32) + shift
    h_planes = h_ptr + ((s.to(tl.int64) * n + t) * N_SLICES + src)[:, None] * MAX_RANK
    delta = minus_zeros([BLOCK_N])
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        if r0 > 0:
            b = _rows_of(b_ptr, r, c, rank, width)
        h = tl.load(h_planes + r[None, :], mask=(s[:, None] < SPLIT) & (r[None, :] < rank), other=0.0)
        delta += tl.sum(tl.sum(h, axis=0)[:, None] * b.to(tl.float32), axis=0)
    tl.store(y_row + c, (acc + delta).to(y_ptr.dtype.element_ty), mask=c < width)


@triton.jit
def _dot(h, b, acc, DOT: tl.constexpr):
    if DOT == "split":
        hi = h.to(b.dtype)
        lo = h - hi.to(tl.float32)
        lo = tl.where(lo == lo, lo, 0.0)  # inf - inf: hi says it all
        acc = tl.dot(hi, b, acc)
        return tl.dot(lo.to(b.dtype), b, acc)
    elif DOT == "tf32":
        return tl.dot(h, b.to(tl.float32), acc, input_precision="tf32x3")
    else:
        return tl.dot(h, b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def _summed(h_rows, r, rank, m_mask, plane, SPLIT: tl.constexpr):
    """h[:, r], the planes of a tile of tokens added up in order."""
    mask = m_mask & (r[None, :] < rank)
    h = tl.load(h_rows + r[None, :], mask=mask, other=0.0)
    for s in tl.static_range(1, SPLIT):
        h += tl.load(h_rows + s * plane + r[None, :], mask=mask, other=0.0)
    return h


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def expand_segments(
    y0_ptr,
    y1_ptr,
    y2_ptr,
    y3_ptr,
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
    tiles,
    capacity,
    s0,
    s1,
    s2,
    s3,
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
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    DELTA: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of rows that share a slot, BLOCK_N columns of one slice. Grid [tiles in use, column blocks, slices]."""
    tile = tl.program_id(0)
    i = tl.program_id(2)
    let_next_begin(PDL)
    width = pick(i, w0, w1, w2, w3, N_SLICES)
    c0 = tl.program_id(1) * BLOCK_N
    if c0 >= width:
        wait_for_input(PDL)
        return
    slot = tl.load(row_slots_ptr + capacity + tile)
    m = tl.arange(0, _TILE)
    t = tl.load(row_slots_ptr + capacity + tiles + tile * _TILE + m)
    live = (t >= 0) & (t < n)
    if STARTS:  # each row has one token here
        live &= tl.load(row_starts_ptr + t, mask=live, other=0) <= 0
    c = c0 + tl.arange(0, BLOCK_N)
    mask = live[:, None] & (c[None, :] < width)
    y_ptr = pick_pointer(i, y0_ptr, y1_ptr, y2_ptr, y3_ptr, N_SLICES, ALIGNED)
    y_tile = y_ptr + t[:, None].to(tl.int64) * pick(i, s0, s1, s2, s3, N_SLICES) + c[None, :]
    if slot < 0:
        wait_for_input(PDL)
        if DELTA:
            tl.store(y_tile, minus_zeros([_TILE, BLOCK_N]), mask=mask)
        return
    first = table_entry(meta_ptr, meta_stride, slot, site)
    b_off, rank, gain_off, shift_off, nothing = _entry(first, i)
    if nothing & (not DELTA):
        wait_for_input(PDL)
        return
    rank = rank.to(tl.int32)
    src = _source(first, i, rank, N_SLICES)
    b_ptr = factor_start(data_ptr, slot, slot_elems, b_off, ALIGN)
    gain, shift = gain_and_shift(floats_ptr, slot, slot_elems, gain_off, shift_off, c, width, ALIGN, DELTA)
    h_tile = h_ptr + (tile.to(tl.int64) * N_SLICES + src) * (_TILE * MAX_RANK) + m[:, None] * MAX_RANK
    wait_for_input(PDL)
    acc = tl.zeros([_TILE, BLOCK_N], dtype=tl.float32)
    for r0 in tl.range(0, rank, BLOCK_R, num_stages=STAGES):
        r = r0 + tl.arange(0, BLOCK_R)
        b = _rows_of(b_ptr, r, c, rank, width)
        h = tl.load(h_tile + r[None, :], mask=live[:, None] & (r[None, :] < rank), other=0.0)
        acc = _dot(h, b, acc, DOT)
    if DELTA:
        if rank == 0:
            acc = minus_zeros([_TILE, BLOCK_N])
    else:
        y = tl.load(y_tile, mask=mask, other=0.0)
        acc = gain[None, :] * y.to(tl.float32) + shift[None, :] + acc
    tl.store(y_tile, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_DYNAMIC, do_not_specialize_on_alignment=_UNALIGNED)
def expand_tiles(
    y0_ptr,
    y1_ptr,
    y2_ptr,
    y3_ptr,
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
    tiles,
    capacity,
    s0,
    s1,
    s2,
    s3,
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
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    DELTA: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_M tokens of one row, STEPS blocks of BLOCK_N columns of a slice. Grid [rows * blocks * spans, 1, slices].

    Programs that follow each other walk along the columns: those that run together stay within few rows of y.
    """
    let_next_begin(PDL)
    spans = tl.cdiv(tl.maximum(tl.maximum(w0, w1), tl.maximum(w2, w3)), STEPS * BLOCK_N)
    block = tl.program_id(0) // spans
    row = block // blocks
    i = tl.program_id(2)
    width = pick(i, w0, w1, w2, w3, N_SLICES)
    c_first = (tl.program_id(0) % spans) * (STEPS * BLOCK_N)
    if c_first >= width:
        wait_for_input(PDL)
        return
    m_start = (block % blocks) * BLOCK_M
    m_first = 0
    slot = tl.load(row_slots_ptr + row)
    idle = slot < 0
    if STARTS:
        m_first = tl.load(row_starts_ptr + row)
        idle |= m_start + BLOCK_M <= m_first
    if idle:
        wait_for_input(PDL)
        return
    m = tl.arange(0, BLOCK_M)
    m_mask = m[:, None] < per_row - m_start
    if STARTS:
        m_mask &= m_start + m[:, None] >= m_first
    t = row.to(tl.int64) * per_row + m_start
    y_ptr = pick_pointer(i, y0_ptr, y1_ptr, y2_ptr, y3_ptr, N_SLICES, ALIGNED)
    y_stride = pick(i, s0, s1, s2, s3, N_SLICES)
    y_rows = y_ptr + t * y_stride + m[:, None] * y_stride
    n_range = tl.arange(0, BLOCK_N)
    wait_for_input(PDL)
    # y takes far longer than the rest: each step's is asked for one step before.
    ahead = tl.load(y_rows + (c_first + n_range)[None, :], mask=m_mask & ((c_first + n_range)[None, :] < width))
    first = table_entry(meta_ptr, meta_stride, slot, site)
    b_off, rank, gain_off, shift_off, nothing = _entry(first, i)
    if nothing:
        return
    rank = rank.to(tl.int32)
    src = _source(first, i, rank, N_SLICES)
    b_ptr = factor_start(data_ptr, slot, slot_elems, b_off, ALIGN)
    plane = tl.cast(n, tl.int64) * N_SLICES * MAX_RANK
    h_rows = h_ptr + (t * N_SLICES + src) * MAX_RANK + m[:, None] * (N_SLICES * MAX_RANK)
    h_first = _summed(h_rows, tl.arange(0, BLOCK_R), rank, m_mask, plane, SPLIT)
    r = tl.arange(0, BLOCK_R)
    LOW: tl.constexpr = MAX_RANK <= _LOW_RANK
    if LOW:  # few enough to ask for these one step before, too
        b_ahead = _rows_of(b_ptr, r, c_first + n_range, rank, width)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        c = c_first + step * BLOCK_N + n_range
        y = ahead
        following = c + BLOCK_N
        wanted = m_mask & (following[None, :] < width) & (step + 1 < STEPS)
        ahead = tl.load(y_rows + following[None, :], mask=wanted)
        gain, shift = gain_and_shift(floats_ptr, slot, slot_elems, gain_off, shift_off, c, width, ALIGN, False)
        if LOW:
            b = b_ahead
            b_ahead = _rows_of(b_ptr, r, following, tl.where(step + 1 < STEPS, rank, 0), width)
        else:
            b = _rows_of(b_ptr, r, c, rank, width)
        acc = _dot(h_first, b, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32), DOT)
        if MAX_RANK > BLOCK_R:
            for r0 in tl.range(BLOCK_R, rank, BLOCK_R, num_stages=1):
                more = r0 + r
                h = _summed(h_rows, more, rank, m_mask, plane, SPLIT)
                acc = _dot(h, _rows_of(b_ptr, more, c, rank, width), acc, DOT)
        out = gain[None, :] * y.to(tl.float32) + shift[None, :] + acc
        tl.store(y_rows + c[None, :], out.to(y_ptr.dtype.element_ty), mask=m_mask & (c[None, :] < width))


_KERNELS = {"rows": expand_rows, "segments": expand_segments, "tiles": expand_tiles}


def _padded(values: Sequence[Any], with_: Any) -> list[Any]:
    return [*values, *[with_] * (4 - len(values))]


def columns_of(ys: Sequence[Tensor]) -> tuple[list[Any], list[int], list[int], bool]:
    """Addresses, row strides and widths of the slices, padded to four; whether all rows lie at 16-byte multiples."""
    aligned = all(y.data_ptr() % 16 == 0 and y.stride(0) * y.element_size() % 16 == 0 for y in ys)
    strides, widths = [y.stride(0) for y in ys], [y.shape[1] for y in ys]
    return _padded(ys, ys[0]), _padded(strides, 0), _padded(widths, 0), aligned


def prepare(
    ys: Sequence[Tensor],
    row_slots: Tensor,
    row_starts: Tensor | None,
    planes: Tensor,
    data: Tensor,
    meta: Tensor,
    rows: int,
    site: int,
    floats: Tensor,
    slot_elems: int,
    max_rank: int,
    shrinking: ShrinkTiling,
    tiling: ExpandTiling,
    delta: bool = False,
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """The launch of one expand: kernel, grid, arguments in order, compile options.

    ys: for each slice a view `[n, width]` with unit stride along its columns, written in place (`delta`: of the fp32
    buffer); planes as `shrinking` left them. The first eight arguments are those that change from call to call or from
    layer to layer. Where there are no row_starts, a pointer that is not read takes their place.
    """
    n = ys[0].shape[0]
    per_row = n // rows
    blocks = -(-per_row // tiling.block_m)
    targets, strides, widths, aligned = columns_of(ys)
    args = (
        *targets,
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
        shrinking.table_tiles,
        shrinking.capacity,
        *strides,
        *widths,
        max_rank,
        len(ys),
        64 // data.dtype.itemsize,
        shrinking.split,
        triton.next_power_of_2(shrinking.split),
        tiling.block_m,
        tiling.block_n,
        tiling.block_r,
        tiling.steps,
        tiling.stages,
        tiling.dot,
        row_starts is not None,
        aligned,
        delta,
        shrinking.pdl,
    )
    columns = -(-max(widths) // (tiling.block_n * tiling.steps))
    grid = {
        "rows": (n, columns, len(ys)),
        "segments": (shrinking.tiles, columns, len(ys)),
        "tiles": (rows * blocks * columns, 1, len(ys)),
    }[shrinking.kind]
    options = {"num_warps": tiling.warps} | ({"launch_pdl": True} if shrinking.pdl else {})
    return _KERNELS[shrinking.kind], grid, args, options
