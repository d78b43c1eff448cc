"""Batches leave out what their sampling does not need; nobody's tokens depend on what a neighbour's need."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from continuous.cb_bed import VOCAB, batching, greedy, prompt
from continuous.cb_bed import enabled as enabled_bed
from continuous.cb_run import Results
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_multilora.generation.continuous import logits
from hf_multilora.generation.continuous.logits import steer
from hf_multilora.generation.continuous.outputs import held_back
from hf_multilora.generation.continuous.sampling import ALL, Needs, TopK, TopP, needs_of

DEFAULTS = {"do_sample": True, "temperature": 0.5, "top_k": 4, "top_p": 0.5}
GREEDY = {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
PLAIN = {"temperature": 50.0, "top_k": VOCAB, "top_p": 1.0}
NARROW = {"temperature": 50.0, "top_k": 3, "top_p": 1.0}
NUCLEUS = {"temperature": 1.0, "top_k": VOCAB, "top_p": 0.6}
PROMPTS = [prompt(5 + i, seed=40 + i) for i in range(4)]
NEW, HALF = 12, VOCAB // 2


def needs(*values: dict[str, float], keep: int = 1) -> Needs:
    processors = [TopK(TopKLogitsWarper(4, min_tokens_to_keep=keep)), TopP(TopPLogitsWarper(0.5))]
    requests = [SimpleNamespace(state=SimpleNamespace(logit_processor_kwargs=value)) for value in values]
    return needs_of(processors, requests, VOCAB)


@pytest.mark.parametrize(
    "values, found",
    [
        ([GREEDY], Needs(False, False, False)),
        ([PLAIN], Needs(False, False, True)),
        ([GREEDY, PLAIN], Needs(False, False, True)),
        ([GREEDY, NARROW], Needs(True, False, True)),
        ([PLAIN, NUCLEUS], Needs(False, True, True)),
        ([NARROW, NUCLEUS], ALL),
        ([{}], ALL),  # the defaults of the manager
        ([GREEDY, {"top_k": 1}], Needs(False, True, False)),
        ([], Needs(False, False, False)),  # prompts in the middle
    ],
)
def test_needs(values: list[dict[str, float]], found: Needs) -> None:
    assert needs(*values) == found


def test_needs_of_other_managers() -> None:
    assert needs(GREEDY, keep=2) == Needs(True, False, True), "two are kept at least, so that one of them is drawn"
    assert needs_of([], [], VOCAB) == ALL == needs_of([TopP(TopPLogitsWarper(0.5))], [], VOCAB)
    assert not ALL.skips(TopK(TopKLogitsWarper(4))) and not Needs(False, False, False).skips(
        TemperatureLogitsWarper(0.5)
    )


@functools.cache
def model() -> Any:
    """Enabled, with adapters a0 … a3; each token has a twin with the same logit, so that every maximum is shared."""
    made = enabled_bed({f"a{number}": number for number in range(4)})
    with torch.no_grad():
        weight = made.get_output_embeddings().weight
        weight[HALF : 2 * HALF].copy_(weight[:HALF].clone())
        weight[2 * HALF :].zero_()
    return made


def alone(tokens: list[int], adapter: str | None) -> list[int]:
    ids = torch.tensor([tokens])
    out = model().generate(
        ids, attention_mask=torch.ones_like(ids), adapter_ids=adapter, do_sample=False, max_new_tokens=NEW,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(tokens) :].tolist()


def ask(*requests: tuple[list[int], str | None, dict[str, Any]], **options: Any) -> list[Any]:
    """Outputs of requests that are all there when the first batch is made."""
    config = batching(per_request_processors=True, seed=5, **options)
    manager = model().init_continuous_batching(greedy(NEW, **DEFAULTS), continuous_batching_config=config)
    names = [
        manager.add_request(tokens, adapter_id=adapter, max_new_tokens=NEW, **values)
        for tokens, adapter, values in requests
    ]
    manager.start()
    try:
        return Results(manager).wait(*names)
    finally:
        manager.stop(block=True, timeout=40)


@pytest.mark.parametrize("probable", [False, True])
@pytest.mark.parametrize("neighbours", [[], [PLAIN], [NARROW], [NUCLEUS], [NARROW, NUCLEUS]])
def test_greedy_beside_whomever(neighbours: list[dict[str, Any]], probable: bool) -> None:
    """Among equal logits generate() takes the first; so does a request with top_k=1, whatever others draw."""
    rows = [(PROMPTS[0], "a0", GREEDY), (PROMPTS[1], None, GREEDY)]
    rows += [(tokens, "a1", values) for tokens, values in zip(PROMPTS[2:], neighbours, strict=False)]
    outputs = ask(*rows, return_logprobs=probable)
    for (tokens, adapter, _), output in zip(rows[:2], outputs, strict=False):
        assert output.generated_tokens == alone(tokens, adapter)
        assert max(output.generated_tokens) < HALF, "the first of two"
        if probable:  # of what the processors leave: two that are equal
            assert output.logprobs == pytest.approx([math.log(0.5)] * NEW, abs=1e-5)


def test_what_is_left_out_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed draws the same tokens, with top-k and top-p in the way or not."""
    rows = [(tokens, f"a{i}", PLAIN if i else GREEDY) for i, tokens in enumerate(PROMPTS)]
    seen = []
    monkeypatch.setattr(logits, "needs_of", lambda *given: seen.append(needs_of(*given)) or seen[-1])
    quick = [output.generated_tokens for output in ask(*rows)]
    assert Needs(False, False, True) in seen and ALL not in seen
    monkeypatch.setattr(logits, "needs_of", lambda *given: ALL)
    assert [output.generated_tokens for output in ask(*rows)] == quick
    assert len(set(quick[1])) > 3, "hot sampling draws many tokens"


def test_limits_of_one_do_not_bind_another() -> None:
    """top_k=3 keeps to the three highest of each step, and its hot neighbour does not."""
    rows = [(PROMPTS[0], "a0", NARROW), (PROMPTS[1], "a0", PLAIN), (PROMPTS[2], "a1", GREEDY)]
    outputs = ask(*rows)
    within = []
    for (tokens, adapter, _), output in zip(rows[:2], outputs, strict=False):
        ids = torch.tensor([tokens + output.generated_tokens])
        with torch.no_grad():
            scores = model()(input_ids=ids, adapter_ids=adapter).logits[0, len(tokens) - 1 : -1]
        third = scores.topk(3).values[:, -1:]
        chosen = scores.gather(1, torch.tensor(output.generated_tokens)[:, None])
        within.append((chosen >= third - 1e-4).sum().item())
    assert within[0] == NEW > within[1]


def test_outputs_are_held_until_they_are_let_go() -> None:
    """In their order, those that come one by one included."""
    router = OutputRouter()
    steer(router, held_back, _held=[])
    one, two, three = (SimpleNamespace(request_id=str(number)) for number in range(3))
    router.deliver_batch([one, two])
    assert router.output_queue.empty()
    router.deliver(three)
    assert [router.output_queue.get_nowait() for _ in range(3)] == [one, two, three]
    router.deliver_batch([two])
    router.release()
    assert router.output_queue.get_nowait() is two and router.output_queue.empty()
    router.release()
    assert router.output_queue.empty()
