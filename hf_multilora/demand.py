"""What calls have asked of the slots, and the number of slots that it speaks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

ENOUGH = 100
"""Lookups (one for each distinct adapter of a call) before slots that were never needed are pointed out."""


@dataclass
class Demand:
    """Counted since the model was enabled.

    Attributes:
        at_once: the most slots that were wanted at the same time: distinct adapters and mixes of a batch, or of calls
            (in continuous batching: requests for which there was room) that ran or waited together, pinned ones added.
        split: batches that ran in waves.
        waves: in how many, all together.
    """

    at_once: int = 0
    split: int = 0
    waves: int = 0


class Used(Protocol):
    """What is read of an adapter's status."""

    hits: int
    misses: int


class Counters(Protocol):
    """What is read of the slots' counters."""

    hits: int
    misses: int
    evictions: int


def suggest(
    max_loras: int, slot_bytes: int, demand: Demand, adapters: Sequence[Used], slots: Counters
) -> tuple[int, str] | None:
    """The number of slots that would serve such traffic better, and why; None where `max_loras` is right.

    More, where batches were split or refused, or where more lookups had to bring an adapter in again than found it in
    its slot (then twice as many, at most one for each adapter that was used: each doubling can be judged by the next
    status). Fewer, where after `ENOUGH` lookups some slot was never needed.

    Args:
        slot_bytes: of one slot.

    Example:
        >>> class Slots: hits, misses, evictions = 8, 24, 0
        >>> suggest(4, 1000, Demand(at_once=12, split=1, waves=3), [], Slots)
        (12, 'max_loras=12: as many adapters were wanted at once; 1 batch ran in 3 waves')
    """
    if demand.at_once > max_loras:
        why = f"max_loras={demand.at_once}: as many adapters were wanted at once"
        if demand.split:
            why += f"; {demand.split} batch{'es' if demand.split > 1 else ''} ran in {demand.waves} waves"
        return demand.at_once, why
    used = sum(adapter.hits + adapter.misses > 0 for adapter in adapters)
    again = sum(max(0, adapter.misses - 1) for adapter in adapters)
    if slots.evictions and again > slots.hits and used > max_loras:
        more = min(used, 2 * max_loras)
        return more, (
            f"max_loras={more}: adapters came back into a slot {again} times after they had lost theirs, and were "
            f"found in it {slots.hits} times"
        )
    fewer = max(1, used, demand.at_once)
    if not slots.evictions and slots.hits + slots.misses >= ENOUGH and fewer < max_loras:
        saved = (max_loras - fewer) * slot_bytes
        return fewer, (
            f"max_loras={fewer} would do so far: {max_loras - fewer} of {max_loras} slots were never needed "
            f"({saved / 1e6:.4g} MB)"
        )
    return None
