"""Embedding: `y[t] = gain · y[t] + shift + A[slot(t), ids[t]] · Bt[slot(t)]`. This file gathers; expand does the rest.

planes[0, t, 0, j] = A[slot(t), ids[t], j]      A [V, rank]: a token's factor is one run of memory
planes: fp32 [1, n, 1, max_rank]; written for j < rank of rows with an adapter only, from their start on
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .lookup import table_entry


@triton.jit(
    do_not_specialize=["site", "n", "per_row", "meta_stride"],
    do_not_specialize_on_alignment=["ids_ptr", "row_slots_ptr", "row_starts_ptr", "meta_ptr", "h_ptr"],
)
def gather_factors(
    ids_ptr,
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
    MAX_RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STARTS: tl.constexpr,
):
    """BLOCK_T tokens, whichever rows they belong to. Grid [ceil(n / BLOCK_T)]."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = t < n
    row = t // per_row
    slot = tl.load(row_slots_ptr + row, mask=inside, other=-1)
    used = slot >= 0
    if STARTS:
        used &= t - row * per_row >= tl.load(row_starts_ptr + row, mask=inside, other=0)
    entry = table_entry(meta_ptr, meta_stride, tl.where(used, slot, 0), site)
    rank = tl.load(entry + 2, mask=used, other=0)
    a_off = tl.load(entry, mask=used, other=0)
    token = tl.load(ids_ptr + t, mask=used, other=0).to(tl.int64)
    start = slot.to(tl.int64) * slot_elems + a_off + token * rank
    h_rows = h_ptr + t.to(tl.int64) * MAX_RANK
    r = tl.arange(0, BLOCK_R)
    mask = r[None, :] < rank[:, None]
    a = tl.load(data_ptr + start[:, None] + r[None, :], mask=mask, other=0.0)
    tl.store(h_rows[:, None] + r[None, :], a.to(tl.float32), mask=mask)


def prepare(
    ids: Tensor,
    row_slots: Tensor,
    row_starts: Tensor | None,
    planes: Tensor,
    data: Tensor,
    meta: Tensor,
    rows: int,
    site: int,
    slot_elems: int,
    max_rank: int,
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, int]]:
    """The launch of one gather: kernel, grid, arguments in order, compile options; ids: contiguous integers `[n]`."""
    n = ids.numel()
    block_r = triton.next_power_of_2(max_rank)
    block_t = max(1, 1024 // block_r)
    args = (
        ids,
        row_slots,
        row_slots if row_starts is None else row_starts,
        planes,
        site,
        data,
        meta,
        slot_elems,
        meta.stride(0),
        n,
        n // rows,
        max_rank,
        block_t,
        block_r,
        row_starts is not None,
    )
    return gather_factors, (-(-n // block_t), 1, 1), args, {"num_warps": 4}
