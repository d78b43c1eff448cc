"""One enabled model, its tokenizer, and the manager of continuous batching that answers all requests."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from transformers import GenerationConfig

from ..base_model import end_tokens
from ..errors import AdapterNotFoundError, ConfigError, ModelError, MultiLoraError
from ..generation.continuous.options import batching_config, cache_tokens
from .problems import ApiError, of_adapter, unavailable
from .tickets import Sampling, Ticket

logger = logging.getLogger(__name__)

T = TypeVar("T")
_WATCH_S = 0.25  # between two looks at the generation thread
_START_S = 300.0  # for the cache to be allocated
_LATE_S = (
    2.0  # a cancelled request is cancelled again until then, should the first have come before the request itself
)
_OPTIONS = {"use_cuda_graph", "use_async_batching", "auto_switch_to_flash", "page_size", "num_blocks"}
_OPTIONS |= {"max_batch_tokens", "max_requests_per_batch", "max_memory_percent"}


class Engine:
    """Takes requests of token ids and gives back tokens; used from one event loop.

    Args:
        model: enabled, with on_demand=False: which names may be loaded is the server's to say.
        tokenizer: of the base model.
        fairness, patience: of the manager, see `init_continuous_batching`.
        batching: fields of transformers' ContinuousBatchingConfig: num_blocks, max_batch_tokens, ….

    Raises:
        ConfigError, ModelError: a model or options that cannot be served.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, fairness: str = "arrival", patience: int = 64, **batching: Any
    ) -> None:
        handle = getattr(model, "multilora", None)
        if handle is None:
            raise ModelError("The model is not enabled: enable_multilora(model, on_demand=False) first.")
        if handle.calls.agreement is not None:
            raise ModelError("A server runs in one process, and this model is shared by ranks (tensor parallelism).")
        if handle.config.on_demand:
            raise ConfigError(
                "A server's model needs enable_multilora(model, on_demand=False): names come from clients."
            )
        unknown = batching.keys() - _OPTIONS
        if unknown:
            raise ConfigError(
                f"Engine has no option {', '.join(sorted(unknown))}. It has {', '.join(sorted(_OPTIONS))}."
            )
        self.model, self.tokenizer, self.multilora = model, tokenizer, handle
        self.eos = end_tokens(model, tokenizer)
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.context = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)
        self.draining = False
        self._options = batching
        self._manage = {"fairness": fairness, "patience": patience}
        self._manager: Any = None
        self._live: dict[str, Ticket] = {}
        self._late: dict[str, float] = {}
        self._ids = itertools.count()
        # Of its own: what is slow (loads, unloads that wait for their requests) must not keep requests from coming in.
        self._quick = ThreadPoolExecutor(4, thread_name_prefix="hf_multilora_requests")
        self._watch: asyncio.Task[None] | None = None

    # -- life

    async def start(self) -> None:
        """Start the generation thread and wait until its cache is allocated.

        Raises:
            ModelError: the thread ended at once; the message says why.
        """
        config = batching_config(per_request_processors=True, **self._options)
        # A processor exists only where its default does something; each request brings its own values for all three.
        defaults = GenerationConfig(do_sample=True, temperature=0.5, top_k=1, top_p=0.5, eos_token_id=self.eos or -1)
        self.draining = False
        self._manager = await asyncio.to_thread(
            self.model.init_continuous_batching, defaults, continuous_batching_config=config, **self._manage
        )
        if self.model.device.type == "cuda":
            await asyncio.to_thread(self._manager.warmup)
        self._manager.start()
        began = time.monotonic()
        while self._manager.batch_processor is None and self.why_dead() is None:
            if time.monotonic() - began > _START_S:
                await self.stop()
                raise ModelError(f"Continuous batching was not ready after {_START_S:.0f} s.")
            await asyncio.sleep(0.01)
        if (dead := self.why_dead()) is not None:
            await self.stop()
            raise ModelError(f"Continuous batching did not start: {dead}")
        # What is larger than the whole cache would end the generation thread, and with it everybody's requests.
        self.context = min(self.context, cache_tokens(self._manager.continuous_batching_config))
        self._watch = asyncio.create_task(self._watching())

    async def stop(self, timeout: float = 10.0) -> None:
        """End the generation thread; requests that are left fail with 503. Safe to call twice."""
        self.draining = True
        self.fail_all("The server is shutting down.")
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        manager, self._manager = self._manager, None
        if manager is not None:
            await asyncio.to_thread(manager.stop, block=True, timeout=timeout, hard_stop=True)

    def why_dead(self) -> str | None:
        """Why no request can be answered; None while all is well."""
        if self._manager is None:
            return "the engine is not started."
        state = self._manager.background_thread_status
        if state.fatal_error is not None:
            return f"the generation thread died: {type(state.fatal_error).__name__}."
        if not self._manager.is_running():
            return "the generation thread has ended."
        # Requests are failed before the error is recorded.
        return None if state.can_accept_new_requests() is None else "the generation thread is stopping."

    def why_not_ready(self) -> str | None:
        """As `why_dead`, or that the server is being stopped."""
        return "The server is shutting down." if self.draining else self.why_dead()

    # -- requests

    @property
    def in_work(self) -> int:
        """Requests that have been added and not ended."""
        return len(self._live)

    def registered(self, name: str) -> bool:
        try:
            self.multilora.missing(name)
        except AdapterNotFoundError:
            return False
        return True

    async def submit(self, prompt: Sequence[int], adapter: str | None, sampling: Sampling) -> Ticket:
        """Add a request.

        Args:
            prompt: token ids below the vocabulary's size; with the answer no longer than `context`.
            adapter: a registered name, or None for the base.

        Raises:
            ApiError: 404 an adapter that is not registered; 503 nothing can be answered.
        """
        if (why := self.why_not_ready()) is not None:
            raise unavailable(why[0].upper() + why[1:])
        ticket = Ticket(self, f"multilora-{next(self._ids)}", adapter)
        self._live[ticket.request_id] = ticket
        greedy = sampling.temperature == 0
        values = {
            "temperature": 1.0 if greedy else float(sampling.temperature),
            "top_k": 1 if greedy else sampling.top_k or self._widest(),
            "top_p": 1.0 if greedy else float(sampling.top_p),
        }
        added = False
        try:
            self._manager.register_result_handler(ticket.request_id, ticket.take)
            # The manager's locks may be held by a load for a while; the event loop does not wait for them.
            added = await _whole(
                self.quickly(
                    self._manager.add_request,
                    list(prompt),
                    ticket.request_id,
                    max_new_tokens=sampling.max_tokens,
                    streaming=sampling.stream,
                    record_timestamps=not sampling.stream,
                    eos_token_id=-1 if sampling.ignore_eos else self.eos or -1,
                    adapter_id=adapter,
                    **values,
                )
            )
            if not added:
                raise unavailable(f"The request was not taken: {self.why_dead() or 'the manager is stopping.'}")
        except MultiLoraError as error:
            raise of_adapter(error) from error
        finally:
            if not added:
                self.cancel(ticket)
        return ticket

    def quickly(self, work: Callable[..., T], *args: Any, **options: Any) -> asyncio.Future[T]:
        """Run what takes a moment in a thread, so that the event loop does not wait."""
        return asyncio.get_running_loop().run_in_executor(self._quick, functools.partial(work, *args, **options))

    def _widest(self) -> int:
        return self.vocab_size + self.multilora.config.extra_vocab_size

    def cancel(self, ticket: Ticket, why: ApiError | None = None) -> None:
        """Have the manager drop a request that has not ended."""
        if ticket.ended:
            return
        self.close(ticket, why or ApiError(499, "The request was cancelled.", "cancelled"))
        if self._manager is not None:
            self._manager.cancel_request(ticket.request_id)
            self._late[ticket.request_id] = time.monotonic() + _LATE_S

    def close(self, ticket: Ticket, error: ApiError | None) -> None:
        self._live.pop(ticket.request_id, None)
        if self._manager is not None:
            self._manager.output_router.result_handlers.pop(ticket.request_id, None)
        ticket.end(error)

    def failure(self, ticket: Ticket, message: str) -> ApiError:
        """What it means that the manager failed a request; of its error only the text has come."""
        if (why := self.why_not_ready()) is not None or "Generation loop finished" in message:
            return unavailable(why or message)
        if ticket.adapter is not None and not self.registered(ticket.adapter):
            return ApiError(404, message, "model_not_found", "model")
        if "not finite" in message or "NaN" in message:
            return ApiError(500, message, "adapter_error", "model")
        return ApiError(500, message, "engine_error")

    def fail_all(self, why: str) -> None:
        """Fail every request that has not ended with 503."""
        for ticket in list(self._live.values()):
            self.cancel(ticket, unavailable(why))

    async def _watching(self) -> None:
        """Sees that the generation thread dies, and lets go of results that nobody waits for any more."""
        while True:
            await asyncio.sleep(_WATCH_S)
            manager = self._manager
            if manager is None:
                return
            try:
                while manager.output_router.output_queue.qsize() and manager.get_result(timeout=0.001) is not None:
                    pass
                now = time.monotonic()
                for request_id, until in list(self._late.items()):
                    manager.cancel_request(request_id)
                    if now > until:
                        del self._late[request_id]
                if self._live and (dead := self.why_dead()) is not None:
                    self.fail_all(f"The request could not be finished: {dead}")
            except Exception:
                logger.exception("While watching the generation thread")

    # -- text

    def decoder(self) -> Callable[[Sequence[int]], str]:
        """Token ids -> text without special tokens."""
        tokenizer = self.tokenizer
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


async def _whole(work: Any) -> bool:
    """Await a thread's work to its end even where the waiting is cancelled, so that nothing is added afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task) is not None
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()
        raise
