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
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..errors import ModelError, RoutingError
from ..memory.lease import Lease
from ..memory.store import AdapterStore
from ..parallel import Agreement
from ..routing import SAVED, Force, Idle, Routing
from ..rows import RowState
from .cache import StateTags, cached_length, check_cache, find_cache, write_tag
from .call import Call, Life, batch_rows, token_ids
from .compiled import CompiledSteps
from .gate import Gate
from .graphs import Graphs
from .ids import Key, names_of, to_keys
from .logits import Vocabulary

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


class Calls:
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
        self.compiled = False  # the user has compiled the model: such calls cannot publish their rows; blocks do
        self._runner: int | None = None  # the thread inside a forward; written under the lock
        self._running: list[RowState | None] = []  # states of that forward and of those that it is nested in
        self._blocks: list[_Block] = []  # `use` blocks, the newest last
        self._users: dict[int, int] = {}  # threads inside of `use` blocks that hold the lock
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
