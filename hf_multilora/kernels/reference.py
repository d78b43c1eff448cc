"""The definition in plain torch, in fp32; also the path of every device without Triton (CPU, MPS, XPU).

    y[t] = gain[slot(t)] * y[t] + shift[slot(t)] + (x[t] · A[slot(t)]ᵀ) · Bt[slot(t)]

for tokens t with slot(t) >= 0, from their row's start on, where the slot has any of the three at this site. An absent
gain or shift changes no bit of the row (y * 1 and y + -0.0 are y).

The factors of all rows are gathered into one batch of `rows` matrices, padded with zero rows to a common rank, and
batched products do the rest, over RANK_STEP of the ranks at a time. The batch always holds every row, inactive ones
too: so whatever the neighbours' ranks are, a row goes through products of one shape, and what its missing ranks add is
0. Hence its result does not depend on its neighbours, to the last bit. (One product per adapter would change a row's
bits with the number of rows that share it, one over all ranks with the largest of them: on CPUs with AVX-512 it does.)

Nothing here loops over rows in Python, and what autograd has seen is not written in place, so it can follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Entries of the table for one site of a slot: offset of A, offset of Bt, rank, offset of gain, offset of shift. The
# first two count elements of the adapters' dtype from the slot's first byte, the last two fp32 elements; 0 = absent.
META = 5
RANK_STEP = 16
# Gathered factors are kept from one step to the next up to this size; larger batches gather again at each call.
CACHE_BYTES = 256 << 20


class Runs:
    """The tokens of a packed batch as rows of several tokens: a factor is then gathered once for each of these rows,
    and not for each token. How tokens are cut depends on their requests' lengths alone.

    Args:
        runs: (slot, tokens) of each run of tokens of one request that have one slot, in order.
        longest: tokens of a row at most.
    """

    KEY = "runs"  # where a cache holds one

    def __init__(self, runs: Sequence[tuple[int, int]], longest: int = 16) -> None:
        length = min(longest, max(count for _, count in runs))
        slots: list[int] = []
        index: list[int] = []
        back: list[int] = []
        at = 0
        for slot, count in runs:
            for first in range(0, count, length):
                tokens = list(range(at + first, at + min(count, first + length)))
                back += range(len(index), len(index) + len(tokens))
                index += tokens + [0] * (length - len(tokens))  # what is computed there, nobody takes
                slots.append(slot)
            at += count
        self.rows, self.length = len(slots), length
        self.slots = torch.tensor(slots, dtype=torch.int32)
        self.index, self.back = torch.tensor(index), torch.tensor(back)
        self.cache: dict[Any, Any] = {}


class _Factors(NamedTuple):
    """What one site contributes to one batch; tensors gathered at each call rather than kept are None."""

    touched: bool  # any row has a delta, a gain or a shift here
    rank: int = 0  # padded; 0: no row has a delta
    active: Tensor | None = None  # bool [rows, 1, 1]; None: every row is active
    valid: Tensor | None = None  # bool [rows, 1, rank]; None: every row fills the padded rank
    a_index: Tensor | None = None  # linear: [rows * rank] starts of A's rows; embedding: [rows] starts of A
    b_index: Tensor | None = None  # [rows * rank] starts of Bt's rows
    gain_index: Tensor | None = None  # [rows] starts of the gains, -1 where absent; None: no row has one
    shift_index: Tensor | None = None
    ranks: Tensor | None = None  # [rows] true ranks, 0 for inactive rows
    a: Tensor | None = None
    b: Tensor | None = None
    gain: Tensor | None = None  # [rows, 1, width]
    shift: Tensor | None = None


def _rows_at(data: Tensor, index: Tensor, width: int) -> Tensor:
    """Gather `[len(index), width]` contiguous runs of the flat `data`, each starting at `index`."""
    return data.as_strided((data.numel() - width + 1, width), (1, 1)).index_select(0, index)


def _locate(
    data: Tensor, meta: Tensor, row_slots: Tensor, rows: int, site: int, slot_elems: int, zero_off: int, k: int, n: int
) -> _Factors:
    slots = row_slots[:rows].long()
    safe = slots.clamp(min=0)
    entry = meta[:, META * site : META * site + META].index_select(0, safe)
    entry = torch.where((slots >= 0)[:, None], entry, 0)
    ranks, gains, shifts = entry[:, 2], entry[:, 3], entry[:, 4]
    used = ranks | gains | shifts
    low, high, unused, gain, shift = torch.stack(
        (ranks.min(), ranks.max(), (used == 0).any(), gains.any(), shifts.any())
    ).tolist()
    if not (high or gain or shift):
        return _Factors(touched=False)
    slot_floats = slot_elems * data.dtype.itemsize // 4
    found = _Factors(
        touched=True,
        active=(used != 0).view(rows, 1, 1) if unused else None,
        gain_index=torch.where(gains > 0, safe * slot_floats + gains, -1) if gain else None,
        shift_index=torch.where(shifts > 0, safe * slot_floats + shifts, -1) if shift else None,
    )
    if not high:
        return found
    rank = -(-high // RANK_STEP) * RANK_STEP
    steps = torch.arange(rank, device=data.device)
    valid = steps < ranks[:, None]
    base = safe * slot_elems
    a_start, b_start = base + entry[:, 0], base + entry[:, 1]
    return found._replace(
        rank=rank,
        valid=None if low == rank else valid.view(rows, 1, rank),
        a_index=torch.where(valid, a_start[:, None] + steps * k, zero_off).view(-1) if k else a_start,
        b_index=torch.where(valid, b_start[:, None] + steps * n, zero_off).view(-1),
        ranks=ranks,
    )


def _factors(
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
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
        vectors = (found.gain_index is not None) + (found.shift_index is not None)
        size = rows * (found.rank * (k + n) + vectors * n) * dtype.itemsize
        used = cache.get("bytes", 0)
        if found.touched and used + size <= CACHE_BYTES:
            cache["bytes"] = used + size
            found = found._replace(
                a=_gather(data, found.a_index, rows, found.rank, k, dtype) if found.rank and k else None,
                b=_gather(data, found.b_index, rows, found.rank, n, dtype) if found.rank else None,
                gain=_gather_vector(floats, found.gain_index, n, 1.0, dtype),
                shift=_gather_vector(floats, found.shift_index, n, -0.0, dtype),
            )
        cache[key] = found
    return found


def _gather(data: Tensor, index: Tensor | None, rows: int, rank: int, width: int, dtype: torch.dtype) -> Tensor:
    assert index is not None
    return _rows_at(data, index, width).to(dtype).view(rows, rank, width)


def _gather_vector(
    floats: Tensor, index: Tensor | None, width: int, absent: float, dtype: torch.dtype
) -> Tensor | None:
    """`[rows, 1, width]`, `absent` in rows whose index is -1; None where there is no index."""
    if index is None:
        return None
    found = _rows_at(floats, index.clamp(min=0), width)
    return torch.where((index >= 0)[:, None], found, absent).to(dtype)[:, None]


def _shrunk(x: Tensor, a: Tensor) -> list[Tensor]:
    """x·Aᵀ of x `[rows, T, K]` and a `[rows, rank, K]`, by steps of the rank, `[rows, T, RANK_STEP]` each."""
    return [torch.bmm(x, part.transpose(1, 2)) for part in a.split(RANK_STEP, 1)]


def _expanded(h: Sequence[Tensor], b: Tensor) -> Tensor:
    """The sum of h·Bt over steps of the rank, b `[rows, rank, width]`; nowhere -0.0.

    Steps beyond a row's rank add 0.0, which would turn a -0.0 around, and tell that a neighbour's rank is larger.
    """
    total: Tensor | None = None
    for part, factor in zip(h, b.split(RANK_STEP, 1), strict=True):
        product = torch.bmm(part, factor)
        total = product.add_(0.0) if total is None else total.add_(product)
    assert total is not None
    return total


def _apply(
    y: Tensor,
    h: Sequence[Tensor] | None,
    f: _Factors,
    data: Tensor,
    floats: Tensor,
    rows: int,
    width: int,
    live: Tensor | None,
) -> Tensor:
    """`gain * y + shift + h·Bt` on active rows' live tokens, y's own bits on the others.

    y `[rows, T, width]`; h by steps of the rank, None where no row has a delta; live bool `[rows, T, 1]`, None = all.
    """
    dtype = compute_dtype(y)
    base = y
    gain = f.gain if f.gain is not None else _gather_vector(floats, f.gain_index, width, 1.0, dtype)
    shift = f.shift if f.shift is not None else _gather_vector(floats, f.shift_index, width, -0.0, dtype)
    if gain is not None:
        base = base.to(dtype) * gain
    if shift is not None:
        base = base.to(dtype) + shift
    if h is None:
        # What the product of a rank of 0 would add: -0.0 must not depend on the neighbours either.
        out = (base + 0.0).to(y.dtype)
    else:
        if f.valid is not None:
            # A padded column of h is 0 · x, which is NaN where x is infinite; it must not reach the row through 0 of
            # Bt.
            steps = f.valid.split(RANK_STEP, -1)
            h = [torch.where(valid, part, 0) for valid, part in zip(steps, h, strict=True)]
        b = f.b if f.b is not None else _gather(data, f.b_index, rows, f.rank, width, dtype)
        out = _expanded(h, b).add_(base).to(y.dtype)
    active = f.active
    if live is not None:
        active = live if active is None else live & active
    return out if active is None else torch.where(active, out, y)


def _live(row_starts: Tensor | None, rows: int, tokens: int) -> Tensor | None:
    if row_starts is None:
        return None
    return (torch.arange(tokens, device=row_starts.device) >= row_starts[:rows, None])[..., None]


def compute_dtype(y: Tensor) -> torch.dtype:
    """fp32, or fp64 under a float64 model."""
    return torch.promote_types(y.dtype, torch.float32)


def lora_linear(
    y: Tensor,
    x: Tensor,
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
    row_slots: Tensor,
    rows: int,
    site: int,
    widths: Sequence[int],
    slot_elems: int,
    zero_off: int,
    cache: dict[Any, Any] | None = None,
    row_starts: Tensor | None = None,
) -> Tensor:
    """Apply every row's own adapter to a linear layer's output: `gain * y + shift + x·Aᵀ·Bt`.

    Args:
        y: `[n, N]`, what the base layer returned; `N = sum(widths)`. Token t belongs to row `t // (n // rows)`.
        x: `[n, K]`, what it was given.
        data: flat view of the arena in the adapters' dtype; A is `[rank, K]`, Bt `[rank, width]` with the scaling.
        meta: int64 `[max_loras, >= META * n_sites]`; `meta[slot, META * site:]` = offset of A, offset of Bt, rank,
            offset of gain, offset of shift; offsets in elements of `data`, of the last two of `floats`, from the
            slot's start; gain and shift are `[width]`, 0 = absent.
        floats: flat fp32 view of the whole arena.
        row_slots: int32 `[>= rows]`, the slot of each row; -1 = base.
        site: number of the first slice; slice i is `site + i` and adds to the columns after `sum(widths[:i])`.
        slot_elems: elements from one slot to the next.
        zero_off: first element of a run of zeros in `data`, at least as long as any row of a factor.
        cache: a dict that the caller owns and drops as soon as `row_slots` or a slot's contents change; it may hold
            `Runs` of the same tokens (without row_starts).
        row_starts: int32 `[>= rows]`; a row's tokens before its start (counted within the row) are the base's. None:
            all tokens of all rows are active.

    Returns:
        A new `[n, N]` in y's dtype; rows without an adapter, or whose adapter did not train the site, and tokens
        before their row's start are y's bits.
    """
    n, k = x.shape
    if n == 0 or rows == 0:
        return y
    runs: Runs | None = cache.get(Runs.KEY) if cache is not None else None
    if runs is not None:
        common = (data, meta, floats, runs.slots, runs.rows, site, widths, slot_elems, zero_off, runs.cache)
        return lora_linear(y[runs.index], x[runs.index], *common)[runs.back]
    dtype = compute_dtype(y)
    y3, x3 = y.view(rows, n // rows, -1), x.view(rows, n // rows, k)
    live = _live(row_starts, rows, n // rows)
    xc: Tensor | None = None
    pieces, start, touched = [], 0, False
    for i, width in enumerate(widths):
        piece = y3[..., start : start + width]
        start += width
        f = _factors(data, meta, floats, row_slots, rows, site + i, slot_elems, zero_off, k, width, dtype, cache)
        if f.touched:
            h = None
            if f.rank:
                xc = x3.to(dtype) if xc is None else xc
                a = f.a if f.a is not None else _gather(data, f.a_index, rows, f.rank, k, dtype)
                h = _shrunk(xc, a)
            piece = _apply(piece, h, f, data, floats, rows, width, live)
            touched = True
        pieces.append(piece)
    if not touched:
        return y
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)).view(n, -1)


def lora_embedding(
    y: Tensor,
    ids: Tensor,
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
    row_slots: Tensor,
    rows: int,
    site: int,
    width: int,
    slot_elems: int,
    zero_off: int,
    cache: dict[Any, Any] | None = None,
    row_starts: Tensor | None = None,
) -> Tensor:
    """Apply every row's own adapter to an embedding's output: `gain * y[t] + shift + A[ids[t]] · Bt`.

    Args:
        y: `[n, width]`; ids: integers `[n]`. A is stored `[V, rank]`, so that a token's factor is one run of memory.
        Others as for `lora_linear`.

    Returns:
        A new `[n, width]` in y's dtype; rows without an adapter here, and tokens before their start, are y's bits.
    """
    n = ids.numel()
    if n == 0 or rows == 0:
        return y
    dtype = compute_dtype(y)
    f = _factors(data, meta, floats, row_slots, rows, site, slot_elems, zero_off, 0, width, dtype, cache)
    if not f.touched:
        return y
    h = None
    if f.rank:
        assert f.a_index is not None and f.ranks is not None
        steps = torch.arange(f.rank, device=data.device)
        start = f.a_index[:, None] + ids.view(rows, -1).long() * f.ranks[:, None]
        index = start[..., None] + steps
        if f.valid is not None:
            index = torch.where(f.valid, index, zero_off)
        whole = data.index_select(0, index.view(-1)).to(dtype).view(rows, n // rows, f.rank)
        h = [part.contiguous() for part in whole.split(RANK_STEP, -1)]
    live = _live(row_starts, rows, n // rows)
    return _apply(y.view(rows, n // rows, width), h, f, data, floats, rows, width, live).view(n, width)
