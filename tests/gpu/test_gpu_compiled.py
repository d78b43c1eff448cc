"""generate() with a static cache: compiled, captured, and one graph for every mix."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
from gpu_bed import (
    ADAPTERS,
    CUDA,
    DEVICE,
    MARKS,
    MIXED,
    ROWS,
    adapter,
    bare,
    enabled,
    fresh,
    greedy,
    inputs,
    load,
    needs_cuda,
)
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from hf_multilora import enable_multilora

pytestmark = MARKS

NEW = 8
MIXES: list[Any] = [
    list(MIXED),
    ["r33"] * ROWS,
    ["r3", "r8", "r3", "r8", None, None, None, "r16"],
    [None] * (ROWS - 1) + ["r1"],
    list(reversed(MIXED)),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _compile_options() -> dict[str, Any]:
    if CUDA:
        return {}
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True  # generate() compiles by itself on a GPU only
    return {"compile_config": config}


def _static(model: Any, batch: dict[str, Any] | None = None, new: int = NEW, **options: Any) -> torch.Tensor:
    batch = inputs(11, padded=True) if batch is None else batch
    return greedy(model, batch, new, cache_implementation="static", **_compile_options(), **options)


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_one_graph_for_every_mix():
    dtype = torch.float32
    _static(fresh(dtype))
    bare_graphs = _graphs()
    torch._dynamo.reset()
    counters.clear()

    model = enabled(dtype, max_loras=5)
    outputs = [_static(model, adapter_ids=MIXES[0])]
    assert 1 <= _graphs() <= bare_graphs, "an enabled model needs no more graphs than the bare one"
    first = _graphs()
    outputs += [_static(model, adapter_ids=mix) for mix in MIXES[1:]]
    assert _graphs() == first, "another mix compiled again"
    none = _static(model)
    assert _graphs() <= first + 1, "no adapter active: one graph more at most"
    second = _graphs()
    again = _static(model, adapter_ids=MIXES[0])
    assert _graphs() == second, "going back to a mix compiled again"
    assert torch.equal(again, outputs[0])
    assert counters["inductor"]["cudagraph_skips"] == 0
    for mix, output in zip(MIXES, outputs, strict=True):
        assert torch.equal(output, greedy(model, inputs(11, padded=True), NEW, adapter_ids=mix)), mix
    assert torch.equal(none, greedy(bare(dtype), inputs(11, padded=True), NEW))


def test_compiled_rows_do_not_depend_on_the_mix():
    """In bf16, where the compiler's fusions round elsewhere than the eager model, which cannot be the reference."""
    model = enabled(torch.bfloat16)
    alone = {name: _static(model, adapter_ids=name) for name in ADAPTERS}
    graphs = _graphs()
    for mix in MIXES:
        output = _static(model, adapter_ids=mix)
        for row, name in enumerate(mix):
            if name is not None:
                assert torch.equal(output[row], alone[name][row]), f"row {row} ({name}) in {mix}"
    assert _graphs() == graphs
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_slots_that_change_under_a_captured_graph():
    """Three slots, five adapters: the graph captured with some reads whatever is in the slots when it is replayed."""
    model = enabled(torch.float32, max_loras=3)
    expected = {name: greedy(model, inputs(11, padded=True), NEW, adapter_ids=name) for name in ADAPTERS}
    names = list(ADAPTERS)
    graphs = None
    for turn in range(6):
        ids = [names[(turn + row) % 3 + turn % 3] for row in range(ROWS)]
        output = _static(model, adapter_ids=ids)
        for row, name in enumerate(ids):
            assert torch.equal(output[row], expected[name][row]), f"turn {turn}, row {row} ({name})"
        graphs = graphs or _graphs()
        assert _graphs() == graphs


def test_nothing_compiles_after_warmup():
    """Mixes, orders, loads and evictions over three slots; answers do not depend on who else is in the batch."""
    model = enabled(torch.bfloat16, max_loras=3)
    before = repr(model.multilora.status())
    model.multilora.warmup(4, max_length=32, **_compile_options())
    assert repr(model.multilora.status()) == before, "warm-up touched an adapter"
    graphs, rng = _graphs(), random.Random(0)
    assert graphs >= 1
    batch = inputs(7, rows=4, padded=True)
    alone = {name: _static(model, batch, 4, adapter_ids=name) for name in (*ADAPTERS, None)}
    for turn in range(40):
        if turn % 10 == 5:
            name = rng.choice(list(ADAPTERS))
            load(model, name, adapter(name, torch.bfloat16), reload=True)
        chosen: list[str | None] = [*rng.sample(list(ADAPTERS), 3), None]
        ids = [rng.choice(chosen) for _ in range(4)]
        output = _static(model, batch, 4, adapter_ids=ids)
        assert all(torch.equal(output[row], alone[name][row]) for row, name in enumerate(ids)), (turn, ids)
        _static(model, inputs(rng.choice([3, 9]), rows=4, seed=turn), 4, adapter_ids=ids)
        assert _graphs() == graphs, f"turn {turn}: {ids} compiled again"
    assert counters["inductor"]["cudagraph_skips"] == 0


@needs_cuda
@pytest.mark.parametrize("order", ["compiled before", "compiled after"])
def test_a_model_that_the_user_compiles(order):
    model = fresh(torch.bfloat16)
    options: dict[str, Any] = {"mode": "reduce-overhead", "fullgraph": True}
    compiled = torch.compile(model, **options) if order == "compiled before" else None
    enable_multilora(model, max_loras=8, max_lora_rank=64)
    for name in ADAPTERS:
        load(model, name, adapter(name, torch.bfloat16))
    if compiled is None:
        compiled = torch.compile(model, **options)
    batch = inputs(11)

    def logits(ids: Any) -> torch.Tensor:
        with torch.no_grad(), model.multilora.use(ids):
            return compiled(**batch, use_cache=False).logits.clone()

    alone = {name: logits(name) for name in ADAPTERS}
    graphs = _graphs()
    for mix in MIXES:
        output = logits(mix)
        for row, name in enumerate(mix):
            assert name is None or torch.equal(output[row], alone[name][row]), f"row {row} ({name}) in {mix}"
    assert _graphs() == graphs <= 2
    assert counters["inductor"]["cudagraph_skips"] == 0


@needs_cuda
@pytest.mark.parametrize("ids", [["r1", None, "r3", "r8"], [None] * 4], ids=["mixed", "none"])
def test_a_compiled_step_does_not_wait_for_the_device(ids):
    model = enabled(torch.bfloat16)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = StaticCache(config=model.config, max_cache_len=32)
    tokens = inputs(5, rows=4)["input_ids"]
    at = torch.arange(32, device=DEVICE)[None].expand(4, -1)
    with torch.no_grad(), model.multilora.use(ids):
        model(input_ids=tokens, position_ids=at[:, :5], use_cache=True, **{name: cache})
        compiled = model.get_compiled_call(None)
        steps = [
            {"input_ids": tokens[:, i : i + 1].clone(), "position_ids": at[:, 5 + i : 6 + i].clone(), name: cache}
            for i in range(5)
        ]
        for step in steps[:-1]:  # compiles, warms up, records, replays
            compiled(**step, use_cache=True, return_dict=True)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            compiled(**steps[-1], use_cache=True, return_dict=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_a_compiled_call_sees_whole_slots():
    """One slot that adapters take in turns, on alternating streams: the copy is as long as the forward is short."""
    model = enabled(torch.bfloat16, max_loras=1)
    compiled = torch.compile(model, fullgraph=True)
    batch = inputs(1)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]

    def logits(name: str, stream: torch.cuda.Stream) -> torch.Tensor:
        with torch.no_grad(), torch.cuda.stream(stream), model.multilora.use(name):
            output = compiled(**batch, use_cache=False).logits.clone()
        return output

    torch.cuda.synchronize()
    expected = {}
    for name in ADAPTERS:
        expected[name] = logits(name, streams[0])
        torch.cuda.synchronize()
    got = [(name, logits(name, streams[turn % 2])) for turn in range(5) for name in ADAPTERS]
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected[name]) for name, output in got)


@needs_cuda
def test_rows_that_are_freed_while_another_stream_reads_them():
    """The block that the rows' slots lie in is not given to the next call before the forward has read it."""
    model = enabled(torch.float32, max_loras=5)
    batch, other = inputs(11, padded=True), torch.cuda.Stream()
    with torch.no_grad():
        expected = [model(**batch, use_cache=False, adapter_ids=mix).logits for mix in MIXES]
        torch.cuda.synchronize()
        got = []
        for mix in MIXES * 3:
            with model.multilora.use(mix), torch.cuda.stream(other):
                got.append(model(**batch, use_cache=False).logits)
        torch.cuda.synchronize()
    for turn, output in enumerate(got):
        assert torch.equal(output, expected[turn % len(MIXES)]), turn
