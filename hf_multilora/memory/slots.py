"""The slot table: what is in each slot, who uses it, and which slots a call may have.

Nothing here locks: the store calls it with its own lock held.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..report import CacheCounters
from .extras import Extras

if TYPE_CHECKING:
    import torch

    from .lease import Grant


@dataclass(eq=False)
class Slot:
    """One slot.

    Attributes:
        tag: identity of its content ((uid, generation), or those of a mix with the weights); None: free.
        label: what status() calls it.
        names: the adapters in it, several for a mix.
        sites: the sites that they touch.
        extras: what the block has beside factors, gains and shifts.
        users: calls in flight that read it. A set of tokens rather than a number, so that leaving twice is harmless.
        stale: reloaded or unloaded while in use: nobody new gets it, and the last user frees it.
        ready: the copy that filled it (CUDA; where there are several devices, one for each).
        last_use: the last forward that read it, by stream (CUDA).
    """

    index: int
    tag: Hashable | None = None
    label: str | None = None
    names: tuple[str, ...] = ()
    sites: frozenset[int] = frozenset()
    extras: Extras = Extras()
    users: set[Grant] = field(default_factory=set)
    pinned: bool = False
    stale: bool = False
    used: int = 0
    ready: Any = None
    last_use: dict[Hashable, torch.cuda.Event] = field(default_factory=dict)

    def free(self) -> None:
        """Forget the content. `last_use` stays: the next copy still has to wait for it."""
        self.tag = None
        self.label, self.names, self.sites = None, (), frozenset()
        self.extras = Extras()
        self.pinned = self.stale = False
        self.used = 0


class SlotTable:
    """All slots of one arena."""

    def __init__(self, max_loras: int) -> None:
        self.slots = [Slot(i) for i in range(max_loras)]
        self.counters = CacheCounters()

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def find(self, tag: Hashable) -> Slot | None:
        """The slot that holds this content, for a new call."""
        for slot in self.slots:
            if slot.tag == tag and not slot.stale:
                return slot
        return None

    def plan(self, tags: Iterable[Hashable]) -> dict[Hashable, Slot] | None:
        """A slot for each tag: its own where it is resident, then free ones, then the least recently used.

        Returns None where too few can be had now. Slots in use and pinned ones are not taken.
        """
        plan: dict[Hashable, Slot] = {}
        missing: list[Hashable] = []
        for tag in dict.fromkeys(tags):
            slot = self.find(tag)
            if slot is None:
                missing.append(tag)
            else:
                plan[tag] = slot
        kept = {slot.index for slot in plan.values()}
        can_go = [s for s in self.slots if s.index not in kept and not s.users and not s.pinned]
        can_go.sort(key=lambda s: (s.tag is not None, s.used, s.index))
        if len(can_go) < len(missing):
            return None
        plan.update(zip(missing, can_go, strict=False))
        return plan

    def reachable(self, tags: Collection[Hashable], stuck: Collection[int]) -> int:
        """How many slots a call for `tags` can ever have, if the threads in `stuck` never let go of theirs."""
        return sum(
            (slot.tag in tags and not slot.stale)
            or (not slot.pinned and not any(user.thread in stuck for user in slot.users))
            for slot in self.slots
        )

    def of(self, name: str) -> list[Slot]:
        """Every slot that `name` is in: its own, older ones that are still in use, and mixes."""
        return [slot for slot in self.slots if name in slot.names]

    def users_of(self, name: str) -> set[Grant]:
        return {user for slot in self.of(name) for user in slot.users}

    def held_by(self, thread: int) -> bool:
        """Whether any call of this thread is in flight."""
        return any(user.thread == thread for slot in self.slots for user in slot.users)

    def retire(self, name: str) -> None:
        """Give no slot of `name` to new calls: free those that nobody uses, and the others when they are left."""
        for slot in self.of(name):
            slot.pinned = False
            if slot.users:
                slot.stale = True
            else:
                slot.free()

    def leave(self, user: Grant) -> None:
        """Take a call out of all its slots."""
        for slot in self.slots:
            slot.users.discard(user)
            if slot.stale and not slot.users:
                slot.free()
