"""generate() with a static cache: compiled, captured, and one graph for every mix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_bed import ADAPTERS, CUDA, MARKS, MIXED, ROWS, bare, enabled, fresh, greedy, inputs
from torch._dynamo.utils import counters
from transformers import CompileConfig

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


def _static(model: Any, **options: Any) -> torch.Tensor:
    kwargs: dict[str, Any] = {"cache_implementation": "static", **options}
    if not CUDA:  # generate() compiles by itself on a GPU only
        kwargs["compile_config"] = CompileConfig(backend="eager", mode=None)
        kwargs["compile_config"]._compile_all_devices = True
    return greedy(model, inputs(11, padded=True), NEW, **kwargs)


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
