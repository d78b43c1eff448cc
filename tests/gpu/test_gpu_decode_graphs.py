"""On a device, batches that decode are captured where nobody has said anything; what cannot be captured runs on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from continuous.cb_bed import assert_answer, batching, enabled, greedy, prompt
from continuous.cb_run import Results, running
from gpu_bed import whole_fp32  # noqa: F401
from transformers import ContinuousBatchingConfig

from hf_multilora.generation.continuous.forwards import Graphs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("whole_fp32")]

IDS: list[Any] = ["a", None, "b", "c", "a", None, "b"]
SOURCES: list[Any] = [0, None, 1, 2, 0, None, 1]


def config() -> ContinuousBatchingConfig:
    """As somebody writes it who has not heard of graphs."""
    made = batching(max_batch_tokens=48)
    made.use_cuda_graph = made.use_async_batching = None
    return made


def serve(manager: Any) -> None:
    inputs = [prompt(4 + 3 * i, seed=i) for i in range(len(IDS))]
    asked = [manager.add_request(p, adapter_id=i, max_new_tokens=9) for p, i in zip(inputs, IDS, strict=True)]
    for output, source in zip(Results(manager).wait(*asked), SOURCES, strict=True):
        assert_answer(output, source, 9, SOURCES)


def captured(manager: Any) -> int:
    return sum(len(graphs._storage) for graphs in manager._forwards._graphs.values())


def test_batches_that_decode_are_captured() -> None:
    model = enabled({"a": 0, "b": 1, "c": 2}, device="cuda")
    with running(model, config()) as manager:
        assert manager._forwards.graphs == "decode"
        serve(manager)
        first = captured(manager)
        assert first > 0
        serve(manager)
        serve(manager)
        assert captured(manager) <= first + 3, "the same sizes come again"
    assert captured(manager) == 0, "graphs go with the processor"


def test_graphs_belong_to_what_a_batch_is_drawn_with() -> None:
    """Greedy requests alone, beside hot ones, and alone again: each time with the same tokens, as they come."""
    model = enabled({"a": 0, "b": 1, "c": 2}, device="cuda")
    made, draws = config(), greedy(9, do_sample=True, temperature=0.5, top_k=4, top_p=0.5)
    made.per_request_processors = True
    best = {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    hot = {"temperature": 50.0, "top_k": 5, "top_p": 1.0}
    with running(model, made, generation_config=draws) as manager:
        for beside in (0, 3, 0):
            inputs = [prompt(4 + 3 * i, seed=i) for i in range(len(IDS))]
            others = [manager.add_request(prompt(6), max_new_tokens=30, **hot) for _ in range(beside)]
            asked = [
                manager.add_request(p, adapter_id=i, max_new_tokens=9, streaming=True, **best)
                for p, i in zip(inputs, IDS, strict=True)
            ]
            results = Results(manager)
            for request, source in zip(asked, SOURCES, strict=True):
                assert_answer(results.wait(request)[0], source, 9, SOURCES)
                parts = [len(part.generated_tokens) for part in results.parts[request]]
                assert parts == list(range(1, 9)), "each token comes by itself, in order"
            results.wait(*others)
        kinds = {variant[-1] for _, variant in manager._forwards._graphs}
        assert {(False, False, False), (True, False, True)} <= kinds


def test_a_capture_that_fails_is_given_up() -> None:
    model = enabled({"a": 0, "b": 1, "c": 2}, device="cuda")
    layer = model.model.layers[1]
    layer.register_forward_hook(lambda *_: torch.cuda.current_stream().synchronize())  # refused while capturing
    with running(model, config()) as manager:
        serve(manager)
        assert manager._forwards.graphs == "off" and captured(manager) == 0
        serve(manager)


def test_the_oldest_graph_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_multilora.generation.continuous.forwards._GRAPHS", 2)
    x = torch.zeros(4, device="cuda")
    graphs = Graphs()
    for key in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
        graphs.set_graph((key,), graph)
        assert graphs.get_graph((0,)) is not None, "used again each time"
    assert graphs.get_graph((1,)) is None and graphs.get_graph((2,)) is not None
