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

from collections.abc import Sequence

import torch
from torch import Tensor

from .reference import META, RANK_STEP, _rows_at, compute_dtype
from .tuning import TILE_TOKENS

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
    projections: Sequence[tuple[int, int, int, int]],
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
    if tokens.numel() == 0 or rows == 0:
        return y
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
        return y
    slots, experts = slots[members[:, 0]], experts[members[:, 0]]
    out = y
    for site, first, step, width in projections:
        entry = meta[:, META * site : META * site + META].index_select(0, slots)
        a_start = slots * slot_elems + entry[:, 0] + experts * entry[:, 3]
        b_start = slots * slot_elems + entry[:, 1] + experts * entry[:, 4]
        columns = slice(first, first + step * (width - 1) + 1, step)
        where = (members, used, entry[:, 2], a_start, b_start)
        changed, values = _products(y[:, columns], x, x_rows, data, *where, zero_off)
        if len(changed):
            out = y.clone() if out is y else out
            out[:, columns].index_copy_(0, changed, values)
    return out


def _products(
    y: Tensor,
    x: Tensor,
    x_rows: Tensor | None,
    data: Tensor,
    members: Tensor,
    used: Tensor,
    ranks: Tensor,
    a_start: Tensor,
    b_start: Tensor,
    zero_off: int,
) -> tuple[Tensor, Tensor]:
    """(pairs that have factors at this projection, their new columns) of y `[S, width]`."""
    dtype, (k, width) = compute_dtype(y), (x.shape[1], y.shape[1])
    size = min(MAX_CHUNK, max(MIN_CHUNK, CHUNK_BYTES // (RANK_STEP * (k + width) * dtype.itemsize)), y.shape[0])
    steps = torch.arange(RANK_STEP, device=data.device)
    # Largest ranks first: then the entries of a round need about the same number of steps.
    order = ranks.argsort(descending=True, stable=True)[: int(ranks.count_nonzero())]
    changed, values = [members.new_empty(0)], [y.new_empty(0, width)]
    for start in range(0, len(order), size):
        chunk = order[start : start + size]
        real = len(chunk)
        chunk = torch.cat((chunk, chunk[:1].expand(size - real)))
        pairs, rank = members[chunk], ranks[chunk, None]
        xs = x[pairs if x_rows is None else x_rows[pairs]].to(dtype)
        total: Tensor | None = None
        for r0 in range(0, int(rank[0]), RANK_STEP):
            r = r0 + steps
            valid = r < rank
            a_index = torch.where(valid, a_start[chunk, None] + r * k, zero_off)
            b_index = torch.where(valid, b_start[chunk, None] + r * width, zero_off)
            a = _rows_at(data, a_index.view(-1), k).to(dtype).view(size, RANK_STEP, k)
            b = _rows_at(data, b_index.view(-1), width).to(dtype).view(size, RANK_STEP, width)
            # A padded column is 0 · x, which is NaN where x is infinite; it must not reach the pair through 0 of Bt.
            h = torch.where(valid[:, None], torch.bmm(xs, a.transpose(1, 2)), 0)
            product = torch.bmm(h, b)
            # -0.0 would become 0.0 where another entry of the round has a further step.
            total = product.add_(0.0) if total is None else total.add_(product)
        assert total is not None
        taken = used[chunk[:real]]
        mine = pairs[:real][taken]
        changed.append(mine)
        values.append((y[mine].to(dtype) + total[:real][taken]).to(y.dtype))
    return torch.cat(changed), torch.cat(values)
