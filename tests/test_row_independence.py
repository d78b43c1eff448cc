"""Rows are tenants: which other adapters share a batch of the same shape changes not one bit of a row's result."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import pytest
import torch
from enabled import enabled
from hypothesis import given, settings
from hypothesis import strategies as st
from models import prompts
from oracle import MIX, Id, adapters
from safetensors.torch import load_file
from transformers import PreTrainedModel

ROWS = 5
NAMES = ["r1", "r3", "r8", "r16", "r33", "r64"]
CHOICES: list[Id] = [None, *NAMES, MIX, {"r64": -0.5, "r33": 1.5}]
SHAPES = [1, 2, 12]  # tokens per row: a decoding step, the smallest prefill, a prompt

FAMILIES = ["llama", "phi3", "opt", "llama in bfloat16", "gpt2 in float16"]
ids_of_neighbours = st.lists(st.sampled_from(CHOICES), min_size=ROWS - 1, max_size=ROWS - 1)


def poison(model: PreTrainedModel, family: str = "llama") -> None:
    """Load adapters that are broken in every way that spreads: NaN, infinities, overflow, NaN in B only."""
    folder = adapters(family)["r64"]
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    for name, part, value in (
        ("nan", "lora_", math.nan),
        ("inf", "lora_", math.inf),
        ("huge", "lora_", 1e38),
        ("half", "lora_B", math.nan),
    ):
        bad = {key: torch.full_like(t, value) if part in key else t for key, t in tensors.items()}
        model.multilora.load(bad, name=name, config=config)


@cache
def model(family: str) -> PreTrainedModel:
    """Enough slots for every id at once: a wave would be a batch of another shape."""
    name, _, dtype = family.partition(" in ")
    built = enabled(name, max_loras=8)
    poison(built, name)
    return built.to(getattr(torch, dtype)) if dtype else built


def inputs(length: int, seed: int) -> dict[str, torch.Tensor]:
    return prompts(ROWS, length=length, seed=seed, side=None if length < 4 else "left")


@torch.no_grad()
def logits(family: str, ids: list[Id] | Id, length: int, seed: int = 0) -> torch.Tensor:
    return model(family)(**inputs(length, seed), adapter_ids=ids).logits


@cache
def among_base_rows(family: str, choice: int, row: int, length: int) -> torch.Tensor:
    ids: list[Id] = [None] * ROWS
    ids[row] = CHOICES[choice]
    return logits(family, ids, length)[row]


def reference(family: str, adapter: Id, row: int, length: int) -> torch.Tensor:
    """The row with this id among base rows."""
    return among_base_rows(family, CHOICES.index(adapter), row, length)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    adapter=st.sampled_from(CHOICES),
    neighbours=ids_of_neighbours,
    row=st.integers(0, ROWS - 1),
    length=st.sampled_from(SHAPES),
)
def test_neighbours_change_no_bit(family: str, adapter: Id, neighbours: list[Id], row: int, length: int) -> None:
    got = logits(family, [*neighbours[:row], adapter, *neighbours[row:]], length)[row]
    assert torch.equal(got, reference(family, adapter, row, length))
    if adapter is not None:
        assert torch.equal(logits(family, adapter, length)[row], got), "one id for all rows"


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    good=st.lists(st.sampled_from(CHOICES[:-1]), min_size=ROWS, max_size=ROWS),
    bad=st.dictionaries(st.integers(0, ROWS - 1), st.sampled_from(["nan", "inf", "huge", "half"]), min_size=1),
    length=st.sampled_from(SHAPES),
)
def test_poison_stays_in_its_rows(family: str, good: list[Id], bad: dict[int, str], length: int) -> None:
    ids: list[Id] = [bad.get(row, adapter) for row, adapter in enumerate(good)]
    got = logits(family, ids, length)
    for row, adapter in enumerate(ids):
        if row in bad:
            if bad[row] in ("nan", "half"):
                assert got[row].isnan().any(), "a poisoned adapter that does not show was not applied"
        else:
            assert torch.equal(got[row], reference(family, adapter, row, length))


def test_poison_in_a_slot_that_nobody_uses() -> None:
    """Rows of lower rank and untrained modules read nothing of their slot's past, nor of the slots beside theirs."""
    narrow = enabled("llama", ["r1", "r3"], max_loras=2)
    want = narrow(**inputs(12, 0), adapter_ids=["r1", None, "r3", "r1", None]).logits
    poison(narrow)
    for _ in range(2):
        for name in ("nan", "inf", "half"):
            with torch.no_grad():
                narrow(**inputs(12, 0), adapter_ids=[name, None, name, None, None])
                narrow(**inputs(12, 0), adapter_ids=["r1", None, name, "r1", None])
                got = narrow(**inputs(12, 0), adapter_ids=["r1", None, "r3", "r1", None]).logits
            assert torch.equal(got, want)


def test_poison_in_a_decoding_batch() -> None:
    """Greedy decoding with a poisoned neighbour: every step's logits of the other rows keep their bits."""
    options: dict[str, Any] = {
        "max_new_tokens": 4,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }

    def steps(ids: list[Id]) -> torch.Tensor:
        return torch.stack(model("llama").generate(**inputs(12, 1), **options, adapter_ids=ids).logits, 1)

    got, want = steps(["r8", "nan", None, MIX, "r64"]), steps(["r8", None, None, MIX, "r64"])
    for row in (0, 2, 3, 4):
        assert torch.equal(got[row], want[row])


def test_other_traffic_changes_no_bit() -> None:
    """Loading, reloading and evicting others, between the same two calls."""
    busy = enabled("llama", ["r8", "r3"], max_loras=3)
    ids: list[Id] = ["r8", None, "r3", "r8", None]
    with torch.no_grad():
        want = busy(**inputs(12, 2), adapter_ids=ids).logits
        for name in ("r64", "r16", "r33"):
            busy.load_adapter(adapters()[name], adapter_name="other", reload=True)
            busy(**inputs(2, 2), adapter_ids=["other"] * ROWS)
            assert torch.equal(busy(**inputs(12, 2), adapter_ids=ids).logits, want)
        busy.multilora.unload("other")
        assert torch.equal(busy(**inputs(12, 2), adapter_ids=ids).logits, want)
