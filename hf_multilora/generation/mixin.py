"""What an enabled model's class gets on top: generate() and forward with adapter ids, row expansion, waves."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.utils import logging

from ..errors import ModelError, RoutingError
from ..layers import LoraLayer
from .calls import Calls
from .compiled import generating
from .continuous.mixin import ContinuousBatchingMixin
from .generate import run
from .ids import one_of
from .logits import AdapterVocabularyLogitsProcessor
from .obstacles import environment
from .pipelines import refuse_repeated
from .words import AdapterWords

logger = logging.get_logger(__name__)


class MultiLoraMixin(AdapterWords):
    """Mixed into the class of an enabled model, in front of the model's own class."""

    multilora: Any  # the handle (api.MultiLora); transformers resolves the annotations of model classes at run time

    def __call__(self, *args: Any, adapter_ids: Any = None, adapter_names: Any = None, **kwargs: Any) -> Any:
        """The model's forward, each row through its own adapter.

        Args:
            adapter_ids: one id per row, or one for all rows; None: the call around, the default id, or the base.
            adapter_names: PEFT's spelling of the same.

        Raises:
            RoutingError: ids that do not fit the rows, or ids inside a compiled call.
            AdapterNotFoundError, SlotError: unknown names; more adapters than slots.
            CacheMismatchError: a KV cache that another adapter wrote.
        """
        if torch.compiler.is_dynamo_compiling():
            if adapter_ids is not None or adapter_names is not None:
                raise RoutingError("Names cannot be resolved inside a compiled call: use model.multilora.use(ids).")
            self.multilora.calls.routing.serving("The model")
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if "multilora" not in self.__dict__:  # a method that somebody kept beyond disable_multilora
            return type(self).__call__(self, *args, **kwargs)
        ids = one_of(adapter_ids, adapter_names)
        return self.multilora.calls.forward(super().__call__, args, kwargs, ids)  # type: ignore[misc]

    @property
    def loss_function(self) -> Any:
        """The model's own loss, over as many columns as the logits have."""
        loss = super().loss_function  # type: ignore[misc]
        if self.multilora.config.extra_vocab_size == 0:
            return loss

        def over_all_columns(logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return loss(logits, labels, **{**kwargs, "vocab_size": logits.shape[-1]})

        return over_all_columns

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        super(MultiLoraMixin, type(self)).loss_function.fset(self, value)  # type: ignore[misc]

    def get_compiled_call(self, compile_config: Any) -> Any:
        calls = self.multilora.calls
        if calls.graphs is not None:
            with calls.lock:
                return functools.partial(_stepped_forward, calls, calls.graphs.begin(self))
        compiled = super().get_compiled_call(compile_config)  # type: ignore[misc]
        if generating.get():
            compiled = calls.steps.begin(self, compiled)
        return functools.partial(_compiled_forward, self, compiled)

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._expand_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        _begin(self.multilora.calls, self.config.is_encoder_decoder, args, kwargs, result)  # type: ignore[attr-defined]
        return result

    def _prepare_static_cache(self, cache_implementation: str, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        cache = super()._prepare_static_cache(cache_implementation, batch_size, *args, **kwargs)  # type: ignore[misc]
        calls = self.multilora.calls
        length = int(self._previous_max_cache_length)  # type: ignore[attr-defined]
        with calls.lock:
            if calls.graphs is not None:
                calls.graphs.prepare(self, cache, batch_size, length)
            else:
                calls.steps.caches.prepare(cache, batch_size, length, environment(self))
        return cache

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
        processors = super()._get_logits_processor(*args, **kwargs)  # type: ignore[misc]
        calls = self.multilora.calls
        call = calls.current()
        if call is not None and call.invocation is not None and any(map(_is_guidance, processors)):
            raise RoutingError("guidance_scale runs prompts of its own, in which an aLoRA cannot be invoked.")
        if call is None or calls.vocabulary is None:
            return processors
        own = AdapterVocabularyLogitsProcessor(calls.vocabulary.sizes(call.vocabulary))
        # Guidance turns -inf into NaN, which processors after it would rank first: mend that at once, and at the end.
        mended = [p for q in processors for p in ([q, own] if _is_guidance(q) else [q])]
        return type(processors)([*mended, own])

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            return super().resize_token_embeddings()  # type: ignore[misc]
        raise ModelError(
            "The vocabulary cannot be resized while the model is enabled: slots and adapters have the old width. Call "
            "disable_multilora(model), resize, and enable again."
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        calls = self.multilora.calls
        with calls.stopped("moved or cast"):
            before = self.device, self.dtype  # type: ignore[attr-defined]
            result = super()._apply(fn, recurse)  # type: ignore[misc]
            self.multilora.follow_model()
            if before != (self.device, self.dtype):  # type: ignore[attr-defined]
                calls.steps.clear()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.multilora.copy_model(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("An enabled model cannot be pickled. Call disable_multilora(model) first, or save_pretrained.")


class MultiLoraGenerationMixin(ContinuousBatchingMixin, MultiLoraMixin):
    """The same for models that generate."""

    def generate(
        self,
        *args: Any,
        adapter_ids: Any = None,
        adapter_names: Any = None,
        assistant_adapter_ids: Any = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' generate(), each prompt row through its own adapter.

        Args:
            adapter_ids: one id per prompt row (a name, None for the base, or a mix `{"a": 0.7, "b": 0.3}`), or one for
                all rows. Beams and return sequences are repeated for you.
            adapter_names: PEFT's spelling of the same.
            assistant_adapter_ids: ids for an enabled `assistant_model`; without them it runs its own default.

        A batch that names more adapters than slots runs in waves. Everything else is as in transformers.

        Raises:
            RoutingError: ids that do not fit the rows.
            AdapterNotFoundError, SlotError, CacheMismatchError: see `__call__`.
        """
        ids = one_of(adapter_ids, adapter_names)
        token = generating.set(True)
        try:
            return run(self, super().generate, args, kwargs, ids, assistant_adapter_ids)  # type: ignore[misc]
        finally:
            generating.reset(token)


class PartMixin:
    """Mixed into the classes of models inside of an enabled model (a decoder, an encoder, a language model).

    Code that calls them on their own, generate() of some models among it, runs under the ids of its call, too.
    """

    _multilora_calls: Calls
    _multilora_class: Any

    def __call__(self, *args: Any, adapter_ids: Any = None, adapter_names: Any = None, **kwargs: Any) -> Any:
        if "_multilora_calls" not in self.__dict__:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if torch.compiler.is_dynamo_compiling():
            if adapter_ids is not None or adapter_names is not None:
                raise RoutingError("Names cannot be resolved inside a compiled call: use model.multilora.use(ids).")
            self._multilora_calls.routing.serving("A part of the model")
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        ids = one_of(adapter_ids, adapter_names)
        return self._multilora_calls.forward(super().__call__, args, kwargs, ids)  # type: ignore[misc]

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._expand_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        _begin(self._multilora_calls, self.config.is_encoder_decoder, args, kwargs, result)  # type: ignore[attr-defined]
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A part alone has no slots: its copy is one of the class that it had."""
        twin = self._multilora_class.__new__(self._multilora_class)
        memo[id(self)] = twin
        for key, value in self.__dict__.items():
            if key not in ("_multilora_calls", "_multilora_class"):
                twin.__dict__[key] = copy.deepcopy(value, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("A part of an enabled model cannot be pickled. Call disable_multilora(model) first.")


def _begin(calls: Calls, two_lengths: bool, args: Any, kwargs: dict[str, Any], result: Any) -> None:
    """generate() has repeated its prompts: tell the call."""
    call = calls.current()
    if call is None:
        return
    ids = kwargs.get("input_ids")
    if calls.vocabulary is not None and not two_lengths:
        calls.vocabulary.check(ids, call.vocabulary)
    if call.invocation is not None and two_lengths:
        raise RoutingError("aLoRA adapters are served in decoder-only models.")
    times = kwargs.get("expand_size", args[0] if args else 1)
    call.begin(ids, times, result[0].shape[0] if result[0] is not None else None)


def swap_parts(model: PreTrainedModel, calls: Calls) -> None:
    """Give the models inside of `model` classes that run under the ids of their caller's call.

    Those without a wrapped layer (vision towers) are left alone: what they see are not rows of the batch.
    """
    for part in model.modules():
        inside = part is not model and isinstance(part, PreTrainedModel)
        if inside and any(isinstance(module, LoraLayer) for module in part.modules()):
            old = type(part)
            part.__dict__.update(_multilora_calls=calls, _multilora_class=old)
            part.__class__ = _part_class(old)  # type: ignore[arg-type]


def restore_parts(model: PreTrainedModel) -> None:
    """Undo `swap_parts`."""
    for part in model.modules():
        if isinstance(part, PartMixin):
            part.__class__ = part.__dict__.pop("_multilora_class")
            del part.__dict__["_multilora_calls"]


@functools.cache
def _part_class(old: type[PreTrainedModel]) -> type[PreTrainedModel]:
    names = {"__module__": old.__module__, "__qualname__": old.__qualname__, "__doc__": old.__doc__}
    return type(old.__name__, (PartMixin, old), names)


def _is_guidance(processor: Any) -> bool:
    return isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


def _stepped_forward(calls: Calls, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return calls.forward(step, args, kwargs)


def _compiled_forward(model: MultiLoraMixin, compiled: Any, *args: Any, **kwargs: Any) -> Any:
    calls = model.multilora.calls
    call = calls.current()
    if call is not None and call.state is not None:
        if calls.store.spread:
            logger.warning_once("The model computes on several devices: decoding is not compiled for adapters.")
            return model(*args, **kwargs)
        if call.state.saved:
            logger.warning_once("An adapter of this batch saves whole modules: decoding is not compiled for it.")
            return model(*args, **kwargs)
    return calls.forward(compiled, args, kwargs)


def swap_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Give `model` a class with the mixin in front, under the old name; returns the old class."""
    old = type(model)
    model.__class__ = _enabled_class(old)  # type: ignore[arg-type]
    return old


@functools.cache
def _enabled_class(old: type[PreTrainedModel]) -> type[PreTrainedModel]:
    generates = hasattr(old, "generate")
    mixin = MultiLoraGenerationMixin if generates else MultiLoraMixin

    # transformers reads the signature of forward to see what a model takes; wraps keeps it as it was.
    @functools.wraps(old.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # accelerate may hold on to this method beyond disable_multilora.
        if torch.compiler.is_dynamo_compiling() or "multilora" not in self.__dict__:
            return old.forward(self, *args, **kwargs)
        ids = one_of(kwargs.pop("adapter_ids", None), kwargs.pop("adapter_names", None))
        return self.multilora.calls.forward(functools.partial(old.forward, self), args, kwargs, ids)

    names: dict[str, Any] = {
        "__module__": old.__module__,
        "__qualname__": old.__qualname__,
        "__doc__": old.__doc__,
        "forward": forward,
    }
    if generates:

        @functools.wraps(MultiLoraGenerationMixin.generate)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            if "multilora" not in self.__dict__:  # a method that somebody kept beyond disable_multilora
                return type(self).generate(self, *args, **kwargs)
            refuse_repeated(kwargs, sys._getframe(1))
            return MultiLoraGenerationMixin.generate(self, *args, **kwargs)

        generate.__signature__ = _both_signatures(old.generate, MultiLoraGenerationMixin.generate)  # type: ignore
        names["generate"] = generate
    return type(old.__name__, (mixin, old), names)


def _both_signatures(old: Callable[..., Any], new: Callable[..., Any]) -> inspect.Signature:
    """The old parameters, then the new one's keywords."""
    parameters = list(inspect.signature(old).parameters.values())
    keywords = [p for p in inspect.signature(new).parameters.values() if p.kind is p.KEYWORD_ONLY]
    end = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_KEYWORD), len(parameters))
    return inspect.Signature(parameters[:end] + keywords + parameters[end:])
