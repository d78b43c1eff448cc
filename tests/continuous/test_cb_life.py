"""Adapters are loaded, reloaded, unloaded and evicted while requests wait and run."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from continuous.cb_bed import (
    assert_answer,
    assert_told_apart,
    batching,
    enabled,
    folder,
    greedy,
    load,
    prompt,
)
from continuous.cb_run import WAIT_S, Results, running, wait_for_waiting
from transformers.generation.continuous_batching.requests import RequestStatus

pytestmark = pytest.mark.timeout(120)

TOKENS = prompt(13, seed=1)
LONG = 40  # tokens of an answer that is still going on when something happens
VERSIONS = {"a": 0, "b": 1, "c": 2}


def test_the_sources_here_are_told_apart() -> None:
    assert_told_apart([TOKENS], [None, *range(8)], 8)


def is_registered(model: Any, name: str) -> bool:
    return name in {adapter.name for adapter in model.multilora.status().adapters}


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_reload_while_its_requests_decode(slots: int) -> None:
    """Those in flight end on the old weights, later ones use the new; with one slot the later ones wait."""
    model = enabled(VERSIONS, max_loras=slots)
    with running(model) as manager:
        results = Results(manager)
        old = [manager.add_request(TOKENS[i:], adapter_id="a", max_new_tokens=LONG, streaming=True) for i in range(2)]
        for request in old:
            results.started(request, 2)
        load(model, "a", 5, reload=True)
        new = [manager.add_request(TOKENS[i:], adapter_id="a", max_new_tokens=8) for i in range(2)]
        other, now = manager.add_request(TOKENS, adapter_id="b"), time.perf_counter()
        for output in results.wait(*old):
            assert output.lifespan[1] > now, "it ended too early for this test"
            assert_answer(output, 0, LONG, [5])
        for output in results.wait(*new):
            assert_answer(output, 5, 8, [0])
        assert_answer(results.wait(other)[0], 1, 8)
    assert all(adapter.in_use == 0 for adapter in model.multilora.status().adapters)


def test_reloads_one_after_the_other() -> None:
    """Several generations of one name decode beside each other."""
    model = enabled(VERSIONS)
    with running(model) as manager:
        results, requests = Results(manager), []
        for number in (0, 3, 4, 6):
            load(model, "a", number, reload=True)
            request = manager.add_request(TOKENS, adapter_id="a", max_new_tokens=LONG, streaming=True)
            results.started(request)
            requests.append((request, number))
        outputs = results.wait(*(request for request, _ in requests))
        assert min(output.lifespan[1] for output in outputs) > max(output.lifespan[0] for output in outputs)
        for output, (_, number) in zip(outputs, requests, strict=True):
            assert_answer(output, number, LONG, [0, 3, 4, 6])


def test_an_unload_waits_for_running_requests() -> None:
    model = enabled(VERSIONS)
    with running(model) as manager:
        results = Results(manager)
        request = manager.add_request(TOKENS, adapter_id="a", max_new_tokens=LONG, streaming=True)
        results.started(request, 2)
        ended, now = list[float](), time.perf_counter()
        thread = threading.Thread(
            target=lambda: (model.multilora.unload("a"), ended.append(time.perf_counter())), daemon=True
        )
        thread.start()
        other = manager.add_request(TOKENS, adapter_id="b", max_new_tokens=4)
        output = results.wait(request)[0]
        assert_answer(output, 0, LONG)
        thread.join(WAIT_S)
        assert not thread.is_alive() and not is_registered(model, "a")
        assert now < output.lifespan[1], "it ended too early for this test"
        assert ended[0] >= output.lifespan[1], "its slot was free while it was read"
        assert_answer(results.wait(other)[0], 1, 4)


def test_waiting_requests_of_an_unloaded_adapter_fail_alone() -> None:
    model = enabled(VERSIONS, max_loras=1)
    with running(model) as manager:
        results = Results(manager)
        runs = manager.add_request(TOKENS, adapter_id="a", max_new_tokens=LONG, streaming=True)
        results.started(runs, 2)
        gone = [manager.add_request(TOKENS[i:], adapter_id="b") for i in range(3)]
        stay = manager.add_request(TOKENS, adapter_id="c")
        base = manager.add_request(TOKENS)
        wait_for_waiting(manager, "c")
        model.delete_adapter("b")
        for output in results.wait(*gone):
            assert output.status == RequestStatus.FAILED and "b" in output.error and not output.generated_tokens
        assert runs not in results, "they waited until the slot was free"
        for output, source, new in zip(results.wait(runs, stay, base), (0, 2, None), (LONG, 8, 8), strict=True):
            assert_answer(output, source, new)
        assert manager.status().adapters["b"].failed == 3
        load(model, "b", 7)
        assert_answer(results.wait(manager.add_request(TOKENS, adapter_id="b"))[0], 7, 8, [1])


def test_a_new_adapter_while_others_decode() -> None:
    model = enabled(VERSIONS)
    with running(model) as manager:
        results = Results(manager)
        runs = manager.add_request(TOKENS, adapter_id="a", max_new_tokens=LONG, streaming=True)
        results.started(runs, 2)
        model.load_adapter(folder(4), adapter_name="new")
        late = manager.add_request(TOKENS, adapter_id="new")
        assert_answer(results.wait(late)[0], 4, 8)
        assert_answer(results.wait(runs)[0], 0, LONG)
        assert results[late].lifespan[0] < results[runs].lifespan[1], "it waited for what had nothing to do with it"


@contextmanager
def held(*paths: Path) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Reading the adapters at these paths waits for the second event; the first says that somebody tried."""
    import hf_multilora.reading as reading

    tried, may, plain = threading.Event(), threading.Event(), reading.load_plan

    def slow(source: Any, *args: Any, **kwargs: Any) -> Any:
        if str(source) in map(str, paths):
            tried.set()
            assert may.wait(WAIT_S)
        return plain(source, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "load_plan", slow)
        try:
            yield tried, may
        finally:
            may.set()


def test_requests_that_come_before_the_manager_starts(tmp_path: Path) -> None:
    """Whatever the start makes ready or anew, loads that requests wait for already go on."""
    model, paths = enabled(VERSIONS), [folder(3 + i, tmp_path / f"f{i}") for i in range(4)]
    manager = model.init_continuous_batching(generation_config=greedy(), continuous_batching_config=batching())
    manager.warmup()
    with held(*paths) as (tried, may):
        requests = [manager.add_request(TOKENS, adapter_id=str(path)) for path in paths]
        requests.append(manager.add_request(TOKENS, adapter_id="a"))
        assert tried.wait(WAIT_S)
        manager.start()
        try:
            results = Results(manager)
            assert_answer(results.wait(requests[-1])[0], 0, 8)
            may.set()
            for output, number in zip(results.wait(*requests), (3, 4, 5, 6, 0), strict=True):
                assert_answer(output, number, 8)
        finally:
            manager.stop(timeout=WAIT_S, hard_stop=True)
    assert all(adapter.in_use == 0 for adapter in model.multilora.status().adapters)


def test_a_folder_is_loaded_in_the_background(tmp_path: Path) -> None:
    """Its request waits, others go on, arriving ones as well."""
    model, path = enabled(VERSIONS), folder(4, tmp_path / "fresh")
    with held(path) as (tried, may), running(model) as manager:
        results = Results(manager)
        waits = [manager.add_request(TOKENS[i:], adapter_id=str(path)) for i in range(2)]
        assert tried.wait(WAIT_S), "nobody reads the folder"
        for name, number in (("a", 0), ("b", 1), ("a", 0)):
            assert_answer(results.wait(manager.add_request(TOKENS, adapter_id=name))[0], number, 8)
        assert not any(request in results for request in waits)
        may.set()
        for output in results.wait(*waits):
            assert_answer(output, 4, 8)
    assert is_registered(model, str(path))


def test_a_cancelled_request_that_waits_for_its_files(tmp_path: Path) -> None:
    model, path = enabled(VERSIONS), folder(4, tmp_path / "fresh")
    with held(path) as (tried, may), running(model) as manager:
        results = Results(manager)
        request = manager.add_request(TOKENS, adapter_id=str(path))
        assert tried.wait(WAIT_S)
        manager.cancel_request(request)
        assert_answer(results.wait(manager.add_request(TOKENS, adapter_id="a"))[0], 0, 8)
        may.set()
        assert_answer(results.wait(manager.add_request(TOKENS, adapter_id=str(path)))[0], 4, 8)
        assert request not in results


def test_what_fell_out_of_host_memory_is_read_in_the_background(tmp_path: Path) -> None:
    model = enabled(max_loras=1, max_cpu_loras=2)
    paths = {name: folder(number, tmp_path / name) for number, name in enumerate("abcd")}
    for name, path in paths.items():
        model.load_adapter(path, adapter_name=name)
    gone = next(name for name in paths if model.multilora.store.entry(name).packed is None)
    there = [name for name in paths if model.multilora.store.entry(name).packed is not None][0]
    with held(paths[gone]) as (tried, may), running(model) as manager:
        results = Results(manager)
        waits = manager.add_request(TOKENS, adapter_id=gone)
        assert tried.wait(WAIT_S)
        assert_answer(results.wait(manager.add_request(TOKENS, adapter_id=there))[0], "abcd".index(there), 8)
        assert waits not in results
        may.set()
        assert_answer(results.wait(waits)[0], "abcd".index(gone), 8)


def test_files_that_vanished_fail_their_requests_alone(tmp_path: Path) -> None:
    model = enabled(max_loras=1, max_cpu_loras=1)
    path = folder(0, tmp_path / "a")
    model.load_adapter(path, adapter_name="a")
    model.load_adapter(folder(1), adapter_name="b")
    shutil.rmtree(path)
    with running(model) as manager:
        results = Results(manager)
        lost, fine = manager.add_request(TOKENS, adapter_id="a"), manager.add_request(TOKENS, adapter_id="b")
        assert_answer(results.wait(fine)[0], 1, 8)
        assert results.wait(lost)[0].status == RequestStatus.FAILED and results[lost].error
