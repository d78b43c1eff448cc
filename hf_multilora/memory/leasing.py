"""How calls get their slots: all of them at once, in order of arrival, or a reason why that cannot be."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import SlotError
from ..report import count
from .contents import check_plain
from .lease import Grant, Key, Lease, Mix, Ticket, label_of, parts_of
from .loading import LoadingStore
from .pack import PackedAdapter, compose
from .registry import Entry
from .slots import Slot


class NoRoomError(SlotError):
    """There is no room now, and the call would not wait."""


@dataclass(frozen=True)
class Standing:
    """How a key stands at the moment.

    Attributes:
        tag: identity of its weights, as a lease would have it.
        resident: whether a slot holds them.
        ready: whether a lease would have nothing to read.
    """

    tag: Hashable
    resident: bool
    ready: bool


@dataclass(eq=False)
class _Call:
    """A call on its way to a lease."""

    wishes: dict[Key, Mix]
    grant: Grant = field(default_factory=Grant)
    tags: dict[Key, Hashable] = field(default_factory=dict)
    mixes: dict[Hashable, PackedAdapter] = field(default_factory=dict)  # composed for this call
    read: set[str] = field(default_factory=set)  # read again for this call
    held: dict[str, Entry] = field(default_factory=dict)
    ticket: Ticket | None = None


class LeasingStore(LoadingStore):
    """The part of AdapterStore that gives out leases."""

    def acquire(self, wanted: Iterable[Key], *, block: bool = True) -> Lease:
        """Make adapters and mixes resident and hold their slots until `release`.

        All slots are taken together, in the order of arrival over threads; a call of a thread that holds a lease goes
        first. Adapters that were dropped from host memory are read again.

        Raises:
            AdapterNotFoundError: a name that is not registered (any more).
            SlotError: more distinct keys than the slots that pins leave; a mix whose ranks exceed max_lora_rank, or
                whose bytes exceed a slot; `block` is False and there is no room now; a wait that could never end,
                because the slots belong to leases of this thread, or of threads that wait for it.
            UnsupportedAdapterError: a mix of adapters that are not plain LoRA.
            RoutingError: a mix without parts, with a part twice, or with a weight that is not finite.
            Whatever the loader of an adapter raises that has to be read again.
        """
        call = _Call({key: parts_of(key) for key in wanted})
        lease = Lease(self, call.grant)  # from here on, whatever happens, its end gives back what the call has got
        try:
            if call.wishes:
                self._take(call, lease, block)
        except BaseException:
            self.release(lease)
            raise
        return lease

    def look(self, wanted: Iterable[Key]) -> dict[Key, Standing | None]:
        """How keys stand; None for those that name an adapter which is not registered."""
        found: dict[Key, Standing | None] = {}
        with self._lock:
            resident = {slot.tag for slot in self._slots if slot.tag is not None and not slot.stale}
            for key in wanted:
                parts = parts_of(key)
                known = [self._registry.entries.get(name) for name, _ in parts]
                entries = [entry for entry in known if entry is not None]
                if len(entries) < len(parts):
                    found[key] = None
                    continue
                tag = self._tag_of(key, entries, parts)
                ready = tag in resident or all(entry.packed is not None for entry in entries)
                found[key] = Standing(tag, tag in resident, ready)
        return found

    def spare(self) -> int:
        """Slots that no call holds and no pin."""
        with self._lock:
            return sum(not slot.users and not slot.pinned for slot in self._slots)

    def waited(self, but: tuple[str, ...] = ()) -> float:
        """Seconds that the first call in line has waited for slots; threads whose names begin with one of `but` do not
        count."""
        with self._lock:
            since = [t.since for t in self._line.tickets if t.in_line and not t.name.startswith(but)]
        return time.monotonic() - min(since) if since else 0.0

    def asked(self, at_once: int, waves: int = 0) -> None:
        """Note for `status()` what a caller knows: slots wanted at once by requests in line, or a batch in waves."""
        with self._lock:
            self._ask(at_once)
            self._demand.split += waves > 0
            self._demand.waves += waves

    def _ask(self, at_once: int) -> None:
        self._demand.at_once = max(self._demand.at_once, at_once)

    def _want(self, call: _Call) -> None:
        self._wanted[call.grant] = set(call.tags.values())
        pinned = {slot.tag for slot in self._slots if slot.pinned}
        self._ask(len(pinned.union(*self._wanted.values())))

    @staticmethod
    def _tag_of(key: Key, entries: list[Entry], parts: Mix) -> Hashable:
        if isinstance(key, str):
            return entries[0].tag
        return tuple((entry.tag, weight) for entry, (_, weight) in zip(entries, parts, strict=True))

    def release(self, lease: Lease) -> None:
        """End a lease; on CUDA, its slots are written again only after what the current stream has been given so far,
        and the streams of `lease.wait`. A second time does nothing."""
        if lease._grant is not None:
            with self._changing():
                self._leave(lease._grant)
            lease._grant = None

    def _take(self, call: _Call, lease: Lease, block: bool) -> None:
        """The lock is not held."""
        try:
            while True:
                with self._changing():
                    todo = self._missing(call)
                    if not todo:
                        slots = self._wait_for_slots(call, block)
                        if slots is not None:
                            lease._fill(slots)
                            return
                        todo = self._missing(call)
                for item in todo:
                    self._make(call, item)
        finally:
            with self._changing():
                self._line.leave(call.ticket)
                for entry in call.held.values():
                    entry.holders.discard(call.grant)

    def _missing(self, call: _Call) -> list[Any]:
        """Fill in each key's tag as of now; return the entries to read and mixes to compose before slots are of use.

        Raises: AdapterNotFoundError, SlotError where the call can never be served.
        """
        todo: list[Any] = []
        for key, parts in call.wishes.items():
            entries = [self._registry.get(name) for name, _ in parts]
            tag = self._tag_of(key, entries, parts)
            call.tags[key] = tag
            for entry in entries:
                entry.holders.add(call.grant)
                call.held[entry.name] = entry
            if self._slots.find(tag) is not None or tag in call.mixes:
                continue
            dropped = [entry for entry in entries if entry.packed is None]
            if dropped:
                todo += [entry for entry in dropped if entry not in todo]
            elif not isinstance(key, str):
                blocks = [(entry.packed, weight) for entry, (_, weight) in zip(entries, parts, strict=True)]
                self._check_mix(key, {e.name: e.packed for e in entries if e.packed is not None})
                todo.append((tag, key, blocks))
        self._check_slots(len(set(call.tags.values())), {key for key in call.wishes if isinstance(key, str)})
        return todo

    def _make(self, call: _Call, item: Any) -> None:
        """Read one entry again, or compose one mix. The lock is not held."""
        if isinstance(item, Entry):
            self._read_again(item)
            call.read.add(item.name)
        else:
            tag, key, blocks = item
            packed = compose(blocks, self.layout, self.arena.dtype, pin=self.pin_memory)
            call.mixes[tag] = self._check_bytes(f"Mix {label_of(key)}", packed)

    def _wait_for_slots(self, call: _Call, block: bool) -> dict[Key, Slot] | None:
        """All slots of a call, or None where something has to be read or composed first."""

        def can_end(stuck: Collection[int]) -> bool:
            tags = set(call.tags.values())
            return not block or self._slots.reachable(tags, stuck) >= len(tags)

        if call.ticket is None:
            call.ticket = Ticket(can_end, nested=self._slots.held_by(call.grant.thread))
            self._line.join(call.ticket)
            if block:
                self._want(call)
            self._cond.notify_all()  # others may find that they wait for this thread
        while not self._missing(call):
            plan = self._slots.plan(call.tags.values()) if self._line.may_go(call.ticket) else None
            if plan is not None:
                self._fill(call, plan)
                self._want(call)
                self._line.leave(call.ticket)  # at once: whoever holds slots and stands in line looks like a deadlock
                return {key: plan[tag] for key, tag in call.tags.items()}
            if not block:
                raise NoRoomError(
                    f"No room now for {self._listed(call)}: the {self.config.max_loras} slots are in use by calls "
                    "that cannot be waited for here. Raise max_loras, or name fewer adapters at once."
                )
            if self._line.hopeless(call.ticket):
                raise SlotError(
                    f"No slots for {self._listed(call)}: those of this model's {self.config.max_loras} that are not "
                    "pinned are held by calls that this one is nested in, or that wait for it. Raise max_loras, or "
                    "let the outer call end first."
                )
            self._sleep()
        return None

    def _fill(self, call: _Call, plan: dict[Hashable, Slot]) -> None:
        resident, registered = self._slots.counters, self._registry.counters
        for tag, slot in plan.items():
            key = next(key for key, wanted in call.tags.items() if wanted == tag)
            entries = [call.held[name] for name, _ in call.wishes[key]]
            hit = slot.tag == tag
            if hit:
                resident.hits += 1
            else:
                misses = call.read.intersection(entry.name for entry in entries)
                call.read -= misses
                resident.misses += 1
                registered.misses += len(misses)
                registered.hits += len(entries) - len(misses)
                packed = entries[0].packed if isinstance(key, str) else call.mixes[tag]
                assert packed is not None
                self._bring_in(slot, tag, label_of(key), entries, packed)
            for entry in entries:
                entry.hits += hit
                entry.misses += not hit
                self._touch(entry, slot)
        for slot in plan.values():
            slot.users.add(call.grant)

    def _check_slots(self, wanted: int, names: set[str]) -> None:
        """Raises: SlotError if `wanted` distinct keys, `names` among them, need more slots than pins leave."""
        pinned = sorted(entry.name for entry in self._registry if entry.pinned and entry.name not in names)
        if wanted > self.config.max_loras - len(pinned):
            self._ask(wanted + len(pinned))
        if wanted > self.config.max_loras:
            raise SlotError(
                f"{wanted} distinct adapters at once need as many slots; max_loras={self.config.max_loras}. Enable "
                f"the model with max_loras={wanted} or more, or name fewer."
            )
        if wanted > self.config.max_loras - len(pinned):
            raise SlotError(
                f"{', '.join(map(repr, sorted(names)))}: {count(wanted, 'distinct adapter')} at once, but "
                f"{len(pinned)} of {self.config.max_loras} are pinned ({', '.join(pinned)}). Unpin one of "
                "them, or raise max_loras."
            )

    def _check_mix(self, key: Key, blocks: Mapping[str, PackedAdapter]) -> None:
        ranks: dict[int, int] = {}
        for name, packed in blocks.items():
            check_plain(f"Mix {label_of(key)}: adapter {name!r}", packed)
            for site, rank in packed.ranks.items():
                ranks[site] = ranks.get(site, 0) + self.layout.sites[site].padded(rank)
        most = max(ranks, key=lambda site: ranks[site], default=None)
        if most is None:
            return
        where, limit = self.layout.sites[most], self.config.max_lora_rank
        if ranks[most] > where.padded(limit):
            split = where.padded(1)
            rounded = f" (fully sharded, each counts as a multiple of {split})" if split > 1 else ""
            raise SlotError(
                f"Mix {label_of(key)}: its ranks add up to {ranks[most]} in {where.path!r}{rounded}, more than "
                f"max_lora_rank={limit}. Enable the model with max_lora_rank={ranks[most]} or more."
            )

    @staticmethod
    def _listed(call: _Call) -> str:
        return ", ".join(label_of(key) for key in call.wishes)
