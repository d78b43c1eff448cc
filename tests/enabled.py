"""Enabled models for tests of the public API."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any

import torch
from models import BUILDS
from oracle import adapters
from transformers import PreTrainedModel

from hf_multilora import enable_multilora


def enabled(family: str = "llama", names: Iterable[str] | None = None, **options: Any) -> PreTrainedModel:
    """A fresh model of this family, enabled, with the adapters of `oracle.adapters` called `names` (None: all)."""
    model = enable_multilora(BUILDS[family].build(), **{"max_loras": 8, "max_lora_rank": 128, **options})
    folders = adapters(family)
    for name in folders if names is None else names:
        model.load_adapter(folders[name], adapter_name=name)
    return model


class Calls:
    """Counts a model's forwards while it is entered; `rows` holds each one's batch size."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.rows: list[int] = []

    def __enter__(self) -> Calls:
        def note(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            self.rows.append(output.logits.shape[0])

        self.hook = self.model.register_forward_hook(note, with_kwargs=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.hook.remove()

    def __len__(self) -> int:
        return len(self.rows)


@contextmanager
def seeded(seed: int = 0):
    """The global random state from `seed`, as it was before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def in_use(model: PreTrainedModel) -> int:
    """References that calls in flight hold; 0 whenever nothing runs."""
    return sum(adapter.in_use for adapter in model.multilora.status().adapters)


def resident(model: PreTrainedModel) -> set[str]:
    return {adapter.name for adapter in model.multilora.status().adapters if adapter.slot is not None}
