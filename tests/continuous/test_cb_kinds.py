"""Every kind of adapter beside every other: what PEFT gives for that adapter and that prompt alone."""

from __future__ import annotations

from typing import Any

import enabled as of_families
import moe_bed
import pytest
import torch
from continuous.cb_bed import batching, greedy
from fidelity import bed
from models import VOCAB, prompts
from oracle import adapters, alone
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_multilora import enable_multilora

pytestmark = pytest.mark.timeout(240)

KINDS = [None, *bed.kinds("llama")]
NEW = 8
FAMILIES = ["qwen3", "mistral", "gemma3", "phi3", "gpt2"]


def rows_of(inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """The prompts of a padded batch, without their padding."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]


def tokens_of(model: Any, tokens: list[int], new: int = NEW) -> list[int]:
    ids = torch.tensor([tokens])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0, len(tokens) :].tolist()


@torch.no_grad()
def log_probabilities(model: Any, tokens: list[int], answer: list[int], temperature: float = 1.0) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([tokens + answer])).logits[0, len(tokens) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def run(model: Any, inputs: list[list[int]], config: Any = None, generation: Any = None, **options: Any) -> list[Any]:
    options = {"generation_config": generation or greedy(NEW), **options}
    outputs = model.generate_batch(inputs, continuous_batching_config=config or batching(), **options)
    assert len(outputs) == len(inputs)
    return list(outputs.values())


@pytest.mark.parametrize("slots, budget", [(4, 48), (40, 11)])
def test_every_kind_in_one_batch(slots: int, budget: int) -> None:
    """Tokens, and how probable each was: an adapter that is weak at one site shows there."""
    model = bed.enabled("llama", KINDS[1:], max_loras=slots)
    inputs = rows_of(bed.batch("llama", KINDS, seed=4))
    config = batching(max_batch_tokens=budget, return_logprobs=True)
    outputs = run(model, inputs, config, adapter_ids=KINDS)
    base, unlike = bed.reference("llama", None), 0
    for name, tokens, output in zip(KINDS, inputs, outputs, strict=True):
        assert output.error is None, f"{name}: {output.error}"
        reference = bed.reference("llama", name)
        assert output.generated_tokens == tokens_of(reference, tokens), name
        # Of an aLoRA PEFT looks for the invocation in all it is given; its answers have none.
        want = log_probabilities(reference, tokens, output.generated_tokens)
        torch.testing.assert_close(torch.tensor(output.logprobs), want, rtol=2e-4, atol=2e-4, msg=str(name))
        plain = log_probabilities(base, [min(token, VOCAB - 1) for token in tokens], [0] * NEW)
        unlike += name is not None and not torch.allclose(
            plain, log_probabilities(reference, tokens, [0] * NEW), atol=1e-2
        )
    assert unlike == len(KINDS) - 1, "an adapter that changes nothing would prove nothing"


VOCABULARIES = ["more_tokens_4", None, "more_tokens_7", "plain", "more_tokens_saved", "more_tokens_rows", "tokens"]


def test_each_request_sees_its_own_columns() -> None:
    """Sampled at a high temperature, where every token comes up: none of another's, but some of one's own."""
    model = bed.enabled("llama", [name for name in VOCABULARIES if name], max_loras=4)
    names = VOCABULARIES * 8
    inputs = rows_of(bed.batch("llama", names, seed=6))
    hot = greedy(16, do_sample=True, temperature=50.0, top_k=0, top_p=1.0)
    config = batching(return_logprobs=True, seed=3)
    outputs, own = run(model, inputs, config, hot, adapter_ids=names), dict.fromkeys(VOCABULARIES, 0)
    for name, tokens, output in zip(names, inputs, outputs, strict=True):
        assert output.error is None, f"{name}: {output.error}"
        assert max(output.generated_tokens) < bed.vocabulary("llama", name), name
        own[name] += sum(token >= VOCAB for token in output.generated_tokens)
        want = log_probabilities(bed.reference("llama", name), tokens, output.generated_tokens, 50.0)
        torch.testing.assert_close(torch.tensor(output.logprobs), want, rtol=2e-4, atol=2e-4, msg=str(name))
    for name in VOCABULARIES:
        assert (own[name] > 0) == (bed.vocabulary("llama", name) > VOCAB), own


def test_tokens_of_others_in_a_prompt_fail_their_request_alone() -> None:
    """The base, and adapters with fewer tokens, have no embedding for them."""
    model = bed.enabled("llama", ["more_tokens_4", "more_tokens_7", "plain"], max_loras=3)
    names = [None, "plain", "more_tokens_4", "more_tokens_7"] * 2
    inputs = [[5, 11, VOCAB + 5, 17, 21]] * 4 + [[5, 11, 13, 17, 21]] * 4
    outputs = run(model, inputs, adapter_ids=names)
    for row, (name, tokens, output) in enumerate(zip(names, inputs, outputs, strict=True)):
        if row < 3:
            assert output.status == RequestStatus.FAILED and str(VOCAB + 5) in output.error, f"{name}: {output}"
        else:
            assert output.error is None, f"{name}: {output.error}"
            assert output.generated_tokens == tokens_of(bed.reference("llama", name), tokens), name


def test_a_default_temperature_is_left_as_it_is() -> None:
    """A processor of ours for vocabularies does not stand in the way of those that requests set for themselves."""
    model = bed.enabled("llama", ["more_tokens_4", "plain"])
    inputs = rows_of(bed.batch("llama", ["more_tokens_4", "plain"], seed=6))
    generation = greedy(NEW, do_sample=True, temperature=3.0, top_k=5)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching(per_request_processors=True), timeout=40
    ) as manager:
        requests = [
            manager.add_request(tokens, adapter_id=name, temperature=0.5, top_k=1)
            for tokens, name in zip(inputs, ["more_tokens_4", "plain"], strict=True)
        ]
        outputs = {}
        while len(outputs) < len(requests):
            output = manager.get_result(timeout=40)
            assert output is not None, "no result"
            outputs[output.request_id] = output
    for request, tokens, name in zip(requests, inputs, ["more_tokens_4", "plain"], strict=True):
        assert outputs[request].generated_tokens == tokens_of(bed.reference("llama", name), tokens), name


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    """Windows, fused projections, Conv1D, positions that are learned; embeddings and heads among the adapters."""
    ids = [None, *adapters(family), {"r3": 0.7, "r8": -0.4}, None, "r64", "r1"]
    model = of_families.enabled(family, max_loras=3)
    inputs = rows_of(prompts(len(ids), seed=21))
    outputs, answers = run(model, inputs, batching(max_batch_tokens=20), adapter_ids=ids), set()
    for one, tokens, output in zip(ids, inputs, outputs, strict=True):
        assert output.error is None, f"{one}: {output.error}"
        assert output.generated_tokens == tokens_of(alone(family, one), tokens), one
        answers.add(tuple(tokens_of(alone(family, one), inputs[0])))
    assert len(answers) >= 6, "the adapters are hardly told apart"


MOE = {"experts": ("experts",), "attention": ("attention",), "all": ("experts", "attention", "router", "shared")}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe"])
def test_mixtures_of_experts(family: str) -> None:
    made = {name: moe_bed.made(family, 3 + i, 10 + i, *parts) for i, (name, parts) in enumerate(MOE.items())}
    model = enable_multilora(moe_bed.bare(family), max_loras=2, max_lora_rank=8, slot_bytes=4 << 20)
    for name, adapter in made.items():
        tensors, config = moe_bed.two_d(family, adapter)
        model.multilora.load(tensors, name, config=config)
    ids = [None, *MOE, "experts", None, "all"]
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randint(3, moe_bed.VOCAB, (5 + 4 * i,), generator=generator).tolist() for i in range(len(ids))]
    outputs = run(model, inputs, batching(max_batch_tokens=23), adapter_ids=ids)
    references = {name: moe_bed.merged(family, made.get(name)) for name in ids}
    for one, tokens, output in zip(ids, inputs, outputs, strict=True):
        assert output.error is None, f"{one}: {output.error}"
        assert output.generated_tokens == tokens_of(references[one], tokens), one
    assert len({tuple(tokens_of(reference, inputs[-1])) for reference in references.values()}) == len(references)
