"""The two halves of `reference.lora_linear` in plain torch, for layers with a collective between them.

    h[t, i] = x[t] · A_i[slot(t)]ᵀ                                              shrink
    y[t] = gain[slot(t)] * y[t] + shift[slot(t)] + h[t, i] · Bt_i[slot(t)]      expand

h has as many columns as a slot may have ranks, whoever is in the batch: all ranks of a model exchange tensors of one
shape, and a row's sums over them do not depend on its neighbours. Columns beyond a row's rank are never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .reference import RANK_STEP, _apply, _factors, _gather, _live, _shrunk, compute_dtype


def shrink(
    x: Tensor,
    dtype: torch.dtype,
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
    row_slots: Tensor,
    rows: int,
    site: int,
    slices: int,
    max_rank: int,
    slot_elems: int,
    zero_off: int,
    cache: dict[Any, Any] | None = None,
) -> Tensor:
    """x·Aᵀ of every slice.

    Args:
        x: `[n, K]`.
        dtype: of the result.
        slices, max_rank: sites from `site` on, and columns for each.
        Others as for `reference.lora_linear`.

    Returns:
        `[n, slices, max_rank]`; 0 or NaN where a row has no such rank.
    """
    n, k = x.shape
    x3, found = x.view(rows, n // rows, k).to(dtype), []
    for i in range(slices):
        f = _factors(data, meta, floats, row_slots, rows, site + i, slot_elems, zero_off, k, 0, dtype, cache)
        if not f.rank:
            found.append(x3.new_zeros(n, max_rank))
            continue
        a = f.a if f.a is not None else _gather(data, f.a_index, rows, f.rank, k, dtype)
        found.append(_wide(torch.cat(_shrunk(x3, a), -1).view(n, -1), max_rank))
    return torch.stack(found, 1)


def expand(
    y: Tensor,
    h: Tensor | None,
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
    """Add `h` `[n, slices, columns]` times Bt, gains and shifts to `y` `[n, N]`; None: gains and shifts alone.

    Arguments and result as for `reference.lora_linear`.
    """
    n = y.shape[0]
    dtype, tokens = compute_dtype(y), n // rows
    live, pieces = _live(row_starts, rows, tokens), []
    for i, piece in enumerate(y.view(rows, tokens, -1).split(list(widths), -1)):
        width = piece.shape[-1]
        f = _factors(data, meta, floats, row_slots, rows, site + i, slot_elems, zero_off, 0, width, dtype, cache)
        if f.touched:
            steps = None
            if h is not None and f.rank:
                columns = _wide(h[:, i], f.rank).view(rows, tokens, f.rank)
                steps = [part.contiguous() for part in columns.split(RANK_STEP, -1)]
            piece = _apply(piece, steps, f, data, floats, rows, width, live)
        pieces.append(piece)
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)).reshape(n, -1)


def _wide(h: Tensor, columns: int) -> Tensor:
    """The first columns, with zeros where there are not as many."""
    return (h[:, :columns] if h.shape[1] >= columns else F.pad(h, (0, columns - h.shape[1]))).contiguous()
