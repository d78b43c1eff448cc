"""Who of the waiting requests may go next, so that a batch never names more adapters than there are slots.

- What runs keeps its seat. Requests of the base and of adapters that have a seat go first, then those of adapters that
  lie in a slot, then the others, as long as slots are to be had; within each by arrival, or (`fairness="tokens"`) the
  adapter that has had the fewest tokens first.
- **Nobody starves**: a request that waits for a slot lets `patience` later ones go first (and what goes in the same
  round as the last of them). Then it goes before all others; and if there is no slot, one seat (the one whose requests
  have the least left to do) gets no new requests until it is empty, and the slot is the waiting one's: so it starts
  when those who run on that seat have ended, at the latest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...memory.leasing import Standing
from ..ids import Key
from .requests import Carrier, carrier_of
from .seats import Seat, Seats

FAIRNESS = ("arrival", "tokens")
OTHERS: Key = ""  # stands for calls outside of the manager; no adapter is called so


@dataclass
class Turn:
    """One round of scheduling.

    Attributes:
        room: how many more requests the batch can take, and `tokens` of them; beyond that no new slot is filled.
        offered: the requests that the scheduler may take; `seated` of them with a seat that they did not have before.
        refused: requests that cannot be served, and why.
        next: keys that would have got a slot if the batch had room for them.
    """

    room: int
    tokens: int
    offered: list[Any] = field(default_factory=list)
    seated: list[tuple[Any, Carrier]] = field(default_factory=list)
    refused: list[tuple[Any, BaseException]] = field(default_factory=list)
    next: list[Key] = field(default_factory=list)


class Admission:
    """The order of waiting requests.

    Args:
        seats: of running requests.
        board: called with a request and its seat before it goes for the first time; may raise.
        served: gives the tokens that keys have had so far.
        left: tokens that a request may still generate.
        patience, fairness: see above.
        ranks: other ranks have to come to the same order, so that what lies in a slot by chance does not count.
    """

    def __init__(
        self,
        seats: Seats,
        board: Callable[[Any, Seat], None],
        served: Callable[[], Mapping[Key | None, int]],
        left: Callable[[str], int],
        patience: int,
        fairness: str,
        ranks: bool = False,
    ) -> None:
        self._seats, self._board, self._served, self._left = seats, board, served, left
        self._patience, self._fairness, self._ranks = patience, fairness, ranks
        self._emptied: dict[Key, Seat] = {}  # key of an overdue request -> the seat that is being emptied for it

    def offer(self, waiting: Sequence[Any], standings: Mapping[Key, Standing | None], turn: Turn) -> None:
        """Fill a turn from waiting requests, whose adapters are registered and read."""
        carriers = {id(state): carrier_of(state) for state in waiting}
        served = self._served() if self._fairness == "tokens" else {}
        self._reopen(carriers.values())
        full, blocked = False, []
        for state in sorted(waiting, key=lambda state: self._rank(carriers[id(state)], standings, served)):
            carrier = carriers[id(state)]
            if carrier is not None and carrier.key is not None and carrier.seat is None:
                standing = standings[carrier.key]
                assert standing is not None
                seat = self._seats.get(standing.tag)
                try:
                    if seat is None and not full:
                        if turn.room <= 0 or turn.tokens <= 0:
                            turn.next.append(carrier.key)
                        elif (seat := self._seats.take(carrier.key)) is None:
                            full = True
                    if seat is None or seat.closing:
                        blocked.append(carrier)
                        continue
                    self._board(state, seat)
                except Exception as error:
                    turn.refused.append((state, error))
                    continue
                carrier.seat = seat
                turn.seated.append((state, carrier))
            turn.room -= 1
            turn.tokens -= len(state.remaining_prefill_tokens)
            turn.offered.append(state)
        self._bound(sorted(blocked, key=lambda carrier: carrier.arrived), turn)
        if full:
            self._seats.crowded(min(len({carrier.key for carrier in blocked}), max(0, turn.room)))
        self._seats.wait_for(blocked[0].key if blocked and full else None)

    def _bound(self, blocked: Iterable[Carrier], turn: Turn) -> None:
        """Empty a seat for those that more than `patience` later requests would have passed; who would go on that seat
        beyond these does not go."""
        fresh = {id(state) for state, _ in turn.seated}

        def arrivals() -> list[int]:
            carriers = map(carrier_of, (s for s in turn.offered if id(s) in fresh or _based(s)))
            return sorted(carrier.arrived for carrier in carriers if carrier is not None)

        going = arrivals()
        for carrier in blocked:
            assert carrier.key is not None
            later = going[bisect_right(going, carrier.arrived) :]
            allowed = max(0, self._patience - carrier.passed)
            if len(later) <= allowed and carrier.passed < self._patience:
                continue
            seat = self._empty_for(carrier.key)
            if seat is not None and len(later) > allowed:
                last = later[allowed - 1] if allowed else carrier.arrived
                stays = {id(s) for s, c in turn.seated if c.seat is seat and c.arrived > last}
                turn.offered = [state for state in turn.offered if id(state) not in stays]
                going = arrivals()

    def went(self, gone: Iterable[Carrier], waiting: Iterable[Any]) -> None:
        """Requests have gone: note by how many later ones each waiting one was passed."""
        arrivals = sorted(carrier.arrived for carrier in gone)
        if not arrivals:
            return
        for state in waiting:
            carrier = carrier_of(state)
            if carrier is not None and carrier.key is not None and carrier.seat is None:
                carrier.passed += len(arrivals) - bisect_right(arrivals, carrier.arrived)

    def _rank(
        self,
        carrier: Carrier | None,
        standings: Mapping[Key, Standing | None],
        served: Mapping[Key | None, int],
    ) -> tuple[int, int, int]:
        if carrier is None:
            return (0, 0, 0)
        if carrier.seat is not None:  # it has run before
            return (0, 0, carrier.arrived)
        tokens = served.get(carrier.key, 0)
        if carrier.key is None:
            return (2, tokens, carrier.arrived)
        if carrier.passed >= self._patience:
            return (1, 0, carrier.arrived)
        standing = standings[carrier.key]
        assert standing is not None
        resident = standing.resident and not self._ranks
        return (2 if self._seats.get(standing.tag) else 3 if resident else 4, tokens, carrier.arrived)

    def make_room(self, wanted: bool) -> None:
        """Calls outside of the manager (generate()) have waited for a slot for long, or do so no more."""
        seat = self._emptied.get(OTHERS)
        if seat is not None and (not wanted or seat not in list(self._seats)):
            seat.closing = False
            del self._emptied[OTHERS]
        if wanted:
            self._empty_for(OTHERS)

    def _empty_for(self, key: Key) -> Seat | None:
        """The seat that takes nobody new for the sake of `key`; None where all are being emptied for others."""
        if key in self._emptied:
            return self._emptied[key]
        seats = [seat for seat in self._seats if not seat.closing]
        if not seats:
            return None
        seat = min(seats, key=lambda seat: max(map(self._left, seat.users), default=0))
        seat.closing = True
        self._emptied[key] = seat
        return seat

    def _reopen(self, carriers: Iterable[Carrier | None]) -> None:
        """Seats that were emptied for somebody who is gone (cancelled, or served by another slot)."""
        overdue = {c.key for c in carriers if c is not None and c.seat is None and c.passed >= self._patience}
        seats = list(self._seats)
        for key, seat in list(self._emptied.items()):
            if key is OTHERS:
                continue
            if key not in overdue or seat not in seats:
                seat.closing = False
                del self._emptied[key]


def _based(state: Any) -> bool:
    carrier = carrier_of(state)
    return carrier is not None and carrier.key is None
