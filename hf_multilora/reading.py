"""From a checkpoint to a packed adapter of one model: what it cannot serve is refused, what it saves is wrapped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .adapters.load import load_plan
from .adapters.plan import AdapterPlan, SavedParam
from .config import MultiLoraConfig
from .errors import ConfigError, ModelError, UnsupportedAdapterError
from .generation.calls import Calls
from .generation.logits import Vocabulary
from .layers.router import LoraRouter
from .memory.registry import Loaded
from .memory.store import AdapterStore
from .parallel import shared
from .survey import Found, Survey
from .wrapped import Wrapped


@dataclass(frozen=True, eq=False)
class Load:
    """Reads one adapter, the first time and whenever it was dropped from host memory.

    Args:
        reader: of the model that it is for.
        source: folder, hub id, or a list of one dictionary of tensors: that is emptied, since the packed block is what
            stays.
        options: of `load_plan`.
    """

    reader: Reader
    source: Any
    options: Mapping[str, Any]

    def __call__(self) -> Loaded:
        if not isinstance(self.source, list):
            return self.reader.read(self.source, self.options)
        if not self.source:
            raise ModelError("This adapter was given as tensors, which are gone: pass them again to reload it.")
        loaded = self.reader.read(self.source[0], self.options)
        self.source.clear()
        return loaded


class Reader:
    """Reads adapters for one model.

    Args:
        model: that is to serve them.
        seen: what the survey has found in it.
        wrapped: its wrappers; a layer that an adapter saves, and that has none, gets one.
        store: that packs them.
        calls: of the model, whose logits grow with a vocabulary that an adapter has resized.
        config: of enable_multilora.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        seen: Survey,
        wrapped: Wrapped,
        store: AdapterStore,
        calls: Calls,
        config: MultiLoraConfig,
    ) -> None:
        self._model, self._survey, self._table, self._wrapped = model, seen, seen.table, wrapped
        self._store, self._calls, self._config = store, calls, config
        if config.extra_vocab_size:
            self._widen()

    @staticmethod
    def check(model: PreTrainedModel, config: MultiLoraConfig) -> None:
        """Raises: ConfigError where the model could not show what the configuration asks for."""
        if config.extra_vocab_size and hasattr(model, "final_logits_bias"):
            raise ConfigError(
                f"extra_vocab_size={config.extra_vocab_size}: {type(model).__name__} adds a bias as wide as the base "
                "vocabulary to its logits, which leaves no room for tokens of adapters. Leave extra_vocab_size=0."
            )

    def of(self, source: Any, **options: Any) -> Load:
        """What reads an adapter.

        Args:
            source: folder, hub id, or tensors by name.
            options: of `load_plan`.
        """
        return Load(self, [dict(source)] if isinstance(source, Mapping) else source, options)

    def base_dtype(self, path: str, name: str) -> torch.dtype | None:
        """dtype of a parameter of the base model; what adapters save of it is kept in the same."""
        parameter = self._table.read_base(f"{path}.{name}" if path else name)
        return None if parameter is None else parameter.dtype

    def read(self, source: Any, options: Mapping[str, Any]) -> Loaded:
        """Read an adapter now; arguments as of `of`."""
        with load_plan(source, self._table, max_lora_rank=self._config.max_lora_rank, **options) as plan:
            check_plan(plan, self._model, self._survey.found, self._config)
            saved = self._with_tied(plan)
            packed = self._store.pack(
                plan.factors,
                saved=saved,
                tokens=plan.tokens,
                invocation=plan.invocation,
                vocab_size=plan.vocab_size,
                base_dtype=self.base_dtype,
            )
            self._wrapped.wrap(f"{item.path}.{item.name}".rpartition(".")[0] for item in saved)
            if plan.vocab_size is not None and self._calls.vocabulary is None:
                self._widen()
            # Known before the first batch names it, so that a warm-up compiles for it.
            self._store.arena.expect(packed.ranks, packed.has_vectors)
            return Loaded(
                packed,
                source=plan.source,
                fingerprint=plan.fingerprint_of_source,
                base_model=plan.base_model,
                ignored=plan.ignored,
                left_out=plan.left_out,
                warnings=plan.warnings,
                facts=plan.facts(),
            )

    def _with_tied(self, plan: AdapterPlan) -> list[SavedParam]:
        """A resized vocabulary was written into one matrix, and so into every module that shares it."""
        saved = list(plan.saved)
        known = {f"{item.path}.{item.name}" for item in saved}
        for item in plan.saved if plan.vocab_size is not None else ():
            for name in self._wrapped.tied.get(f"{item.path}.{item.name}", ()):
                if name not in known:
                    path, _, attribute = name.rpartition(".")
                    saved.append(SavedParam(path, attribute, item.ref))
                    known.add(name)
        return saved

    def _widen(self) -> None:
        self._calls.vocabulary = Vocabulary(_vocabulary_of(self._model), self._config.extra_vocab_size)


def check_plan(plan: AdapterPlan, model: PreTrainedModel, found: Mapping[str, Found], config: MultiLoraConfig) -> None:
    """What a checkpoint may have, and a model that is enabled with `config` cannot serve.

    Args:
        found: the layers of the model that carry adapters.

    Raises:
        UnsupportedAdapterError: an aLoRA that saves modules or tokens; a router, or a part of a layer, saved whole.
        ConfigError: a larger vocabulary than there is room for.
    """
    if plan.invocation and (plan.saved or plan.tokens):
        raise UnsupportedAdapterError(
            f"{plan.source}: an aLoRA that also saves whole modules or tokens is not served: these have no start."
        )
    for item in plan.saved:
        path = f"{item.path}.{item.name}".rpartition(".")[0]
        if shared(found[path].module if path in found else model.get_submodule(path)):
            raise UnsupportedAdapterError(
                f"{plan.source}: it saves {path!r} whole (modules_to_save), a layer that the ranks of this "
                "tensor-parallel model share: that is not served. Saved heads and embeddings are."
            )
        if path in found and issubclass(found[path].wrapper, LoraRouter):
            raise UnsupportedAdapterError(
                f"{plan.source}: it saves the router {path!r} whole (modules_to_save), which is not served: "
                "LoRA on routers is."
            )
    size = _vocabulary_of(model)
    room = size + config.extra_vocab_size
    if plan.vocab_size is not None and plan.vocab_size > room:
        raise ConfigError(
            f"{plan.source}: its vocabulary has {plan.vocab_size} tokens, the model serves {room}. Enable it with "
            f"extra_vocab_size={plan.vocab_size - size}."
        )


def _vocabulary_of(model: PreTrainedModel) -> int:
    embedding = model.get_input_embeddings()
    return int(getattr(embedding, "num_embeddings", model.config.get_text_config().vocab_size))
