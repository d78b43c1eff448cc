"""Options of generate() that stand in the config passed in, or in the model's: both count, as in the bare model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enabled import Calls, enabled
from models import FAMILIES, prompts
from oracle import alone
from transformers import GenerationConfig

from hf_multilora import enable_multilora
from hf_multilora.errors import RoutingError, SlotError

NAMES = ["r3", "r8"]


def test_rows_of_waves_end_as_those_of_one_batch() -> None:
    """No pad token, and the end token in the model's config alone: finished rows are filled up with it."""
    model, inputs = enabled("llama", NAMES, max_loras=1), prompts(2, seed=31)
    want = {name: alone("llama", name).generate(**inputs, do_sample=False, max_new_tokens=8) for name in NAMES}
    start = inputs["input_ids"].shape[1]
    eos = int(want["r3"][0, start + 2])  # one wave ends early
    assert eos not in want["r8"][1, start:], "choose another prompt"
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = eos, None
    got = model.generate(**inputs, adapter_ids=NAMES, generation_config=GenerationConfig(max_new_tokens=8))
    assert got[0].tolist() == [*want["r3"][0, : start + 3].tolist(), *[eos] * 5]
    assert torch.equal(got[1], want["r8"][1])


@pytest.mark.parametrize("where", ["argument", "passed", "model"])
def test_dictionaries_cannot_be_joined_from_waves(where: str) -> None:
    model, options = enabled("llama", NAMES, max_loras=1), {"max_new_tokens": 2}
    given: dict[str, Any] = {"return_dict_in_generate": True, **options}
    if where == "passed":
        given = {"generation_config": GenerationConfig(return_dict_in_generate=True, **options)}
    elif where == "model":
        model.generation_config.return_dict_in_generate = True
        given = {"generation_config": GenerationConfig(**options)}
    with Calls(model) as calls, pytest.raises(SlotError, match="max_loras=2 or more"):
        model.generate(**prompts(2), adapter_ids=NAMES, **given)
    assert len(calls) == 0


def test_the_slots_that_would_do_count_pinned_ones() -> None:
    model = enabled("llama", ["r1", "r3", "r8"], max_loras=2)
    model.multilora.pin("r1")
    with pytest.raises(SlotError, match="max_loras=3 or more"):
        model.generate(**prompts(2), adapter_ids=NAMES, return_dict_in_generate=True, max_new_tokens=2)


@pytest.mark.parametrize("where", ["argument", "passed", "model"])
def test_assisted_sampling_over_logits_of_two_widths(where: str) -> None:
    model = enabled("llama", NAMES, extra_vocab_size=4)
    draft = enable_multilora(FAMILIES["llama"].build())
    given: dict[str, Any] = {"do_sample": True}
    if where == "passed":
        given = {"generation_config": GenerationConfig(do_sample=True)}
    elif where == "model":
        model.generation_config.do_sample = True
        given = {"generation_config": GenerationConfig(max_new_tokens=4)}
    with pytest.raises(RoutingError, match="one width"):
        model.generate(**prompts(1), adapter_ids="r8", assistant_model=draft, **given)


def test_a_model_that_drafts_for_itself_has_no_other_ids() -> None:
    model = enabled("llama", NAMES)
    with pytest.raises(RoutingError, match="drafts for itself"):
        model.generate(**prompts(1), adapter_ids="r8", assistant_model=model, assistant_adapter_ids="r3")


def test_what_was_compiled_goes_where_the_model_is_cast() -> None:
    model = enabled("llama", NAMES)
    steps, options = model.multilora.calls.steps, {"cache_implementation": "static", "max_new_tokens": 3}
    model.generate(**prompts(2), adapter_ids="r8", **options)
    kept = object()
    steps._kept.append((kept, None, None))
    model.to("cpu")
    assert steps._kept[-1][0] is kept, "nothing has changed"
    model.double()
    assert not steps._kept and not steps.caches._kept
