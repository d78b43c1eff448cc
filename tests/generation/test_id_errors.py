"""Ids that cannot be honoured: an error that says which and why, before any forward, and nothing left behind."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from enabled import Calls, enabled, in_use
from models import FAMILIES, prompts
from oracle import adapters
from transformers import PreTrainedModel

from hf_multilora import enable_multilora
from hf_multilora.errors import AdapterNotFoundError, MultiLoraError, RoutingError, SlotError

ROWS = 3


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return enabled("llama")


def forward(model: PreTrainedModel, **ids: Any) -> None:
    model(**prompts(ROWS), **ids)


def generate(model: PreTrainedModel, **ids: Any) -> None:
    model.generate(**prompts(ROWS), max_new_tokens=2, **ids)


def use(model: PreTrainedModel, *, adapter_ids: Any) -> None:
    with model.multilora.use(adapter_ids):
        model(**prompts(ROWS))


@pytest.fixture(params=[forward, generate, use], ids=lambda call: call.__name__)
def refused(request: pytest.FixtureRequest, model: PreTrainedModel) -> Iterator[Any]:
    """Calls the model with ids that must raise `error`; checks that nothing ran and nothing stays."""

    def check(error: type[Exception], ids: Any, *words: str) -> None:
        with Calls(model) as calls, pytest.raises(error) as raised:
            request.param(model, adapter_ids=ids)
        for word in words:
            assert word in str(raised.value), str(raised.value)
        assert len(calls) == 0
        assert in_use(model) == 0

    yield check
    base = FAMILIES["llama"].build()
    with torch.no_grad():
        assert torch.equal(model(**prompts(ROWS)).logits, base(**prompts(ROWS)).logits)


@pytest.mark.parametrize("ids", [["r8"], ["r8", None], ["r8"] * 4, ["r8"] * 6])
def test_wrong_length(refused: Any, ids: list[str | None]) -> None:
    refused(RoutingError, ids, str(len(ids)), str(ROWS))


def test_empty_list(refused: Any) -> None:
    refused(RoutingError, [])


@pytest.mark.parametrize("ids", ["r18", ["r8", "r18", None], {"r8": 0.5, "r18": 0.5}, [{"r18": 1.0}, None, None]])
def test_unknown_name(refused: Any, ids: Any) -> None:
    refused(AdapterNotFoundError, ids, "'r18'", "'r8'", "Closest")


def test_unknown_path_and_hub_id(refused: Any, tmp_path: Any) -> None:
    """These look like sources, so they are tried: what comes is the loader's error, never the base's answer."""
    refused(MultiLoraError, str(tmp_path / "nothing" / "here"), "here")
    refused(MultiLoraError, "no-such-org/no-such-adapter", "no-such-org/no-such-adapter")
    (tmp_path / "empty").mkdir()
    refused(MultiLoraError, [str(tmp_path / "empty"), None, None], "empty")


@pytest.mark.parametrize(
    "ids",
    [1, [1, 2, 3], [b"r8", None, None], [["r8"], None, None], torch.tensor([0, 1, 2]), [0.5, None, None], ...],
    ids=str,
)
def test_wrong_type(refused: Any, ids: Any) -> None:
    refused(RoutingError, ids)


@pytest.mark.parametrize(
    "mix", [{}, {"r8": "much"}, {"r8": None}, {"r8": float("nan")}, {"r8": float("inf")}, {1: 0.5}], ids=str
)
def test_wrong_mix(refused: Any, mix: Any) -> None:
    refused(RoutingError, [mix, None, None])


def test_mix_over_the_maximum_rank() -> None:
    small = enabled("llama", ["r64", "r33"], max_lora_rank=64)
    for call in (forward, generate):
        with pytest.raises(SlotError, match="max_lora_rank"):
            call(small, adapter_ids=[{"r64": 0.5, "r33": 0.5}, None, None])
    forward(small, adapter_ids="r64")
    ids = {"r64": 0.5, "r33": 0.5, "r16": 0.5, "r8": 0.5, "r3": 0.5}  # 124 in all
    with torch.no_grad():
        assert enabled("llama")(**prompts(1), adapter_ids=ids).logits.isfinite().all()


def test_both_spellings_at_once(model: PreTrainedModel) -> None:
    for call in (forward, generate):
        with pytest.raises((MultiLoraError, TypeError), match="adapter_names"):
            call(model, adapter_ids="r8", adapter_names="r3")


def test_both_spellings_at_once_where_the_instance_has_methods_of_its_own() -> None:
    base = FAMILIES["llama"].build()
    base.forward, base.generate = base.forward, base.generate  # as accelerate puts a forward there
    model = enable_multilora(base, max_lora_rank=64)
    model.load_adapter(adapters()["r8"], adapter_name="r8")
    for call in (model, model.forward, model.generate):
        with pytest.raises(RoutingError, match="the same argument"):
            call(**prompts(ROWS), adapter_ids="r8", adapter_names="r8")
    assert torch.equal(*(model(**prompts(ROWS), **{name: "r8"}).logits for name in ("adapter_names", "adapter_ids")))


def test_other_keyword_arguments_are_the_models_own(model: PreTrainedModel) -> None:
    """Unknown ones fail as on the bare model, known ones arrive."""
    with pytest.raises(ValueError, match="adapter_idz"):
        generate(model, adapter_idz="r8")
    out = model(**prompts(2), adapter_ids="r8", output_hidden_states=True, output_attentions=False, use_cache=False)
    assert len(out.hidden_states) == 3
    as_tuple = model(**prompts(2), adapter_ids="r8", return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], out.logits)
    labels = prompts(2)["input_ids"]
    assert model(**prompts(2), adapter_ids="r8", labels=labels).loss > 0


@pytest.mark.parametrize("family", ["llama", "t5", "gpt2"])
def test_signatures_stay(family: str) -> None:
    """transformers reads them to decide which masks, positions and slices it passes."""
    bare, model = FAMILIES[family].build(), enabled(family, ["r8"])
    for method in ("forward", "prepare_inputs_for_generation"):
        before = set(inspect.signature(getattr(bare, method)).parameters)
        assert before <= set(inspect.signature(getattr(model, method)).parameters), method


def test_the_whole_batch_is_refused_for_one_bad_row(model: PreTrainedModel) -> None:
    """More adapters named than there are slots, one of them unknown: no wave runs before the error."""
    small = enabled("llama", max_loras=1)
    with Calls(small) as calls, pytest.raises(AdapterNotFoundError, match="r99"):
        generate(small, adapter_ids=["r1", "r3", "r99"])
    assert len(calls) == 0
    with pytest.raises(RoutingError):
        generate(small, adapter_ids=["r1", "r3", "r8", "r16"])


def test_on_demand_switched_off() -> None:
    model = enabled("llama", ["r8"], on_demand=False)
    folder = str(adapters("llama")["r3"])
    with pytest.raises(AdapterNotFoundError):
        forward(model, adapter_ids=folder)
    model = enabled("llama", ["r8"])
    with torch.no_grad():
        got = model(**prompts(2), adapter_ids=folder).logits
        model.load_adapter(folder, adapter_name="r3")
        assert torch.equal(got, model(**prompts(2), adapter_ids="r3").logits)
