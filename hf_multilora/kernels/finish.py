"""Finish: `y[t] = gain · y[t] + shift + d[t]`, with the deltas d that expand made beside the base layer.

Rows without an adapter, and slices that have neither delta nor gain nor shift, are not written. The result has the
bits of the expand that writes in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .expand import columns_of
from .lookup import META, gain_and_shift, pick, pick_pointer, table_entry

_COLUMNS = 1024


@triton.jit(
    do_not_specialize=["site", "meta_stride"],
    do_not_specialize_on_alignment=["row_slots_ptr", "meta_ptr", "d_ptr"],
)
def finish_rows(
    y0_ptr,
    y1_ptr,
    y2_ptr,
    y3_ptr,
    row_slots_ptr,
    d_ptr,
    site,
    meta_ptr,
    floats_ptr,
    slot_elems,
    meta_stride,
    per_row,
    d_stride,
    s0,
    s1,
    s2,
    s3,
    w0,
    w1,
    w2,
    w3,
    N_SLICES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One token, BLOCK_N columns of one slice. Grid [n, blocks of the widest slice, slices]."""
    t = tl.program_id(0)
    i = tl.program_id(2)
    width = pick(i, w0, w1, w2, w3, N_SLICES)
    c0 = tl.program_id(1) * BLOCK_N
    if c0 >= width:
        return
    slot = tl.load(row_slots_ptr + t // per_row)
    if slot < 0:
        return
    c = c0 + tl.arange(0, BLOCK_N)
    start = pick(i, 0, w0, w0 + w1, w0 + w1 + w2, N_SLICES)
    d = tl.load(d_ptr + t.to(tl.int64) * d_stride + start + c, mask=c < width, other=0.0)
    y_ptr = pick_pointer(i, y0_ptr, y1_ptr, y2_ptr, y3_ptr, N_SLICES, ALIGNED)
    y_row = y_ptr + t.to(tl.int64) * pick(i, s0, s1, s2, s3, N_SLICES)
    y = tl.load(y_row + c, mask=c < width, other=0.0)
    entry = table_entry(meta_ptr, meta_stride, slot, site) + META * i
    rank = tl.load(entry + 2)
    gain_off = tl.load(entry + 3)
    shift_off = tl.load(entry + 4)
    if (rank | gain_off | shift_off) == 0:
        return
    gain, shift = gain_and_shift(floats_ptr, slot, slot_elems, gain_off, shift_off, c, width, ALIGN, False)
    out = gain * y.to(tl.float32) + shift + d
    tl.store(y_row + c, out.to(y_ptr.dtype.element_ty), mask=c < width)


def prepare(
    ys: Sequence[Tensor],
    row_slots: Tensor,
    delta: Tensor,
    data: Tensor,
    meta: Tensor,
    rows: int,
    site: int,
    floats: Tensor,
    slot_elems: int,
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """The launch of one finish; ys as for `expand.prepare`, delta: fp32 `[n, sum of the widths]`, contiguous."""
    n = delta.shape[0]
    targets, strides, widths, aligned = columns_of(ys)
    args = (*targets, row_slots, delta, site, meta, floats, slot_elems, meta.stride(0), n // rows)
    args += (delta.stride(0), *strides, *widths, len(ys), 64 // data.dtype.itemsize, _COLUMNS, aligned)
    grid = (n, -(-max(widths) // _COLUMNS), len(ys))
    return finish_rows, grid, args, {"num_warps": 4}
