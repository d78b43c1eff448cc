"""Asynchronous batching on a CPU: batches overlap as on a device, one is prepared before another is seen. Streams
and events stand in for CUDA's. What only a device can show is in tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from continuous.cb_bed import assert_answer, batch, batching, enabled, greedy, poisoned, prompt
from continuous.cb_run import Results, running
from continuous.cb_soak import soak
from transformers.generation.continuous_batching import continuous_api, input_outputs, model_runner, offloading_manager
from transformers.generation.continuous_batching.requests import RequestStatus

AHEAD = {"use_async_batching": True, "use_cuda_graph": False}


class Quiet:
    """A stream or an event that orders nothing: on a CPU all is in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@pytest.fixture(autouse=True)
def ahead_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Quiet)
    pairs = input_outputs.ContinuousBatchingAsyncIOs
    if hasattr(input_outputs, "create_device_stream"):
        monkeypatch.setattr(input_outputs, "create_device_stream", Quiet)
        monkeypatch.setattr(torch, "Event", Quiet)
        monkeypatch.setattr(pairs, "_supported_device_types", ("cpu",))
        for module in (input_outputs, model_runner, continuous_api, offloading_manager):
            monkeypatch.setattr(module, "stream_context", lambda stream: nullcontext(), raising=False)
    else:  # transformers 5.17 asks for CUDA where it makes them, and nowhere else
        make = pairs.__init__

        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "is_available", lambda: True)
                patch.setattr(torch.cuda, "Event", Quiet)
                patch.setattr(input_outputs, "get_available_devices", lambda: ["cpu"])
                make(self, *args, **kwargs)

        monkeypatch.setattr(pairs, "__init__", made)
    yield


def test_a_mixed_batch() -> None:
    model = enabled({"a": 0, "b": 1, "c": 2}, max_loras=2)
    ids, sources = ["a", None, "b", "c", "a"] * 2, [0, None, 1, 2, 0] * 2
    inputs = [prompt(4 + 3 * i, seed=i) for i in range(len(ids))]
    outputs = batch(model, inputs, 12, batching(max_batch_tokens=17, **AHEAD), adapter_ids=ids)
    for output, source in zip(outputs, sources, strict=True):
        assert_answer(output, source, 12, [0, 1, 2, None])


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "top-1"])
def test_a_poisoned_adapter_fails_alone(sampling: dict[str, Any]) -> None:
    """Its request is in the next batch already when it is found out."""
    model = enabled({"a": 0})
    tensors, config = poisoned(5)
    model.multilora.load(tensors, "bad", config=config)
    ids = ["bad", "a", None, "bad", "a", None]
    settings = {"config": batching(max_batch_tokens=20, **AHEAD), "generation_config": greedy(9, **sampling)}
    outputs = batch(model, [prompt(5 + i, seed=i) for i in range(6)], 9, adapter_ids=ids, **settings)
    for output, name in zip(outputs, ids, strict=True):
        if name == "bad":
            assert output.status == RequestStatus.FAILED and "finite" in output.error
        else:
            assert_answer(output, 0 if name else None, 9)


def test_a_request_that_is_cancelled_while_its_batch_runs() -> None:
    model = enabled({"a": 0, "b": 1})
    with running(model, batching(**AHEAD)) as manager:
        results = Results(manager)
        long = [manager.add_request(prompt(9, seed=i), adapter_id="b", max_new_tokens=40) for i in range(6)]
        asked = manager.add_request(prompt(9), adapter_id="a", max_new_tokens=40, streaming=True)
        for tokens, request in enumerate(long, start=1):
            results.started(asked, tokens)
            manager.cancel_request(request)
        assert_answer(results.wait(asked)[0], 0, 40)


def test_soak() -> None:
    ended, events = soak(1, requests=120, **AHEAD)
    assert sum(ended.values()) == len(events["asked"]) >= 120
    assert ended["one version"] >= 30 and events["resets"] > 0 and ended.get("tie", 0) <= 1, ended
