"""Clocks, counters and result files."""

from __future__ import annotations

import gc
import json
import math
import time

import pytest
import torch

from hf_multilora.bench.measure import Counter, alternate, covered, median_ratio
from hf_multilora.bench.results import Results, read_runs


def test_overlapping_kernels_count_once():
    assert covered([]) == 0
    assert covered([(10, 5), (0, 5), (3, 4), (4, 1), (11, 1)]) == 12
    assert covered([(0, 10), (2, 3), (10, 2)]) == 12


def test_cases_alternate_and_stop_after_a_whole_round():
    order = []
    cases = {name: (lambda name=name: order.append((name, gc.isenabled())) or float(len(order))) for name in "abc"}
    values = alternate(cases, 3, time.monotonic() + 60)
    assert "".join(name for name, _ in order) == "abcbcacab"
    assert not any(collecting for _, collecting in order) and gc.isenabled()
    assert values["a"] == [1.0, 6.0, 8.0]
    assert {len(times) for times in alternate(cases, 3, time.monotonic() - 1).values()} == {1}


def test_garbage_is_collected_again_after_a_case_that_fails():
    def fail() -> float:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        alternate({"a": fail}, 1, time.monotonic() + 60)
    assert gc.isenabled()


def test_ratios_are_taken_within_repetitions():
    assert median_ratio([2, 20, 200], [1, 10, 100]) == 2


def test_compilations_are_counted():
    counter = Counter()
    before = counter.now()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    done = counter.now().since(before)
    assert (done.compiled, done.captured) == (1, 0)


def test_captures_are_counted(monkeypatch):
    begun = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda graph, *args, **kwargs: begun.append(args))
    original = torch.cuda.CUDAGraph.capture_begin
    counter = Counter()
    with counter.counting():
        torch.cuda.CUDAGraph.capture_begin("graph", "pool")
    torch.cuda.CUDAGraph.capture_begin("graph", "later")
    assert counter.now().captured == 1 and begun == [("pool",), ("later",)]
    assert torch.cuda.CUDAGraph.capture_begin is original


def test_rows_are_written_at_once_and_read_back(tmp_path):
    said = []
    results = Results("generate", tmp_path, "cpu", say=said.append)
    results.settings(rows=4, out="/some/where", model=str(tmp_path))
    results.add("a step", 2.0, "ms", goal=1.0, all=[1.0, 3.0])
    results.add("not a number", math.nan, "ms", ratio_goal=2.0)
    lines = [json.loads(line) for line in results.path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["environment", "settings", "result", "result"]
    assert [line["missed"] for line in lines[2:]] == [True, True]
    assert lines[0]["torch"] == torch.__version__.split("+")[0] or lines[0]["torch"] == torch.__version__
    assert len(said) == 2 and "MISSED" in said[0]
    (run,) = read_runs(tmp_path, "generate")
    assert run.figures["a step"]["all"] == [1.0, 3.0] and run.about["benchmark"] == "generate"
    assert run.settings == {"rows": 4, "model": tmp_path.name}


def test_several_runs_of_a_file_stay_apart_and_failed_ones_are_left_out(tmp_path):
    for value in (1.0, 2.0, 3.0):
        results = Results("generate", tmp_path, "cpu", say=lambda line: None)
        results.add("a step", value, "ms")
        if value == 2.0:
            results.fail("wrong tokens")
            assert results.finish() == 1
    assert len(list(tmp_path.iterdir())) == 1
    assert [run.figures["a step"]["value"] for run in read_runs(tmp_path, "generate")] == [1.0, 3.0]
    assert read_runs(tmp_path, "gen") == []
