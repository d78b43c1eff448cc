"""Reading ahead: adapters of the next wave while one decodes, and several files at once."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from transformers.utils import logging

from .direct import cores
from .lease import Grant
from .registry import Entry, Loaded

if TYPE_CHECKING:
    from .store import AdapterStore

logger = logging.get_logger(__name__)

_AT_ONCE = 4  # files that are read at the same time, where there are cores for it


class Hold:
    """Host blocks that are not dropped until `close`."""

    def __init__(self, store: AdapterStore, entries: Sequence[Entry]) -> None:
        self._store, self._entries, self._grant = store, list(entries), Grant()
        for entry in self._entries:
            entry.holders.add(self._grant)

    def close(self) -> None:
        """Let go of the host blocks. A second time does nothing."""
        with self._store._changing():
            for entry in self._entries:
                entry.holders.discard(self._grant)


class Ahead(Hold):
    """Adapters that a call to come will need: read again where they were dropped, and kept in host memory until
    `close`; in slots, as many as nobody uses or waits for.

    Nothing here holds a slot, so that no call ever waits for it; and what cannot be read is not its business, for the
    call that needs it will meet the same error.
    """

    def __init__(self, store: AdapterStore, entries: Sequence[Entry]) -> None:
        super().__init__(store, entries)
        self._closed = False

    def begin(self) -> None:
        """Start; what has to be read is read by a thread of its own."""
        if all(entry.packed is not None for entry in self._entries):
            self._run()
        else:
            try:
                threading.Thread(target=self._run, name="hf_multilora_ahead", daemon=True).start()
            except RuntimeError as error:  # the system has no more threads: the call reads what it needs itself
                logger.debug(f"Nothing is read ahead: {error}")

    def _run(self) -> None:
        try:
            self._store._make_resident(self._entries, self._grant, lambda: not self._closed)
        except Exception as error:
            logger.debug(f"Reading ahead stopped: {error}")

    def close(self) -> None:
        """Let go of the host blocks. Does not wait for what is being read. A second time does nothing."""
        self._closed = True
        super().close()


def read_ahead(
    reads: Mapping[str, Callable[[], Loaded]], *, remote: bool = False
) -> Generator[tuple[str, Callable[[], Loaded]], None, None]:
    """Names, in order, each with what gives the adapter that is being read already, a few of them at a time.

    Close the iterator to stop. What a loader raises, is raised where its adapter is asked for.

    Args:
        reads: name -> loader.
        remote: whether some of it comes over a network, which is waited for rather than worked for.
    """

    def timed(read: Callable[[], Loaded]) -> Loaded:
        began = time.perf_counter()
        loaded = read()
        return replace(loaded, read_ms=(time.perf_counter() - began) * 1e3)

    todo = deque(reads.items())
    running: deque[tuple[str, Future[Loaded]]] = deque()
    # Each local file is read by several threads already, and checked by one that needs the interpreter's lock.
    at_once = _AT_ONCE if remote else min(_AT_ONCE, max(1, cores() // 4))
    with ThreadPoolExecutor(at_once, thread_name_prefix="hf_multilora_load") as pool:
        try:
            while todo or running:
                while todo and len(running) < at_once:
                    name, read = todo.popleft()
                    running.append((name, pool.submit(timed, read)))
                name, future = running.popleft()
                yield name, future.result
        finally:
            for _, future in running:
                future.cancel()
