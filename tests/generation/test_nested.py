"""Calls inside of calls: a processor, a callback or a loop that asks the same model, or another one, again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from enabled import enabled, in_use
from models import prompts
from oracle import Id, alone, relative_error, rows_of
from transformers import LogitsProcessor, PreTrainedModel

from hf_multilora.errors import RoutingError

IDS: list[Id] = ["r8", None, "r3"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return enabled("llama", ["r8", "r3", "r64"])


class Asking(LogitsProcessor):
    """Runs `ask(input_ids)` at every step and keeps what it gives."""

    def __init__(self, ask: Callable[[torch.Tensor], Any]) -> None:
        self.ask = ask
        self.answers: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.answers.append(self.ask(input_ids))
        return scores


def generate(model: PreTrainedModel, asking: Asking, **options: Any) -> None:
    """A generate() whose own result must be what it is without the inner call."""
    inputs = prompts(3, side=None)
    got = model.generate(**inputs, **OPTIONS, **options, logits_processor=[asking], adapter_ids=IDS)
    assert torch.equal(got, rows_of("llama", IDS, lambda ref: ref.generate(**inputs, **OPTIONS, **options)))
    assert in_use(model) == 0


def last(model: PreTrainedModel, tokens: torch.Tensor, **ids: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **ids).logits[:, -1]


@pytest.mark.parametrize("beams", [1, 2])
def test_a_forward_without_ids_inherits(model: PreTrainedModel, beams: int) -> None:
    seen: list[torch.Tensor] = []
    asking = Asking(lambda tokens: (seen.append(tokens), last(model, tokens))[1])
    generate(model, asking, num_beams=beams)
    ids = [adapter for adapter in IDS for _ in range(beams)]
    for tokens, answer in zip(seen, asking.answers, strict=True):
        want = rows_of("llama", ids, lambda ref, tokens=tokens: last(ref, tokens))
        assert relative_error(answer, want) <= 1e-5


@pytest.mark.parametrize("adapter", ["r64", "__base__"])
def test_a_forward_with_ids_of_its_own(model: PreTrainedModel, adapter: str) -> None:
    seen: list[torch.Tensor] = []
    asking = Asking(lambda tokens: (seen.append(tokens), last(model, tokens[:1], adapter_ids=adapter))[1])
    generate(model, asking)
    reference = alone("llama", None if adapter == "__base__" else adapter)
    for tokens, answer in zip(seen, asking.answers, strict=True):
        assert relative_error(answer, last(reference, tokens[:1])) <= 1e-5


def test_a_generate_inside(model: PreTrainedModel) -> None:
    """A nested generate without ids inherits; with ids it has its own."""
    inner = {"max_new_tokens": 2, "do_sample": False}
    inherits = Asking(lambda tokens: model.generate(tokens, **inner))
    own = Asking(lambda tokens: model.generate(tokens, **inner, num_beams=2, adapter_ids=["r64", "r3", None]))
    for asking, ids, beams in ((inherits, IDS, 1), (own, ["r64", "r3", None], 2)):
        generate(model, asking)
        for answer in asking.answers:
            want = rows_of("llama", ids, lambda ref, a=answer, b=beams: ref.generate(a[:, :-2], **inner, num_beams=b))
            assert torch.equal(answer, want)


def test_a_batch_that_does_not_fit_raises(model: PreTrainedModel) -> None:
    """One row asked inside of a batch of three: whose adapter would it be?"""
    with pytest.raises(RoutingError, match="3"):
        generate(model, Asking(lambda tokens: last(model, tokens[:1])))
    with pytest.raises(RoutingError):
        generate(model, Asking(lambda tokens: model.generate(tokens[:2], max_new_tokens=1)))
    assert in_use(model) == 0
    assert torch.equal(last(model, prompts(2)["input_ids"]), last(alone("llama", None), prompts(2)["input_ids"]))


def test_one_id_for_all_rows_fits_any_batch(model: PreTrainedModel) -> None:
    inputs = prompts(3, side=None)
    asking = Asking(lambda tokens: (tokens, last(model, tokens[:1])))
    model.generate(**inputs, **OPTIONS, logits_processor=[asking], adapter_ids="r3")
    for tokens, answer in asking.answers:
        assert relative_error(answer, last(alone("llama", "r3"), tokens[:1])) <= 1e-5


def test_another_model_inside(model: PreTrainedModel) -> None:
    """A scorer that is enabled too: it neither inherits ids nor takes part in this model's call."""
    scorer = enabled("llama_tied", ["r8"])
    asking = Asking(lambda tokens: (tokens, last(scorer, tokens), last(scorer, tokens, adapter_ids="r8")))
    generate(model, asking)
    for tokens, bare, adapted in asking.answers:
        assert torch.equal(bare, last(alone("llama_tied", None), tokens))
        assert relative_error(adapted, last(alone("llama_tied", "r8"), tokens)) <= 1e-5


def test_a_custom_loop_with_ids_of_its_own(model: PreTrainedModel) -> None:
    """The loop may ask under other ids than the call was given, step by step."""

    def contrast(model: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for _ in range(3):
            scores = 2 * last(model, input_ids) - last(model, input_ids, adapter_ids="__base__")
            input_ids = torch.cat([input_ids, scores.argmax(-1, keepdim=True)], dim=1)
        return input_ids

    inputs = prompts(3, side=None)
    got = model.generate(**inputs, custom_generate=contrast, adapter_ids=IDS)
    tokens = inputs["input_ids"]
    for _ in range(3):
        scores = 2 * rows_of("llama", IDS, lambda ref, t=tokens: last(ref, t)) - last(alone("llama", None), tokens)
        tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(got, tokens)
