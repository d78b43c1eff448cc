"""The benchmark of continuous batching, in the shape "tiny" on the CPU, and what it is made of."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from hf_multilora.bench import continuous, serving
from hf_multilora.bench.results import read_runs
from hf_multilora.bench.serving import Shape, Side, StuckError
from hf_multilora.bench.soak import Look, Traffic, growth

SMALL = ["--requests", "48", "--rows", "24", "--registered", "48", "--zipf-requests", "24", "--reps", "2"]
SOAK = ["--soak-requests", "90", "--soak-every", "30", "--soak-adapters", "12"]


def run(tmp_path, *options: str):
    given = [*SMALL, *SOAK, *options, "--shape", "tiny", "--device", "cpu", "--dtype", "fp32", "--out", str(tmp_path)]
    status = continuous.main(given)
    (kept,) = read_runs(tmp_path, "continuous") or [None]
    return status, kept


def test_the_bare_model(tmp_path, capsys):
    status, kept = run(tmp_path, "--parts", "base")
    row = kept.figures["throughput, bare model"]
    assert status == 0 and len(kept.figures) == 1
    assert len(row["all"]) == 2 and row["of_bare"] == 1 and row["counted"] == {}
    assert row["tokens_a_step"] * row["steps"] == pytest.approx(48 * 6)
    assert 0 < sum(row["step_parts_ms"].values()) < row["step_ms"]


def test_adapters_beside_the_bare_model(tmp_path, capsys):
    status, kept = run(tmp_path, "--parts", "slots32", "slots8", "registered", "graphs")
    assert status == 0, "tokens differ from the bare model's, or do not where adapters are"
    rows = {what.removeprefix("throughput, "): row for what, row in kept.figures.items() if "all" in row}
    assert list(rows) == [
        "bare model", "32 slots, no adapters", "32 slots, 32 adapters", "8 slots, 32 adapters",
        "bare model, 16 requests at once", "bare model, 24 requests", "48 registered, 32 slots, 15 adapters by Zipf",
        "bare model, graphs", "32 slots, no adapters, graphs", "32 slots, 32 adapters, graphs",
    ]  # fmt: skip
    for name, row in rows.items():
        assert len(row["all"]) == 2 and (row["counted"] == {}) == name.startswith("bare model")
    mixed, few = rows["32 slots, 32 adapters"], rows["8 slots, 32 adapters"]
    assert mixed["adapters"] == few["adapters"] == 32 and mixed["counted"]["finished"] == 48
    assert mixed["counted"]["brought_in"] == 0 and few["counted"]["brought_in"] >= 24
    assert few["tokens_a_step"] < mixed["tokens_a_step"], "8 adapters have fewer requests than 32"
    assert "time of a token, 8 slots, 32 adapters" in kept.figures
    assert set(few["longest"]) == {"longest_wait_s", "passed_over"}


def test_soak(tmp_path, capsys):
    status, kept = run(tmp_path, "--parts", "soak", "--soak-bare")
    assert status == 0, "something outlives the manager"
    for label in ("soak", "soak, bare model"):
        looks = kept.figures[f"{label}, host memory per 1000 requests"]["looks"]
        assert [look["served"] for look in looks] == [30, 60, 90]
        assert kept.figures[f"{label}, objects that outlive the manager"]["alive"] == []
    counted = kept.figures["soak, requests a second"]["counted"]
    assert counted["requests"] == counted["finished"] + counted["cancelled"] == 90, "one may be done by then"
    assert 1 <= counted["cancelled"] <= 3 and counted["prefix_tokens"] > 0


def test_what_outlives_the_manager_fails_the_run(tmp_path, capsys, monkeypatch):
    kept = []
    entered = Side.__enter__
    monkeypatch.setattr(Side, "__enter__", lambda side: (entered(side), kept.append(side.manager.batch_processor))[0])
    status, _ = run(tmp_path, "--parts", "soak")
    assert status == 1 and "batch processor, cache outlive the manager" in capsys.readouterr().out
    kept.clear()
    gc.collect()


def test_the_mask_of_the_full_shape_stays_small():
    sizes = continuous.SIZES["8B"]
    shape = Shape(128, (64, 192), sizes["new_tokens"], sizes["rows"], sizes["batch_tokens"], sizes["block"])
    assert 2 * shape.mask_elements < 2 << 30
    assert 0.85 * shape.blocks > shape.rows * -(-(192 + 128) // shape.block), "no request waits for blocks"


def test_prompts_and_their_lengths_differ_between_repetitions():
    shape = Shape(9, (3, 7), 2, 4, 16, 4)
    first, again, other = (shape.prompts(100, seed) for seed in (1, 1, 2))
    assert first == again != other and [len(p) for p in first] != [len(p) for p in other]
    assert {len(prompt) for prompt in first} <= set(range(3, 8))


def result(request: str, tokens: int, finished: bool = True, error: str | None = None):
    return SimpleNamespace(
        request_id=request, generated_tokens=[1] * tokens, error=error, is_finished=lambda: finished
    )


class Manager:
    """Hands out what it is given, then nothing."""

    def __init__(self, *results, running: bool = True) -> None:
        self.results, self.running, self.stopped = list(results), running, False

    def get_result(self, timeout: float):
        return self.results.pop(0) if self.results else None

    def is_running(self) -> bool:
        return self.running

    def stop(self, hard_stop: bool, timeout: float) -> None:
        self.stopped = hard_stop


def side(manager: Manager) -> Side:
    made = Side(None, Shape(1, (1, 1), 1, 1, 1, 4))
    made.manager = manager
    return made


def test_results_of_others_and_unfinished_ones_are_passed_over():
    manager = Manager(result("x", 1), result("a", 1, finished=False), result("a", 2), result("b", 3))
    assert side(manager).results(["a", "b"]) == [("a", [1, 1]), ("b", [1, 1, 1])]


def test_a_manager_that_fails_or_hangs_ends_the_run(monkeypatch):
    with pytest.raises(StuckError, match="request a: no"):
        side(Manager(result("a", 0, error="no"))).results(["a"])
    with pytest.raises(StuckError, match="thread ended"):
        side(Manager(running=False)).results(["a"])
    monkeypatch.setattr(serving, "STUCK_S", 0.01)
    manager = Manager()
    with pytest.raises(StuckError, match="1 requests are missing"):
        side(manager).results(["a"])
    assert manager.stopped


def test_a_manager_that_fails_leaves_a_result_file_with_the_reason(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Side, "results", lambda *args: (_ for _ in ()).throw(StuckError("no result")))
    assert run(tmp_path, "--parts", "base") == (1, None)
    assert "FAILED: no result" in capsys.readouterr().out


def test_growth_is_per_thousand():
    looks = [Look(served, 0.0, 100 + served / 500, 0, 0, 0) for served in (1000, 2000, 5000)]
    looks[1].host_mb += 50
    assert growth(looks, "host_mb") == pytest.approx(2) and growth(looks[:1], "host_mb") == 0


def test_traffic_of_the_soak_shares_prefixes():
    traffic = Traffic(5, 100)
    drawn = [next(traffic) for _ in range(200)]
    assert len({tuple(prompt[:16]) for prompt, _, _ in drawn}) == 4
    assert {name for _, name, _ in drawn} == {f"a{number}" for number in range(5)}
    assert all(16 <= len(prompt) <= 48 and 8 <= new <= 24 for prompt, _, new in drawn)
    assert {name for _, name, _ in (next(Traffic(0, 100)) for _ in range(3))} == {None}
