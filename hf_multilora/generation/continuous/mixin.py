"""What a model that generates gets for continuous batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import ContinuousBatchingConfig

from ...errors import ModelError, RoutingError
from ...parallel import alike
from ..ids import one_of
from .forwards import check_config
from .manager import PATIENCE, LoraBatching, check_kept, check_options, with_keys

# transformers' functions call each other without these.
_options: ContextVar[tuple[str | None, int | None]] = ContextVar("hf_multilora_batching_options", default=(None, None))


class ContinuousBatchingMixin:
    """Adapter ids in transformers' entry points of continuous batching."""

    multilora: Any

    def init_continuous_batching(
        self, *args: Any, fairness: str | None = None, patience: int | None = None, **kwargs: Any
    ) -> Any:
        """transformers' init_continuous_batching; the manager's requests take adapter ids.

        Args:
            fairness: "arrival" (the default), or "tokens": among waiting requests, the adapter that has had the fewest
                tokens goes first.
            patience: later requests that one which waits for a slot lets go first (64); then a slot is emptied for it,
                so that it starts when those who run there have ended, at the latest.

        Raises:
            RoutingError: inside of a `use` block or another call, whose ids requests would not have.
            ConfigError, ModelError: options, or a configuration, that cannot be served.
        """
        calls = self.multilora.calls
        if calls.current() is not None:
            raise RoutingError(
                "Continuous batching cannot take its ids from a `use` block: pass adapter_ids to generate_batch, or "
                "adapter_id to add_request."
            )
        asked = _asked(fairness, patience)
        options = ("arrival" if asked[0] is None else asked[0], PATIENCE if asked[1] is None else asked[1])
        check_options(*options)
        if calls.store.spread:
            devices = ", ".join(str(arena.device) for arena in calls.store.arenas)
            raise ModelError(
                f"Continuous batching runs on one device, and the model computes on several ({devices}). Load it onto "
                "one device, or use generate()."
            )
        kept = getattr(self, "_cached_continuous_batching_manager", None)
        if kept is not None and not isinstance(kept, LoraBatching):
            raise ModelError(
                "The model keeps a manager of continuous batching from before it was enabled. Call "
                "model.destroy_cached_continuous_batching_manager() first."
            )
        config = _config_of(args, kwargs)
        check_config(config)
        manager = super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]
        if isinstance(manager, LoraBatching):
            check_kept(manager, *asked)
        else:
            try:
                LoraBatching.adopt(manager, self.multilora, *options, graphs_asked=_graphs_asked(config))
            except BaseException:
                if manager._original_attn_impl is not None:  # the manager that would give it back is not to be
                    self.set_attn_implementation(manager._original_attn_impl)  # type: ignore[attr-defined]
                raise
            calls.managers.add(manager)
        return manager

    @contextmanager
    def continuous_batching_context_manager(
        self, *args: Any, fairness: str | None = None, patience: int | None = None, **kwargs: Any
    ) -> Iterator[Any]:
        """transformers' continuous_batching_context_manager, with the options of `init_continuous_batching`.

        Raises:
            ModelError: ranks share the model, and an error has ended their loops: they differ, or one has failed.
        """
        with ExitStack() as stack:
            with _chosen(fairness, patience):
                manager = stack.enter_context(super().continuous_batching_context_manager(*args, **kwargs))  # type: ignore[misc]
            yield manager
        manager.check_alive()

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        *args: Any,
        adapter_ids: Any = None,
        adapter_names: Any = None,
        fairness: str | None = None,
        patience: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' generate_batch, each prompt through its own adapter.

        Args:
            inputs: token ids of each prompt.
            adapter_ids: one id per prompt (a name, None for the base, a mix), or one for all.
            adapter_names: PEFT's spelling of the same.
            fairness, patience: see `init_continuous_batching`.

        Returns:
            request id -> GenerationOutput, in the order of the prompts. A request that failed says why in `error`.

        Raises:
            AdapterNotFoundError: a name that is not registered, and nothing that could be loaded.
            RoutingError: ids that do not fit the prompts.
            ModelError: ranks that share the model name other ids, or one of them has failed.
        """
        calls = self.multilora.calls
        calls.check_quiet("generate_batch() begins")
        with alike(calls.agreement, "the adapters of a batch") as facts:
            prompts = with_keys(calls.default, inputs, one_of(adapter_ids, adapter_names))
            keys = [prompt.key for prompt in prompts]
            for key in dict.fromkeys(keys):
                self.multilora.missing(key)
            if calls.agreement is not None:  # all of them now, since ranks load nothing while they batch
                calls.ensure(calls.distinct(keys))
                facts += keys
        with _chosen(fairness, patience):
            return super().generate_batch(prompts, *args, **kwargs)  # type: ignore[misc]


def _config_of(args: Sequence[Any], kwargs: dict[str, Any]) -> ContinuousBatchingConfig | None:
    """The configuration among the arguments of init_continuous_batching, if there is one."""
    given = [*args, *kwargs.values()]
    given += [getattr(value, "continuous_batching_config", None) for value in given]
    return next((value for value in given if isinstance(value, ContinuousBatchingConfig)), None)


def _graphs_asked(config: ContinuousBatchingConfig | None) -> bool:
    """Whether somebody has said if there are to be CUDA graphs."""
    if config is None:
        return False
    sizes = (config.q_padding_interval_size, config.kv_padding_interval_size)
    return config.use_cuda_graph is not None or any(sizes) or bool(config.use_async_batching)


def _asked(fairness: str | None, patience: int | None) -> tuple[str | None, int | None]:
    """The options given here, else those given around; None: nowhere."""
    around = _options.get()
    return around[0] if fairness is None else fairness, around[1] if patience is None else patience


@contextmanager
def _chosen(fairness: str | None, patience: int | None) -> Iterator[None]:
    token = _options.set(_asked(fairness, patience))
    try:
        yield
    finally:
        _options.reset(token)
