"""Reading ahead: for the next wave, which nothing waits for and nothing is taken from; and several files at once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from memory_bed import Files, block, holds, in_host, resident, store_of
from waits import until

from hf_multilora.errors import SlotError
from hf_multilora.memory.ahead import read_ahead
from hf_multilora.memory.registry import Loaded


def nobody_reads() -> bool:
    return not any(thread.name == "hf_multilora_ahead" for thread in threading.enumerate())


def test_free_slots_are_filled() -> None:
    store = store_of(Files(a=1, b=2, c=3), max_loras=3)
    with store.acquire(["a"]):
        ahead = store.ahead(["b", "c"])
        assert resident(store) == {"a", "b", "c"}
        before = store.status().resident
        assert before.misses == 1 and before.evictions == 0
        with store.acquire(["b", "c"], block=False) as lease:
            ahead.close()
            assert holds(store, lease.slots["b"], block(2)) and holds(store, lease.slots["c"], block(3))
        after = store.status().resident
        assert (after.misses, after.hits, after.nbytes) == (1, 2, before.nbytes)


def test_what_is_in_use_or_pinned_stays() -> None:
    store = store_of(Files(a=1, b=2, c=3, d=4), max_loras=3)
    store.pin("a")
    with store.acquire(["b"]) as lease:
        ahead = store.ahead(["c", "d"])
        assert resident(store) == {"a", "b", "c"}, "one slot was free"
        assert holds(store, lease.slots["b"], block(2))
    ahead.close()
    with store.acquire(["b", "c"]), closing(store.ahead(["d"])):
        assert resident(store) == {"a", "b", "c"}


def test_none_of_them_takes_anothers_slot() -> None:
    """`b` is resident and was used longest ago, so that `c` alone would take its slot."""
    store = store_of(Files(a=1, b=2, c=3, d=4), max_loras=3)
    for name in ("b", "d"):
        store.acquire([name]).__exit__()
    with store.acquire(["a"]), closing(store.ahead(["c", "b"])):
        assert resident(store) == {"a", "b", "c"}
        assert store.status().resident.nbytes == sum(block(seed).nbytes for seed in (1, 2, 3, 4)), "b was copied once"


def test_dropped_ones_are_read_and_stay_until_closed() -> None:
    files = Files(a=1, b=2, c=3, d=4)
    store = store_of(files, max_loras=2, max_cpu_loras=2)
    with store.acquire(["a", "b"]):
        assert in_host(store) == {"a", "b"}
        files.reads.clear()
        ahead = store.ahead(["c", "d"])
        until(lambda: in_host(store) == {"a", "b", "c", "d"})
        assert files.reads == ["c", "d"] and resident(store) == {"a", "b"}
    assert in_host(store) == {"c", "d"}, "what is used no more goes first"
    with store.acquire(["c", "d"], block=False):
        ahead.close()
        ahead.close()
        assert files.reads == ["c", "d"]
        assert in_host(store) == {"c", "d"}
    assert store.status().registered.misses == 2, "a and b alone had to be waited for"


def test_closing_lets_the_blocks_go() -> None:
    store = store_of(Files(a=1, b=2, c=3), max_loras=1, max_cpu_loras=1)
    with store.acquire(["a"]):
        ahead = store.ahead(["b", "c"])
        until(lambda: in_host(store) == {"a", "b", "c"})
        ahead.close()
        assert in_host(store) == {"a"}


def test_a_lost_one_lets_the_blocks_go() -> None:
    store = store_of(Files(a=1, b=2), max_loras=1, max_cpu_loras=1)
    with store.acquire(["a"]):
        ahead = store.ahead(["b"])
        until(lambda: in_host(store) == {"a", "b"} and nobody_reads())
        del ahead
    assert len(in_host(store)) == 1


class Slow(Files):
    """Files that are read when the test says so."""

    def __init__(self, **contents: int) -> None:
        super().__init__(**contents)
        self.go = threading.Event()
        self.go.set()
        self.began = threading.Event()

    def loader(self, name: str) -> Callable[[], Loaded]:
        load = super().loader(name)

        def slow() -> Loaded:
            self.began.set()
            assert self.go.wait(20)
            return load()

        return slow


def test_a_call_joins_what_is_being_read() -> None:
    files = Slow(a=1, b=2)
    store = store_of(files, max_loras=1, max_cpu_loras=1)
    files.reads.clear()
    files.go.clear()
    files.began.clear()
    with closing(store.ahead(["a"])):
        assert files.began.wait(20)
        threading.Timer(0.05, files.go.set).start()
        with store.acquire(["a"]) as lease:
            assert holds(store, lease.slots["a"], block(1))
    assert files.reads == ["a"]


def test_closed_while_it_reads() -> None:
    files = Slow(a=1, b=2, c=3)
    store = store_of(files, max_loras=1, max_cpu_loras=1)
    files.reads.clear()
    files.go.clear()
    files.began.clear()
    ahead = store.ahead(["a", "b"])
    assert files.began.wait(20)
    ahead.close()
    files.go.set()
    until(nobody_reads)
    assert files.reads == ["a"], "the second was not begun"
    assert resident(store) == set() and len(in_host(store)) == 1


def test_calls_that_wait_come_first() -> None:
    store = store_of(Files(a=1, b=2, c=3, d=4), max_loras=2)
    first = store.acquire(["a"])
    got: list[bool] = []

    def call() -> None:
        with store.acquire(["b", "c"]) as lease:
            got.append(holds(store, lease.slots["b"], block(2)) and holds(store, lease.slots["c"], block(3)))

    waiter = threading.Thread(target=call)
    waiter.start()
    until(lambda: bool(store._line.tickets))
    with closing(store.ahead(["d"])):
        assert resident(store) == {"a"}
        first.__exit__()
        waiter.join(20)
    assert got == [True]


def test_errors_are_the_calls_own() -> None:
    files = Files(a=1, b=2)
    store = store_of(files, max_loras=1, max_cpu_loras=1)
    files.contents["a"] = OSError("gone")
    with closing(store.ahead(["a", "nobody"])):
        until(lambda: files.reads.count("a") == 2)
    with pytest.raises(OSError, match="gone"):
        store.acquire(["a"])
    with store.acquire(["b"]):
        pass


def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of waves: the call goes on, and reads what it needs itself."""
    store = store_of(Files(a=1, b=2), max_loras=1, max_cpu_loras=1)
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if self.name == "hf_multilora_ahead":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with closing(store.ahead(["a", "b"])):
        pass
    with store.acquire(["a"]) as lease:
        assert holds(store, lease.slots["a"], block(1))


def test_unloaded_meanwhile() -> None:
    files = Slow(a=1, b=2)
    store = store_of(files, max_loras=1, max_cpu_loras=1)
    files.go.clear()
    files.began.clear()
    with closing(store.ahead(["a"])):
        assert files.began.wait(20)
        store.unload("a")
        files.go.set()
        until(nobody_reads)
    assert store.names() == ["b"] and resident(store) == set()


def test_threads_in_waves() -> None:
    """Each thread: a wave, the next one prepared; loads and unloads beside them. All end, and see their own bytes."""
    contents = {f"a{i}": i for i in range(8)}
    files = Files(**contents)
    store = store_of(files, max_loras=3, max_cpu_loras=4)
    failed: list[BaseException] = []
    stop = time.monotonic() + 3

    def waves(seed: int) -> None:
        rng = random.Random(seed)
        ahead = None
        try:
            while time.monotonic() < stop:
                names = rng.sample(sorted(contents), rng.randint(1, 3))
                with store.acquire(names) as lease:
                    if ahead is not None:
                        ahead.close()
                    ahead = store.ahead(rng.sample(sorted(contents), 3))
                    for name in names:
                        assert holds(store, lease.slots[name], block(contents[name]))
        except BaseException as error:
            failed.append(error)
        finally:
            if ahead is not None:
                ahead.close()

    def churn() -> None:
        try:
            while time.monotonic() < stop:
                store.register("extra", files.loader("a1"))
                with closing(store.ahead(["extra", "a2"])):
                    store.unload("extra")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=waves, args=(seed,), daemon=True) for seed in range(4)]
    threads.append(threading.Thread(target=churn, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert not failed, failed
    until(nobody_reads)
    store.ahead([]).close()
    status = store.status()
    assert not any(adapter.in_use for adapter in status.adapters)
    assert sum(entry.packed is not None for entry in store._registry) <= 4
    with pytest.raises(SlotError):
        store.acquire(["a0", "a1", "a2", "a3"])


class TestReadAhead:
    @pytest.fixture(autouse=True)
    def many_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hf_multilora.memory.ahead.cores", lambda: 16)

    def loaded(self, name: str) -> Loaded:
        return Loaded(block(1), source=name)

    def test_in_order_and_at_once(self) -> None:
        barrier = threading.Barrier(3)

        def read(name: str) -> Loaded:
            if name in "abc":
                barrier.wait(20)
            return self.loaded(name)

        reads = {name: lambda name=name: read(name) for name in "abcdefgh"}
        found = [(name, first()) for name, first in read_ahead(reads)]
        assert [name for name, _ in found] == list("abcdefgh") == [loaded.source for _, loaded in found]
        assert all(loaded.read_ms is not None and loaded.read_ms >= 0 for _, loaded in found)

    def test_few_cores_read_one_local_file_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hf_multilora.memory.ahead.cores", lambda: 2)
        inside: list[int] = []
        most: list[int] = []

        def read(name: str) -> Loaded:
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()
            return self.loaded(name)

        reads = {name: lambda name=name: read(name) for name in "abcd"}
        assert [first().source for _, first in read_ahead(reads)] == list("abcd")
        assert max(most) == 1
        assert [first().source for _, first in read_ahead(reads, remote=True)] == list("abcd")
        assert max(most) > 1

    def test_no_more_than_a_few_ahead(self) -> None:
        begun: list[str] = []

        def read(name: str) -> Loaded:
            begun.append(name)
            return self.loaded(name)

        with closing(read_ahead({str(i): lambda i=i: read(str(i)) for i in range(50)})) as ahead:
            for _ in range(3):
                next(ahead)
            time.sleep(0.1)
            assert len(begun) <= 3 + 4
        assert len(begun) <= 3 + 4

    def test_errors_come_when_their_turn_is(self) -> None:
        def broken() -> Loaded:
            raise ValueError("b is broken")

        with closing(read_ahead({"a": lambda: self.loaded("a"), "b": broken})) as ahead:
            assert next(ahead)[1]().source == "a"
            name, first = next(ahead)
            with pytest.raises(ValueError, match="b is broken"):
                first()
            assert name == "b"
