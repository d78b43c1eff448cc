"""What the slots will take, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .arena import arena_bytes
from .layout import FACTOR_ALIGN, SLOT_ALIGN, Layout, align

_LARGEST = 8


def estimate_memory(
    layout: Layout,
    max_loras: int,
    max_lora_rank: int,
    dtype: torch.dtype,
    ranks: int | Mapping[str, int] | None = None,
    *,
    slot_bytes: int | None = None,
    saved: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Bytes of the arena, of a slot, and of one adapter.

    Args:
        layout: the model's sites.
        max_loras, max_lora_rank, slot_bytes: as in MultiLoraConfig.
        dtype: of the slots.
        ranks: of an adapter: one rank for every site, or module path -> rank; None: max_lora_rank everywhere.
        saved: what an adapter saves whole (a head, an embedding, a norm): parameter name -> bytes in the base's dtype.

    Returns:
        "arena": all of what is allocated, on all devices together; "slot": one slot; "header": its table (one on each
        device); "tail": the zeros at the end of the arena; "adapter": one adapter's block, in host memory and as
        copied into a slot: plain factors (those shared between sites count each time) and what is in `saved`; where it
        is more than "slot", slot_bytes has to be raised to it; "largest": module path -> bytes of its factors, gain
        and shift in a slot at max_lora_rank, and what is in `saved`, the largest ones first.
    """
    itemsize = dtype.itemsize
    slots = [
        align(slot_bytes or layout.default_slot_bytes(max_lora_rank, dtype, group), SLOT_ALIGN)
        for group in range(layout.n_groups)
    ]
    slot, arena = sum(slots), sum(arena_bytes(layout, max_loras, part, dtype) for part in slots)
    by_path: dict[str, int] = {}
    for site in layout.sites:
        nbytes = site.nbytes(max_lora_rank, itemsize) + 2 * site.vector_bytes
        by_path[site.path] = by_path.get(site.path, 0) + nbytes
    whole = {name: align(nbytes, FACTOR_ALIGN) for name, nbytes in (saved or {}).items()}
    if isinstance(ranks, Mapping):
        by_site = {site.index: ranks[site.path] for site in layout.sites if ranks.get(site.path)}
    else:
        by_site = dict.fromkeys(range(layout.n_sites), max_lora_rank if ranks is None else ranks)
    return {
        "arena": arena,
        "slot": slot,
        "header": layout.header_bytes * layout.n_groups,
        "tail": arena - max_loras * slot,
        "adapter": layout.packed_bytes(by_site, dtype) + sum(whole.values()),
        "largest": dict(sorted((by_path | whole).items(), key=lambda item: -item[1])[:_LARGEST]),
    }
