"""Every kind of checkpoint that PEFT writes, all of them in one batch: each row as if PEFT ran its adapter alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fidelity.bed import (
    CAUSAL,
    NAMES,
    assert_own_columns,
    batch,
    enabled,
    folder_of,
    kinds,
    known,
    logits,
    reference,
    vocabulary,
    wanted,
)
from models import VOCAB
from oracle import relative_error
from transformers import PreTrainedModel

from hf_multilora import disable_multilora

FAMILIES = [*CAUSAL, "t5"]
CASES = [(family, kind) for family in FAMILIES for kind in kinds(family)]


def rows(family: str) -> list[str | None]:
    """All kinds in one batch, base rows first, last and between."""
    names: list[str | None] = [None]
    for number, name in enumerate(kinds(family)):
        names += [name, None] if number % 8 == 7 else [name]
    return [*names, None]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Iterator[PreTrainedModel]:
    model = enabled(family, kinds(family))
    yield model
    disable_multilora(model)


def new_tokens(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """What generate() adds to the prompts, [rows, 5]."""
    size = 1 if "decoder_input_ids" in inputs else inputs["input_ids"].shape[1]
    inputs = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(**inputs, **options)[:, size:]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_references_differ_from_the_base(family: str) -> None:
    """A test of the tests: an adapter that is missing, or only half served, cannot pass for the real one."""
    names = rows(family)
    inputs = batch(family, names)
    base = wanted(family, [None] * len(names), inputs, logits)
    for name, own, plain in zip(names, wanted(family, names, inputs, logits), base, strict=True):
        if name is not None:
            assert relative_error(own[..., :VOCAB], plain) > 0.03, name


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_alone(family: str, kind: str) -> None:
    """One kind between base rows: which one is wrong, where the batch of all is."""
    model = enabled(family, [kind])
    names = [None, kind, None, kind]
    inputs = batch(family, names)
    got = logits(model, inputs, adapter_ids=names)
    for row, (name, want) in enumerate(zip(names, wanted(family, names, inputs, logits), strict=True)):
        assert_own_columns(got[row], want, name, f"{family} row {row}")


@pytest.mark.parametrize("side", ["left", "right"])
def test_all_kinds_in_one_batch(family: str, model: PreTrainedModel, side: str) -> None:
    names = rows(family)
    inputs = batch(family, names, side=side, seed=3)
    got = logits(model, inputs, adapter_ids=names)
    for row, (name, want) in enumerate(zip(names, wanted(family, names, inputs, logits), strict=True)):
        assert_own_columns(got[row], want, name, f"{family} row {row}")


def test_greedy_tokens(family: str, model: PreTrainedModel) -> None:
    names = rows(family)
    inputs = batch(family, names)
    got = new_tokens(model, inputs, adapter_ids=names)
    want = wanted(family, names, inputs, new_tokens)
    wrong = [name for row, name in enumerate(names) if not torch.equal(got[row], want[row])]
    assert not wrong


def test_beams(family: str, model: PreTrainedModel) -> None:
    names = [name for name in rows(family) if name is None or "alora" not in name]  # PEFT has no beams for aLoRA
    inputs = batch(family, names)
    got = new_tokens(model, inputs, num_beams=2, adapter_ids=names)
    want = wanted(family, names, inputs, lambda reference, own: new_tokens(reference, own, num_beams=2))
    wrong = [name for row, name in enumerate(names) if not torch.equal(got[row], want[row])]
    assert not wrong


def test_neighbours_change_no_bit(family: str, model: PreTrainedModel) -> None:
    """The same row among other kinds: the same bits."""
    names = rows(family)
    inputs = batch(family, names)
    together = logits(model, inputs, adapter_ids=names)
    for row in range(1, len(names), 5):
        name = names[row]
        ids = [name if i == row else None for i in range(len(names))]
        size = vocabulary(family, name)
        own = {**known(inputs, VOCAB)}
        own["input_ids"][row] = inputs["input_ids"][row]
        alone = logits(model, own, adapter_ids=ids)
        assert torch.equal(alone[row, ..., :size], together[row, ..., :size]), name


def test_the_base_before_during_and_after(family: str) -> None:
    """What adapters of all kinds do to the base: nothing."""
    model = enabled(family)
    inputs = batch(family, [None] * 3)
    want = logits(reference(family, None), inputs)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for kind in kinds(family):
        model.load_adapter(folder_of(family, kind), adapter_name=kind)
        got = logits(model, inputs, adapter_ids=[None, kind, None])
        assert torch.equal(got[::2, ..., :VOCAB], want[::2]), kind
    disable_multilora(model)
    assert torch.equal(logits(model, inputs), want)
    assert set(before) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_half_of_the_kinds_in_waves() -> None:
    """Fewer slots than kinds: the same tokens, in order."""
    names = rows("llama")
    model = enabled("llama", kinds("llama"), max_loras=9)
    inputs = batch("llama", names)
    got = new_tokens(model, inputs, adapter_ids=names)
    want = wanted("llama", names, inputs, new_tokens)
    wrong = [name for row, name in enumerate(names) if not torch.equal(got[row], want[row])]
    assert not wrong


def test_names_of_every_family() -> None:
    assert set(NAMES) >= {"llama", "llama_tied", "qwen2", "gemma3", "gpt2", "phi3", "t5", "bert_cls", "llama_cls"}
