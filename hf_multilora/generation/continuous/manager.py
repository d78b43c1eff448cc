"""The manager of continuous batching with an adapter id for each request."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import ConfigError, ModelError, RoutingError
from ...report import BatchingStatus
from ..ids import Key, one_of, to_key, to_keys
from .admission import FAIRNESS
from .batching import Batching
from .forwards import Forwards, check_config
from .logits import steer_processors
from .outputs import held_back
from .ranks import Ranks, with_ranks
from .requests import KEYWORD, Prompt
from .steer import steer
from .steering import steer_processor

PATIENCE = 64


class LoraBatching:
    """In front of ContinuousBatchingManager: `add_request` and `add_requests` take adapter ids."""

    batching: Batching
    _forwards: Forwards
    _options: tuple[Any, ...]  # what ranks have to agree about

    def adopt(self, handle: Any, fairness: str, patience: int, graphs_asked: bool) -> None:
        """Make a new manager of transformers' this.

        Args:
            graphs_asked: whether somebody has said if there are to be CUDA graphs.

        Raises:
            ConfigError: options that do not exist.
            ModelError: a configuration that cannot carry adapters.
        """
        check_options(fairness, patience)
        config: Any = self.continuous_batching_config  # type: ignore[attr-defined]
        check_config(config)  # transformers may have found something to compile in the model's own config
        forwards = Forwards(handle.calls, handle.served_sites, config)
        ranks = LoraBatching._meet(self, handle, config, graphs_asked)
        cuda = self.model.device.type == "cuda"  # type: ignore[attr-defined]
        if cuda and ranks is None and not graphs_asked and not any(config.cuda_graph_booleans):
            forwards.choose_graphs()
        wake = getattr(self, "_wake_up_loop", None) or self._has_new_requests  # type: ignore[attr-defined]
        calls = handle.calls
        batching = Batching(
            calls, handle.check_layers, handle.ensure, handle.missing, fairness, patience, wake.set, ranks
        )
        columns = self.model.config.get_text_config().vocab_size + handle.config.extra_vocab_size  # type: ignore[attr-defined]
        steer_processors(self.logit_processor, batching, forwards, columns)  # type: ignore[attr-defined]
        steer(self.output_router, held_back, _held=[])  # type: ignore[attr-defined]
        options = (fairness, patience, handle.config.max_loras, config.max_requests_per_batch, config.scheduler_type)
        self.__dict__.update(batching=batching, _forwards=forwards, _options=options)
        own: Any = type(self)
        self.__class__ = _class_of(own)

    def _meet(self, handle: Any, config: Any, graphs_asked: bool) -> Ranks | None:
        """The other ranks, None for a model of one process.

        Raises:
            ModelError: a configuration that ranks do not run.
        """
        helper: Any = self.distributed_helper  # type: ignore[attr-defined]
        if (helper.tp_size > 1) != (handle.calls.agreement is not None):
            raise ModelError("Continuous batching finds other ranks than the model's layers are split over.")
        if helper.tp_size == 1:
            return None
        if graphs_asked and (any(config.cuda_graph_booleans) or config.use_async_batching):
            raise ModelError(
                "Continuous batching over the ranks of a tensor-parallel model runs eagerly and in step. Leave "
                "use_cuda_graph and use_async_batching unset, or False."
            )
        config.use_cuda_graph, config.use_async_batching = (False, False), False
        ranks = Ranks(helper)
        steer(helper, with_ranks, _ranks=ranks)
        return ranks

    def start(self) -> None:
        """transformers' start.

        Raises:
            ModelError: the model was disabled; ranks that share it have other adapters or options; another manager
                of these ranks runs.
        """
        self._check_enabled()
        batching, calls = self.batching, self.batching.calls
        if batching.ranks is not None and not self.is_running():  # type: ignore[attr-defined]
            calls.check_quiet("another manager is started")
            batching.ranks.begin()
            assert calls.agreement is not None
            calls.agreement.check("their adapters and options", *self._options, *calls.store.registered())
        super().start()  # type: ignore[misc]

    def beside(self) -> bool:
        """Whether the generation thread runs and this thread has not paused it. One that is to stop is waited for."""
        thread = self._generation_thread  # type: ignore[attr-defined]
        me = threading.current_thread()
        if thread is None or thread is me or me.ident in self.batching.pausing:
            return False
        if self.background_thread_status.can_accept_new_requests() is not None:  # type: ignore[attr-defined]
            thread.join()
        return bool(thread.is_alive())

    def _handle_critical_error(self, error: Exception, *args: Any) -> None:
        if self.batching.ranks is not None:
            self.batching.ranks.failed = True
        super()._handle_critical_error(error, *args)  # type: ignore[misc]

    def check_alive(self) -> None:
        """Raises: ModelError where ranks share the model, and an error has ended their loops."""
        error = self.background_thread_status.fatal_error  # type: ignore[attr-defined]
        if self.batching.ranks is not None and error is not None:
            raise ModelError(f"Continuous batching has ended on this rank: {error}") from error

    def _check_enabled(self) -> None:
        if not self.batching.enabled:
            raise ModelError("The model was disabled since this manager was made. Make a new one.")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """transformers' pause. Slots of running requests are not waited for inside of it: that raises SlotError.

        Where ranks share a model, all of them pause, and do the same inside: load and unload adapters, or call it.
        """
        thread = getattr(self._generation_thread, "ident", None)  # type: ignore[attr-defined]
        me = threading.get_ident()
        with super().pause(), self.batching.store.parked(thread, me):  # type: ignore[misc]
            self.batching.pausing.append(me)
            try:
                yield
            finally:
                self.batching.pausing.remove(me)

    def add_request(
        self, input_ids, request_id=None, *args, adapter_id=None, adapter_name=None, **kwargs: Any
    ) -> str | None:
        """transformers' add_request, with the id of an adapter (or a mix of adapters by weights).

        An id that is not registered, and is a folder or a hub id, is loaded in the background; other requests go on.

        Args:
            adapter_id: None: the default id of the model (`set_adapter`), else the base.
            adapter_name: PEFT's spelling of the same.

        Raises:
            AdapterNotFoundError: a name that is not registered, and nothing that could be loaded.
            RoutingError: no id.
            ModelError: the model was disabled; ranks share it, and an error has ended their loops.
        """
        self._check_enabled()
        self.check_alive()
        if isinstance(input_ids, Prompt):
            key: Key | None = input_ids.key
        else:
            given = one_of(adapter_id, adapter_name)
            key = self.batching.calls.default if given is None else to_key(given, "adapter_id")
        if KEYWORD in kwargs:
            raise RoutingError(f"{KEYWORD!r} is no argument of add_request: pass adapter_id.")
        if self.background_thread_status.can_accept_new_requests() is not None:  # type: ignore[attr-defined]
            return super().add_request(list(input_ids), request_id, *args, **kwargs)  # type: ignore[misc]
        carrier = self.batching.carry(key)
        return super().add_request(list(input_ids), request_id, *args, **kwargs, **{KEYWORD: carrier})  # type: ignore[misc]

    def add_requests(
        self, inputs: Sequence[Sequence[int]], *args, adapter_ids=None, adapter_names=None, **kwargs: Any
    ) -> list[str]:
        """transformers' add_requests, with one id for each prompt, or one for all. Raises what `add_request` does."""
        prompts = with_keys(self.batching.calls.default, inputs, one_of(adapter_ids, adapter_names))
        for key in {prompt.key for prompt in prompts}:
            self.batching.missing(key)  # before any of them is added
        return super().add_requests(prompts, *args, **kwargs)  # type: ignore[misc]

    def status(self) -> BatchingStatus:
        """Requests, tokens and waiting times of each adapter."""
        return self.batching.status()

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()  # type: ignore[misc]
        if self.batching.processor is not processor:
            self._forwards.forget()
            steer_processor(processor, self.batching, self._forwards)
            # transformers 5.17 takes memory as it is. What is masked counts as zero times what lies there, and a
            # warm-up reads it all: a NaN that somebody has left would end the process on a GPU.
            for tensors in ("key_cache", "value_cache"):
                for tensor in getattr(processor.cache, tensors, ()):
                    tensor.zero_()
        return processor

    def _run_generation_loop(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._run_generation_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.output_router.release()  # type: ignore[attr-defined]
            self.batching.close()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        super().stop(*args, **kwargs)  # type: ignore[misc]
        if self.batch_processor is None and not self.is_running():  # type: ignore[attr-defined]
            self.batching.processor = self.batching.scheduler = None
            self._forwards.forget()


@functools.cache
def _class_of(own: Any) -> Any:
    return type(own.__name__, (LoraBatching, own), {"__module__": own.__module__, "__doc__": own.__doc__})


def check_options(fairness: str, patience: int) -> None:
    """Raises: ConfigError."""
    if fairness not in FAIRNESS:
        raise ConfigError(f"fairness={fairness!r}: expected one of {', '.join(map(repr, FAIRNESS))}.")
    if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
        raise ConfigError(f"patience={patience!r}: expected the number of requests, at least 1.")


def check_kept(manager: LoraBatching, fairness: str | None, patience: int | None) -> None:
    """Raises: ConfigError where a manager that is kept for the next call has other options than are asked for."""
    kept = dict(zip(("fairness", "patience"), manager._options, strict=False))
    for name, value in (("fairness", fairness), ("patience", patience)):
        if value is not None and value != kept[name]:
            raise ConfigError(
                f"{name}={value!r}: the model keeps a manager of continuous batching with {name}={kept[name]!r}. Call "
                "model.destroy_cached_continuous_batching_manager() first, or leave the option out."
            )


def with_keys(default: Key | None, inputs: Sequence[Sequence[int]], ids: Any) -> list[Prompt]:
    """Prompts with their keys. Raises: RoutingError where ids do not fit them."""
    if ids is None and inputs and all(isinstance(prompt, Prompt) for prompt in inputs):
        return list(inputs)  # type: ignore[arg-type]
    if not inputs:
        return []
    keys = [default] * len(inputs) if ids is None else to_keys(ids, len(inputs))[0]
    return [Prompt(prompt, key) for prompt, key in zip(inputs, keys, strict=True)]
