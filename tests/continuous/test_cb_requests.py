"""Every request of a mixed batch is what generate() gives for its prompt and its adapter alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from continuous.cb_bed import (
    BASE,
    Source,
    answer,
    assert_answer,
    assert_told_apart,
    batch,
    batching,
    enabled,
    load,
    prompt,
)
from continuous.cb_run import Results, running, several, wait_until

from hf_multilora.errors import ConfigError

pytestmark = pytest.mark.timeout(120)

NAMES = {f"a{i}": i for i in range(8)}
IDS: list[Any] = ["a0", None, "a1", {"a2": 0.7, "a3": -0.5}, "a4", "a1", "a5", None, "a6", "a7"]
SOURCES: list[Source] = [0, None, 1, ((2, 0.7), (3, -0.5)), 4, 1, 5, None, 6, 7]
INPUTS = [prompt(3 + (7 * i) % 29, seed=i) for i in range(len(IDS))]


@pytest.fixture(scope="module")
def model() -> Any:
    return enabled(NAMES)


def test_the_sources_here_are_told_apart() -> None:
    assert_told_apart(INPUTS, list(dict.fromkeys(SOURCES)), 8)


def assert_all(outputs: list[Any], sources: list[Source] = SOURCES, new: int = 8) -> None:
    assert len(outputs) == len(sources)
    for output, source in zip(outputs, sources, strict=True):
        assert_answer(output, source, new, sources)


@pytest.mark.parametrize("slots", [1, 3, 4, 8])
@pytest.mark.parametrize("budget", [7, 48])
def test_a_mixed_batch(slots: int, budget: int) -> None:
    """More adapters than slots or fewer; prompts that are cut into chunks, or not."""
    model = enabled(NAMES, max_loras=slots)
    outputs = batch(model, INPUTS, config=batching(max_batch_tokens=budget), adapter_ids=IDS)
    assert [output.prompt_ids for output in outputs] == INPUTS
    assert_all(outputs)
    assert all(adapter.in_use == 0 for adapter in model.multilora.status().adapters)


def test_tokens_of_its_own_generate(model: Any) -> None:
    """The same enabled model, one prompt at a time."""
    outputs = batch(model, INPUTS, adapter_ids=IDS)
    for output, tokens, one in zip(outputs, INPUTS, IDS, strict=True):
        alone = model.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=8, adapter_ids=one)
        assert output.generated_tokens == alone[0, len(tokens) :].tolist(), one


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention(implementation: str) -> None:
    model = enabled(NAMES)
    model.set_attn_implementation(implementation)
    assert_all(batch(model, INPUTS, adapter_ids=IDS))
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("word", ["adapter_ids", "adapter_names"])
def test_one_for_all(model: Any, word: str) -> None:
    assert_all(batch(model, INPUTS, **{word: "a2"}), [2] * len(INPUTS))
    assert_all(batch(model, INPUTS, **{word: {"a2": 0.7, "a3": -0.5}}), [SOURCES[3]] * len(INPUTS))


def test_none_is_the_base(model: Any) -> None:
    for ids in ({}, {"adapter_ids": None}, {"adapter_ids": "__base__"}, {"adapter_ids": [None] * len(INPUTS)}):
        assert_all(batch(model, INPUTS, **ids), [None] * len(INPUTS))


def test_add_requests_sorts_inputs_and_keeps_their_ids(model: Any) -> None:
    """transformers adds inputs in descending order where it shares prefixes: an id stays with its input."""
    inputs = sorted(INPUTS)
    assert inputs != sorted(INPUTS, reverse=True)
    with running(model) as manager:
        results = Results(manager)
        outputs = results.wait(*manager.add_requests(inputs, adapter_ids=IDS, max_new_tokens=5))
        assert [output.prompt_ids for output in outputs] == inputs
        assert_all(outputs, new=5)
        requests = manager.add_requests(inputs, adapter_ids="a3", max_new_tokens=6)
        assert_all(results.wait(*requests), [3] * len(inputs), new=6)
        assert_all(results.wait(*manager.add_requests(inputs, max_new_tokens=6)), [None] * len(inputs), new=6)


def test_requests_one_by_one(model: Any) -> None:
    with running(model) as manager:
        results, requests = Results(manager), []
        for i, (tokens, one) in enumerate(zip(INPUTS, IDS, strict=True)):
            requests.append(manager.add_request(tokens, adapter_id=one, max_new_tokens=4 + i))
        for i, output in enumerate(results.wait(*requests)):
            assert_answer(output, SOURCES[i], 4 + i)


def test_streaming_and_request_id_iter(model: Any) -> None:
    """Each part is the answer so far."""
    want = answer(INPUTS[0], 4, 12)
    with running(model) as manager:
        request = manager.add_request(INPUTS[0], adapter_id="a4", max_new_tokens=12, streaming=True)
        parts = list(manager.request_id_iter(request))
    assert [len(part.generated_tokens) for part in parts] == list(range(1, 13))
    for part in parts:
        assert part.generated_tokens == want[: len(part.generated_tokens)]


def test_end_of_sequence(model: Any) -> None:
    want = answer(INPUTS[2], 1, 8)
    end = next(token for i, token in enumerate(want) if i >= 2 and token not in want[:i])
    with running(model) as manager:
        requests = [manager.add_request(INPUTS[2], adapter_id=one, eos_token_id=end) for one in ("a1", None)]
        output, base = Results(manager).wait(*requests)
    assert output.generated_tokens == want[: want.index(end) + 1]
    assert base.generated_tokens[:3] == answer(INPUTS[2], None, 3) != want[:3]


def test_log_probabilities(model: Any) -> None:
    outputs = batch(model, INPUTS, config=batching(return_logprobs=True), adapter_ids=IDS)
    assert_all(outputs)
    for output, tokens, one in zip(outputs, INPUTS, IDS, strict=True):
        whole = torch.tensor([tokens + output.generated_tokens])
        with torch.no_grad():
            logits = model(whole, adapter_ids=[one]).logits[0, len(tokens) - 1 : -1].log_softmax(-1)
        want = logits.gather(1, whole[0, len(tokens) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [64, 12], ids=["children fit", "children wait"])
def test_return_sequences_keep_the_adapter(model: Any, blocks: int) -> None:
    outputs = several(model, INPUTS, 3, 8, batching(num_blocks=blocks), IDS)
    assert_all(outputs, [source for source in SOURCES for _ in range(3)])


def test_the_default_of_set_adapter() -> None:
    model = enabled(NAMES)
    model.set_adapter("a6")
    assert_all(batch(model, INPUTS), [6] * len(INPUTS))
    assert_all(batch(model, INPUTS, adapter_ids=IDS))
    with running(model) as manager:
        results = Results(manager)
        ids: list[dict[str, Any]] = [{}, {"adapter_id": None}, {"adapter_id": "a1"}, {"adapter_id": "__base__"}]
        requests = [manager.add_request(INPUTS[0], **one) for one in ids]
        assert_all(results.wait(*requests), [6, 6, 1, None])
        model.set_adapter("a7")
        assert_all(results.wait(manager.add_request(INPUTS[1])), [7])
        model.disable_adapters()
        requests = [manager.add_request(INPUTS[0]), manager.add_request(INPUTS[0], adapter_id="a7")]
        assert_all(results.wait(*requests), [None, 7])


def test_generate_with_the_paged_cache(model: Any) -> None:
    ids = torch.tensor([prompt(11, seed=50 + i) for i in range(len(IDS))])
    got = model.generate(
        ids,
        do_sample=False,
        max_new_tokens=8,
        cache_implementation="paged",
        adapter_ids=IDS,
        continuous_batching_config=batching(),
    )
    got = got.reshape(len(IDS), -1)
    for row, source in enumerate(SOURCES):
        assert got[row].tolist() == ids[row].tolist() + answer(ids[row].tolist(), source, 8), source


def test_cancel_waiting_and_running_requests() -> None:
    model = enabled(NAMES, max_loras=1)
    with running(model) as manager:
        results = Results(manager)
        first = manager.add_request(prompt(9), adapter_id="a0", max_new_tokens=40, streaming=True)
        results.started(first, 3)
        stays = [manager.add_request(prompt(7, seed=i), adapter_id="a1") for i in range(2)]
        waits = manager.add_request(prompt(9, seed=5), adapter_id="a2")
        manager.cancel_request(waits)
        manager.cancel_request(first)
        assert_all(results.wait(*stays), [1, 1])
        assert waits not in results and first not in results
        wait_until(lambda: manager.status().adapters["a2"].cancelled == 1, "a2's request is cancelled", manager)
        status = manager.status().adapters
        assert (status["a0"].cancelled, status["a0"].finished) == (1, 0)
        assert (status["a1"].cancelled, status["a1"].finished) == (0, 2)
        load(model, "a2", 3, reload=True)
        assert_all(results.wait(manager.add_request(prompt(9), adapter_id="a2")), [3])
    assert all(adapter.in_use == 0 for adapter in model.multilora.status().adapters)


def test_status(model: Any) -> None:
    assert model.multilora.status().batching is None
    with running(model) as manager:
        results = Results(manager)
        results.wait(*manager.add_requests(INPUTS, adapter_ids=IDS, max_new_tokens=5))
        status = manager.status()
        assert model.multilora.status().batching == status
    assert model.multilora.status().batching is None
    label = next(name for name in status.adapters if "a2" in name)
    assert set(status.adapters) == {"a0", "a1", "a4", "a5", "a6", "a7", BASE, label}
    assert status.prefix_tokens == sum(one.prefix_tokens for one in status.adapters.values())
    for name, one in status.adapters.items():
        rows = [
            i for i, each in enumerate(IDS) if (BASE if each is None else each) == name or name == label and i == 3
        ]
        assert (one.requests, one.finished, one.failed, one.cancelled) == (len(rows), len(rows), 0, 0), name
        assert (one.waiting, one.running) == (0, 0)
        assert one.prompt_tokens == sum(len(INPUTS[i]) for i in rows), name
        assert one.new_tokens == 5 * len(rows), name
        assert 0 <= one.longest_wait_s <= one.wait_s + 1e-9


def test_a_kept_manager() -> None:
    """persistent_manager: the next call goes on with the same cache, and other adapters."""
    model = enabled(NAMES)
    assert_all(batch(model, INPUTS, adapter_ids=IDS, persistent_manager=True))
    load(model, "a1", 9, reload=True)
    turned: list[Callable[[list[Any]], list[Any]]] = [lambda items: items[::-1], lambda items: items]
    for turn in turned:
        sources = [9 if source == 1 else source for source in turn(SOURCES)]
        assert_all(batch(model, INPUTS, adapter_ids=turn(IDS), persistent_manager=True), sources)
    for asked in ({"fairness": "tokens"}, {"patience": 5}):
        with pytest.raises(ConfigError, match="destroy_cached_continuous_batching_manager"):
            batch(model, INPUTS, adapter_ids=IDS, **asked)
    assert_all(batch(model, INPUTS, adapter_ids=IDS, fairness="arrival", persistent_manager=True), [*sources])
    model.destroy_cached_continuous_batching_manager()
    batch(model, INPUTS[:1], adapter_ids=IDS[:1], fairness="tokens")


def test_generate_beside_a_running_manager(model: Any) -> None:
    """Several threads may call one model: a call of generate() changes no request, and no request changes it."""
    with running(model) as manager:
        if model.config._attn_implementation != "sdpa":
            pytest.skip("this transformers has no other attention than the manager's while one runs")
        results = Results(manager)
        requests = [
            manager.add_request(tokens, adapter_id=one, max_new_tokens=30)
            for tokens, one in zip(INPUTS, IDS, strict=True)
        ]
        ends = []
        for i in range(6):
            got = model.generate(torch.tensor([INPUTS[i]]), do_sample=False, max_new_tokens=8, adapter_ids=IDS[-1 - i])
            assert got[0, len(INPUTS[i]) :].tolist() == answer(INPUTS[i], SOURCES[-1 - i], 8), i
            ends.append(time.perf_counter())
        assert_all(results.wait(*requests), new=30)
        assert any(output.lifespan[1] > ends[0] for output in results.values()), "nothing ran beside generate()"
