"""What a stranger found: each of these was wrong once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from continuous.cb_bed import BASE, assert_answer, batch, batching, enabled, folder, greedy, load, prompt, sequences
from continuous.cb_run import Results, counted, running
from models import FAMILIES
from transformers import CompileConfig

from hf_multilora import enable_multilora
from hf_multilora.errors import AdapterNotFoundError, ModelError, SlotError
from hf_multilora.generation.continuous.admission import OTHERS, Admission
from hf_multilora.generation.continuous.batching import Batching

T = prompt(13, seed=1)


def test_a_refused_configuration_leaves_the_model_as_it_was() -> None:
    model = enabled({"a": 0})
    model.set_attn_implementation("eager")
    with pytest.raises(ModelError, match="varlen_compile_config"):
        model.generate_batch([T], continuous_batching_config=batching(varlen_compile_config=CompileConfig()))
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_norms_of_heads_that_an_adapter_saves(family: str) -> None:
    """Tokens lie before the heads in one, behind them in the other; and there may be as many."""
    model, random = FAMILIES[family].build(), torch.Generator().manual_seed(0)
    heads = model.config.get_text_config().num_attention_heads
    tensors = {
        f"base_model.model.{name}.weight": module.weight.detach() * 1.5 + 0.1 * (1 + i)
        for i, (name, module) in enumerate(model.named_modules())
        if name.endswith("q_norm")
    }
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            out, inside = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, inside, generator=random) * 0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, 4, generator=random) * 0.5
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "modules_to_save": ["q_norm"],
    }
    model = enable_multilora(model, max_loras=2, max_lora_rank=8)
    model.multilora.load(tensors, "own", config=config)
    want = [_alone(model, name, 6) for name in ("own", None)]
    assert not torch.allclose(want[0][1], want[1][1], atol=1e-3)
    for rows in (1, heads, heads + 1):
        names = ["own", *[None] * (rows - 1)]
        outputs = batch(model, [T] * rows, 6, batching(max_batch_tokens=64, return_logprobs=True), adapter_ids=names)
        for output, name in zip(outputs, names, strict=True):
            tokens, scores = want[name is None]
            assert output.error is None and output.generated_tokens == tokens
            torch.testing.assert_close(torch.tensor(output.logprobs), scores, rtol=1e-4, atol=1e-4)


def _alone(model: Any, name: str | None, new: int) -> tuple[list[int], torch.Tensor]:
    """Tokens and their log probabilities by generate()."""
    ids = torch.tensor([T])
    out = model.generate(ids, adapter_ids=[name], generation_config=greedy(new))
    with torch.no_grad():
        scores = model(out, adapter_ids=[name]).logits.float().log_softmax(-1)[0, len(T) - 1 : -1]
    tokens = out[0, len(T) :]
    return tokens.tolist(), scores.gather(1, tokens[:, None])[:, 0]


def test_children_of_a_request_that_fails_are_told(tmp_path: Any) -> None:
    """generate_batch waits for all of them."""
    model = enabled({"a": 0})
    broken = folder(3, tmp_path / "broken")
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    done: list[Any] = []
    settings = {"generation_config": sequences(2, 6), "continuous_batching_config": batching()}

    def ask() -> None:
        done.append(model.generate_batch([T, T], adapter_ids=["a", str(broken)], **settings))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and len(done[0]) >= 2


def test_an_adapter_that_is_unloaded_while_a_round_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enabled({"a": 0, "b": 1})
    store = model.multilora.store

    def gone(names: Any) -> Future[list[str]]:
        raise AdapterNotFoundError("it was unloaded just now")

    monkeypatch.setattr(store, "prefetch", gone)
    with running(model, batching(max_requests_per_batch=1)) as manager, counted(Batching, "after"):
        asked = [manager.add_request(T, adapter_id=name, max_new_tokens=6) for name in ("a", "b")]
        for output, source in zip(Results(manager).wait(*asked), (0, 1), strict=True):
            assert_answer(output, source, 6)


def test_inside_of_a_pause_running_slots_are_not_waited_for() -> None:
    model = enabled({"a": 0, "b": 1}, max_loras=1)
    with running(model) as manager:
        if not hasattr(type(manager).__mro__[2], "pause"):
            pytest.skip("this transformers has no pause")
        results = Results(manager)
        asked = manager.add_request(T, adapter_id="a", max_new_tokens=40, streaming=True)
        results.started(asked)
        with manager.pause():
            with pytest.raises(SlotError):
                model.generate(torch.tensor([T]), adapter_ids="b", max_new_tokens=2)
            model.generate(torch.tensor([T]), max_new_tokens=2)
            with pytest.raises(SlotError):
                model.multilora.pin("b")
        assert_answer(results.wait(asked)[0], 0, 40)


def test_calls_outside_and_the_manager_starve_each_other_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_multilora.generation.continuous.batching._OTHERS_S", 0.2)
    model = enabled({"a": 0, "b": 1, "c": 2}, max_loras=1)
    leases, stop = [0], threading.Event()

    def hold(name: str) -> None:  # what generate() does with slots; transformers 5.17 cannot run it beside a manager
        while not stop.is_set():
            with model.multilora.store.acquire([name]):
                leases[0] += 1
                time.sleep(0.001)

    threads = [threading.Thread(target=hold, args=(name,), daemon=True) for name in "bc"]
    try:
        with running(model) as manager:
            for thread in threads:
                thread.start()
            results = Results(manager)
            assert_answer(results.wait(manager.add_request(T, adapter_id="a", max_new_tokens=6))[0], 0, 6)
            before, asked, end = leases[0], [], time.monotonic() + 30
            while leases[0] == before:  # an endless stream of requests must let the others have the slot
                assert time.monotonic() < end, "calls outside of the manager have starved"
                asked.append(manager.add_request(T, adapter_id="a", max_new_tokens=6))
                results.take(0.02)
            results.wait(*asked)
            stop.set()
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)


def test_requests_that_ask_for_one_folder_share_its_load(tmp_path: Any) -> None:
    model = enabled()
    source = str(folder(4, tmp_path / "four"))
    ensure, calls, go = model.multilora.ensure, [], threading.Event()

    def slow(name: str) -> None:
        calls.append(name)
        assert go.wait(30)
        ensure(name)

    with running(model) as manager:
        manager.batching.reading.ensure = slow
        asked = [manager.add_request(T, adapter_id=source, max_new_tokens=5) for _ in range(12)]
        plain = manager.add_request(T, max_new_tokens=5)
        results = Results(manager)
        results.wait(plain)
        go.set()
        for output in results.wait(*asked):
            assert_answer(output, 4, 5)
    assert calls == [source]


def test_a_seat_that_somebody_else_took_is_not_waited_for_any_more() -> None:
    seats: dict[str, Any] = {}
    table = SimpleNamespace(__iter__=None)
    table = type(
        "Table", (), {"__iter__": lambda self: iter(list(seats.values())), "get": lambda s, t: seats.get(t)}
    )()
    admission = Admission(table, lambda *_: None, dict, lambda name: 1, 1, "arrival")  # type: ignore[arg-type]
    seats["a"] = SimpleNamespace(users={"r"}, closing=False)
    assert admission._empty_for("b") is seats["a"] and seats["a"].closing
    seats["e"] = SimpleNamespace(users={"r"}, closing=False)
    del seats["a"]
    waiting = SimpleNamespace(key="b", seat=None, passed=5)
    admission._reopen([waiting])  # type: ignore[list-item]
    assert admission._empty_for("b") is seats["e"]
    admission.make_room(True)
    assert OTHERS not in admission._emptied, "nothing is open"


def test_rounds_that_can_admit_nobody_are_skipped() -> None:
    model = enabled({"a": 0, "b": 1}, max_loras=1)
    with running(model) as manager, counted(Admission, "offer") as rounds:
        results = Results(manager)
        first = manager.add_request(T, adapter_id="a", max_new_tokens=48)
        second = manager.add_request(T, adapter_id="b", max_new_tokens=5)
        results.wait(first, second)
        steps = manager.status().steps
    assert steps >= 50 and len(rounds) < steps


def test_an_adapter_called_base_is_not_the_base() -> None:
    model = enabled({"base": 0})
    with running(model) as manager:
        asked = [manager.add_request(T, adapter_id=name, max_new_tokens=2) for name in (None, None, "base")]
        Results(manager).wait(*asked)
        adapters = manager.status().adapters
    assert (adapters[BASE].requests, adapters["base"].requests) == (2, 1)


def test_no_prompts_no_answers() -> None:
    assert enabled({"a": 0}).generate_batch([], adapter_ids="a") == {}


def test_a_manager_that_has_stopped_loads_nothing(tmp_path: Any) -> None:
    model = enabled()
    with running(model) as manager:
        pass
    before = threading.active_count()
    source = str(folder(5, tmp_path / "five"))
    assert manager.add_request(T, adapter_id=source) is None
    assert source not in model.multilora.adapters and threading.active_count() == before


def test_a_reload_under_a_waiting_lease_takes_the_new_weights() -> None:
    """A lease that was stood in line for may come with weights that have been replaced since."""
    model = enabled({"a": 0, "b": 1}, max_loras=1)
    store = model.multilora.store
    lease = store.acquire(["b"])
    try:
        with running(model) as manager:
            results = Results(manager)
            asked = manager.add_request(T, adapter_id="a", max_new_tokens=6)
            time.sleep(0.3)  # it stands in line by now; nothing depends on it
            load(model, "a", 2, reload=True)
            store.release(lease)
            assert_answer(results.wait(asked)[0], 2, 6)
    finally:
        store.release(lease)


@pytest.mark.parametrize("large", ["prompt", "answer"])
def test_a_request_that_the_whole_cache_cannot_hold_fails_alone(large: str) -> None:
    model = enabled({"a": 0})
    with running(model, batching(num_blocks=6, max_batch_tokens=24, safety_margin=0.0)) as manager:
        results = Results(manager)
        tokens, new = (prompt(90), 4) if large == "prompt" else (prompt(9), 200)
        too_large = manager.add_request(tokens, adapter_id="a", max_new_tokens=new)
        small = [manager.add_request(prompt(6, seed=i), adapter_id="a", max_new_tokens=5) for i in range(4)]
        for output in results.wait(*small):
            assert_answer(output, 0, 5)
        assert "whole cache" in results.wait(too_large)[0].error
        again = manager.add_request(prompt(6), adapter_id="a", max_new_tokens=5)
        assert_answer(results.wait(again)[0], 0, 5)
