"""A gate: calls go in and out, until somebody has to change the model as a whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Calls go in and out; whoever changes the model as a whole closes it, and waits until none is inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def through(self, nested: bool) -> Iterator[None]:
        with self._changed:
            # A call within a call must go on, or the outer one would never come out.
            self._changed.wait_for(lambda: nested or not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._closed = True
            try:
                self._changed.wait_for(lambda: self._inside == 0)
            except BaseException:
                self._closed = False
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()
