"""Too few pages: requests begin again, or lie in host memory meanwhile, and keep their adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from continuous.cb_bed import assert_answer, assert_told_apart, batch, batching, enabled, load, prompt
from continuous.cb_run import Results, counted, running
from transformers.generation.continuous_batching import offloading_manager
from transformers.generation.continuous_batching.requests import RequestState

pytestmark = pytest.mark.timeout(120)

TOKENS = prompt(13, seed=1)
LONG = 40
VERSIONS = {"a": 0, "b": 1, "c": 2}


def test_the_sources_here_are_told_apart() -> None:
    assert_told_apart([TOKENS], [None, 0, 1, 2, 5], 8)


def test_a_reset_after_a_reload_ends_on_the_old_weights() -> None:
    """Requests that lose their pages begin again with what they have: under the weights they began with."""
    model = enabled(VERSIONS)
    config = batching(num_blocks=9, safety_margin=0.0)
    with counted(RequestState, "create_equivalent_initial_request") as resets, running(model, config) as manager:
        results = Results(manager)
        old = [manager.add_request(TOKENS[i:], adapter_id="a", max_new_tokens=LONG, streaming=True) for i in range(2)]
        for request in old:
            results.started(request, 2)
        assert not resets
        load(model, "a", 5, reload=True)
        for output in results.wait(*old):
            assert_answer(output, 0, LONG, [5])
        assert resets, "the cache is too large for what this tests"
        assert_answer(results.wait(manager.add_request(TOKENS, adapter_id="a"))[0], 5, 8)


@contextmanager
def unpinned_pool() -> Iterator[None]:
    """Page-locked memory needs a CUDA device; the pool for offloaded requests is plain memory here."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return torch.empty(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloading_manager, "torch", Torch())
        yield


@pytest.mark.parametrize("space", [0.0, 0.01], ids=["reset", "offloaded"])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_memory_pressure_keeps_adapters(slots: int, space: float) -> None:
    model = enabled(VERSIONS, max_loras=slots)
    inputs = [prompt(9 + i % 4, seed=i) for i in range(9)]
    ids, sources = ["a", "b", "c", None] * 3, [0, 1, 2, None] * 3
    config = batching(num_blocks=10, safety_margin=0.0, cpu_offload_space=space)
    manager_class = offloading_manager.OffloadingManager
    with (
        unpinned_pool(),
        counted(RequestState, "create_equivalent_initial_request") as resets,
        counted(manager_class, "_offload_to_cpu") as offloads,
    ):
        outputs = batch(model, inputs, new=24, config=config, adapter_ids=ids[:9])
    for output, source in zip(outputs, sources[:9], strict=True):
        assert_answer(output, source, 24, [0, 1, 2])
    if space:
        assert any(offloads) and not resets
    else:
        assert resets and not any(offloads)
