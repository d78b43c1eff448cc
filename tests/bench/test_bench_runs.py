"""Every benchmark from end to end, in the shape "tiny" on the CPU: what it measures, and what it writes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hf_multilora.bench import decode, kernels, registered
from hf_multilora.bench.generate import run
from hf_multilora.bench.kernels import Layers, Point
from hf_multilora.bench.measure import Counter
from hf_multilora.bench.models import Models, Settings, ids, sparse_ids
from hf_multilora.bench.results import Results, read_runs
from hf_multilora.bench.workload import linear_shapes
from hf_multilora.kernels.ops import LinearOp


def test_the_runtime_does_not_import_benchmarks():
    code = "import sys, hf_multilora; sys.exit(any('bench' in name for name in sys.modules if 'hf_multilora' in name))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_mixes_of_rows():
    assert ids(5, 2) == ["a0", "a1", "a0", "a1", "a0"] and ids(5, 0) is None
    rows = sparse_ids(32)
    assert [row for row in rows if row] == ["a0", "a1", "a2", "a3"] and len(rows) == 32


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """All parts at once; with batch 8, of which 8 adapters are as many as fit."""
    settings = Settings(
        parts=["check", "eager", "prefill", "peft", "static", "graphs", "mixes"],
        batch=[8],
        adapters=[0, 1, 8],
        reps=2,
        new_tokens=4,
        prefill=[64],
        peft_adapters=[1, 8],
        peft_batch=[8],
        peft_reps=2,
        mixes=12,
    )
    lines: list[str] = []
    results = Results("generate", tmp_path_factory.mktemp("results"), "cpu", say=lines.append)
    run(settings, results)
    return results, lines


def test_all_parts_leave_their_rows(whole_run):
    results, _ = whole_run
    assert results.failed == [], "logits differ from merged weights, or from PEFT's"
    rows = {row["what"]: row for row in results.rows}
    expected = [
        "logits against fp32 merged weights, decode (worst row)",
        "prefill 64 tokens, 16 adapters",
        "eager decode, batch 8, PEFT, one active adapter",
        "eager decode, batch 8, PEFT mixed batch, 8 adapters",
    ]
    for path in ("eager", "static"):
        labels = ("bare model", "enabled, none active", "1 adapters", "8 adapters")
        expected += [f"{path} decode, batch 8, {label}" for label in labels]
    expected += ["graphs decode, batch 8, 8 adapters", "graphs decode, batch 8, 8 adapters, over the compiled step"]
    assert not set(expected) - set(rows)
    mixed = rows["static decode, batch 8, 8 adapters"]
    assert len(mixed["all"]) == 2 and mixed["over"] == "static bare" and mixed["adapters"] == 8
    assert mixed["compiled"] >= 1, "the first mix compiles"
    assert rows["logits, ours against PEFT's, same mixed batch"]["moved_by_adapters"] > 0.1
    (kept,) = read_runs(results.path.parent, "generate")
    assert set(kept.figures) == set(rows)


def test_mixes_compile_nothing(whole_run):
    rows = {row["what"]: row for row in whole_run[0].rows}
    row = rows["static, batch 8, 12 random mixes, loads and evictions: compiled"]
    assert row["value"] == 0 and row["evictions"] > 0
    for path in ("static", "graphs"):
        assert rows[f"{path} decode, batch 8, compiled after the first mix and none"]["value"] == 0


def test_busy_time_is_that_of_a_step(tmp_path, monkeypatch):
    """The profiler's part, with a profiler that sees 5 ms a generate() and 2 ms a step."""
    results = Results("generate", tmp_path, "cpu", say=lambda line: None)
    models = Models(Settings(batch=[2], adapters=[0, 2], reps=1, new_tokens=3), results)
    looks = decode.run_decode(models, ["eager"], 2, Counter(), 60)
    asked: list[int] = []
    monkeypatch.setattr(decode.Case, "generate", lambda case, inputs, new: asked.append(new))

    def busy_ms(run) -> float:
        run()
        return 5.0 + 2.0 * (asked[-1] - 1)

    monkeypatch.setattr(decode, "busy_ms", busy_ms)
    looks()
    rows = {row["what"]: row for row in results.rows if row["what"].endswith("GPU busy")}
    labels = ("bare model", "2 adapters", "enabled, none active")
    assert list(rows) == [f"eager decode, batch 2, {label}, GPU busy" for label in labels]
    assert {row["value"] for row in rows.values()} == {2.0} and rows[f"eager decode, batch 2, {labels[0]}, GPU busy"][
        "side"
    ] == "bare"


@pytest.mark.parametrize("adapters", [[0, 1], [1, 8, 0, 32], [0]])
def test_first_calls_make_both_graphs_first(adapters):
    cases = [decode.Case("static", key, "", None, 32, {}) for key in (*map(str, adapters), "sparse", decode.BARE)]
    order = [case.mix for case in decode.order_of_first_calls(cases)]
    assert order[: 1 + len(adapters[:2])] == [decode.BARE, *dict.fromkeys([str(max(adapters)), "0"])]
    assert sorted(order) == sorted(case.mix for case in cases)


def test_registered(tmp_path, capsys):
    options = ["--registered", "8", "40", "--rows", "8", "--waiting", "60", "--new-tokens", "2", "--batches", "2"]
    assert (
        registered.main([*options, "--reps", "2", "--shape", "tiny", "--device", "cpu", "--out", str(tmp_path)]) == 0
    )
    (kept,) = read_runs(tmp_path, "registered")
    few, many = (kept.figures[f"eager throughput, {count} registered, 8 slots"] for count in (8, 40))
    assert few["rows"] == many["rows"] == 8 and len(many["all"]) == 2
    assert few["brought_in"] == 0 and many["brought_in"] > 0, "eight adapters stay in eight slots"
    ratio = kept.figures["eager throughput, 40 over 8 registered, time of a token"]
    assert ratio["value"] * ratio["throughput"] == pytest.approx(1)


def test_registered_looks_at_the_host_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(registered, "available_bytes", lambda: 1000)
    options = ["--registered", "8", "40", "--shape", "tiny", "--device", "cpu", "--out", str(tmp_path)]
    assert registered.main(options) == 1
    assert "host memory" in capsys.readouterr().out


def test_no_two_adapters_of_the_pool_are_equal():
    pool = registered.Pool({"a.q_proj": (16, 8)}, 3, torch.float32)
    first, second = (pool[number] for number in (0, 1))
    assert {key: tuple(value.shape) for key, value in first.items()} == {
        "base_model.model.a.q_proj.lora_A.weight": (8, 16),
        "base_model.model.a.q_proj.lora_B.weight": (8, 8),
    }
    assert all(not torch.equal(first[key], second[key]) for key in first)


def test_available_memory_is_that_of_this_machine():
    assert 1 << 20 < registered.available_bytes() < 1 << 44


def test_layers_of_the_kernel_benchmark_are_what_the_kernels_read():
    """The arena is laid out by hand there: its delta must be that of the factors."""
    torch.manual_seed(0)
    layers = Layers("tiny", Point(rows=4, adapters=2, rank=4), "cpu", torch.float32)
    op, x, ys = layers.ops[1][0], layers.x[0][0], layers.ys[0][0]
    before = [y.clone() for y in ys]
    after = op(ys, x, layers.slots, 4)
    site = 3 + 1 + 2 + 1  # the first of the second layer
    data = op.data.view(2, -1)
    for row in range(4):
        slot = data[row % 2]
        for number, (y, old) in enumerate(zip(after, before, strict=True)):
            a_at, b_at, rank, gain, shift = slot.view(torch.int64)[5 * (site + number) :][:5].tolist()
            assert (rank, gain, shift) == (4, 0, 0)
            a = slot[a_at : a_at + 4 * x.shape[1]].view(4, -1)
            b = slot[b_at : b_at + 4 * y.shape[1]].view(4, -1)
            torch.testing.assert_close(y[row], old[row] + x[row] @ a.T @ b, rtol=1e-5, atol=1e-6)


class FakeGraph:
    """Runs what it would capture, once; replays take 40 us for the GEMMs of two layers and 10 more with adapters."""

    def __init__(self, run) -> None:
        run()
        self.calls = FakeGraph.seen
        FakeGraph.seen = 0

    seen = 0

    def replay_us(self) -> float:
        return 40.0 + 10.0 * (self.calls > 0)

    def times(self, replays: int) -> list[float]:
        return [30.0] * replays


def test_kernels_over_base(tmp_path, monkeypatch):
    def end(op, *args, **kwargs):
        FakeGraph.seen += 1
        return original(op, *args, **kwargs)

    original = LinearOp.end
    monkeypatch.setattr(LinearOp, "end", end)
    monkeypatch.setattr(kernels, "Graph", FakeGraph)
    results = Results("layer", tmp_path, "cpu", say=lambda line: None)
    kernels.measure(results, "tiny", kernels.Point(4, 2, 8), 1e9, device="cpu", dtype=torch.float32)
    alone, *ways = results.rows
    assert alone["value"] == 15.0 and [row["value"] for row in ways] == [5.0] * 3
    assert all(len(row["all"]) == kernels.ROUNDS and row["low"] == row["high"] == 5.0 for row in ways)
    over = ways[0]
    # A and B of two adapters; x once; y twice; 64 wide, 32 for k and v, 160 between gate and down
    factors = 2 * 8 * (3 * 64 + 64 + 2 * 32 + 64 + 64 + 2 * 64 + 2 * 160 + 160 + 64)
    moved = 4 * (64 + 2 * 128 + 64 + 2 * 64 + 64 + 2 * 320 + 160 + 2 * 64)
    assert over["floor_us"] == pytest.approx((factors + moved) * 4 / 1e3)


def test_linear_layers_of_a_model_without_the_usual_names():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16))
    assert linear_shapes(model) == {
        "transformer.h.0.attn.c_attn": (16, 48),
        "transformer.h.0.attn.c_proj": (16, 16),
        "transformer.h.0.mlp.c_fc": (16, 64),
        "transformer.h.0.mlp.c_proj": (64, 16),
    }
