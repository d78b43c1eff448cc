"""Continuous batching on a GPU: soak, poison, reloads, offloading; with CUDA graphs and without, async or in step."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from continuous.cb_bed import assert_answer, batch, batching, enabled, greedy, load, poisoned, prompt
from continuous.cb_run import Results, counted, running
from continuous.cb_soak import soak
from gpu_bed import CUDA, DEVICE, MARKS, whole_fp32  # noqa: F401
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestStatus

pytestmark = [*MARKS, pytest.mark.timeout(400), pytest.mark.usefixtures("whole_fp32")]

WAYS = [
    pytest.param({"use_cuda_graph": graphs, "use_async_batching": ahead}, id=f"graphs={graphs}-async={ahead}")
    for graphs in (False, True)
    for ahead in (False, True)
    if CUDA or not (graphs or ahead)
]
INPUTS = [prompt(4 + 3 * i, seed=i) for i in range(8)]
IDS: list[Any] = ["a", None, "b", {"a": 0.7, "c": -0.5}, "c", "a", None, "b"]
SOURCES: list[Any] = [0, None, 1, ((0, 0.7), (2, -0.5)), 2, 0, None, 1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slots", [2, 4])
def test_a_mixed_batch(way: dict[str, Any], slots: int) -> None:
    model = enabled({"a": 0, "b": 1, "c": 2}, device=DEVICE, max_loras=slots)
    for budget in (11, 48):
        outputs = batch(model, INPUTS, 24, batching(max_batch_tokens=budget, **way), adapter_ids=IDS)
        for output, source in zip(outputs, SOURCES, strict=True):
            assert_answer(output, source, 24, SOURCES)


@pytest.mark.parametrize("way", WAYS)
def test_soak(way: dict[str, Any]) -> None:
    ended, events = soak(1, device=DEVICE, requests=500, **way)
    assert sum(ended.values()) == len(events["asked"]) >= 500
    assert ended["one version"] >= 200 and ended["poisoned"] > 0 and ended.get("tie", 0) <= 2, ended
    assert events["reload"] > 3 and events["resets"] > 0 and events["traffic"].prefix_tokens > 0, events


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "top-1"])
def test_a_poisoned_adapter_fails_alone(way: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Padding of captured batches, and pages that others had before, carry nothing over."""
    model = enabled({"a": 0, "b": 1}, device=DEVICE)
    tensors, config = poisoned(5)
    model.multilora.load(tensors, "bad", config=config)
    ids, sources = ["bad", "a", None, "bad", "b", "bad", "a", None] * 3, [5, 0, None, 5, 1, 5, 0, None] * 3
    outputs = batch(
        model, INPUTS * 3, config=batching(num_blocks=24, **way), generation_config=greedy(**sampling), adapter_ids=ids
    )
    assert len(outputs) == len(ids)
    for output, source in zip(outputs, sources, strict=True):
        if source == 5:
            assert output.status == RequestStatus.FAILED and "finite" in output.error, output
        else:
            assert_answer(output, source, 8)


@pytest.mark.parametrize("way", WAYS)
def test_a_reload_while_its_requests_decode(way: dict[str, Any]) -> None:
    """One captured graph serves the old weights and the new."""
    model = enabled({"a": 0, "b": 1}, device=DEVICE)
    with running(model, batching(**way)) as manager:
        results = Results(manager)
        old = manager.add_request(INPUTS[3], adapter_id="a", max_new_tokens=48, streaming=True)
        results.started(old, 2)
        load(model, "a", 5, reload=True)
        now, new = time.perf_counter(), manager.add_request(INPUTS[3], adapter_id="a", max_new_tokens=24)
        for output, source, tokens in zip(results.wait(old, new), (0, 5), (48, 24), strict=True):
            assert_answer(output, source, tokens, [0, 5])
        assert results[old].lifespan[1] > now, "it ended too early for this test"


@pytest.fixture
def eager_collection() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(20)
    yield
    gc.set_threshold(*before)


def captures(model: Any, then: Any) -> list[bool]:
    """Calls `then` in the middle of each capture; a list with an item for each."""
    seen: list[bool] = []

    def hook(*_: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            seen.append(True)
            then()
            [[i] for i in range(100)]  # so many objects that the collector runs, where it may

    model.model.layers[0].input_layernorm.register_forward_pre_hook(hook)
    return seen


@pytest.mark.skipif(not CUDA, reason="nothing is captured without a CUDA device")
@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_dead_manager_leaves_is_not_freed_in_a_capture(ahead: bool, eager_collection: None) -> None:
    model = enabled({"a": 0, "b": 1, "c": 2}, device=DEVICE)
    pools = []
    for _ in range(40):
        pools.append(torch.cuda.MemPool())
        with torch.cuda.use_mem_pool(pools[-1]):
            torch.zeros(1 << 22, device=DEVICE)

    def leave_a_pool() -> None:
        if pools:
            knot: list[Any] = [pools.pop()]
            knot.append(knot)

    seen = captures(model, leave_a_pool)
    way = {"use_cuda_graph": True, "use_async_batching": ahead}
    outputs = batch(model, INPUTS, 24, batching(max_batch_tokens=48, **way), adapter_ids=IDS)
    assert seen, "nothing was captured"
    for output, source in zip(outputs, SOURCES, strict=True):
        assert_answer(output, source, 24, SOURCES)


@pytest.mark.skipif(not CUDA, reason="nothing is captured without a CUDA device")
def test_after_a_failed_capture_the_next_manager_works() -> None:
    model = enabled({"a": 0, "b": 1, "c": 2}, device=DEVICE)
    forbidden = [True]
    seen = captures(model, lambda: torch.cuda.synchronize() if forbidden else None)
    way = {"use_cuda_graph": True, "use_async_batching": False}
    outputs = batch(model, INPUTS, 24, batching(max_batch_tokens=48, **way), adapter_ids=IDS)
    assert seen and all(output.error for output in outputs), "a graph that was asked for could not be captured"
    forbidden.clear()
    outputs = batch(model, INPUTS, 24, batching(max_batch_tokens=48, **way), adapter_ids=IDS)
    for output, source in zip(outputs, SOURCES, strict=True):
        assert_answer(output, source, 24, SOURCES)


@pytest.mark.skipif(not CUDA, reason="page-locked memory needs a CUDA device")
@pytest.mark.parametrize("way", WAYS)
def test_offloaded_requests_keep_their_adapters(way: dict[str, Any]) -> None:
    model = enabled({"a": 0, "b": 1, "c": 2}, device=DEVICE)
    config = batching(num_blocks=12, safety_margin=0.0, cpu_offload_space=0.01, **way)
    with counted(OffloadingManager, "_offload_to_cpu") as offloads:
        outputs = batch(model, INPUTS, 32, config, adapter_ids=IDS)
    assert any(offloads), "the cache is too large for what this tests"
    for output, source in zip(outputs, SOURCES, strict=True):
        assert_answer(output, source, 32, SOURCES)
