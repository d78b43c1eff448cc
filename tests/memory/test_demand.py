"""What status() says about the number of slots: from batches in waves, refusals, evictions, and slots never needed."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from enabled import enabled
from models import prompts
from transformers import PreTrainedModel
from waits import until

from hf_multilora.demand import ENOUGH
from hf_multilora.errors import SlotError

NAMES = ["r1", "r3", "r8", "r16"]


def generate(model: PreTrainedModel, ids: Any) -> None:
    model.generate(**prompts(len(ids)), adapter_ids=ids, max_new_tokens=1, do_sample=False)


def suggested(model: PreTrainedModel) -> int | None:
    status = model.multilora.status()
    assert (status.suggested_max_loras is None) == (status.suggestion == "")
    assert status.suggestion in str(status) and status.to_dict()["suggested_max_loras"] == status.suggested_max_loras
    json.dumps(status.to_dict())
    return status.suggested_max_loras


def test_nothing_is_said_of_what_fits() -> None:
    model = enabled("llama", NAMES, max_loras=2)
    assert suggested(model) is None
    generate(model, ["r1", None, "r3"])
    assert suggested(model) is None
    assert model.multilora.status().demand.at_once == 2


def test_waves() -> None:
    model = enabled("llama", NAMES, max_loras=2)
    generate(model, ["r1", None, "r3", "r8"])
    assert suggested(model) == 3
    generate(model, [*NAMES, {"r3": 0.5, "r1": 0.5}])
    assert suggested(model) == 5
    demand = model.multilora.status().demand
    assert (demand.split, demand.waves) == (2, 5)
    assert "2 batches ran in 5 waves" in model.multilora.status().suggestion


def test_pinned_slots_are_wanted_too() -> None:
    model = enabled("llama", NAMES, max_loras=2)
    model.multilora.pin("r16")
    generate(model, ["r1", "r3"])
    assert suggested(model) == 3


def test_a_batch_that_was_refused() -> None:
    model = enabled("llama", NAMES, max_loras=2)
    with pytest.raises(SlotError, match="max_loras=3"):
        model(**prompts(3), adapter_ids=NAMES[:3])
    assert suggested(model) == 3


def test_calls_at_the_same_time() -> None:
    """One holds both slots while two others wait."""
    model = enabled("llama", NAMES, max_loras=2)
    store = model.multilora.store
    threads = [threading.Thread(target=lambda name=name: store.acquire([name]).__exit__()) for name in NAMES[2:]]
    with store.acquire(NAMES[:2]):
        for thread in threads:
            thread.start()
        until(lambda: len(store._line.tickets) == 2)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert suggested(model) == 4
    with store.acquire(NAMES[:2]):  # whoever has left is not counted again
        assert suggested(model) == 4


def test_adapters_that_lose_their_slots_to_each_other() -> None:
    model = enabled("llama", NAMES, max_loras=1)
    for name in NAMES:
        generate(model, [name])
    assert suggested(model) is None  # each came once
    for name in NAMES * 2:
        generate(model, [name])
    assert suggested(model) == 2  # twice as many, though four took part
    assert "8 times" in model.multilora.status().suggestion
    for _ in range(9):
        generate(model, ["r16"])
    assert suggested(model) is None  # most find theirs


def test_slots_that_were_never_needed() -> None:
    model = enabled("llama", NAMES, max_loras=8)
    store = model.multilora.store
    for _ in range(ENOUGH // 2 - 1):
        store.release(store.acquire(NAMES[:2]))
    assert suggested(model) is None
    store.release(store.acquire(NAMES[1:3]))
    assert suggested(model) == 3
    megabytes = 5 * model.multilora.status().slot_bytes / 1e6
    assert "5 of 8 slots" in model.multilora.status().suggestion
    assert f"{megabytes:.4g} MB" in model.multilora.status().suggestion
