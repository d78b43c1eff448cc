"""AdapterStore: registered adapters in host memory, resident ones in slots, and the calls that use them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers.utils import logging

from ..demand import suggest
from ..errors import SlotError
from ..report import AdapterStatus, Status
from .ahead import Ahead, Hold
from .core import Devices, devices_of
from .extras import BaseDtype
from .lease import Grant, Ticket
from .leasing import LeasingStore
from .pack import PackedAdapter
from .registry import Entry

logger = logging.get_logger(__name__)


class AdapterStore(LeasingStore):
    """All adapters of one model; thread-safe.

    One lock guards both tables. Files are read and mixes composed outside of it; copies into slots are started under
    it. A hit or a miss is counted for each distinct key of a lease; in host memory, for each adapter that a slot
    missed.

    Args:
        layout: the model's sites.
        config: max_loras, max_lora_rank, max_cpu_loras and slot_bytes are read here.
        device, dtype: of the slots; several devices, where the layout has as many groups of sites.

    Raises:
        ConfigError, SlotError: the arena cannot be allocated (see Arena).
    """

    def pin(self, name: str) -> None:
        """Make an adapter resident, and keep its slot and its host block until `unpin` or `unload`.

        Raises:
            AdapterNotFoundError: there is none of that name.
            SlotError: all slots are pinned, or host memory is full of what must stay.
        """
        while True:
            with self._lock:
                self._registry.get(name)
                self._registry.check_room(name)
            with self.acquire([name]), self._changing():
                entry = self._registry.get(name)
                slot = self._slots.find(entry.tag)
                if slot is None:  # reloaded meanwhile
                    continue
                self._registry.check_room(name)
                self._check_slots(1, {name})
                entry.pinned = slot.pinned = True
                return

    def unpin(self, name: str) -> None:
        """Let an adapter be evicted again. Raises: AdapterNotFoundError."""
        with self._changing():
            entry = self._registry.get(name)
            entry.pinned = False
            for slot in self._slots.of(name):
                slot.pinned = False

    def prefetch(self, names: Iterable[str]) -> Future[list[str]]:
        """Start to make adapters resident, as many as fit beside what is in use or pinned, in this order.

        Returns at once; what has to be read again is read by a thread of its own. The result is the list of names that
        are resident then.

        Raises:
            AdapterNotFoundError: a name that is not registered.
        """
        wanted = list(dict.fromkeys(names))[: self.config.max_loras]
        future: Future[list[str]] = Future()
        with self._lock:
            entries = [self._registry.get(name) for name in wanted]
            at_once = all(entry.packed is not None for entry in entries)
        if at_once:
            self._prefetch(entries, future)
        else:
            threading.Thread(target=self._prefetch, args=(entries, future), daemon=True).start()
        return future

    def _prefetch(self, entries: Sequence[Entry], future: Future[list[str]]) -> None:
        try:
            names = self._make_resident(entries)
        except Exception as error:  # the call that needs the adapter will meet it again, and raise it
            logger.warning(f"Prefetch stopped: {error}")
            future.set_exception(error)
        else:
            future.set_result(names)

    def ahead(self, names: Iterable[str]) -> Ahead:
        """Prepare adapters for a call to come, until the result is closed (see Ahead). Unknown names are left out."""
        with self._lock:
            known = self._registry.entries
            ahead = Ahead(self, [known[name] for name in dict.fromkeys(names) if name in known])
        ahead.begin()
        return ahead

    def registered(self) -> list[tuple[Hashable, ...]]:
        """Name, identity and pin of each adapter, in the order of registration."""
        with self._lock:
            return [(entry.name, entry.tag, entry.pinned) for entry in self._registry]

    @contextmanager
    def parked(self, thread: int | None, by: int) -> Iterator[None]:
        """A thread that holds slots goes on only when the thread `by` lets it: `by` need not wait for these slots."""
        ticket = Ticket(lambda stuck: by not in stuck, in_line=False, thread=thread or 0)
        with self._lock:
            self._line.join(ticket)
            self._cond.notify_all()
        try:
            yield
        finally:
            with self._lock:
                self._line.leave(ticket)
                self._cond.notify_all()

    def hold(self, names: Iterable[str]) -> Hold:
        """Read again what was dropped of these adapters, and keep it in host memory until the result is closed.

        Raises:
            AdapterNotFoundError: a name that is not registered.
            Whatever the loader of an adapter raises.
        """
        with self._lock:
            entries = [self._registry.get(name) for name in dict.fromkeys(names)]
            hold = Hold(self, entries)
        try:
            for entry in entries:
                self._read_again(entry)
        except BaseException:
            hold.close()
            raise
        return hold

    def _make_resident(
        self, entries: Sequence[Entry], kept: Grant | None = None, going: Callable[[], bool] | None = None
    ) -> list[str]:
        """Bring in what fits, without holding it; return the names. The lock is not held.

        Args:
            kept: what holds the host blocks already, and still does afterwards.
            going: asked before each step; with it, slots are left to calls that wait for some.
        """
        grant = kept or Grant()
        tags: list[Hashable] = []
        names: list[str] = []
        try:
            for entry in entries:  # all of them first: reading one must not drop another
                entry.holders.add(grant)
            with self._lock:  # those that have a slot come first, so that no other of these takes it
                entries = sorted(entries, key=lambda entry: self._slots.find(entry.tag) is None)
            for entry in entries:
                if going is not None and not going():
                    break
                self._read_again(entry)
                with self._changing():
                    packed, tag = entry.packed, entry.tag
                    if going is not None and (not going() or self._line.tickets):
                        continue
                    plan = self._slots.plan([*tags, tag])
                    if plan is None or packed is None or self._registry.entries.get(entry.name) is not entry:
                        continue
                    if plan[tag].tag != tag:
                        self._bring_in(plan[tag], tag, entry.name, [entry], packed)
                    # What runs meanwhile is used after this, and must not outlive it all the same.
                    self._touch(entry, plan[tag], ahead=2 * self.config.max_loras)
                    tags.append(tag)
                    names.append(entry.name)
        finally:
            if kept is None:
                with self._changing():
                    for entry in entries:
                        entry.holders.discard(grant)
        return names

    def status(self) -> Status:
        """A snapshot of slots, adapters (in the order of registration) and counters."""
        with self._lock:
            self._sweep()
            self._transfer.collect()
            adapters = []
            for entry in self._registry:
                slot = self._slots.find(entry.tag)
                adapters.append(
                    AdapterStatus(
                        name=entry.name,
                        generation=entry.generation,
                        rank=entry.version.rank,
                        nbytes=entry.version.nbytes,
                        slot=None if slot is None else slot.index,
                        pinned=entry.pinned,
                        in_use=len(self._slots.users_of(entry.name)),
                        source=entry.version.loaded.source,
                        hits=entry.hits,
                        misses=entry.misses,
                        evictions=entry.evictions,
                    )
                )
            found = Status(
                max_loras=self.config.max_loras,
                max_lora_rank=self.config.max_lora_rank,
                slot_bytes=sum(arena.slot_bytes for arena in self.arenas),
                device=", ".join(str(arena.device) for arena in self.arenas),
                dtype=str(self.arena.dtype).removeprefix("torch."),
                adapters=adapters,
                slots=[slot.label for slot in self._slots],
                resident=replace(self._slots.counters, ms=self._transfer.ms),
                registered=replace(self._registry.counters),
                demand=replace(self._demand),
            )
        advice = suggest(found.max_loras, found.slot_bytes, found.demand, found.adapters, found.resident)
        if advice is not None:
            found.suggested_max_loras, found.suggestion = advice
        return found

    def retarget(self, device: Devices, dtype: torch.dtype, *, base_dtype: BaseDtype | None = None) -> bool:
        """Move the arenas to other devices or dtypes: blocks are cast elementwise, slots refilled, mixes forgotten.

        Saved tensors and token rows follow the base: `base_dtype` says which dtype a parameter (module path, name) of
        it has now. It is kept and asked for every block from now on, with the store's lock held.

        Waits for calls in flight. Every address changes, unless device and all dtypes are what they were. On an error
        everything stays as it was. Returns whether anything changed.

        Raises:
            SlotError: this thread's own call is in flight, or calls that wait for this one; an adapter no longer fits
                slot_bytes; the device has no room.
        """
        devices = [torch.empty(0, device=place).device for place in devices_of(device, self.layout)]
        with self._changing():
            base_dtype = base_dtype or self._base_dtype
            now = [arena.device for arena in self.arenas]
            if (devices, dtype) == (now, self.arena.dtype) and all(
                entry.version.extras.follows(base_dtype) for entry in self._registry
            ):
                self._base_dtype = base_dtype
                return False
            if self._slots.held_by(threading.get_ident()):
                raise SlotError("The model cannot be moved or cast from within a call that uses its adapters.")

            def users() -> set[Grant]:
                return {user for slot in self._slots for user in slot.users}

            ticket = Ticket(lambda stuck: not any(user.thread in stuck for user in users()))
            with self._waiting(ticket):
                while users() or not self._line.may_go(ticket):
                    if self._line.hopeless(ticket):
                        raise SlotError("The model cannot be moved or cast: calls in flight wait for each other.")
                    self._sleep()
                self._move(devices, dtype, base_dtype)
                return True

    def _move(self, devices: Sequence[torch.device], dtype: torch.dtype, base_dtype: BaseDtype | None) -> None:
        slot_bytes = [self._slot_bytes(dtype, group) for group in range(len(devices))]
        recast, pin = dtype != self.arena.dtype, any(device.type == "cuda" for device in devices)
        blocks: list[tuple[Entry, PackedAdapter]] = []
        for entry in self._registry:
            if entry.packed is not None:
                packed = entry.packed.to(dtype, pin=pin, base_dtype=base_dtype)
                self._check_bytes(f"Adapter {entry.name!r} in {dtype}", packed, slot_bytes)
                blocks.append((entry, packed))
        found = [(self._slots.find(entry.tag), entry) for entry, _ in blocks]
        resident = [(slot, slot.used, entry) for slot, entry in found if slot is not None]
        for slot in self._slots:
            slot.free()
        try:
            self._move_arenas(devices, dtype, slot_bytes)
            self._base_dtype = base_dtype
            self._transfer = self._transfers(self._transfer)
            for slot in self._slots:
                slot.ready, slot.last_use = None, {}
            for entry, packed in blocks:
                entry.version = entry.version.recast(packed)
            for entry in self._registry:
                if entry.packed is None and (recast or not entry.version.extras.follows(base_dtype)):
                    entry.version = entry.version.forgotten()  # nothing to compare the files with any more
        finally:
            for slot, used, entry in resident:
                assert entry.packed is not None
                self._bring_in(slot, entry.tag, entry.name, [entry], entry.packed)
                slot.used = used

    def _move_arenas(self, devices: Sequence[torch.device], dtype: torch.dtype, slot_bytes: Sequence[int]) -> None:
        """All of them, or none."""
        old = [(arena.device, arena.dtype, arena.slot_bytes) for arena in self.arenas]
        moved = 0
        try:
            for arena, device, nbytes in zip(self.arenas, devices, slot_bytes, strict=True):
                arena.to(device, dtype, nbytes)
                moved += 1
        except BaseException:
            for arena, where in zip(self.arenas[:moved], old, strict=False):
                arena.to(*where)
            if moved:
                self._transfer = self._transfers(self._transfer)
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> AdapterStore:
        """An independent store with the same adapters and pins; host blocks are shared, slots and counters are not."""
        with self._lock:
            devices = [arena.device for arena in self.arenas]
            new = AdapterStore(self.layout, self.config, devices, self.arena.dtype)
            memo[id(self)] = new
            memo.update({id(arena): twin for arena, twin in zip(self.arenas, new.arenas, strict=True)})
            for entry in self._registry:
                new._registry.entries[entry.name] = entry.copy()
            new._tick = self._tick
        with new._changing():
            new._refill_pins()
        return new
