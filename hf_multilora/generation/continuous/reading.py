"""Reading: adapters that requests wait for, loaded or read again by threads while others run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ...memory.ahead import Hold
from ...memory.leasing import Standing
from ...memory.store import AdapterStore
from ..ids import Key, names_of

# Threads for names that are not registered, for those dropped from host memory, and to stand in line for a slot.
_THREADS = {"load": 4, "read": 2, "slot": 1}


class Reading:
    """What is being read for the requests of one manager.

    Args:
        store: of the model.
        ensure: loads a name that is not registered.
        woken: called, by any thread, when something has been read.
    """

    def __init__(
        self,
        store: AdapterStore,
        ensure: Callable[[str], None],
        woken: Callable[[], None],
    ) -> None:
        self.store = store
        self.ensure = ensure
        self._woken = woken
        self._lock = threading.RLock()
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._loading: dict[str, Future[Any]] = {}
        self._reads: dict[Key, Future[Hold]] = {}

    def loads(self, names: Sequence[str]) -> list[Future[Any]]:
        """What loads these names; requests that ask while one is being loaded share it."""
        with self._lock:
            for name in names:
                running = self._loading.get(name)
                if running is None or running.done():
                    self._loading[name] = self.background("load", self.ensure, name)
            return [self._loading[name] for name in names]

    def background(self, kind: str, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run a function in a thread of the kind."""
        with self._lock:
            if kind not in self._pools:
                self._pools[kind] = ThreadPoolExecutor(_THREADS[kind], thread_name_prefix=f"hf_multilora_{kind}")
            future = self._pools[kind].submit(work, *args)
        future.add_done_callback(lambda _: self._woken())
        return future

    def read_again(self, key: Key) -> BaseException | None:
        """Have adapters read that were dropped from host memory. Returns why they cannot be, once that is known."""
        future = self._reads.get(key)
        if future is None:
            if len(self._reads) < self.store.config.max_loras:
                self._reads[key] = self.background("read", self.store.hold, names_of(key))
            return None
        if not future.done():
            return None
        del self._reads[key]
        error = future.exception()
        if error is None:
            _close(future)  # dropped again by now: the next round asks anew
        return error

    def drop(self, standings: Mapping[Key, Standing | None]) -> None:
        """Let go of what nobody waits for any more, or what a slot has by now."""
        for key in list(self._reads):
            standing = standings.get(key)
            if standing is None or standing.resident:
                _close(self._reads.pop(key))

    def close(self) -> None:
        """Nobody waits for anything."""
        self.drop({})
        with self._lock:
            pools, self._pools = self._pools, {}
            self._loading.clear()
        for pool in pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _close(future: Future[Hold]) -> None:
    """Let go of what was read, now or when it has been."""

    def close(done: Future[Hold]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().close()

    future.cancel()
    future.add_done_callback(close)
