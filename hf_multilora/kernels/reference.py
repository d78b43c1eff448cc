"""The definition in plain torch, in fp32; also the path of every device without Triton (CPU, MPS, XPU).

    y[t] += (x[t] · A[slot(t)]ᵀ) · Bt[slot(t)]        for tokens t with slot(t) >= 0 and rank(slot(t)) > 0

The factors of all rows are gathered into one batch of `rows` matrices, padded with zero rows to a common rank, and two
batched products do the rest. The batch always holds every row, inactive ones too, and the padded rank is a multiple of
16: then a row's result does not depend on its neighbours, to the last bit, on the CPU kernels tested. (One product per
adapter would change a row's bits with the number of rows that share it.)

Nothing here loops over rows in Python, and nothing is written in place, so autograd can follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

RANK_STEP = 16
# Gathered factors are kept from one step to the next up to this size; larger batches gather again at each call.
CACHE_BYTES = 256 << 20


class _Factors(NamedTuple):
    """What one site contributes to one batch; `a` and `b` are None where they are gathered at each call."""

    rank: int  # padded; 0: no row trained this site
    active: Tensor | None  # bool [rows, 1, 1]; None: every row is active
    valid: Tensor | None  # bool [rows, 1, rank]; None: every row fills the padded rank
    a_index: Tensor | None  # linear: [rows * rank] starts of A's rows; embedding: [rows] starts of A
    b_index: Tensor | None  # [rows * rank] starts of Bt's rows
    ranks: Tensor | None  # [rows] true ranks, 0 for inactive rows
    a: Tensor | None
    b: Tensor | None


_NOTHING = _Factors(0, None, None, None, None, None, None, None)


def _rows_at(data: Tensor, index: Tensor, width: int) -> Tensor:
    """Gather `[len(index), width]` contiguous runs of the flat `data`, each starting at `index`."""
    return data.as_strided((data.numel() - width + 1, width), (1, 1)).index_select(0, index)


def _locate(
    data: Tensor, meta: Tensor, row_slots: Tensor, rows: int, site: int, slot_elems: int, zero_off: int, k: int, n: int
) -> _Factors:
    slots = row_slots[:rows].long()
    safe = slots.clamp(min=0)
    entry = meta[:, 3 * site : 3 * site + 3].index_select(0, safe)
    ranks = torch.where(slots >= 0, entry[:, 2], 0)
    low, high = (int(v) for v in torch.aminmax(ranks))
    if high == 0:
        return _NOTHING
    rank = -(-high // RANK_STEP) * RANK_STEP
    steps = torch.arange(rank, device=data.device)
    valid = steps < ranks[:, None]
    base = safe * slot_elems
    a_start, b_start = base + entry[:, 0], base + entry[:, 1]
    a_index = torch.where(valid, a_start[:, None] + steps * k, zero_off).view(-1) if k else a_start
    b_index = torch.where(valid, b_start[:, None] + steps * n, zero_off).view(-1)
    return _Factors(
        rank,
        active=None if low > 0 else (ranks > 0).view(rows, 1, 1),
        valid=None if low == rank else valid.view(rows, 1, rank),
        a_index=a_index,
        b_index=b_index,
        ranks=ranks,
        a=None,
        b=None,
    )


def _factors(
    data: Tensor,
    meta: Tensor,
    row_slots: Tensor,
    rows: int,
    site: int,
    slot_elems: int,
    zero_off: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    cache: dict[Any, Any] | None,
) -> _Factors:
    """Where the rows' factors lie and, while the cache has room, the factors; `k` is 0 for an embedding."""
    key = (site, rows, dtype)
    found = cache.get(key) if cache is not None else None
    if found is not None:
        return found
    found = _locate(data, meta, row_slots, rows, site, slot_elems, zero_off, k, n)
    if cache is not None:
        size = rows * found.rank * (k + n) * dtype.itemsize
        used = cache.get("bytes", 0)
        if found.rank and used + size <= CACHE_BYTES:
            cache["bytes"] = used + size
            found = found._replace(
                a=_gather(data, found.a_index, rows, found.rank, k, dtype) if k else None,
                b=_gather(data, found.b_index, rows, found.rank, n, dtype),
            )
        cache[key] = found
    return found


def _gather(data: Tensor, index: Tensor | None, rows: int, rank: int, width: int, dtype: torch.dtype) -> Tensor:
    assert index is not None
    return _rows_at(data, index, width).to(dtype).view(rows, rank, width)


def _add(y: Tensor, h: Tensor, f: _Factors, data: Tensor, rows: int, width: int) -> Tensor:
    """`y + h·Bt` on active rows and y's own bits on the others; y [rows, T, width], h [rows, T, rank]."""
    if f.valid is not None:
        # A padded column of h is 0 · x, which is NaN where x is infinite; it must not reach the row through 0 of Bt.
        h = torch.where(f.valid, h, 0)
    b = f.b if f.b is not None else _gather(data, f.b_index, rows, f.rank, width, h.dtype)
    out = torch.bmm(h, b).add_(y).to(y.dtype)
    return out if f.active is None else torch.where(f.active, out, y)


def compute_dtype(y: Tensor) -> torch.dtype:
    """fp32, or fp64 under a float64 model."""
    return torch.promote_types(y.dtype, torch.float32)


def lora_linear(
    y: Tensor,
    x: Tensor,
    data: Tensor,
    meta: Tensor,
    row_slots: Tensor,
    rows: int,
    site: int,
    widths: Sequence[int],
    slot_elems: int,
    zero_off: int,
    cache: dict[Any, Any] | None = None,
) -> Tensor:
    """Add every row's own LoRA delta to a linear layer's output.

    Args:
        y: `[n, N]`, what the base layer returned; `N = sum(widths)`. Token t belongs to row `t // (n // rows)`.
        x: `[n, K]`, what it was given.
        data: flat view of the arena in the adapters' dtype; A is `[rank, K]`, Bt `[rank, width]` with the scaling.
        meta: int64 `[max_loras, >= 3 * n_sites]`; `meta[slot, 3 * site:]` = offset of A, offset of Bt, rank; offsets
            in elements from the slot's start.
        row_slots: int32 `[>= rows]`, the slot of each row; -1 = base.
        site: number of the first slice; slice i is `site + i` and adds to the columns after `sum(widths[:i])`.
        slot_elems: elements from one slot to the next.
        zero_off: first element of a run of zeros in `data`, at least as long as any row of a factor.
        cache: a dict that the caller owns and drops as soon as `row_slots` or a slot's contents change.

    Returns:
        A new `[n, N]` in y's dtype; rows without an adapter, or whose adapter did not train the site, are y's bits.
    """
    n, k = x.shape
    if n == 0 or rows == 0:
        return y
    dtype = compute_dtype(y)
    y3, x3 = y.view(rows, n // rows, -1), x.view(rows, n // rows, k)
    xc: Tensor | None = None
    pieces, start = [], 0
    for i, width in enumerate(widths):
        piece = y3[..., start : start + width]
        start += width
        f = _factors(data, meta, row_slots, rows, site + i, slot_elems, zero_off, k, width, dtype, cache)
        if f.rank:
            xc = x3.to(dtype) if xc is None else xc
            a = f.a if f.a is not None else _gather(data, f.a_index, rows, f.rank, k, dtype)
            piece = _add(piece, torch.bmm(xc, a.transpose(1, 2)), f, data, rows, width)
        pieces.append(piece)
    if xc is None:
        return y
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)).view(n, -1)


def lora_embedding(
    y: Tensor,
    ids: Tensor,
    data: Tensor,
    meta: Tensor,
    row_slots: Tensor,
    rows: int,
    site: int,
    width: int,
    slot_elems: int,
    zero_off: int,
    cache: dict[Any, Any] | None = None,
) -> Tensor:
    """Add every row's own LoRA delta to an embedding's output: `y[t] += A[slot(t)][ids[t]] · Bt[slot(t)]`.

    Args:
        y: `[n, width]`; ids: integers `[n]`. A is stored `[V, rank]`, so that a token's factor is one run of memory.
        Others as for `lora_linear`.

    Returns:
        A new `[n, width]` in y's dtype; rows without an adapter here are y's bits.
    """
    n = ids.numel()
    if n == 0 or rows == 0:
        return y
    dtype = compute_dtype(y)
    f = _factors(data, meta, row_slots, rows, site, slot_elems, zero_off, 0, width, dtype, cache)
    if not f.rank:
        return y
    assert f.a_index is not None and f.ranks is not None
    steps = torch.arange(f.rank, device=data.device)
    start = f.a_index[:, None] + ids.view(rows, -1).long() * f.ranks[:, None]
    index = start[..., None] + steps
    if f.valid is not None:
        index = torch.where(f.valid, index, zero_off)
    h = data.index_select(0, index.view(-1)).to(dtype).view(rows, n // rows, f.rank)
    return _add(y.view(rows, n // rows, width), h, f, data, rows, width).view(n, width)
