"""The definition of LoRA on routed experts in plain torch, in fp32; also the path of every device without Triton.

    y[p, c0_i + step_i * j] += sum_r (sum_k x[xr(p), k] · A_i[s, e][r, k]) · Bt_i[s, e][r, j]

for each *pair* p of a token t = tokens[p] and an expert e = experts[p] that it was sent to, s the slot of t's row, and
each projection i of the call (gate and up in one call, down in another); xr(p) = x_rows[p], or p. Pairs whose row has
no slot, whose expert is not one of ours (sentinels of expert parallelism), or whose adapter did not train the
projection keep y's bits.

Products are made for *entries*: a pair each where rows are short (decode), tiles of up to TILE pairs of one adapter
and expert where they are long (prefill), which read the factors once for all of them. CHUNK_BYTES of factors are
gathered at a time, for a number of entries that the shape of the call alone decides; the last ones are filled up with
entries that are done twice. So every product has one shape whatever the mix is, and a pair's bits do not depend on
its neighbours. (On CPUs a product of one entry is split over threads in another way than one of many.)

Nothing that autograd has seen is written in place, so it can follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .reference import META, RANK_STEP, _rows_at, compute_dtype
from .tuning import TILE_TOKENS

Projection = tuple[int, int, int, int]  # site, first column, columns from one to the next, how many

TILE = 16
# Gathered factors of one round: they should still be in a core's cache when they are multiplied.
CHUNK_BYTES = 4 << 20
MIN_CHUNK, MAX_CHUNK = 16, 1024


def _tiles(bucket: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """(pairs `[tiles, TILE]`, which of these places are used) of the live pairs, in their order within a bucket.

    Unused places repeat the tile's first pair: no other pair's numbers get into its products.
    """
    pairs = live.nonzero().view(-1)
    keys, order = bucket[pairs].sort(stable=True)
    pairs = pairs[order]
    _, inverse, counts = torch.unique_consecutive(keys, return_inverse=True, return_counts=True)
    tiles = (counts + TILE - 1) // TILE
    place = torch.arange(len(pairs), device=pairs.device) - (counts.cumsum(0) - counts)[inverse]
    tile = (tiles.cumsum(0) - tiles)[inverse] + place // TILE
    place = place % TILE
    members = pairs[place == 0][:, None].repeat(1, TILE)
    members[tile, place] = pairs
    used = torch.zeros_like(members, dtype=torch.bool)
    used[tile, place] = True
    return members, used


class Entries(NamedTuple):
    """What products are made for: `pairs [entries, 1 or TILE]`, which of these places are `used`, and the `slots` and
    `experts [entries]`."""

    pairs: Tensor
    used: Tensor
    slots: Tensor
    experts: Tensor


def entries(
    tokens: Tensor, experts: Tensor, n_tokens: int, row_slots: Tensor, rows: int, n_experts: int
) -> Entries | None:
    """Arguments as for `lora_experts`. None: no pair has a slot and an expert."""
    if tokens.numel() == 0 or rows == 0:
        return None
    per_row = n_tokens // rows
    slots = row_slots[:rows].long()[tokens.long() // per_row]
    experts = experts.long()
    live = (slots >= 0) & (experts >= 0) & (experts < n_experts)
    if per_row >= TILE_TOKENS:
        members, used = _tiles(slots * n_experts + experts, live)
    else:
        members = live.nonzero()
        used = torch.ones_like(members, dtype=torch.bool)
    if len(members) == 0:
        return None
    return Entries(members, used, slots[members[:, 0]], experts[members[:, 0]])


def lora_experts(
    y: Tensor,
    x: Tensor,
    x_rows: Tensor | None,
    tokens: Tensor,
    experts: Tensor,
    n_tokens: int,
    data: Tensor,
    meta: Tensor,
    row_slots: Tensor,
    rows: int,
    projections: Sequence[Projection],
    slot_elems: int,
    zero_off: int,
    n_experts: int,
) -> Tensor:
    """Apply every pair's own adapter and expert to what the base model's experts returned for it.

    Args:
        y: `[S, N]`, one row for each pair.
        x: `[any, K]`, what the experts were given; pair p reads row `x_rows[p]`, or p where x_rows is None.
        tokens, experts: integers `[S]`, the pair's token (below `n_tokens`) and expert, in any order.
        n_tokens: tokens of the call; token t belongs to row `t // (n_tokens // rows)`.
        data: flat view of the arena in the adapters' dtype.
        meta: int64; `meta[slot, META * site:]` = offset of A, offset of Bt, rank, elements from one expert's A to the
            next, the same of Bt (0: all experts share it). A is `[rank, K]`, Bt `[rank, width]` with the scaling.
        row_slots: int32 `[>= rows]`, the slot of each row; -1 = base.
        projections: (site, first column, step from column to column, width) of each.
        slot_elems: elements from one slot to the next.
        zero_off: first element of a run of zeros in `data`, at least as long as any row of a factor.
        n_experts: experts of each site; other numbers in `experts` are left alone.

    Returns:
        A new `[S, N]` in y's dtype, or y itself where nothing is added.
    """
    found = entries(tokens, experts, n_tokens, row_slots, rows, n_experts)
    if found is None:
        return y
    arena = (data, meta, slot_elems, zero_off)
    h = shrink(x, x_rows, len(y), compute_dtype(y), found, [site for site, *_ in projections], None, *arena)
    return expand(y, h, found, projections, *arena)


def shrink(
    x: Tensor,
    x_rows: Tensor | None,
    pairs: int,
    dtype: torch.dtype,
    entries: Entries | None,
    sites: Sequence[int],
    columns: int | None,
    data: Tensor,
    meta: Tensor,
    slot_elems: int,
    zero_off: int,
) -> Tensor:
    """x·Aᵀ of each pair, `[pairs, sites, columns]` in `dtype`; zeros beyond a pair's rank.

    Args:
        columns: None: as many as the largest rank of a pair takes.
        Others as for `lora_experts`.
    """
    k, parts = x.shape[1], []
    for site in sites:
        h = x.new_zeros(pairs, columns or 0, dtype=dtype)
        if entries is not None:
            rank, start = _factors(entries, meta, slot_elems, site, 0)
            for chunk, real in _rounds(rank, k, pairs, dtype):
                members, used = entries.pairs[chunk], entries.used[chunk[:real]]
                xs = x[members if x_rows is None else x_rows[members]].to(dtype)
                values = []
                for valid, a in _steps(data, rank[chunk], start[chunk], k, zero_off, dtype):
                    # A padded column is 0 · x, which is NaN where x is infinite; it must not reach the pair.
                    values.append(torch.where(valid[:, None], torch.bmm(xs, a.transpose(1, 2)), 0))
                own = torch.cat(values, -1)[:real][used]
                h = _wide(h, own.shape[1]) if columns is None else h
                h[members[:real][used]] = _wide(own, h.shape[1])[:, : h.shape[1]]
        parts.append(h)
    width = max(h.shape[1] for h in parts)
    return torch.stack([_wide(h, width) for h in parts], 1)


def expand(
    y: Tensor,
    h: Tensor,
    entries: Entries | None,
    projections: Sequence[Projection],
    data: Tensor,
    meta: Tensor,
    slot_elems: int,
    zero_off: int,
) -> Tensor:
    """`y` with h·Bt added; h `[S, projections, columns]`. Others, and the result, as for `lora_experts`."""
    out = y
    for i, (site, first, step, width) in enumerate(projections if entries is not None else ()):
        assert entries is not None
        rank, start = _factors(entries, meta, slot_elems, site, 1)
        span = slice(first, first + step * (width - 1) + 1, step)
        own, changed, values = h[:, i], [], []
        for chunk, real in _rounds(rank, width, len(y), h.dtype):
            members, used = entries.pairs[chunk], entries.used[chunk[:real]]
            hs, total, r0 = own[members], None, 0
            for valid, b in _steps(data, rank[chunk], start[chunk], width, zero_off, h.dtype):
                piece = _wide(hs[..., r0 : r0 + RANK_STEP], RANK_STEP)
                product = torch.bmm(torch.where(valid[:, None], piece, 0), b)
                # -0.0 would become 0.0 where another entry of the round has a further step.
                total = product.add_(0.0) if total is None else total.add_(product)
                r0 += RANK_STEP
            assert total is not None
            mine = members[:real][used]
            changed.append(mine)
            values.append((y[:, span][mine].to(h.dtype) + total[:real][used]).to(y.dtype))
        if changed:
            out = y.clone() if out is y else out
            out[:, span].index_copy_(0, torch.cat(changed), torch.cat(values))
    return out


def _factors(entries: Entries, meta: Tensor, slot_elems: int, site: int, which: int) -> tuple[Tensor, Tensor]:
    """(rank, first element) of the A (0) or Bt (1) of each entry."""
    entry = meta[:, META * site : META * site + META].index_select(0, entries.slots)
    return entry[:, 2], entries.slots * slot_elems + entry[:, which] + entries.experts * entry[:, 3 + which]


def _rounds(ranks: Tensor, width: int, pairs: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, int]]:
    """(entries, how many of them are real) of each round; the others repeat its first. Entries of rank 0 have none.

    Largest ranks first: then the entries of a round need about the same number of steps.
    """
    size = min(MAX_CHUNK, max(MIN_CHUNK, CHUNK_BYTES // (RANK_STEP * width * dtype.itemsize)), pairs)
    order = ranks.argsort(descending=True, stable=True)[: int(ranks.count_nonzero())]
    for start in range(0, len(order), size):
        chunk = order[start : start + size]
        yield torch.cat((chunk, chunk[:1].expand(size - len(chunk)))), len(chunk)


def _steps(
    data: Tensor, ranks: Tensor, start: Tensor, width: int, zero_off: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each RANK_STEP ranks of a round: (which of them an entry has, their rows `[entries, RANK_STEP, width]`)."""
    steps = torch.arange(RANK_STEP, device=data.device)
    for r0 in range(0, int(ranks[0]), RANK_STEP):
        r = r0 + steps
        valid = r < ranks[:, None]
        index = torch.where(valid, start[:, None] + r * width, zero_off)
        yield valid, _rows_at(data, index.view(-1), width).to(dtype).view(len(ranks), RANK_STEP, width)


def _wide(h: Tensor, columns: int) -> Tensor:
    """With zeros behind, where there are fewer columns."""
    return h if h.shape[-1] >= columns else F.pad(h, (0, columns - h.shape[-1]))
