"""`use` blocks: ids for code that cannot pass them. Calls of a model that the user compiled read what is in force for
the whole model, so blocks around these hold its lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..errors import RoutingError
from ..memory.store import AdapterStore
from ..routing import SAVED, Force, Routing
from ..rows import RowState
from .call import Call

_PATIENCE = 60.0  # seconds that a compiled call waits for other threads' forwards, once
_BUSY = "another thread is running the model. Call the compiled model once before threads begin."
_LATE = (
    "this `use` block began before another thread called the compiled model for the first time, and runs beside that "
    "thread's. Begin the block anew; or call the compiled model once before threads begin."
)
_TASKS = (
    "Two tasks of this thread are in `use` blocks of a compiled model, and it cannot tell them apart. Let one end "
    "before the other begins, or pass adapter_ids to the model itself."
)


@dataclass(eq=False)
class _Block:
    """A `use` block.

    Attributes:
        force: its thread's.
        held: whether it holds the model's lock.
        late: it does not, and compiled forwards of others may run meanwhile.
    """

    call: Call
    force: Force
    thread: int = field(default_factory=threading.get_ident)
    held: bool = False
    late: bool = False

    def inside_of(self, other: _Block) -> bool:
        outer = self.call.outer
        while outer is not None and outer.life is not other.call.life:
            outer = outer.outer
        return outer is not None


class UseBlocks:
    """The part of `Calls` that `use` blocks and compiled forwards are; its lock is theirs."""

    store: AdapterStore
    routing: Routing
    lock: Any
    compiled: bool  # the user has compiled the model: such calls cannot publish their rows; blocks do
    _runner: int | None  # the thread inside a forward; written under the lock
    _running: list[RowState | None]  # states of that forward and of those that it is nested in

    def __init__(self) -> None:
        self.compiled = False
        self._blocks: list[_Block] = []  # the newest last
        self._users: dict[int, int] = {}  # threads inside of blocks that hold the lock

    def open(self, ids: Any, rows: int | None) -> AbstractContextManager[Call]:
        raise NotImplementedError

    def current(self) -> Call | None:
        raise NotImplementedError

    def order_streams(self) -> None:
        raise NotImplementedError

    @contextmanager
    def use(self, ids: Any) -> Iterator[None]:
        """Ids for code that cannot pass them.

        They belong to this thread or task: a thread that is started inside of the block does not have them. Calls of a
        model that the user compiled read what is in force for the whole model; once there is such a model, blocks hold
        the model's lock, and other threads wait. The block and the compiled calls in it run on one CUDA stream.

        Raises:
            RoutingError: two tasks of one thread are in blocks around a compiled model. (Compiled calls raise it that
                have another number of rows than there are ids, or whose block began before the model was compiled
                in another thread.)
        """
        with self.open(ids, None) as call:
            block = _Block(call, self.routing.force)
            try:
                with self.lock:
                    if self.compiled:
                        around = [other for other in self._blocks if other.force is block.force]
                        if around and not block.inside_of(around[-1]):
                            raise RoutingError(_TASKS)
                        self._hold(block)
                    self._blocks.append(block)
                    self._ready(call)
                    self._trace(block.force)
                try:
                    yield
                finally:
                    with self.lock:
                        self._ready(call)
                        self._blocks.remove(block)
                        self._trace(block.force)
            finally:
                if block.held:
                    self._let_go(block)

    def _hold(self, block: _Block) -> None:
        """Keep the model's lock to the block's end; the caller holds it."""
        self.lock.acquire()
        block.held = True
        self._users[block.thread] = self._users.get(block.thread, 0) + 1

    def _let_go(self, block: _Block) -> None:
        self._users[block.thread] -= 1
        if not self._users[block.thread]:
            del self._users[block.thread]
        self.lock.release()

    def _ready(self, call: Call) -> None:
        """Compiled forwards of a block run between two of these on the same stream: they see whole slots, and whoever
        overwrites these or runs next waits for them."""
        self.order_streams()
        if call.lease is not None:
            call.lease.wait()

    def _traced(self) -> None:
        """A forward of this thread is being compiled: from now on, blocks hold the lock.

        Those that are open in this thread begin to; for those of other threads it is too late.

        Raises:
            RoutingError: this thread runs in the context of another one's call, whose ids it cannot have.
        """
        force = self.routing.force
        if self._runner == threading.get_ident():  # a part of a forward, which holds the lock
            if not self.routing.compiled:
                self.routing.compiled = True
                self._trace(force)
            return
        blocks = [block for block in self._blocks if block.force is force]
        if not blocks:
            if self.current() is not None:
                raise RoutingError(
                    "A compiled model was called in another thread than the `use` block around. Put the block into "
                    "the function that the thread runs."
                )
            return
        if force.refusal or all(block.held for block in blocks):
            return
        if not self.lock.acquire(timeout=_PATIENCE):  # it may be held by one who waits for the compiler, as we do
            force.refusal = _BUSY
            return
        try:
            self.compiled = self.routing.compiled = True
            for block in self._blocks:
                if not block.held and block.force is not force:
                    block.late = True
                    self._trace(block.force)
            if all(block.inside_of(outer) for outer, block in pairwise(blocks)):
                for block in blocks:
                    self._hold(block)
                self._ready(blocks[-1].call)
                self._trace(force)
            else:
                force.refusal = _TASKS
        finally:
            self.lock.release()

    def _trace(self, force: Force | None = None) -> None:
        """Let compiled forwards of a thread (this one, by default) run under the rows of its running forward, else of
        its newest `use` block."""
        own = self.routing.force
        force = own if force is None else force
        self.routing.vectors, self.routing.rare = self.store.arena.vectors, self.store.arena.rare
        if self._running and force is own:
            self.routing.trace(self._running[-1], force, "forward")
            return
        for block in reversed(self._blocks):
            if block.force is force:
                refusal = _LATE if block.late else SAVED if block.call.invocation is not None else ""
                self.routing.trace(block.call.state, force, "block", refusal, fill=block.held)
                return
        self.routing.trace(None, force, "")
