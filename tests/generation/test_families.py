"""Every architecture against PEFT: one mixed batch, each row as if its adapter were alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from models import FAMILIES, Family, forward_inputs, prompts
from oracle import MIX, Id, adapters, alone, assert_row, relative_error, rows_of
from transformers import PreTrainedModel

from hf_multilora import disable_multilora, enable_multilora

IDS: list[Id] = ["r8", None, "r1", MIX, "r16", "r33", "r64", "r3"]


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family: Family) -> Iterator[PreTrainedModel]:
    model = enable_multilora(family.build(), max_loras=8, max_lora_rank=128)
    for name, folder in adapters(family.name).items():
        model.load_adapter(folder, adapter_name=name)
    yield model
    disable_multilora(model)


def test_the_references_differ(family: Family) -> None:
    """A test of the tests: no adapter's answer lies near the base's or another's, so a wrong one cannot pass."""
    inputs = forward_inputs(family, len(IDS))
    with torch.no_grad():
        logits = [alone(family.name, adapter)(**inputs).logits for adapter in IDS]
    for first in range(len(IDS)):
        assert logits[first].isfinite().all()
        for second in range(first):
            assert relative_error(logits[first], logits[second]) > 0.05, (IDS[first], IDS[second])


@pytest.mark.parametrize("side", ["left", "right", None])
def test_forward(family: Family, model: PreTrainedModel, side: str | None) -> None:
    inputs = forward_inputs(family, len(IDS), side=side)
    with torch.no_grad():
        got = model(**inputs, adapter_ids=IDS).logits
        want = rows_of(family.name, IDS, lambda reference: reference(**inputs).logits)
    for row, adapter in enumerate(IDS):
        assert_row(got[row], want[row], adapter, f"{family.name} row {row}")


def test_forward_of_the_base_alone(family: Family, model: PreTrainedModel) -> None:
    inputs = forward_inputs(family, 4)
    with torch.no_grad():
        want = alone(family.name, None)(**inputs).logits
        assert torch.equal(model(**inputs).logits, want)
        assert torch.equal(model(**inputs, adapter_ids=[None, "__base__", None, "__base__"]).logits, want)


@pytest.mark.parametrize("adapter", ["r3", "r64"])
def test_forward_of_one_row(family: Family, model: PreTrainedModel, adapter: str) -> None:
    inputs = forward_inputs(family, 1)
    with torch.no_grad():
        got = model(**inputs, adapter_ids=adapter).logits
        want = alone(family.name, adapter)(**inputs).logits
    assert_row(got[0], want[0], adapter, family.name)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate(family: Family, model: PreTrainedModel, beams: int) -> None:
    inputs = prompts(len(IDS), seed=3)
    options = {"max_new_tokens": 7, "num_beams": beams, "do_sample": False}
    got = model.generate(**inputs, **options, adapter_ids=IDS)
    want = rows_of(family.name, IDS, lambda reference: reference.generate(**inputs, **options))
    assert torch.equal(got, want)


def test_scores_of_every_step(family: Family, model: PreTrainedModel) -> None:
    """Tokens hide small errors; the logits behind them do not. Base rows keep their bits at every step."""
    inputs = prompts(len(IDS), seed=4)
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def logits(model: PreTrainedModel, **extra: object) -> torch.Tensor:
        return torch.stack(model.generate(**inputs, **options, **extra).logits, dim=1)

    got = logits(model, adapter_ids=IDS)
    want = rows_of(family.name, IDS, logits)
    for row, adapter in enumerate(IDS):
        assert_row(got[row], want[row], adapter, f"{family.name} row {row}")
