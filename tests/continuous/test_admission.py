"""Who of the waiting requests may go: seats, order, and that nobody starves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_multilora.generation.continuous.admission import Admission, Turn
from hf_multilora.generation.continuous.requests import KEYWORD, Carrier
from hf_multilora.memory.leasing import Standing


class Seats:
    """Stands in for the real ones: `slots` seats, and what lies in slots without one."""

    def __init__(self, slots):
        self.slots, self.taken, self.order, self.most = slots, {}, [], 0

    def __iter__(self):
        return iter(list(self.taken.values()))

    def get(self, tag):
        return self.taken.get(tag)

    def take(self, key):
        if len(self.taken) == self.slots:
            return None
        seat = SimpleNamespace(key=key, tag=key, users=set(), closing=False)
        self.taken[key] = seat
        self.order.append(key)
        return seat

    def crowded(self, more):
        self.most = max(self.most, len(self.taken) + more)

    def wait_for(self, key):
        self.awaited = key

    def leave(self, request):
        for seat in self.taken.values():
            seat.users.discard(request)
        self.taken = {tag: seat for tag, seat in self.taken.items() if seat.users}


class Queue:
    """Requests that arrive, wait, run for a number of steps and end; as the scheduler would have it."""

    def __init__(self, slots, patience=3, fairness="arrival", room=100, ranks=False):
        self.seats, self.room = Seats(slots), room
        self.waiting, self.running, self.served, self.begun = [], {}, {}, []
        self.resident: set = set()
        self.admission = Admission(
            self.seats, lambda state, seat: None, lambda: self.served, lambda name: self.running[name][1], patience,
            fairness, ranks,
        )  # fmt: skip

    def add(self, name, key, steps=1):
        carrier = Carrier(key)
        state = SimpleNamespace(
            request_id=name, logit_processor_kwargs={KEYWORD: carrier}, remaining_prefill_tokens=[1] * 4, steps=steps
        )
        self.waiting.append(state)
        return carrier

    def step(self):
        """One batch: returns the names of those who began."""
        for name, (state, left) in list(self.running.items()):
            self.running[name] = (state, left - 1)
            if left == 1:
                del self.running[name]
                self.seats.leave(name)
        keys = {s.logit_processor_kwargs[KEYWORD].key for s in self.waiting} - {None}
        standings = {key: Standing(key, key in self.resident, True) for key in keys}
        turn = Turn(self.room - len(self.running), 10_000)
        self.admission.offer(list(self.waiting), standings, turn)
        went = turn.offered[: max(0, self.room - len(self.running))]
        for state in went:
            carrier = state.logit_processor_kwargs[KEYWORD]
            self.running[state.request_id] = (state, state.steps)
            if carrier.seat is not None:
                carrier.seat.users.add(state.request_id)
            self.waiting.remove(state)
        for state, carrier in turn.seated:
            if state.request_id not in self.running:
                carrier.seat = None
        self.seats.taken = {tag: seat for tag, seat in self.seats.taken.items() if seat.users}
        self.admission.went([s.logit_processor_kwargs[KEYWORD] for s in went], self.waiting)
        self.begun += [state.request_id for state in went]
        assert len(self.seats.taken) <= self.seats.slots
        return [state.request_id for state in went]


def test_no_more_adapters_than_slots_and_the_base_needs_none():
    queue = Queue(slots=2)
    for name, key in [("a1", "a"), ("b1", "b"), ("c1", "c"), ("x", None), ("a2", "a")]:
        queue.add(name, key, steps=2)
    assert queue.step() == ["x", "a1", "b1", "a2"]
    assert queue.step() == []
    assert queue.step() == ["c1"]


@pytest.mark.parametrize(("room", "most"), [(100, 5), (6, 4), (4, 2)])
def test_slots_that_are_missed_are_counted_as_far_as_there_is_room_in_the_batch(room, most):
    queue = Queue(slots=2, room=room)
    for i in range(10):
        queue.add(f"r{i}", f"a{i % 5}", steps=2)
    queue.step()
    assert queue.seats.most == most


def test_who_has_a_seat_goes_before_who_lies_in_a_slot_before_who_must_be_brought():
    queue = Queue(slots=2)
    queue.add("a1", "a", steps=5)
    queue.step()
    queue.resident = {"a", "b"}
    for name, key in [("c1", "c"), ("b1", "b"), ("a2", "a")]:
        queue.add(name, key)
    assert queue.step() == ["a2", "b1"]


def test_over_ranks_what_lies_in_a_slot_by_chance_does_not_count():
    queue = Queue(slots=2, ranks=True)
    queue.add("a1", "a", steps=5)
    queue.step()
    queue.resident = {"a", "b"}
    for name, key in [("c1", "c"), ("b1", "b"), ("a2", "a")]:
        queue.add(name, key)
    assert queue.step() == ["a2", "c1"]


@pytest.mark.parametrize("patience", [1, 4, 9])
def test_a_request_is_passed_by_no_more_than_patience_before_a_seat_is_emptied_for_it(patience):
    queue = Queue(slots=1, patience=patience)
    queue.add("a0", "a", steps=3)
    queue.step()
    waits = queue.add("b", "b")
    for turn in range(1, 60):
        queue.add(f"a{turn}", "a", steps=3)
        if "b" in queue.step():
            break
    else:
        pytest.fail("b never went")
    assert waits.passed == patience
    assert turn <= patience + 3, "then only those who run are waited for"


def test_the_seat_with_the_least_left_to_do_is_emptied():
    queue = Queue(slots=2, patience=4)
    queue.add("long", "a", steps=30)
    queue.add("short", "b", steps=6)
    queue.step()
    queue.add("c", "c")
    for turn in range(20):
        queue.add(f"a{turn}", "a", steps=30)
        queue.add(f"b{turn}", "b", steps=3)
        if "c" in queue.step():
            break
    assert "c" in queue.begun and "a0" in queue.begun
    closed = queue.seats.get("a")
    assert closed is not None and "long" in closed.users, "who runs there goes on"
    assert queue.seats.get("b") is None, "b had the least left to do, and made room"


def test_a_seat_opens_again_when_the_one_that_waited_for_it_is_gone():
    queue = Queue(slots=1, patience=1)
    queue.add("a0", "a", steps=9)
    queue.step()
    queue.add("b", "b")
    queue.add("a1", "a", steps=9)
    queue.step()
    queue.add("a2", "a")
    assert queue.step() == []
    queue.waiting = [state for state in queue.waiting if state.request_id != "b"]  # cancelled
    assert queue.step() == ["a2"]


def test_fewest_tokens_first():
    queue = Queue(slots=3, fairness="tokens", room=1)
    queue.served = {"a": 100, "b": 10, None: 50}
    queue.resident = {"a", "b"}
    for name, key in [("a", "a"), ("base", None), ("b", "b")]:
        queue.add(name, key)
    assert [queue.step() for _ in range(3)] == [["base"], ["b"], ["a"]]  # the base needs no slot
    arrival = Queue(slots=3, room=1)
    arrival.resident = {"a", "b"}
    for name, key in [("a", "a"), ("b", "b")]:
        arrival.add(name, key)
    assert [arrival.step() for _ in range(2)] == [["a"], ["b"]]


def test_a_request_that_cannot_be_seated_is_refused_alone():
    queue = Queue(slots=2)
    queue.add("good", "a")
    queue.add("bad", "b")
    take = queue.seats.take

    def failing(key):
        if key == "b":
            raise ValueError("no such layer")
        return take(key)

    queue.seats.take = failing
    turn = Turn(10, 100)
    queue.admission.offer(queue.waiting, {k: Standing(k, False, True) for k in "ab"}, turn)
    assert [state.request_id for state in turn.offered] == ["good"]
    assert [(state.request_id, str(error)) for state, error in turn.refused] == [("bad", "no such layer")]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from(["arrival", "tokens"]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=80),
)
def test_everybody_goes_and_is_passed_by_few(slots, patience, fairness, arrivals):
    queue = Queue(slots, patience, fairness, room=4)
    carriers = []
    for i, (adapter, steps) in enumerate(arrivals):
        carriers.append(queue.add(str(i), f"a{adapter}" if adapter else None, steps))
        if i % 2:
            queue.step()
    for _ in range(2000):
        if not queue.waiting:
            break
        queue.step()
    assert not queue.waiting
    assert len(queue.begun) == len(set(queue.begun)) == len(arrivals)
