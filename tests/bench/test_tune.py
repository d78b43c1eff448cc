"""The search over block sizes, with a timer of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch

from hf_multilora.bench import kernels
from hf_multilora.bench.tune import FINAL_TIMINGS, FINALISTS, Problem, gain, kernel_timer, tune
from hf_multilora.errors import ConfigError
from hf_multilora.kernels import table as kernel_table
from hf_multilora.kernels import tuning


@dataclass(frozen=True)
class Tiling:
    block: int


SPACE = [Tiling(block) for block in (32, 16, 64, 128, 256)]
PROBLEMS = [Problem("shrink_rows", {"n": 1, "k": 4096}), Problem("expand_rows", {"n": 32, "k": 4096})]


def space(problem: Problem) -> list[Tiling]:
    return SPACE


class Clock:
    """Microseconds by block size; a block may fail, and its first timing may be a lucky one."""

    def __init__(self, times: dict[int, float], failing: tuple[int, ...] = (), lucky: int | None = None) -> None:
        self.times, self.failing, self.lucky = times, failing, lucky
        self.asked: list[tuple[str, int]] = []

    def __call__(self, problem: Problem, tiling: Tiling) -> float:
        first = (problem.kind, tiling.block) not in self.asked
        self.asked.append((problem.kind, tiling.block))
        if tiling.block in self.failing:
            raise RuntimeError("out of resource: shared memory")
        return 0.1 if tiling.block == self.lucky and first else self.times[tiling.block]


TIMES = {32: 10.0, 16: 12.0, 64: 8.0, 128: 6.0, 256: 7.0}


def search(tmp_path, clock, seconds=60.0, **options):
    options = {"problems": PROBLEMS, "space": space, "say": lambda line: None, **options}
    return tune(seconds, tmp_path / "new" / "table.json", timer=clock, device="cpu", **options)


def test_the_fastest_wins_and_is_written(tmp_path):
    clock = Clock(TIMES, failing=(256,))
    table = search(tmp_path, clock)
    path = tmp_path / "new" / "table.json"
    assert json.loads(path.read_text()) == table and list(path.parent.iterdir()) == [path]
    assert [row["kind"] for row in table["rows"]] == ["shrink_rows", "expand_rows"]
    for row, problem in zip(table["rows"], PROBLEMS, strict=True):
        assert row["shape"] == problem.shape and row["tiling"] == {"block": 128}
        assert (row["us"], row["untuned_us"], row["tried"], row["failed"]) == (6.0, 10.0, 4, 1)
    assert gain(table) == pytest.approx(0.6)
    assert {key for key in table} >= {"format", "device", "torch", "triton", "date", "rows"}


def test_problems_take_turns(tmp_path):
    clock = Clock(TIMES)
    search(tmp_path, clock)
    assert clock.asked[:4] == [("shrink_rows", 32), ("expand_rows", 32), ("shrink_rows", 16), ("expand_rows", 16)]
    assert len(clock.asked) == 2 * (len(SPACE) + FINAL_TIMINGS * (1 + FINALISTS))


def test_a_lucky_timing_does_not_win(tmp_path):
    table = search(tmp_path, Clock(TIMES, lucky=16))
    assert {row["tiling"]["block"] for row in table["rows"]} == {128}


def test_the_untuned_tiling_stays_where_nothing_is_clearly_faster(tmp_path):
    table = search(tmp_path, Clock({**dict.fromkeys(TIMES, 10.0), 128: 9.9}))
    assert {row["tiling"]["block"] for row in table["rows"]} == {32} and gain(table) == 1


def test_without_time_the_untuned_tilings_are_written(tmp_path):
    clock = Clock(TIMES)
    table = search(tmp_path, clock, seconds=0)
    assert {row["tried"] for row in table["rows"]} == {1} and {row["tiling"]["block"] for row in table["rows"]} == {32}


def test_a_search_that_is_stopped_leaves_a_table(tmp_path):
    class Stopped(Clock):
        def __call__(self, problem: Problem, tiling: Tiling) -> float:
            if tiling.block == 256:
                raise KeyboardInterrupt
            return super().__call__(problem, tiling)

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, Stopped(TIMES))
    rows = json.loads((tmp_path / "new" / "table.json").read_text())["rows"]
    assert [row["tiling"]["block"] for row in rows] == [128, 128]


def test_what_cannot_be_tuned_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no tiling to try"):
        search(tmp_path, Clock(TIMES), space=lambda problem: [])
    with pytest.raises(ConfigError, match="untuned tiling cannot be timed"):
        search(tmp_path, Clock(TIMES, failing=(32,)))


def test_families_come_one_after_another_until_the_time_is_up(tmp_path):
    others = [Problem("shrink_rows", {"n": n, "k": 1024}) for n in (1, 32)]
    clock, said = Clock(TIMES), []
    search(tmp_path, clock, problems=[*PROBLEMS, *others], space=lambda problem: SPACE[:2])
    assert [kind for kind, _ in clock.asked[:4]] == ["shrink_rows", "expand_rows"] * 2
    assert {kind for kind, _ in clock.asked[-4 - 4 * FINAL_TIMINGS :]} == {"shrink_rows"}
    table = search(tmp_path, Clock(TIMES), seconds=0, problems=[*PROBLEMS, *others], say=said.append)
    assert [row["shape"] for row in table["rows"]] == [problem.shape for problem in PROBLEMS]
    assert "2 of 4 shapes were not reached" in said[-1]


def test_from_the_kernels_problems_to_a_table_that_they_read(tmp_path, monkeypatch):
    """All but the device: its graph is a stand-in that runs once and reads its time off the sizes in force."""
    forgotten = []

    class Graph:
        def __init__(self, run) -> None:
            run()
            (sizes,) = kernel_table._Trial.table.values()
            self.us = 10.0 - (sizes.get("warps") == 2) - (sizes.get("block_n") == 512) if sizes else 10.0

        def times(self, replays: int) -> list[float]:
            return [2 * self.us] * replays

    class Layers(kernels.Layers):
        def forget(self) -> None:
            forgotten.append(self)
            super().forget()

    monkeypatch.setattr(kernels, "Graph", Graph)
    monkeypatch.setattr(kernels, "Layers", Layers)
    shape = {"n": 4, "rows": 4, "adapters": 4, "k": 512, "widths": (512, 512), "max_rank": 8, "dtype": "bfloat16"}
    problems = [Problem("shrink_rows", shape), Problem("expand_rows", shape)]
    path = tmp_path / "table.json"
    table = tune(60, path, problems=problems, timer=kernel_timer("cpu"), device="cpu", say=lambda line: None)
    assert [row["us"] for row in table["rows"]] == [9.0, 9.0] and not any(row["failed"] for row in table["rows"])
    assert len(forgotten) > 20 and len(set(map(id, forgotten))) == 1
    monkeypatch.setattr(kernel_table, "_named", lambda: kernel_table.read(path))
    call = tuning.call_of(shape)
    assert tuning.shrink_tiling(call).warps == 2
    assert (tuning.expand_tiling(call).block_n, tuning.expand_tiling(call).warps) == (512, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_needs_a_gpu(tmp_path):
    with pytest.raises(ConfigError, match="CUDA"):
        tune(1, tmp_path / "table.json")
