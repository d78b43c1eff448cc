"""AdapterStore under threads: order of arrival, waits that end, waits that never could, and rows that never change."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from memory_bed import Files, block, holds, in_host, resident, store_of
from waits import until

from hf_multilora.errors import AdapterNotFoundError, SlotError
from hf_multilora.memory.registry import Loaded

ABCD = dict(a=1, b=2, c=3, d=4)
LONG = 20.0  # seconds after which a test has deadlocked


class Run(threading.Thread):
    """A thread that keeps what it returned or raised."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._act, self.result, self.error = act, None, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._act()
        except BaseException as error:
            self.error = error

    def end(self) -> object:
        self.join(LONG)
        assert not self.is_alive(), "deadlock"
        if self.error is not None:
            raise self.error
        return self.result


def waiting(store) -> int:
    return len(store._line.tickets)


class Holder:
    """A thread that acquires in steps and releases when it is told to."""

    def __init__(self, store, *steps: list[str]) -> None:
        self.store, self.steps = store, steps
        self.go = [threading.Event() for _ in steps]
        self.leave = threading.Event()
        self.held = 0
        self.thread = Run(self._run)

    def _run(self) -> None:
        leases = []
        try:
            for go, step in zip(self.go, self.steps, strict=True):
                assert go.wait(LONG)
                leases.append(self.store.acquire(step))
                self.held += 1
            assert self.leave.wait(LONG)
        finally:
            for lease in leases:
                self.store.release(lease)

    def step(self, number: int) -> Holder:
        self.go[number].set()
        return self


def held(holder: Holder, number: int = 1) -> Holder:
    until(lambda: holder.held >= number or not holder.thread.is_alive())
    assert holder.held >= number, holder.thread.error
    return holder


def finish(*holders: Holder) -> None:
    for holder in holders:
        holder.leave.set()
    for holder in holders:
        holder.thread.end()


def test_slots_go_to_whoever_came_first():
    store = store_of(Files(**ABCD))
    one, two = held(Holder(store, ["a"]).step(0)), held(Holder(store, ["b"]).step(0))
    wide = Holder(store, ["c", "d"]).step(0)
    until(lambda: waiting(store) == 1)
    narrow = Holder(store, ["a"]).step(0)  # resident, but whoever came first must not wait for ever
    until(lambda: waiting(store) == 2)
    with pytest.raises(SlotError, match="No room now"):
        Run(lambda: store.acquire(["a"], block=False)).end()
    finish(one)
    time.sleep(0.02)
    assert wide.held == narrow.held == 0
    finish(two)
    held(wide)
    assert narrow.held == 0
    finish(wide)
    finish(held(narrow))


def test_a_nested_call_goes_before_those_who_wait():
    store = store_of(Files(**ABCD), max_loras=2)
    outer = held(Holder(store, ["a"], ["b"]).step(0))
    other = held(Holder(store, ["c"]).step(0))
    first = Holder(store, ["c", "d"]).step(0)
    until(lambda: waiting(store) == 1)
    outer.step(1)
    until(lambda: waiting(store) == 2)
    finish(other)
    held(outer, 2)
    assert first.held == 0
    finish(outer)
    finish(held(first))


def test_a_nested_call_that_cannot_fit_raises():
    store = store_of(Files(**ABCD))
    with store.acquire(["a"]):
        with pytest.raises(SlotError, match="nested"):
            store.acquire(["b", "c"])
        with store.acquire(["a", "b"]), pytest.raises(SlotError, match="nested"):
            store.acquire(["c"])
    assert waiting(store) == 0
    with store.acquire(["b", "c"]):
        pass


def test_two_nested_calls_that_wait_for_each_other_do_not_hang():
    store = store_of(Files(**ABCD))
    one, two = held(Holder(store, ["a"], ["c"]).step(0)), held(Holder(store, ["b"], ["d"]).step(0))
    one.step(1)
    until(lambda: waiting(store) == 1)
    two.step(1)  # it would close the circle
    with pytest.raises(SlotError, match="nested"):
        two.thread.end()
    finish(held(one, 2))


def test_a_nested_wait_that_can_end_is_waited_for():
    store = store_of(Files(**ABCD), max_loras=3)
    free = held(Holder(store, ["c"]).step(0))
    one, two = held(Holder(store, ["a"], ["d"]).step(0)), held(Holder(store, ["b"], ["d"]).step(0))
    one.step(1)
    two.step(1)
    until(lambda: waiting(store) == 2)
    assert one.thread.is_alive() and two.thread.is_alive()
    finish(free)
    held(one, 2)
    held(two, 2)
    finish(one, two)


def test_who_asks_without_waiting_makes_nobody_elses_wait_hopeless(monkeypatch):
    """A generation thread asks for slots in each round while it holds others; it never waits, and will let go."""
    store, seen = store_of(Files(**ABCD)), []
    leave = store._line.leave

    def look(ticket):
        seen.extend(store._line.hopeless(other) for other in store._line.tickets if other is not ticket)
        leave(ticket)

    with store.acquire(["a", "b"]):
        waits = Holder(store, ["c"]).step(0)
        until(lambda: waiting(store) == 1)
        monkeypatch.setattr(store._line, "leave", look)
        with pytest.raises(SlotError, match="No room now"):
            store.acquire(["d"], block=False)
        monkeypatch.undo()
    assert seen == [False]
    finish(held(waits))


def test_a_pin_that_makes_a_wait_endless_ends_it():
    store = store_of(Files(**ABCD))
    with store.acquire(["a", "b"]):
        wide = Holder(store, ["c", "d"]).step(0)
        until(lambda: waiting(store) == 1)
        store.pin("a")
        with pytest.raises(SlotError, match=r"pinned \(a\)"):
            wide.thread.end()


def test_pin_waits_for_a_slot_like_a_call():
    store = store_of(Files(**ABCD), max_loras=1)
    lease = store.acquire(["a"])
    pin = Run(lambda: store.pin("b"))
    until(lambda: waiting(store) == 1)
    store.release(lease)
    pin.end()
    assert resident(store) == {"b"} and store.entry("b").pinned


def test_a_reload_with_all_slots_busy_lets_new_calls_wait():
    files = Files(**ABCD)
    store = store_of(files, max_loras=1)
    old = held(Holder(store, ["a"]).step(0))
    files.contents["a"] = 9
    store.register("a", files.loader("a"), reload=True)
    assert holds(store, 0, block(1))
    new = Holder(store, ["a"]).step(0)
    until(lambda: waiting(store) == 1)
    assert holds(store, 0, block(1))
    finish(old)
    held(new)
    assert holds(store, 0, block(9))
    finish(new)


def test_unload_waits_for_calls_in_flight_and_then_frees():
    store = store_of(Files(**ABCD))
    use = held(Holder(store, ["a", "b"]).step(0))
    unload = Run(lambda: store.unload("a"))
    until(lambda: "a" not in store)
    with pytest.raises(AdapterNotFoundError):
        store.acquire(["a"])
    assert unload.is_alive() and holds(store, 0, block(1))
    finish(use)
    unload.end()
    assert resident(store) == {"b"}


def test_unload_with_a_time_limit_frees_later():
    store = store_of(Files(**ABCD), max_loras=1)
    use = held(Holder(store, ["a"]).step(0))
    with pytest.raises(SlotError, match="still used by 1 calls after 0.01 s"):
        store.unload("a", timeout=0.01)
    assert "a" not in store and holds(store, 0, block(1))
    finish(use)
    assert resident(store) == set()


def test_unload_while_a_call_waits_for_the_name():
    store = store_of(Files(**ABCD), max_loras=1)
    use = held(Holder(store, ["a"]).step(0))
    late = Holder(store, ["b"]).step(0)
    until(lambda: waiting(store) == 1)
    store.unload("b")
    with pytest.raises(AdapterNotFoundError):
        late.thread.end()
    finish(use)


def test_an_unload_and_a_nested_call_that_wait_for_each_other_do_not_hang():
    store = store_of(Files(**ABCD))
    one = held(Holder(store, ["a"], ["c"]).step(0))

    def unload():
        with store.acquire(["b"]):
            store.unload("a")

    two = Run(unload)
    until(lambda: "a" not in store)
    one.step(1)  # needs the slot of b, whose holder waits for a
    with pytest.raises(SlotError):
        one.thread.end()
    two.end()


def test_an_unload_during_a_reload_wins():
    files = Files(a=1)
    store = store_of(files)
    begun, go = threading.Event(), threading.Event()

    def load():
        begun.set()
        assert go.wait(LONG)
        return Loaded(block(2), "slow")

    reload = Run(lambda: store.register("a", load, reload=True))
    assert begun.wait(LONG)
    store.unload("a")
    go.set()
    with pytest.raises(AdapterNotFoundError, match="unloaded while"):
        reload.end()
    assert store.names() == []


def test_threads_that_ask_at_once_load_once():
    store, gate, reads = store_of(), threading.Barrier(8), []

    def load():
        reads.append(1)
        time.sleep(0.02)
        return Loaded(block(1), "slow")

    def ask():
        gate.wait(LONG)
        return store.ensure("a", load)

    entries = [run.end() for run in [Run(ask) for _ in range(8)]]
    assert len(reads) == 1 and len(set(map(id, entries))) == 1


def test_a_dropped_adapter_is_read_once_for_all_who_wait():
    files = Files(**ABCD)
    store = store_of(files, max_loras=1, max_cpu_loras=1)
    gate = threading.Barrier(8)

    def ask():
        gate.wait(LONG)
        with store.acquire(["a"]) as lease:
            return holds(store, lease.slots["a"], block(1))

    files.reads.clear()
    assert all(run.end() for run in [Run(ask) for _ in range(8)])
    assert files.reads == ["a"]


def test_a_load_that_fails_does_not_fail_those_who_waited_for_it():
    store, reads, begun, go = store_of(), [], threading.Event(), threading.Event()

    def load():
        reads.append(1)
        if len(reads) == 1:
            begun.set()
            assert go.wait(LONG)
            raise OSError("first")
        return Loaded(block(1), "second")

    first = Run(lambda: store.ensure("a", load))
    assert begun.wait(LONG)
    second = Run(lambda: store.ensure("a", load))
    go.set()
    with pytest.raises(OSError, match="first"):
        first.end()
    assert second.end() is store.entry("a") and len(reads) == 2


def test_a_slow_load_holds_up_nobody_else():
    files = Files(**ABCD)
    store = store_of(files, max_loras=2, max_cpu_loras=2)  # a and b are dropped
    begun, go = threading.Event(), threading.Event()
    slow = store.entry("a").version.load

    def load():
        begun.set()
        assert go.wait(LONG)
        return slow()

    store.register("a", slow, reload=True)
    with store.acquire(["c", "d"]):
        pass
    object.__setattr__(store.entry("a").version, "load", load)
    call = Holder(store, ["a"]).step(0)
    assert begun.wait(LONG)
    with store.acquire(["c", "d"]) as lease:
        assert holds(store, lease.slots["d"], block(4))
    store.register("e", Files(e=5).loader("e"))
    go.set()
    finish(held(call))


def test_retarget_waits_for_calls_in_flight_and_holds_back_new_ones():
    store = store_of(Files(**ABCD))
    use = held(Holder(store, ["a"]).step(0))
    move = Run(lambda: store.retarget("cpu", torch.bfloat16))
    until(lambda: waiting(store) == 1)
    late = Holder(store, ["b"]).step(0)
    until(lambda: waiting(store) == 2)
    assert store.arena.dtype == torch.float32 and holds(store, 0, block(1))
    finish(use)
    move.end()
    held(late)
    assert holds(store, store.status().slots.index("b"), block(2, torch.bfloat16))
    finish(late)


@pytest.mark.parametrize("max_cpu_loras", [None, 4])
def test_rows_never_change_under_threads(max_cpu_loras):
    """Eight threads use random sets of adapters and mixes while others load, reload, unload, pin and prefetch."""
    names = [f"n{i}" for i in range(7)]
    versions = dict.fromkeys(names, 0)
    store = store_of(max_loras=4, max_cpu_loras=max_cpu_loras)
    contents: dict[object, int] = {}  # tag -> what was seen under it
    errors: list[BaseException] = []
    stop = threading.Event()
    lock = threading.Lock()

    def loader(name: str):
        return lambda: Loaded(block(10 * names.index(name) + versions[name] % 10), name)

    def publish(name: str, reload: bool) -> None:
        with lock:
            versions[name] += 1
        store.register(name, loader(name), reload=reload)

    for name in names:
        publish(name, False)

    def content(slot: int) -> int:
        seed = next((s for s in range(10 * len(names)) if holds(store, slot, block(s))), None)
        assert seed is not None, "a slot holds no adapter's bytes"
        return seed

    def user(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            keys = rng.sample(names, rng.randint(1, 3))  # with a pair at most three: a pin takes a slot
            pair = tuple((name, 0.5) for name in rng.sample(names, 2))
            try:
                lease = store.acquire([*keys, pair] if len(keys) < 3 and rng.random() < 0.5 else keys)
            except AdapterNotFoundError:
                continue
            with lease:
                assert len(set(lease.slots.values())) == len(lease.slots)
                before = store.arena.storage.clone()
                for key in keys:
                    seen = content(lease.slots[key])
                    assert seen // 10 == names.index(key)
                    assert contents.setdefault(lease.tags[key], seen) == seen
                time.sleep(rng.random() * 0.002)
                size = store.arena.slot_bytes
                for slot in lease.slots.values():
                    assert store.arena.slot(slot).equal(before[slot * size : (slot + 1) * size])

    def changer(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            name = rng.choice(names)
            with suppress(AdapterNotFoundError):
                act = rng.randrange(5)
                if act == 0:
                    publish(name, True)
                elif act == 1:
                    store.unload(name)
                    publish(name, True)
                elif act == 2:
                    store.prefetch([name]).result(LONG)
                elif act == 3 and name == "n0":  # one pin leaves room for the widest lease
                    store.pin(name)
                    store.unpin(name)
                else:
                    store.status()

    def guarded(act: Callable[[int], None], seed: int) -> None:
        try:
            act(seed)
        except BaseException as error:
            errors.append(error)

    users = [Run(lambda seed=seed: guarded(user, seed)) for seed in range(8)]
    changers = [Run(lambda seed=seed: guarded(changer, seed)) for seed in (100, 101)]
    for run in users:
        run.join(120)
        assert not run.is_alive(), "deadlock"
    stop.set()
    for run in changers:
        run.end()
    assert not errors, errors[0]
    assert not any(slot.users or slot.stale for slot in store._slots) and waiting(store) == 0
    assert not any(entry.holders for entry in store._registry)
    if max_cpu_loras:
        assert len(in_host(store)) <= max_cpu_loras
