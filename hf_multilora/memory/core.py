"""StoreCore: the two tables behind one lock, and how blocks move in and out of them.

Whatever is interrupted half-way (KeyboardInterrupt) leaves a state that is right: a slot gets its tag only after its
copy was started, an entry changes in one assignment, calls are members of sets, so that leaving twice or never having
joined is harmless, and what a call has to take back in the end (its place in line, its turn to load, its hold on host
blocks) is known to the store only weakly, so that it goes with the call at the latest.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..config import MultiLoraConfig
from ..demand import Demand
from ..errors import SlotError
from .arena import Arena
from .extras import BaseDtype, SavedTensor
from .layout import Layout
from .lease import Grant, Line, Ticket
from .pack import PackedAdapter
from .registry import Entry, Registry
from .slots import Slot, SlotTable
from .spread import SpreadTransfer
from .transfer import Transfer

Devices = torch.device | str | Sequence[torch.device | str]

# Waiters look up at least this often (seconds): a lost lease is noted without the lock, so nobody is woken for it.
_POLL = 0.5


class StoreCore:
    """State of an AdapterStore. Methods with a leading underscore expect the lock to be held, unless they say not.

    Attributes:
        arenas: one for each group of the layout's sites, on the device where these compute.
        arena: the first of them, which is the only one of most models; it has what is not kept for each.
    """

    def __init__(self, layout: Layout, config: MultiLoraConfig, device: Devices, dtype: torch.dtype) -> None:
        self.layout, self.config = layout, config
        self.arenas = tuple(
            Arena(layout, config.max_loras, self._slot_bytes(dtype, group), place, dtype)
            for group, place in enumerate(devices_of(device, layout))
        )
        self.arena = self.arenas[0]
        self._transfer: Any = self._transfers()
        self._slots = SlotTable(config.max_loras)
        self._demand = Demand()
        self._wanted: dict[Grant, set[Hashable]] = {}  # tags of calls that wait for slots or hold some
        self._registry = Registry(config.max_cpu_loras)
        self._line = Line()
        self._lock = threading.Lock()  # used in `with` itself: a Condition's own `with` can be interrupted half-way
        self._cond = threading.Condition(self._lock)
        self._loading: WeakValueDictionary[str, Grant] = WeakValueDictionary()  # name -> who loads it now
        self._lost: deque[Grant] = deque()  # leases that were collected without a release
        self._unhashed: set[Entry] = set()  # dropped from host memory, content not hashed yet
        self._tick = 0
        self._base_dtype: BaseDtype | None = None

    @property
    def pin_memory(self) -> bool:
        """Whether host blocks are to be page-locked."""
        return any(arena.device.type == "cuda" for arena in self.arenas)

    @property
    def spread(self) -> bool:
        """Whether slots have parts on several devices."""
        return len(self.arenas) > 1

    def view(self, slot: int, saved: SavedTensor) -> torch.Tensor:
        """A saved tensor of the adapter in a slot, where its module computes."""
        return self.arenas[saved.group].view(slot, saved)

    def _transfers(self, before: Any = None) -> Transfer | SpreadTransfer:
        return SpreadTransfer(self.arenas, before) if self.spread else Transfer(self.arena, before)

    def _slot_bytes(self, dtype: torch.dtype, group: int = 0) -> int:
        return self.config.slot_bytes or self.layout.default_slot_bytes(self.config.max_lora_rank, dtype, group)

    # -- the lock

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; then restore what must hold and wake the waiters; outside the lock, hash what was dropped."""
        try:
            with self._lock:
                self._sweep()
                try:
                    yield
                finally:
                    self._refill_pins()
                    self._trim()
                    self._cond.notify_all()
        finally:
            self._hash_dropped()

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """Be the only thread that loads `name`. The lock is not held, neither before nor inside."""
        me = Grant()
        try:
            with self._lock:
                while (owner := self._loading.setdefault(name, me)) is not me:
                    if owner.thread == me.thread:
                        raise SlotError(f"The loader of adapter {name!r} asks for {name!r} itself.")
                    self._sleep()
            yield
        finally:
            with self._lock:
                if self._loading.get(name) is me:
                    del self._loading[name]
                    self._cond.notify_all()

    @contextmanager
    def _waiting(self, ticket: Ticket) -> Iterator[None]:
        """Be in the line."""
        try:
            self._line.join(ticket)
            self._cond.notify_all()  # others may find that they wait for this thread
            yield
        finally:
            self._line.leave(ticket)

    def _sleep(self, deadline: float | None = None) -> None:
        """Wait until something changed (or might have)."""
        left = _POLL if deadline is None else min(_POLL, max(0.0, deadline - time.monotonic()))
        self._cond.wait(left)
        self._sweep()

    # -- slots

    def _bring_in(self, slot: Slot, tag: Hashable, label: str, entries: list[Entry], packed: PackedAdapter) -> None:
        """Start the copy of a block into a slot that nobody uses, in place of what is there."""
        if slot.tag is not None:
            self._evict(slot)
        packed = self._in_dtype(packed)
        self.arena.expect(packed.ranks, packed.has_vectors)
        slot.ready = self._transfer.start(slot.index, packed, slot.last_use.values())
        slot.last_use = {}  # whoever comes next waits for the copy, which waited for these
        slot.label, slot.names = label, tuple(entry.name for entry in entries)
        slot.sites, slot.extras = frozenset(packed.ranks), packed.extras
        slot.pinned = entries[0].pinned and tag == entries[0].tag
        slot.tag = tag
        self._slots.counters.nbytes += packed.nbytes

    def _evict(self, slot: Slot) -> None:
        for name in slot.names:
            entry = self._registry.entries.get(name)
            if entry is not None:
                entry.evictions += 1
        slot.free()
        self._slots.counters.evictions += 1

    def _in_dtype(self, packed: PackedAdapter) -> PackedAdapter:
        """The block in the dtypes of slots and base, where it was made before a retarget."""
        if packed.dtype == self.arena.dtype and packed.extras.follows(self._base_dtype):
            return packed
        return packed.to(self.arena.dtype, pin=self.pin_memory, base_dtype=self._base_dtype)

    def _refill_pins(self) -> None:
        """Give pinned adapters that were reloaded their slots back, as soon as there are any."""
        for entry in self._registry:
            if entry.pinned and entry.packed is not None and self._slots.find(entry.tag) is None:
                plan = self._slots.plan([entry.tag])
                if plan is not None:
                    slot = plan[entry.tag]
                    self._bring_in(slot, entry.tag, entry.name, [entry], entry.packed)
                    self._touch(entry, slot)

    def _leave(self, grant: Grant) -> None:
        """End a call's use of its slots; a second time does nothing."""
        mine = [slot for slot in self._slots if grant in slot.users]
        try:
            if mine:
                marks = self._transfer.mark(grant.streams.values())
                for slot in mine:
                    slot.last_use.update(marks)
        finally:
            self._slots.leave(grant)
            self._wanted.pop(grant, None)

    def _sweep(self) -> None:
        while self._lost:
            self._leave(self._lost.popleft())
            self._cond.notify_all()

    def _touch(self, entry: Entry, slot: Slot | None = None, ahead: int = 0) -> None:
        """Note a use; `ahead`: one that is to come before so many others."""
        self._tick += 1
        entry.used = self._tick + ahead
        if slot is not None:
            slot.used = entry.used

    # -- host memory

    def _trim(self) -> None:
        """Drop host blocks, and the slots with them, until no more are kept than max_cpu_loras."""
        while self._registry.overfull():
            victim = self._registry.victim(lambda name: bool(self._slots.users_of(name)))
            if victim is None:
                return
            slot = self._slots.find(victim.tag)
            if slot is not None:
                self._evict(slot)
            victim.version = victim.version.without_block()
            self._unhashed.add(victim)
            self._registry.counters.evictions += 1
            self._transfer.collect()

    def _hash_dropped(self) -> None:
        """Hash the blocks that were dropped, and let them go. The lock is not held."""
        while self._unhashed:
            try:
                entry = self._unhashed.pop()
            except KeyError:  # another thread was faster
                return
            before = entry.version
            after = before.hashed()
            with self._lock:
                if entry.version is before:
                    entry.version = after


def devices_of(device: Devices, layout: Layout) -> list[torch.device | str]:
    """One for each group of sites."""
    places = [device] if isinstance(device, (str, torch.device)) else list(device)
    if len(places) != layout.n_groups:
        raise ValueError(f"{len(places)} devices for {layout.n_groups} groups of sites")
    return places
