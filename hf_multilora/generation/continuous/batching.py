"""Batching: which requests of one manager go next, and the slots that they hold.

The manager's generation thread schedules, prepares and runs one batch after another. `steering` has transformers' own
scheduler ask here whom it may take (`admission`), and its objects for the forward ask `forwards`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from ...errors import AdapterNotFoundError, ModelError
from ...memory.leasing import Standing
from ...report import BatchingStatus
from ..calls import Calls
from ..ids import Key, names_of
from .admission import Admission, Turn
from .prefix import Seeded
from .ranks import Ranks
from .reading import Reading
from .requests import Carrier, carrier_of
from .seats import Seat, Seats
from .traffic import Traffic

_AGAIN_S = 0.05  # seconds
_OTHERS_S = 1.0  # seconds that calls outside of the manager wait for a slot before one is emptied for them


class Batching:
    """The adapters' part of one manager.

    Args:
        calls: of the model.
        check: raises where the layers of these sites, or these modules, are not in the model any more.
        ensure: loads a name that is not registered; `missing` names those of a key, or raises for what never could be.
        fairness, patience: see `admission`.
        wake: wakes the generation thread.
        ranks: that share the model, None for a model of one process.

    Attributes:
        processor, scheduler: transformers' own objects, as long as there are any.
        enabled: whether the model still is.
        pausing: threads that have paused the generation thread.
        batch: requests that were scheduled last.
    """

    def __init__(
        self,
        calls: Calls,
        check: Callable[[Collection[int], Iterable[str]], None],
        ensure: Callable[[str], None],
        missing: Callable[[Key | None], list[str]],
        fairness: str,
        patience: int,
        wake: Callable[[], None],
        ranks: Ranks | None = None,
    ) -> None:
        self.calls, self.store = calls, calls.store
        self.traffic = Traffic()
        self.ranks = ranks
        self.enabled = True
        self.pausing: list[int] = []
        self.batch: Sequence[Any] = ()
        self.processor: Any = None
        self.scheduler: Any = None
        self.reading = Reading(self.store, ensure, self._woken)
        self.missing = missing
        self.seats = Seats(self.store, check, None if ranks else self.reading.background)
        self.admission = Admission(
            self.seats, self._board, self.traffic.served, self._left, patience, fairness, ranks is not None
        )
        self._wake = wake
        self._turn: Turn | None = None
        self._budget = 0
        self._dirty = False
        self._fruitless: float | None = None  # the last round offered nobody, and need not be repeated before

    # -- requests

    def carry(self, key: Key | None) -> Carrier:
        """A carrier for a new request; what is not registered begins to load. Called by the threads that add requests.

        Raises:
            AdapterNotFoundError: a name that is not registered, and is nothing that could be loaded; or that ranks
                would load, each at its own time.
        """
        missing = self.missing(key)
        if self.ranks is not None:
            self.ranks.check_loaded(missing)
        return Carrier(key, self.reading.loads(missing))

    def _woken(self) -> None:
        self._fruitless = None
        self._wake()

    def check(self, state: Any) -> None:
        """Raises: RoutingError where a request of the base holds tokens that adapters have added."""
        carrier = carrier_of(state)
        if carrier is None or carrier.key is None:
            self._check_tokens(state.initial_tokens, None)

    def _check_tokens(self, tokens: Sequence[int], own: int | None) -> None:
        if self.calls.vocabulary is not None:
            self.calls.vocabulary.check(torch.tensor([list(tokens)]), (own,))

    def _board(self, state: Any, seat: Seat) -> None:
        """A request is about to go for the first time: find out what only its adapter can tell.

        Raises:
            RoutingError: its prompt holds tokens that its adapter does not have.
        """
        carrier = carrier_of(state)
        assert carrier is not None
        self._check_tokens(state.initial_tokens, seat.extras.vocab_size)
        carrier.invoke(state.initial_tokens, seat.extras.invocation)

    def arrived(self, state: Any) -> None:
        carrier = carrier_of(state)
        if carrier is not None and carrier.seat is not None:  # a reset, or a child for which the cache had no room
            carrier.seat.users.add(state.request_id)
        self.traffic.arrived(state)
        self.touched()

    def forked(self) -> None:
        """Children of requests have joined the running ones."""
        for request_id in self.scheduler.active_requests.keys() - self.traffic.live.keys():
            state = self.scheduler.active_requests[request_id]
            self.arrived(state)
            self.traffic.began(state)

    def touched(self) -> None:
        """A request has come, or ended one way or another."""
        self._dirty, self._fruitless = True, None

    def sweep(self) -> None:
        """Note which requests are gone, and give back what they held."""
        if not self._dirty:
            return
        self._dirty = False
        alive = self.scheduler.active_requests.keys() | self.scheduler.waiting_requests.keys()
        for request_id in self.traffic.live.keys() - alive:
            self.traffic.ended(request_id)
        self.seats.leave(alive)

    def clear(self) -> None:
        """Nobody holds anything any more."""
        for request_id in list(self.traffic.live):
            self.traffic.ended(request_id)
        self.seats.leave(())
        self.seats.forget()

    def close(self) -> None:
        """The generation loop is over: nobody waits for what is being read."""
        self.clear()
        self.reading.close()

    def _left(self, request_id: str) -> int:
        state = self.traffic.live.get(request_id)
        return 0 if state is None else state._new_tokens_limit - len(state.generated_tokens)

    # -- scheduling

    def before(self, token_budget: int) -> None:
        """A round of scheduling begins."""
        self.sweep()
        self._turn, self._budget = None, token_budget

    def offer(self, waiting: Sequence[Any]) -> list[Any]:
        """The waiting requests that the scheduler may take, in order."""
        until = self._fruitless  # other threads reset it
        if until is not None and time.monotonic() < until:
            return []
        active = self.scheduler.active_requests
        room = self.scheduler.max_requests_per_batch - len(active)
        self._turn = turn = Turn(room, self._budget - len(active))
        keys = {carrier.key for carrier in map(carrier_of, waiting) if carrier is not None and carrier.key is not None}
        standings = self.store.look(keys)
        self.reading.drop(standings)
        ready = [state for state in waiting if self._ready(state, standings, turn)]
        if self.ranks is None:  # where there are some, nobody but the manager takes slots
            self.admission.make_room(self.store.waited(("hf_multilora_slot",)) > _OTHERS_S)
        self.admission.offer(ready, standings, turn)
        for state, error in turn.refused:
            self.fail(state, error)
        # Nothing changes until a request comes or goes, or something else happens that nobody tells.
        fruitful = turn.offered or turn.refused or self.ranks is not None
        self._fruitless = None if fruitful else time.monotonic() + _AGAIN_S
        return turn.offered

    def _ready(self, state: Any, standings: Mapping[Key, Standing | None], turn: Turn) -> bool:
        """Whether a request's adapter is registered and in host memory; what is not is being read. (Ranks read it when
        they take the seat: all in the same step.)"""
        carrier = carrier_of(state)
        if carrier is None or carrier.key is None or carrier.seat is not None:
            return True
        if carrier.loading:
            if not all(load.done() for load in carrier.loading):
                return False
            done, carrier.loading = carrier.loading, []
            if any(load.cancelled() for load in done):  # the loop has ended since, and begun anew
                carrier.loading = self.reading.loads(self.missing(carrier.key))
                return False
            errors = [error for load in done if (error := load.exception()) is not None]
            if errors:
                turn.refused.append((state, errors[0]))
                return False
        standing = standings[carrier.key]
        if standing is None:  # it may have been loaded since
            standing = self.store.look([carrier.key])[carrier.key]
        if standing is None:
            turn.refused.append((state, self._gone(carrier.key)))
            return False
        if self.ranks is not None:
            return standings[carrier.key] is not None
        if not standing.ready:
            error = self.reading.read_again(carrier.key)
            if error is not None:
                turn.refused.append((state, error))
        return standing.ready and standings[carrier.key] is not None

    def _gone(self, key: Key) -> AdapterNotFoundError:
        gone = [name for name in names_of(key) if name not in self.store]
        return AdapterNotFoundError(
            f"Adapter {', '.join(map(repr, gone))} was unloaded while this request waited for it."
        )

    def after(self) -> None:
        """A round of scheduling has ended: seats of those who go are theirs, the others are given back."""
        turn, self._turn = self._turn, None
        active = self.scheduler.active_requests
        if turn is None:
            return
        for state, carrier in turn.seated:
            if state.request_id in active:
                assert carrier.seat is not None
                carrier.seat.users.add(state.request_id)
            else:
                carrier.seat = None
        self.seats.drop_empty()
        gone = [state for state in turn.offered if state.request_id in active]
        for state in gone:
            self.traffic.began(state)
        carriers = [carrier for carrier in map(carrier_of, gone) if carrier is not None]
        self.admission.went(carriers, self.scheduler.waiting_requests.values())
        self._bring_ahead(turn.next)

    def _bring_ahead(self, keys: Sequence[Key]) -> None:
        """While the batch runs, bring in the next adapter that waits for room in it. No more than there are slots to
        spare: what was brought in ahead would go again for what comes after it."""
        names = [key for key in dict.fromkeys(keys) if isinstance(key, str)][: self.store.spare()]
        found = self.store.look(names)
        standings = {name: standing for name in names if (standing := found[name]) is not None}
        there = [name for name, standing in standings.items() if standing.resident]
        for name, standing in standings.items():
            if standing.ready and not standing.resident:
                with suppress(AdapterNotFoundError):  # unloaded just now
                    self.store.prefetch([*there, name])
                return

    def fail(self, state: Any, error: BaseException) -> None:
        """End one request with an error, and the children that it would have had."""
        scheduler, name = self.scheduler, state.request_id
        scheduler.waiting_requests.pop(name, None)
        if name in scheduler.waiting_requests_order:
            scheduler.waiting_requests_order.remove(name)
        scheduler._requests_to_fork[:] = [other for other in scheduler._requests_to_fork if other is not state]
        children, state.num_children = state.num_children, 0
        self.processor._handle_request_error(error, state)
        for number in range(children):
            output = replace(state.to_generation_output(), request_id=f"{name}__child#{number}")
            self.processor.output_router.deliver(output)
        self.processor.offloading_manager.free_request_cpu_cache(state)
        if name in scheduler.active_requests:
            scheduler.finish_request(name)
        self.touched()

    def fail_largest(self) -> bool:
        """The cache is too small for a request that is alone in it: fail that one. Returns whether there is any."""
        scheduler = self.scheduler
        alone = [state for state, _ in scheduler.starved_requests] or list(scheduler.waiting_requests.values())[:1]
        for state in alone[-1:]:
            tokens = state.current_len()
            error = f"The request has grown to {tokens} tokens, and needs more than the whole cache has room for."
            self.fail(state, ModelError(f"{error} Raise num_blocks, or ask for less."))
        return bool(alone)

    def lost(self, state: Any) -> bool:
        """Whether a request of a batch that was on its way has failed, or was cancelled, meanwhile."""
        status = state.status.name
        cancelled = status in ("PREFILLING", "DECODING") and (
            self.scheduler.active_requests.get(state.request_id) is not state
        )
        return status == "FAILED" or cancelled

    def seeded(self, state: Any, tokens: Sequence[int]) -> Sequence[int]:
        """Tokens of a request as the hashes of its cached blocks are to see them."""
        carrier = carrier_of(state)
        if carrier is None or carrier.seat is None or carrier.start is None:
            return tokens
        # Where it is invoked is a part of it: two invocations may begin in one block of the same tokens.
        return Seeded(tokens, (*carrier.seat.identity, carrier.start), carrier.start)

    def status(self) -> BatchingStatus:
        traffic = self.traffic
        return BatchingStatus(traffic.snapshot(), traffic.steps, len(list(self.seats)), traffic.unfinished_tokens())
