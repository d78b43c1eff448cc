"""No order of loading, using and unloading adapters of any kind changes another adapter, or the base, by one bit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from fidelity.bed import batch, build, enabled, folder_of, kinds, known, logits, reference, vocabulary
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import VOCAB
from oracle import relative_error

from hf_multilora import disable_multilora

ROWS = 4
FAMILIES = ["llama_tied", "gpt2", "qwen2", "roberta_cls"]


@cache
def inputs_of(family: str, kind: str | None) -> Mapping[str, torch.Tensor]:
    """The same prompts for all rows of one kind, so that a result depends on nothing else."""
    return batch(family, [kind] * ROWS, side="right" if family.endswith("cls") else "left", seed=2)


@cache
def first_answer(family: str, kind: str | None) -> torch.Tensor:
    """What a kind answers on a model that holds nothing else, in a batch of its own; checked against PEFT."""
    inputs = inputs_of(family, kind)
    model = enabled(family, [] if kind is None else [kind], max_loras=3)
    got = logits(model, inputs, adapter_ids=kind)
    want = logits(reference(family, kind), known(inputs, vocabulary(family, kind)))
    assert relative_error(got[..., : want.shape[-1]], want) <= 1e-5, kind
    return got


steps = st.lists(
    st.tuples(
        st.sampled_from(["load", "load", "ask", "ask", "unload", "reload", "pin", "mixed"]),
        st.integers(min_value=0, max_value=1000),
    ),
    min_size=4,
    max_size=14,
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=steps)
def test_any_order(family: str, steps: list[tuple[str, int]]) -> None:
    """Two slots, host memory for four, every kind: each answer is the first one's, bit for bit."""
    names = list(kinds(family))
    model = enabled(family, max_loras=3, max_cpu_loras=4)
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    pinned: set[str] = set()
    for step, number in steps:
        here = sorted(model.multilora.adapters)
        if step == "load":
            name = names[number % len(names)]
            if name not in here and len(pinned) < 2:
                model.load_adapter(folder_of(family, name), adapter_name=name)
                check(model, family, name)
        elif not here:
            check(model, family, None)
        else:
            name = here[number % len(here)]
            if step == "ask":
                check(model, family, name)
            elif step == "unload":
                pinned.discard(name)
                model.delete_adapter(name)
            elif step == "reload":
                model.load_adapter(folder_of(family, name), adapter_name=name, reload=True)
                check(model, family, name)
            elif step == "pin" and not pinned:
                model.multilora.pin(name)
                pinned.add(name)
            elif step == "mixed":
                mixed(model, family, [name, None, here[number // 7 % len(here)], name])
        check(model, family, None)
    for name in sorted(model.multilora.adapters):
        check(model, family, name)
    for name in sorted(model.multilora.adapters):
        model.delete_adapter(name)
    check(model, family, None)
    disable_multilora(model)
    assert torch.equal(logits(model, inputs_of(family, None)), logits(build(family), inputs_of(family, None)))
    now = dict(model.named_parameters())
    assert now.keys() == weights.keys()
    assert all(torch.equal(now[name], weight) for name, weight in weights.items())


def check(model: Any, family: str, kind: str | None) -> None:
    """`kind` in every row, and the base with nobody named: the very bits of the first answer."""
    want = first_answer(family, kind)
    got = logits(model, inputs_of(family, kind), adapter_ids=kind)
    assert torch.equal(got[..., : want.shape[-1]], want), kind


def mixed(model: Any, family: str, names: list[str | None]) -> None:
    """Rows of several kinds: each row's bits are those of its own kind."""
    rows = [inputs_of(family, name) for name in names]
    together = {key: torch.stack([row[key][i] for i, row in enumerate(rows)]) for key in rows[0]}
    got = logits(model, together, adapter_ids=names)
    for row, name in enumerate(names):
        want = first_answer(family, name)[row]
        width = min(want.shape[-1], got.shape[-1])
        assert torch.equal(got[row][..., :width], want[..., :width]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_after_every_other(family: str) -> None:
    """All kinds one after the other through one slot: nothing of the one before is left in it."""
    model = enabled(family, max_loras=1)
    names = list(kinds(family))
    for name in [*names, *reversed(names)]:
        if name not in model.multilora.adapters:
            model.load_adapter(folder_of(family, name), adapter_name=name)
        check(model, family, name)
        check(model, family, None)


def test_a_call_in_flight_keeps_its_kind() -> None:
    """An adapter that is reloaded as another kind while a generate() decodes: its rows end as they began."""
    model = enabled("llama_tied", ["more_tokens_saved"], max_loras=2)
    inputs = batch("llama_tied", ["more_tokens_saved"] * 2)
    options: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**inputs, adapter_ids="more_tokens_saved", **options)
    done: list[int] = []

    def swap(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not done:
            done.append(1)
            model.load_adapter(folder_of("llama_tied", "norms"), adapter_name="more_tokens_saved", reload=True)
        return scores

    got = model.generate(**inputs, adapter_ids="more_tokens_saved", logits_processor=[swap], **options)
    assert torch.equal(got, want)
    plain = batch("llama_tied", ["norms"] * 2)
    after = logits(model, plain, adapter_ids="more_tokens_saved")
    assert relative_error(after[..., :VOCAB], logits(reference("llama_tied", "norms"), plain)) <= 1e-5


def test_casting_an_enabled_model_follows_every_kind() -> None:
    """to(float64) and back: saved modules, gains and token rows go along."""
    names = ["dora", "lora_bias", "saved_head", "tokens", "more_tokens_4", "norms", "embedding"]
    model = enabled("llama_tied", names)
    inputs = batch("llama_tied", names)
    before = logits(model, inputs, adapter_ids=names)
    model.to(torch.bfloat16)
    half = logits(model, inputs, adapter_ids=names)
    assert half.dtype == torch.bfloat16
    for row, name in enumerate(names):
        size = vocabulary("llama_tied", name)
        error = relative_error(half[row, :, :size], before[row, :, :size])
        assert error < 0.1, f"{name}: {error:.2e}"
