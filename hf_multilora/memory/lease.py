"""Leases: the slots that a call in flight uses; and the line in which calls wait for them.

A lease gets all of its slots at once, in the order of arrival over threads, so that no call holds some and waits for
others. Only a nested call (its thread holds a lease already) can wait while holding; it goes before the others, and
where nobody could ever make room for it, it raises instead of waiting.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import RoutingError

if TYPE_CHECKING:
    from .extras import Extras
    from .leasing import LeasingStore
    from .slots import Slot

Mix = tuple[tuple[str, float], ...]  # (name, weight) of each part
Key = str | Mix


def parts_of(key: Key) -> Mix:
    """The parts of a key in canonical order, so that {"a": 1, "b": 2} and {"b": 2, "a": 1} share a slot.

    Raises:
        RoutingError: a mix without parts, with a part twice, or with a weight that is not a finite number.
    """
    if isinstance(key, str):
        return ((key, 1.0),)
    parts = tuple(sorted((name, float(weight)) for name, weight in key))
    if not parts or len({name for name, _ in parts}) != len(parts):
        raise RoutingError(f"Mix {key!r}: expected at least one adapter, and each only once.")
    for name, weight in parts:
        if not -float("inf") < weight < float("inf"):
            raise RoutingError(f"Mix {key!r}: the weight of {name!r} is {weight}, expected a finite number.")
    return parts


def label_of(key: Key) -> str:
    """What status() calls a key: "sql", or "poet*0.3+sql*0.7"."""
    return key if isinstance(key, str) else "+".join(f"{name}*{weight:g}" for name, weight in parts_of(key))


@dataclass(eq=False)
class Grant:
    """A call's membership in its slots, and the streams on which it waited for their copies."""

    thread: int = field(default_factory=threading.get_ident)
    streams: dict[Hashable, torch.cuda.Stream] = field(default_factory=dict)


class Lease:
    """Slots that stay as they are until the lease is released: nothing evicts, reloads or frees them.

    Release it with `AdapterStore.release` or by leaving its `with` block. One that is lost is released when it is
    collected.

    Attributes:
        slots: key -> slot number.
        tags: key -> identity of the weights, hashable: (uid, generation); for a mix that and the weight of each part.
        touched: the sites that any of its adapters touches, with factors or with a gain or a shift alone.
        extras: key -> what its block has beside those; false for a plain adapter.
    """

    _grant: Grant | None = None

    def __init__(self, store: LeasingStore, grant: Grant) -> None:
        self._store = store
        self.slots: dict[Key, int] = {}
        self.tags: dict[Key, Hashable] = {}
        self.touched: frozenset[int] = frozenset()
        self._ready: list[Any] = []  # of the store's transfer
        self.extras: dict[Key, Extras] = {}
        self._grant = grant

    def _fill(self, slots: dict[Key, Slot]) -> None:
        self.slots = {key: slot.index for key, slot in slots.items()}
        self.tags = {key: slot.tag for key, slot in slots.items()}
        self.touched = frozenset().union(*(slot.sites for slot in slots.values()))
        self.extras = {key: slot.extras for key, slot in slots.items()}
        self._ready = [slot.ready for slot in slots.values()]

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let `stream` (the device's current one by default) wait for the copies into the lease's slots.

        It does not block the host, and costs next to nothing on a stream that has waited already, so it may be called
        before each forward. Without CUDA it does nothing.
        """
        if self._grant is not None:
            self._store._transfer.wait(self._ready, self._grant.streams, stream)

    def adopt(self) -> None:
        """The lease is this thread's from now on, whichever took it."""
        if self._grant is not None:
            self._grant.thread = threading.get_ident()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self._store.release(self)

    def __del__(self) -> None:
        # May run anywhere, also in a thread that holds the store's lock: leave a note, and never lock.
        if self._grant is not None:
            with suppress(Exception):
                self._store._lost.append(self._grant)


@dataclass(eq=False)
class Ticket:
    """A waiting thread.

    Attributes:
        nested: whether its thread holds a lease.
        in_line: whether it waits for slots, and others wait behind it.
        can_end: whether its wait can end if the given threads never let go of their slots.
    """

    can_end: Callable[[Collection[int]], bool]
    nested: bool = False
    in_line: bool = True
    thread: int = field(default_factory=threading.get_ident)
    name: str = field(default_factory=lambda: threading.current_thread().name)
    since: float = field(default_factory=time.monotonic)


class Line:
    """Waiting threads in order of arrival."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Ticket]] = []  # weak: an interrupted thread must not stand in the way for ever

    @property
    def tickets(self) -> list[Ticket]:
        return [ticket for ref in self._refs if (ticket := ref()) is not None]

    def join(self, ticket: Ticket) -> None:
        self._refs.append(weakref.ref(ticket))

    def leave(self, ticket: Ticket | None) -> None:
        self._refs = [ref for ref in self._refs if ref() not in (None, ticket)]

    def may_go(self, ticket: Ticket) -> bool:
        """Whether it is this thread's turn: nested calls go first, the others one after another."""
        if ticket.nested:
            return True
        before = [t for t in self.tickets if t.in_line]
        return not any(t.nested for t in before) and before[0] is ticket

    def hopeless(self, ticket: Ticket) -> bool:
        """Whether `ticket` waits for threads that (in the end) wait for it.

        Whoever can end its wait will let go of what it holds; what remains when nobody else can is a deadlock.
        """
        waiting = self.tickets
        while True:
            stuck = {t.thread for t in waiting}
            free = [t for t in waiting if t.can_end(stuck)]
            if not free:
                return ticket in waiting
            waiting = [t for t in waiting if t not in free]
