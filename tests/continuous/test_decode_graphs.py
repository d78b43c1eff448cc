"""Batches that decode are padded for graphs; padding, and giving graphs up, change no token."""

from __future__ import annotations

from typing import Any

import pytest
from continuous.cb_bed import assert_answer, batching, enabled, prompt
from continuous.cb_run import Results, running
from hypothesis import given
from hypothesis import strategies as st

from hf_multilora.generation.continuous import forwards as module
from hf_multilora.generation.continuous.forwards import Forwards, bucket

IDS: list[Any] = ["a", None, "b", "c", "a", None, "b"]
SOURCES: list[Any] = [0, None, 1, 2, 0, None, 1]


@given(st.integers(1, 100_000), st.sampled_from([1, 2, 64, 1024]))
def test_buckets_are_few_and_near(size: int, least: int) -> None:
    padded = bucket(size, least, 100_000)
    assert size <= padded <= max(least, 1.34 * size)
    assert bucket(padded, least, 100_000) == padded, "a bucket is its own"
    assert len({bucket(n, least, 100_000) for n in range(max(1, size // 2), size + 1)}) <= 6


def test_a_bucket_is_no_larger_than_the_room() -> None:
    assert [bucket(n, 8, 21) for n in (1, 20, 21)] == [8, 20, 21]


@pytest.mark.parametrize("slots", [2, 4])
def test_padded_batches_answer_as_generate_does(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    model = enabled({"a": 0, "b": 1, "c": 2}, max_loras=slots)
    seen: list[tuple[int, int]] = []
    sizes = Forwards.sizes

    def recorded(self: Forwards, tokens: int, cached: int, cache: Any) -> tuple[int, int]:
        padded = sizes(self, tokens, cached, cache)
        seen.append((tokens, padded[0]))
        return padded

    monkeypatch.setattr(Forwards, "sizes", recorded)
    monkeypatch.setattr(module, "_LEAST_CACHED", 64)
    with running(model, batching(max_batch_tokens=48)) as manager:
        manager._forwards.graphs = "decode"
        inputs = [prompt(4 + 3 * i, seed=i) for i in range(len(IDS))]
        asked = [
            manager.add_request(tokens, adapter_id=name, max_new_tokens=9)
            for tokens, name in zip(inputs, IDS, strict=True)
        ]
        results = Results(manager)
        results.wait(*asked)
    for request, source in zip(asked, SOURCES, strict=True):
        assert_answer(results[request], source, 9, SOURCES)
    assert len(seen) > 5 and any(tokens < padded for tokens, padded in seen), "batches are padded"


def test_without_a_device_for_graphs_nothing_is_chosen() -> None:
    model = enabled({"a": 0})
    with running(model) as manager:
        assert manager._forwards.graphs == "given"
        results = Results(manager)
        request = manager.add_request(prompt(5), adapter_id="a", max_new_tokens=4)
        results.wait(request)
    assert_answer(results[request], 0, 4)
