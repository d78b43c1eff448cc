"""An adapter whose weights are not finite fails its own requests; everybody else's answers stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from continuous.cb_bed import (
    assert_answer,
    assert_told_apart,
    batch,
    batching,
    enabled,
    greedy,
    load,
    poisoned,
    prompt,
    sequences,
)
from continuous.cb_run import Results, running
from transformers.generation.continuous_batching.requests import RequestStatus

pytestmark = pytest.mark.timeout(120)

VERSIONS = {"sql": 0, "poet": 1}
INPUTS = [prompt(7 + 3 * i, seed=i) for i in range(6)]  # none leaves one token beside whole pages: see below


@pytest.fixture
def model() -> Any:
    return enabled(VERSIONS)


def test_the_sources_here_are_told_apart() -> None:
    assert_told_apart(INPUTS, [None, 0, 1, 5], 8)


SAMPLING = [{}, {"do_sample": True, "top_k": 1}, {"do_sample": True, "top_k": 1, "temperature": 2.0, "top_p": 0.9}]
PLACES = ["0.self_attn.q_proj", "0.self_attn.k_proj", "1.self_attn.v_proj", "1.self_attn.o_proj", "1.mlp.down_proj"]
IDS, SOURCES = ["bad", "sql", None, "bad", "poet", "bad"] * 4, [5, 0, None, 5, 1, 5] * 4


def assert_fails_alone(model: Any, budget: int = 48, **sampling: Any) -> None:
    """With pages that others get after it."""
    config = batching(num_blocks=16, max_batch_tokens=budget)
    outputs = batch(model, INPUTS * 4, config=config, generation_config=greedy(8, **sampling), adapter_ids=IDS)
    assert len(outputs) == len(IDS)
    for output, source in zip(outputs, SOURCES, strict=True):
        if source == 5:
            assert output.status == RequestStatus.FAILED and "finite" in output.error, output
            assert "bad" in output.error
        else:
            assert_answer(output, source, 8)
    assert all(adapter.in_use == 0 for adapter in model.multilora.status().adapters)


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "top-1", "warped"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("budget", [7, 48])
def test_whole_prompts_and_chunks(model: Any, sampling: Any, value: float, budget: int) -> None:
    tensors, config = poisoned(5, value)
    model.multilora.load(tensors, "bad", config=config)
    assert_fails_alone(model, budget, **sampling)


@pytest.mark.parametrize("where", [*PLACES, "lm_head"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_wherever_the_poison_is(model: Any, where: str, attention: str) -> None:
    """In keys and values that are kept, behind the last of them, or in the head alone."""
    model.set_attn_implementation(attention)
    tensors, config = poisoned(5, where=where)
    model.multilora.load(tensors, "bad", config=config)
    for sampling in SAMPLING[:2]:
        assert_fails_alone(model, **sampling)


@pytest.mark.parametrize("where", ["0.self_attn.q_proj", "1.mlp.down_proj"])
def test_return_sequences_of_a_poisoned_adapter(model: Any, where: str) -> None:
    """What is not finite shows before the fork, or after it. (transformers itself ends where several sequences of a
    prompt are asked for, of which all but one token is cached.)"""
    tensors, config = poisoned(5, where=where)
    model.multilora.load(tensors, "bad", config=config)
    with running(model, generation_config=sequences(3)) as manager:
        results, requests = Results(manager), manager.add_requests(INPUTS * 4, adapter_ids=IDS, max_new_tokens=8)
        for request, source in zip(requests, SOURCES, strict=True):
            children = [] if source == 5 and where[0] == "0" else [f"{request}__child#0", f"{request}__child#1"]
            for output in results.wait(request, *children):
                if source == 5:
                    assert output.status == RequestStatus.FAILED and "finite" in output.error, output
                else:
                    assert_answer(output, source, 8)
    assert all(adapter.in_use == 0 for adapter in model.multilora.status().adapters)


def test_an_adapter_that_was_poisoned_is_well_after_a_reload(model: Any) -> None:
    tensors, config = poisoned(5)
    model.multilora.load(tensors, "bad", config=config)
    with running(model, batching(num_blocks=16)) as manager:
        results = Results(manager)
        for _ in range(2):
            assert "finite" in results.wait(manager.add_request(INPUTS[5], adapter_id="bad"))[0].error
        load(model, "bad", 5, reload=True)
        assert_answer(results.wait(manager.add_request(INPUTS[5], adapter_id="bad"))[0], 5, 8)
        for name, number in VERSIONS.items():
            assert_answer(results.wait(manager.add_request(INPUTS[5], adapter_id=name))[0], number, 8)
        assert (manager.status().adapters["bad"].failed, manager.status().adapters["bad"].finished) == (2, 1)


@pytest.mark.parametrize("sampled", [False, True])
def test_memory_that_held_nan(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache takes memory that others have left. What no request has written reaches none."""
    taken = torch.empty

    def dirty(*size: Any, **options: Any) -> torch.Tensor:
        tensor = taken(*size, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    model = enabled({"a": 0, "b": 1})
    config = batching(per_request_processors=True)
    manager = model.init_continuous_batching(greedy(8, do_sample=sampled, top_k=1), continuous_batching_config=config)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", dirty)
        manager.warmup()
    cache = manager.batch_processor.cache
    held = [*getattr(cache, "key_cache", ()), *getattr(cache, "value_cache", ())]
    assert all(torch.isfinite(tensor).all() for tensor in held)
    asked = [manager.add_request(INPUTS[i], adapter_id=name) for i, name in enumerate(("a", None, "b"))]
    manager.start()
    try:
        for output, source in zip(Results(manager).wait(*asked), (0, None, 1), strict=True):
            assert_answer(output, source, 8)
    finally:
        manager.stop(block=True, timeout=40)
