"""Calls: who is running what on one model.

A call (one generate(), one forward, one `use` block) holds the slots of its adapters by a lease, from before its first
forward to its end. It lives in a ContextVar, set with a token and reset whatever happens, so that calls of several
threads do not see each other, and nested ones (CFG's second pass, an assistant that is the model itself, a custom
decoding loop) inherit. Before every forward the call's rows are published to the model's routing; the model's lock
spans the forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..errors import ModelError, RoutingError
from ..memory.lease import Lease, label_of
from ..memory.store import AdapterStore
from ..routing import Routing, RowState, Unrouted
from .cache import check_cache, find_cache, write_tag
from .ids import Key, names_of, to_keys

_ROW_ARGUMENTS = (
    "inputs", "input_ids", "inputs_embeds", "input_features", "input_values", "decoder_input_ids",
    "decoder_inputs_embeds", "attention_mask", "encoder_outputs", "pixel_values",
)  # fmt: skip


def batch_rows(args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """Rows of the batch that a forward or generate() was given, or None where the arguments do not say."""
    candidates = [args[0]] if args else []
    candidates += [kwargs[name] for name in _ROW_ARGUMENTS if kwargs.get(name) is not None]
    for value in candidates:
        if not isinstance(value, torch.Tensor):
            value = getattr(value, "last_hidden_state", None)
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return int(value.shape[0])
    return None


class Call:
    """One call: its lease, and the rows that its forwards run at present (prompts, then beams)."""

    def __init__(self, lease: Lease | None, state: RowState | None, tags: tuple[Hashable | None, ...], uniform: bool):
        self.lease = lease
        self.prompt = self.state = state
        self.prompt_tags = self._tags = tags
        self.uniform = uniform
        self.token = object()  # marks the caches that this call writes

    def inherit(self) -> Call:
        """A nested call over the same rows and the same lease."""
        return Call(self.lease, self.state, self._tags, self.uniform)

    def expand(self, times: int, rows: int | None) -> None:
        """From now on every prompt row runs `times` times, in `rows` rows altogether.

        Raises:
            RoutingError: the prompts are not as many as the ids.
        """
        if rows is not None and not self.uniform and rows != times * len(self.prompt_tags):
            raise RoutingError(
                f"adapter_ids names {len(self.prompt_tags)} prompt rows, but there are {rows // times} prompts. "
                "Pass one id per prompt row."
            )
        self._tags = tuple(tag for tag in self.prompt_tags for _ in range(times))
        self.state = self.prompt.repeated(times) if self.prompt is not None and times > 1 else self.prompt

    def check_rows(self, rows: int | None) -> None:
        """Raises: RoutingError where a batch of `rows` rows is not what the ids are for."""
        if rows is not None and not self.uniform and rows != len(self._tags):
            raise RoutingError(
                f"The batch has {rows} rows, but adapter_ids names {len(self._tags)}. Pass one id per row, or one "
                "(a string) for all rows."
            )

    def tags(self, rows: int | None) -> tuple[Hashable | None, ...]:
        """Who writes each row of a cache."""
        return self._tags[:1] * rows if self.uniform and rows is not None else self._tags


class _Gate:
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


class Calls:
    """All calls of one model.

    Args:
        store: adapters and slots.
        routing: what the wrappers read.
        ensure: loads an unknown name on demand, or raises.
        check: raises where the layers of these sites are not in the model any more.
        training: whether the model is in training mode at present.
    """

    def __init__(
        self,
        store: AdapterStore,
        routing: Routing,
        ensure: Callable[[str], None],
        check: Callable[[Collection[int]], None],
        training: Callable[[], bool],
    ) -> None:
        self.store = store
        self.routing = routing
        self.lock = threading.RLock()
        self._ensure = ensure
        self._check = check
        self._training = training
        self._default: Key | None = None
        self._current: ContextVar[Call | None] = ContextVar("hf_multilora_call", default=None)
        self._gate = _Gate()
        self._runner: int | None = None  # the thread inside a forward; written under the lock
        self._users: set[int] = set()  # threads inside a `use` block, which hold the lock
        self._stream: torch.cuda.Stream | None = None

    @property
    def default(self) -> Key | None:
        """The id of calls that name none."""
        return self._default

    @default.setter
    def default(self, key: Key | None) -> None:
        with self.lock:
            self._default = key
            # A part of the model that is called on its own has no rows. It must not be the base without a word.
            self.routing.publish(None if key is None else Unrouted(key))

    def current(self) -> Call | None:
        return self._current.get()

    def distinct(self, keys: Sequence[Key | None]) -> list[Key]:
        return list(dict.fromkeys(key for key in keys if key is not None))

    def ensure(self, keys: Sequence[Key]) -> None:
        """Load on demand what these keys name, or raise."""
        for key in keys:
            for name in names_of(key):
                self._ensure(name)

    @contextmanager
    def open(self, ids: Any, rows: int | None) -> Iterator[Call]:
        """Begin a call: check the ids, load what is missing, take the slots; give them back at the end.

        Raises:
            RoutingError, AdapterNotFoundError, SlotError: see `to_keys` and `AdapterStore.acquire`.
        """
        keys, uniform = to_keys(ids, rows)
        distinct = self.distinct(keys)
        self.ensure(distinct)
        # Whoever holds the model's lock must not wait for slots: those who have them may be waiting for the lock.
        block = threading.get_ident() not in self._users
        with self._gate.through(nested=self._current.get() is not None):
            lease = self.store.acquire(distinct, block=block) if distinct else None
            try:
                if lease is not None:
                    self._check(lease.touched)
                call = self._call(lease, keys, uniform)
                token = self._current.set(call)
                try:
                    yield call
                finally:
                    self._current.reset(token)
            finally:
                if lease is not None:
                    self.store.release(lease)

    @contextmanager
    def stopped(self, what: str) -> Iterator[None]:
        """No call is running and none begins: for changes of the model as a whole.

        Raises:
            ModelError: this thread's own call is running, which would be waited for in vain.
        """
        if self._current.get() is not None:
            raise ModelError(f"The model cannot be {what} from inside of one of its calls. Let the call end first.")
        with self._gate.closed(), self.lock:
            yield

    def _call(self, lease: Lease | None, keys: list[Key | None], uniform: bool) -> Call:
        if lease is None:
            return Call(None, None, (None,) * len(keys), uniform)
        slots = tuple(-1 if key is None else lease.slots[key] for key in keys)
        state = RowState(slots, self.store.arena.device, lease.touched, uniform)
        tags = tuple(None if key is None else (label_of(key), lease.tags[key]) for key in keys)
        return Call(lease, state, tags, uniform)

    @contextmanager
    def inherited(self) -> Iterator[Call | None]:
        """A nested call without ids of its own: it runs on the rows of the call around it."""
        outer = self._current.get()
        inner = None if outer is None else outer.inherit()
        token = self._current.set(inner)
        try:
            yield inner
        finally:
            self._current.reset(token)

    @contextmanager
    def use(self, ids: Any) -> Iterator[None]:
        """Ids for code that cannot pass them; holds the model's lock, so that other threads wait.

        Raises:
            RoutingError: at the end, where a compiled forward ran another number of rows than there are ids. (Others
                raise at once.)
        """
        with self.open(ids, None) as call, self.lock:
            me = threading.get_ident()
            outermost = me not in self._users
            self._users.add(me)
            self.routing.seen = 0
            try:
                with self._published(call, running=False):
                    yield
            finally:
                if outermost:
                    self._users.discard(me)
            seen = int(self.routing.seen)
            if call.state is not None and seen:
                call.check_rows(seen)

    def forward(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], ids: Any = None) -> Any:
        """Run one forward of the model on the rows of its call."""
        if self._runner == threading.get_ident() and ids is None:
            return fn(*args, **kwargs)
        call = self._current.get()
        if ids is None and call is None:
            ids = self._default
        if ids is None:
            return self._run(call, fn, args, kwargs)
        with self.open(ids, batch_rows(args, kwargs)) as call:
            return self._run(call, fn, args, kwargs)

    def _run(self, call: Call | None, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        cache = find_cache(kwargs) or next((a for a in args if isinstance(a, (Cache, EncoderDecoderCache))), None)
        rows = batch_rows(args, kwargs)
        if call is not None:
            call.check_rows(rows)
        with self.lock:
            if cache is not None:
                check_cache(cache, self._tags(call, cache, rows), call and call.token)
            with self._published(call):
                output = fn(*args, **kwargs)
            if call is not None:
                cache = cache if cache is not None else find_cache({}, output)
                if cache is not None:
                    write_tag(cache, call.tags(rows), call.token)
            return output

    @staticmethod
    def _tags(call: Call | None, cache: Any, rows: int | None) -> tuple[Hashable | None, ...]:
        if call is not None:
            return call.tags(rows)
        tag = getattr(cache, "multilora_tag", None)
        return (None,) * (len(tag.rows) if tag is not None else rows or 1)

    @contextmanager
    def published(self, call: Call | None) -> Iterator[None]:
        """The rows of `call` in force, for parts of the model that run outside of its forward (an encoder)."""
        with self.lock, self._published(call):
            yield

    @contextmanager
    def _published(self, call: Call | None, running: bool = True) -> Iterator[None]:
        state = call.state if call is not None else None
        if state is not None:
            if self._training():
                raise ModelError(
                    "The model is in training mode; adapters serve inference only. Call model.eval() first."
                )
            assert call is not None and call.lease is not None
            self._order_streams()
            call.lease.wait()
        previous = self.routing.publish(state)
        runner = self._runner
        if running:
            self._runner = threading.get_ident()
        try:
            self.routing.fill_static()
            # Adapters carry no gradient: outputs that claimed one would be missing the adapters' part of it.
            with torch.no_grad() if state is not None else nullcontext():
                yield
        finally:
            self._runner = runner
            self.routing.publish(previous)

    def _order_streams(self) -> None:
        """Forwards on different streams share the kernels' workspace: the later one waits for the earlier."""
        if self.store.arena.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.store.arena.device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream
