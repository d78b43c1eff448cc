"""Seats: the slots that running requests hold, one for all requests of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ...memory.lease import Lease
from ...memory.leasing import NoRoomError
from ...memory.store import AdapterStore
from ...rows import Saved
from ..call import saved_by
from ..ids import Key
from .prefix import identity_of


@dataclass(eq=False)
class Seat:
    """One slot, held.

    Attributes:
        identity: of the weights, for the hashes of cached blocks.
        saved: module path -> what the adapter replaces there.
        users: ids of the requests that run on it, paused ones included.
        closing: nobody new gets on; it is to be empty soon.
    """

    key: Key
    tag: Hashable
    lease: Lease
    identity: tuple[int, ...]
    saved: Mapping[str, Sequence[Saved]]
    users: set[str] = field(default_factory=set)
    closing: bool = False

    @property
    def slot(self) -> int:
        return self.lease.slots[self.key]

    @property
    def extras(self) -> Any:
        return self.lease.extras[self.key]


class Seats:
    """All seats of one manager, by the identity of the weights.

    Args:
        store: of the model.
        check: raises where the layers that an adapter needs are not in the model any more.
        background: runs a function in a thread of its own; None where seats must not come at a thread's own time, and
            nobody else holds slots.
    """

    def __init__(
        self,
        store: AdapterStore,
        check: Callable[[Collection[int], Iterable[str]], None],
        background: Callable[..., Future[Lease]] | None,
    ) -> None:
        self._store = store
        self._check = check
        self._background = background
        self._seats: dict[Hashable, Seat] = {}
        self._awaited: tuple[Key, Future[Lease]] | None = None

    def __iter__(self) -> Iterator[Seat]:
        return iter(list(self._seats.values()))

    def get(self, tag: Hashable) -> Seat | None:
        return self._seats.get(tag)

    def take(self, key: Key) -> Seat | None:
        """A new seat, its copy started; None where there is no slot now.

        Raises:
            AdapterNotFoundError, UnsupportedAdapterError, ModelError, SlotError (all slots pinned, a mix that fits
                none): what makes the key impossible to serve.
        """
        if self._background is None and not self._store.spare():
            standing = self._store.look([key])[key]
            if standing is None or not standing.resident:  # what was dropped would be read for nothing
                return None
        lease = self._came(key)
        if lease is None:
            try:
                lease = self._store.acquire([key], block=False)
            except NoRoomError:
                return None
        try:
            saved = saved_by(lease, self._store)
            self._check(lease.touched, saved)
        except BaseException:
            self._store.release(lease)
            raise
        tag = lease.tags[key]
        seat = self._seats[tag] = Seat(key, tag, lease, identity_of(tag), saved)
        return seat

    def crowded(self, more: int) -> None:
        """So many more seats would be taken now, if there were slots for them."""
        self._store.asked(len(self._seats) + more)

    def wait_for(self, key: Key | None) -> None:
        """Stand in line for a slot, as long as calls outside of the manager hold some: those that come later wait.

        Asking anew in each round would never be first in a line of threads that wait.
        """
        if self._awaited is not None and self._awaited[0] != key:
            self.forget()
        if self._background is None or key is None or self._awaited is not None:
            return
        if len(self._seats) < self._store.config.max_loras:
            self._awaited = key, self._background("slot", self._store.acquire, [key])

    def _came(self, key: Key) -> Lease | None:
        """The lease that was waited for, if it has come and is of the weights of now."""
        if self._awaited is None or self._awaited[0] != key or not self._awaited[1].done():
            return None
        future, self._awaited = self._awaited[1], None
        lease = future.result()
        lease.adopt()
        standing = self._store.look([key])[key]
        if standing is not None and standing.tag == lease.tags[key]:
            return lease
        self._store.release(lease)
        return None

    def forget(self) -> None:
        """Stand in line no more."""
        if self._awaited is not None:
            future, self._awaited = self._awaited[1], None
            future.cancel()
            future.add_done_callback(self._give_back)

    def _give_back(self, future: Future[Lease]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._store.release(future.result())

    def leave(self, alive: Collection[str]) -> None:
        """Take out the requests that are not among these, and give back the seats that nobody has."""
        for seat in self._seats.values():
            seat.users.intersection_update(alive)
        self.drop_empty()

    def drop_empty(self) -> None:
        for tag, seat in list(self._seats.items()):
            if not seat.users:
                del self._seats[tag]
                self._store.release(seat.lease)
