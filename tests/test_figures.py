"""The figures of the README and the docs are those of the result files, and nothing else; so are the plots."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def scripts(monkeypatch):
    """Import a script of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("tables", "plots"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def test_the_pages_show_the_result_files(scripts):
    tables = scripts("tables")
    block = f"{tables.START}\n{tables.table()}\n{tables.END}"
    assert " ms |" in block
    assert [page.name for page in tables.PAGES] == ["README.md", "figures.md"]
    for page in tables.PAGES:
        assert block in page.read_text(), f"{page.name}: run python benchmarks/tables.py --write"


def test_every_missed_goal_is_told(scripts):
    """A goal that the newest run of a figure misses is named on the page that promises so."""
    tables = scripts("tables")
    page, block = tables.SPEED.read_text(), f"{tables.MISSED}\n{tables.missed()}\n{tables.MISSED_END}"
    assert block in page, "run python benchmarks/tables.py --write"
    assert "| memory | bring an adapter into a slot (wall, with eviction) | 1.7 ms | 1.909 ms, 1.221 x |" in page


ABOUT = {"device": "NVIDIA H200", "cuda": "13.0", "torch": "2.11.0", "transformers": "5.17.0"}
SHAPE = {"shape": "8B", "layers": None, "model": None}


def write(folder: Path, benchmark: str, date: str, figures: dict[str, dict], **settings) -> None:
    rows = [{"kind": "environment", "benchmark": benchmark, "date": f"{date}T10:00:00Z", **ABOUT}]
    rows.append({"kind": "settings", **SHAPE, **settings})
    for what, row in figures.items():
        filled = {"unit": "ms", "ratio": None, "all": [0.9 * row["value"], 1.2 * row["value"]], **row}
        rows.append({"kind": "result", "what": what, **filled})
    path = folder / "results" / f"{benchmark}-h200-{date}.json"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def decode(path: str, bare: float, ratios: dict[int, float], rows: int = 32) -> dict[str, dict]:
    figures = {f"{path} decode, batch {rows}, bare model": {"value": bare, "path": path, "rows": rows}}
    for count, ratio in ratios.items():
        row = {"value": bare * ratio, "ratio": ratio, "path": path, "rows": rows, "over": f"{path} bare"}
        figures[f"{path} decode, batch {rows}, {count} adapters"] = row
    return figures


@pytest.fixture
def results(tmp_path, scripts, monkeypatch):
    """Result files of an eager run, an older one, a later one of few layers, a compiled and a captured one."""
    tables = scripts("tables")
    monkeypatch.setattr(tables, "HERE", tmp_path)
    peft = {
        "eager decode, batch 32, bare model beside PEFT": {"value": 23.0},
        "eager decode, batch 32, PEFT mixed batch, 1 adapters": {"value": 90.0, "ratio": 3.9},
        "eager decode, batch 32, PEFT mixed batch, 32 adapters": {"value": 1100.0, "ratio": 47.8},
    }
    write(tmp_path, "generate", "2026-11-01", decode("eager", 30.0, {1: 1.5, 32: 1.6}))
    write(tmp_path, "generate", "2026-11-03", {**decode("eager", 24.0, {1: 1.1, 32: 1.2}), **peft})
    write(tmp_path, "generate", "2026-11-03", decode("eager", 4.0, {1: 1.0, 32: 1.0}), layers=4)
    write(tmp_path, "generate", "2026-11-03", decode("eager", 22.0, {1: 1.05}, rows=1))
    both = {**decode("static", 10.0, {1: 1.04, 8: 1.06, 32: 1.08}), **decode("graphs", 10.0, {1: 1.2, 32: 1.25})}
    del both["graphs decode, batch 32, bare model"]
    both["graphs decode, batch 32, 1 adapters"]["over"] = "static bare"
    both["graphs decode, batch 32, 32 adapters"]["over"] = "static bare"
    both["graphs decode, batch 32, 32 adapters, ready"] = {"value": 2.1, "unit": "s"}
    both["static decode, batch 32, 32 adapters, ready"] = {"value": 41.0, "unit": "s"}
    both["graphs decode, batch 32, 32 adapters, over the compiled step"] = {"value": 1.157, "unit": "x"}
    write(tmp_path, "generate", "2026-11-03", both)
    served = {
        f"eager throughput, {count} registered, 8 slots": {
            "value": value, "unit": "tokens/s", "path": "eager", "registered": count, "slots": 8, "brought_in": brought
        }
        for count, value, brought in ((8, 1000.0, 0.0), (2000, 970.0, 7.9))
    }  # fmt: skip
    write(tmp_path, "registered", "2026-11-03", served)
    return tmp_path


def test_each_way_to_decode_comes_from_its_newest_run_of_the_whole_shape(scripts, results):
    lines = scripts("tables").table().splitlines()
    assert "(compiled: compiled, captured: compiled)" in lines[0]
    cells = {line.split(" | ")[0]: line.strip("|").split("|") for line in lines if line.startswith("| ")}
    assert cells["| in the batch"] == [" in the batch ", " eager ", " compiled ", " captured ", " PEFT, eager "]
    assert [cell.strip() for cell in cells["| 32 different adapters"]] == [
        "32 different adapters", "28.8 ms, 1.20 x", "10.8 ms, 1.08 x", "12.5 ms, 1.25 x", "1100.0 ms, 47.80 x"
    ]  # fmt: skip
    assert [cell.strip() for cell in cells["| the bare model"]][1:] == ["24.0 ms", "10.0 ms", "", "23.0 ms"]
    text = "\n".join(lines)
    assert "ready in 2.1 s for a batch size, compiled in 41 s; its step takes 1.16 x the compiled one." in text
    assert "Earlier runs, eager, bare and with 32 adapters: 30.0 and 48.0 ms, 1.60 x." in text
    assert "eager -10 to +20 %" in text and "| 2000 | 970 | 873 to 1164 | 7.9 |" in text


def test_continuous_batching_is_one_run_a_group(scripts, results):
    def served(part: str, value: float, of_bare: float) -> dict:
        return {
            "value": value, "unit": "tokens/s", "part": part, "of_bare": of_bare, "tokens_a_step": 97.6,
            "prompt_tokens": [64, 192], "requests": 128, "new_tokens": 128, "attention": "sdpa",
        }  # fmt: skip

    for date, speed in (("2026-11-01", 500.0), ("2026-11-03", 900.0)):
        figures = {
            "throughput, bare model": served("base", speed, 1.0),
            "throughput, 32 slots, 32 adapters": served("slots32", 0.95 * speed, 0.95),
        }
        write(results, "continuous", date, figures)
    write(results, "continuous", "2026-11-04", {"throughput, bare model, graphs": served("graphs", 2000.0, 1.0)})
    lines = scripts("tables").table().splitlines()
    assert "| bare model | 900 | 810 to 1080 | 1.00 x | 98 |" in lines
    assert "| 32 slots, 32 adapters | 855 | 770 to 1026 | 0.95 x | 98 |" in lines
    assert [line for line in lines if "bare model, graphs" in line] and not any("| 500 |" in line for line in lines)


def test_missed_goals_are_those_of_the_newest_runs(scripts, results):
    missed = {"missed": True, "goal": None, "ratio_goal": 1.15}
    for date, figure in (("2026-11-05", {"ratio": 1.4, **missed}), ("2026-11-06", {"ratio": 1.2, **missed})):
        write(results, "tp", date, {"a step": {"value": 12.0, **figure}, "slower": {"value": 9.0}})
    write(results, "tp", "2026-11-04", {"slower": {"value": 99.0, "ratio": 9.0, **missed}})
    assert scripts("tables").missed().splitlines()[2:] == ["| tp | a step | 1.15 x | 12 ms, 1.200 x | 2026-11-06 |"]


def test_earlier_runs_of_two_ranks_are_told(scripts, results):
    for date, ratio in (("2026-11-05", 1.4), ("2026-11-06", 1.2)):
        steps = {
            "static decode over 2 ranks, bare": {"value": 10.0, "ratio": 1.0},
            "static decode over 2 ranks, 32 adapters": {"value": 10.0 * ratio, "ratio": ratio},
        }
        write(results, "tp", date, steps)
    lines = scripts("tables").table().splitlines()
    assert "| compiled decode, 32 adapters | 12.0 ms | 10.8 to 14.4 | 1.20 x |" in lines
    assert "Earlier runs, compiled, bare and with 32 adapters: 10.0 and 14.0 ms, 1.40 x." in lines


def test_plots_draw_the_same_figures(scripts, results):
    plots = scripts("plots")
    runs = [run for run in plots.read_runs(results / "results", "generate") if plots.on_the_shape(run)]
    lines, bare, places = plots.decode_series(runs)
    assert set(lines) == {"eager", "compiled", "captured", "PEFT, eager"} and bare == {"eager": 24.0, "compiled": 10.0}
    assert lines["PEFT, eager"] == [(1, 90.0), (32, 1100.0)] and [x for x, _ in lines["compiled"]] == [1, 8, 32]
    assert places == ["NVIDIA H200, torch 2.11.0, transformers 5.17.0, 2026-11-03"]
    assert plots.batch_series(runs) == {"eager": [(1, 1.05), (32, 1.2)]}
    pytest.importorskip("matplotlib")
    written = plots.draw(results / "figures", "svg")
    assert [path.name for path in written] == ["decode.svg", "batches.svg", "registered.svg"]
    text = written[0].read_text()
    assert "PEFT, eager, 1100.0" in text and "bare model, compiled, 10.0" in text
    assert written == plots.draw(results / "figures", "svg") and written[0].read_text() == text, "the same bytes again"
