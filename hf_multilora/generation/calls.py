"""Calls: who is running what on one model.

A call (one generate(), one forward, one `use` block) holds the slots of its adapters by a lease, from before its first
forward to its end. It lives in a ContextVar, set with a token and reset whatever happens, so that calls of several
threads do not see each other, and nested ones (CFG's second pass, an assistant that is the model itself, a custom
decoding loop) inherit. Before every forward the call's rows are published to the model's routing; the model's lock
spans the forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..errors import ModelError, RoutingError
from ..memory.lease import Lease
from ..memory.store import AdapterStore
from ..parallel import Agreement
from ..routing import Idle, Routing
from ..rows import RowState
from .cache import StateTags, cached_length, check_cache, find_cache, write_tag
from .call import Call, Life, batch_rows, token_ids
from .compiled import CompiledSteps
from .gate import Gate
from .graphs import Graphs
from .ids import Key, names_of, to_keys
from .logits import Vocabulary
from .use_blocks import UseBlocks


class Calls(UseBlocks):
    """All calls of one model.

    Args:
        store: adapters and slots.
        routing: what the wrappers read.
        ensure: loads an unknown name on demand, or raises.
        check: raises where the layers of these sites, or these modules, are not in the model any more.
        training: whether the model is in training mode at present.
        two_lengths: whether the model has an encoder and a decoder, whose rows have different numbers of tokens.
    """

    def __init__(
        self,
        store: AdapterStore,
        routing: Routing,
        ensure: Callable[[str], None],
        check: Callable[[Collection[int], Iterable[str]], None],
        training: Callable[[], bool],
        two_lengths: bool = False,
    ) -> None:
        super().__init__()
        self.two_lengths = two_lengths
        self.store = store
        self.routing = routing
        self.lock = threading.RLock()
        self._ensure = ensure
        self._check = check
        self._training = training
        self._default: Key | None = None
        self._current: ContextVar[Call | None] = ContextVar("hf_multilora_call", default=None)
        self._gate = Gate()
        self._idle = Idle(self._serve)
        self.vocabulary: Vocabulary | None = None  # where adapters may own tokens
        self.agreement: Agreement | None = None  # of the ranks of a tensor-parallel model
        self._runner: int | None = None  # the thread inside a forward; written under the lock
        self._running: list[RowState | None] = []  # states of that forward and of those that it is nested in
        self._stream: torch.cuda.Stream | None = None
        self.graphs: Graphs | None = None  # where decode steps are captured
        self.steps = CompiledSteps()
        self.managers: WeakSet[Any] = WeakSet()  # of continuous batching
        self._states = StateTags()
        routing.on_trace = torch._dynamo.disable(self._traced)
        routing.publish(self._idle)

    @property
    def default(self) -> Key | None:
        """The id of calls that name none."""
        return self._default

    @default.setter
    def default(self, key: Key | None) -> None:
        self._default = key
        self.routing.default = key is not None

    def current(self) -> Call | None:
        """The call that the present context runs in.

        Raises:
            RoutingError: it has ended (a task or thread that it started goes on), and its slots are others' now.
        """
        call = self._current.get()
        if call is not None and call.life.ended:
            raise RoutingError(
                "The call that this task was started in has ended, and its slots may be others' by now. Pass "
                "adapter_ids here, or let the `use` block or generate() around it wait for it."
            )
        return call

    def holds_lock(self) -> bool:
        """Whether this thread holds the model's lock, so that it must not wait for other calls to end."""
        me = threading.get_ident()
        return me in self._users or self._runner == me

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
        self.check_quiet("a call begins")
        keys, uniform = to_keys(ids, rows)
        distinct = self.distinct(keys)
        if self.agreement is None:
            self.ensure(distinct)
        else:
            with self.agreement.of("the adapters of a call") as facts:
                self.ensure(distinct)
                facts += [keys, [self.store.entry(name).generation for key in distinct for name in names_of(key)]]
        # Whoever holds the model's lock must not wait for slots: those who have them may be waiting for the lock.
        outer = self.current()
        with self._gate.through(nested=outer is not None):
            lease = self.store.acquire(distinct, block=not self.holds_lock()) if distinct else None
            life = Life()
            try:
                call = Call(keys, lease, self.store, uniform, life, outer)
                if lease is not None and call.state is not None:
                    self._check(lease.touched, call.state.saved)
                token = self._current.set(call)
                try:
                    yield call
                finally:
                    with suppress(ValueError):  # a generator that is closed in another context than it began in
                        self._current.reset(token)
            finally:
                life.ended = True
                if lease is not None:
                    self.store.release(lease)

    @contextmanager
    def rehearsal(self, rows: int, active: bool) -> Iterator[None]:
        """A call as of `rows` rows under adapters (if `active`), of which none names any.

        All that runs for adapters runs; the slots, their order of use and the statistics are left alone.
        """
        call = Call((None,) * rows, None, self.store, False, Life(), self.current())
        if active:
            sites = frozenset(range(self.store.layout.n_sites))
            arena = self.store.arena
            call.state = RowState((-1,) * rows, arena.device, sites, adapters=arena.max_loras)
            call.row_tags = (("warm-up", ()),) * rows  # compiled forwards are for tagged caches, or for others
        with self._gate.through(nested=call.outer is not None):
            token = self._current.set(call)
            try:
                yield
            finally:
                self._current.reset(token)
                call.life.ended = True

    @contextmanager
    def stopped(self, what: str) -> Iterator[None]:
        """No call is running and none begins: for changes of the model as a whole.

        Raises:
            ModelError: this thread's own call is running, which would be waited for in vain.
        """
        self.check_managers(what)
        if self._current.get() is not None or self.holds_lock():
            raise ModelError(f"The model cannot be {what} from inside of one of its calls. Let the call end first.")
        with self._gate.closed(), self.lock:
            yield

    def check_quiet(self, what: str) -> None:
        """Ranks that share a model speak to each other from one thread at a time.

        Raises:
            ModelError: a manager of continuous batching runs, and this thread has not paused it.
        """
        if self.agreement is not None and any(manager.beside() for manager in list(self.managers)):
            raise ModelError(
                f"Continuous batching runs on ranks that share this model: before {what}, stop its manager, or pause "
                "it on every rank (with manager.pause(): ...), so that all ranks do it in the same step."
            )

    def check_managers(self, what: str) -> None:
        """Raises: ModelError while a manager of continuous batching runs, whose graphs and requests use the slots."""
        if any(manager.is_running() for manager in list(self.managers)):
            raise ModelError(f"The model cannot be {what} while continuous batching runs. Stop its manager first.")

    @contextmanager
    def inherited(self) -> Iterator[Call | None]:
        """A nested call without ids of its own: it runs on the rows of the call around it."""
        outer = self.current()
        inner = None if outer is None else outer.inherit()
        token = self._current.set(inner)
        try:
            yield inner
        finally:
            self._current.reset(token)

    def _serve(self, fn: Callable[[], torch.Tensor], y: torch.Tensor, where: str) -> torch.Tensor:
        """A layer was called outside of a forward: run it under the rows of the caller's own call."""
        call = self.current()
        if call is None and self._default is None:
            return y
        if call is None:
            with self.open(self._default, None):
                return self._serve(fn, y, where)
        if call.invocation is not None:
            raise RoutingError(f"{where} was called outside of the model's own forward, where an aLoRA has no prompt.")
        with self.lock, self._published(call, call.state):
            return fn()

    def forward(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], ids: Any = None) -> Any:
        """Run one forward of the model, or of a model inside of it, on the rows of its call."""
        if self._runner == threading.get_ident() and ids is None:
            return fn(*args, **kwargs)
        call = self.current()
        if ids is None and call is None:
            ids = self._default
        if ids is None:
            if call is None:
                self.check_quiet("a call begins")
            return self._run(call, fn, args, kwargs)
        with self.open(ids, batch_rows(args, kwargs)) as call:
            return self._run(call, fn, args, kwargs)

    def _run(self, call: Call | None, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        cache = find_cache(kwargs)  # an empty cache is false, and still the one that will be written
        if cache is None:
            cache = next((a for a in args if isinstance(a, (Cache, EncoderDecoderCache))), None)
        rows = batch_rows(args, kwargs)
        tupled = kwargs.get("return_dict") is False
        if tupled:  # what is looked at afterwards is known by its names
            kwargs = {**kwargs, "return_dict": True}
        if call is not None:
            call.check_rows(rows)
        if self.vocabulary is not None and (call is None or not call.prompt_seen):
            for ids in (token_ids(args, kwargs), kwargs.get("decoder_input_ids")):
                self.vocabulary.check(ids, call.vocabulary if call is not None else ())
        with self.lock:
            state = call.state if call is not None else None
            past = 0
            if call is not None and call.invocation is not None:
                past = cached_length(cache) if cache is not None else 0
                call, state = self._invoked(call, args, kwargs, cache, past)
            if cache is not None:
                check_cache(cache, self._tags(call, cache, rows), call and call.token)
            self._states.check(kwargs, self._tags(call, None, rows))
            with self._published(call, state, self._tokens(args, kwargs)):
                output = fn(*args, **kwargs)
            self._states.write(output, self._tags(call, None, rows))
            logits = getattr(output, "logits", None)
            if self.vocabulary is not None and isinstance(logits, torch.Tensor) and logits.dim() > 1:
                output.logits = self.vocabulary.mask(logits, call.vocabulary if call is not None else ())
            if call is not None:
                cache = cache if cache is not None else find_cache({}, output)
                if cache is not None:
                    write_tag(cache, call.tags(rows), call.token)
            elif getattr(cache, "multilora_tag", None) is not None:
                write_tag(cache, (None,) * (rows or len(cache.multilora_tag.rows)), None)
            return output.to_tuple() if tupled and hasattr(output, "to_tuple") else output

    def _invoked(
        self, call: Call, args: Sequence[Any], kwargs: dict[str, Any], cache: Any, past: int
    ) -> tuple[Call, RowState | None]:
        """The call and its state for one forward, where a row is under an aLoRA."""
        ids = token_ids(args, kwargs)
        if not call.prompt_seen:  # a plain forward is its own prompt
            tag = getattr(cache, "multilora_tag", None)
            token, call = call.token, call.inherit()
            call.token = token
            call.invoke(ids, past, tag.rows if tag is not None and past else ())
        if ids is None:
            raise RoutingError(
                "An aLoRA is invoked by tokens of the prompt, so that it needs input_ids (no embeddings)."
            )
        return call, call.state_for(ids.shape[-1], past)

    def _tokens(self, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """Tokens of each row; 0 where rows are not of one length all through the model (encoder and decoder)."""
        ids = token_ids(args, kwargs)
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        return 0 if ids is None or ids.dim() < 2 or self.two_lengths else int(ids.shape[1])

    @staticmethod
    def _tags(call: Call | None, cache: Any, rows: int | None) -> tuple[Hashable | None, ...]:
        if call is not None:
            return call.tags(rows)
        tag = getattr(cache, "multilora_tag", None)
        return (None,) * (len(tag.rows) if tag is not None else rows or 1)

    @contextmanager
    def _published(self, call: Call | None, state: RowState | None, tokens: int = 0) -> Iterator[None]:
        """A state in force, for one forward; the caller holds the lock."""
        self._check_mode(state)
        if state is not None:
            assert call is not None
            self.order_streams()
            if self._stream is not None:
                state.follow(self._stream)
            if call.lease is not None:
                call.lease.wait(self._stream)
        # Adapters carry no gradient: outputs that claimed one would be missing the adapters' part of it.
        without = torch.no_grad() if state is not None and torch.is_grad_enabled() else nullcontext()
        with self._in_force(state, tokens), without:
            yield

    @contextmanager
    def packed(self, state: RowState | None, leases: Iterable[Lease], overlap: bool) -> Iterator[None]:
        """One forward of a packed batch, on the current stream; whoever runs it holds the slots.

        Args:
            overlap: it is being captured.
        """
        with self.lock:
            self.order_streams()
            self._check_mode(state)
            for lease in leases:
                lease.wait(self._stream)
            with self._in_force(state, 1):
                self.routing.overlap = overlap
                try:
                    yield
                finally:
                    self.routing.overlap = False

    def _check_mode(self, state: RowState | None) -> None:
        if state is not None and self._training():
            raise ModelError("The model is in training mode; adapters serve inference only. Call model.eval() first.")

    @contextmanager
    def _in_force(self, state: RowState | None, tokens: int) -> Iterator[None]:
        """What wrappers of this thread see, and then what they saw before."""
        runner, self._runner = self._runner, threading.get_ident()
        before = self.routing.tokens
        self._running.append(state)
        try:
            self.routing.publish(state, tokens)
            self._trace()
            yield
        finally:
            self._running.pop()
            self._runner = runner
            self.routing.publish(self._running[-1] if self._running else self._idle, before)
            self._trace()

    def order_streams(self) -> None:
        """Forwards on different streams share the kernels' workspace: the later one waits for the earlier."""
        device = self.store.arena.device
        if device.type != "cuda":
            return
        # A number, for a stream object takes microseconds to make, before each step.
        raw = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if device.index is None else device.index)
        if self._stream is not None and raw == self._stream.cuda_stream:
            return
        stream = torch.cuda.current_stream(device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._stream = stream
