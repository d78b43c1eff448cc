"""KeyboardInterrupt at any line of the store: afterwards it serves the right bytes, and nobody waits for ever."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from collections.abc import Callable

import pytest
from memory_bed import Files, block, holds, in_host, store_of

from hf_multilora.errors import AdapterNotFoundError
from hf_multilora.memory.store import AdapterStore

CONTENTS = dict(a=1, b=2, c=3, d=4)
FOLDER = sys.modules[AdapterStore.__module__].__file__.removesuffix("store.py")
MIX = (("c", 0.5), ("b", 1.0))


def interrupted(act: Callable[[], None], at: int) -> bool:
    """Run `act` with a KeyboardInterrupt before the `at`-th line of the store's code; False if it has fewer."""
    count = 0

    def local(frame, event, arg):
        nonlocal count
        # A `with` line is reported a second time on the way out, and `try:` does nothing: no signal arrives there.
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not source.lstrip().startswith(("with ", "try:")):
            count += 1
            if count == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return local

    def trace(frame, event, arg):
        # What a destructor raises is not seen by anybody, so it is no interrupt of `act`.
        inside = frame.f_code.co_filename.startswith(FOLDER) and frame.f_code.co_name != "__del__"
        return local if inside else None

    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def acquire(store: AdapterStore, files: Files) -> None:
    with store.acquire([MIX, "a"]):
        pass


def reload(store: AdapterStore, files: Files) -> None:
    files.contents["d"] = 8
    store.register("d", files.loader("d"), reload=True)


def pin(store: AdapterStore, files: Files) -> None:
    store.pin("a")


def unload(store: AdapterStore, files: Files) -> None:
    store.unload("d")


def prefetch(store: AdapterStore, files: Files) -> None:
    store._make_resident([store.entry("a"), store.entry("b")])


@pytest.mark.parametrize("act", [acquire, reload, pin, unload, prefetch])
def test_an_interrupt_anywhere(act):
    at = 0
    while True:
        at += 1
        files = Files(**CONTENTS)
        store = store_of(files, max_loras=2, max_cpu_loras=3)
        with store.acquire(["d"]):
            pass
        if not interrupted(lambda store=store, files=files: act(store, files), at):
            break
        gc.collect(0)
        check(store, files, at)
    assert at > 30


def check(store: AdapterStore, files: Files, at: int) -> None:
    done = threading.Event()
    problems: list[BaseException] = []

    def look() -> None:  # another thread, which would meet any lock, turn or place in line that was left behind
        try:
            for name in "abcd":
                try:
                    with store.acquire([name], block=False) as lease:
                        generations = {store.entry(name).tag: files.contents[name]}
                        assert lease.tags[name] in generations
                        old, new = block(CONTENTS[name]), block(int(files.contents[name]))
                        assert holds(store, lease.slots[name], old) or holds(store, lease.slots[name], new), name
                except AdapterNotFoundError:
                    assert name == "d"
                store.register(name, files.loader(name), reload=True)
            for name in "abc":
                store.unpin(name)
            with store.acquire(["a", "b"], block=False) as lease:
                assert holds(store, lease.slots["a"], block(1)) and holds(store, lease.slots["b"], block(2))
            assert not any(slot.users for slot in store._slots)
            assert len(in_host(store)) <= 3
        except BaseException as error:
            problems.append(error)
        done.set()

    threading.Thread(target=look, daemon=True).start()
    assert done.wait(20), f"deadlock after an interrupt at line {at}"
    assert not problems, (at, problems[0])
