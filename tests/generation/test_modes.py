"""Each way that generate() can be called, on mixed batches, against PEFT with each row's adapter alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enabled import Calls, enabled, seeded
from models import FAMILIES, PAD, VOCAB, prompts
from oracle import MIX, Id, adapters, alone, rows_of
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import BaseStreamer

from hf_multilora import enable_multilora
from hf_multilora.errors import MultiLoraError

IDS: list[Id] = ["r8", None, MIX, "r64", "r3"]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return enabled("llama")


def run(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """generate() from a fixed random state. torch's multinomial draws each row's noise whatever the others' logits
    are, so that a row of a mixed batch samples what it would sample beside copies of its own adapter."""
    with seeded(7):
        return model.generate(**inputs, **(options if "generation_config" in options else {**GREEDY, **options}))


MODES: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "num_return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4},
    "beams and num_return_sequences": {"num_beams": 4, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
    "guidance": {"guidance_scale": 1.7},
    "guidance with beams": {"guidance_scale": 1.7, "num_beams": 2},
    "static cache": {"cache_implementation": "static"},
    "static cache with beams": {"cache_implementation": "static", "num_beams": 2},
    "no cache": {"use_cache": False},
    "chunked prefill": {"prefill_chunk_size": 5},
    "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "config object": {"generation_config": GenerationConfig(num_beams=3, max_new_tokens=5, pad_token_id=PAD)},
    "config object with sampling": {
        "generation_config": GenerationConfig(
            do_sample=True, num_return_sequences=2, max_new_tokens=5, pad_token_id=PAD
        )
    },
}


@pytest.mark.parametrize("options", MODES.values(), ids=list(MODES))
def test_mixed_batch(model: PreTrainedModel, options: dict[str, Any]) -> None:
    inputs = prompts(len(IDS), seed=5)
    config = options.get("generation_config")
    per_row = config.num_return_sequences if config else options.get("num_return_sequences")
    got = run(model, inputs, **options, adapter_ids=IDS)
    want = rows_of("llama", IDS, lambda reference: run(reference, inputs, **options), per_row or 1)
    assert torch.equal(got, want)


@pytest.mark.parametrize("adapter", ["r16", MIX, None])
def test_one_id_for_all_rows(model: PreTrainedModel, adapter: Id) -> None:
    inputs = prompts(3, seed=6)
    got = run(model, inputs, do_sample=True, adapter_ids=adapter)
    assert torch.equal(got, run(alone("llama", adapter), inputs, do_sample=True))


def test_num_beams_in_the_models_own_config() -> None:
    model = enabled("llama", ["r8", "r3"])
    model.generation_config.num_beams = 3
    inputs = prompts(3, seed=8)
    got = run(model, inputs, adapter_ids=["r3", None, "r8"])
    want = rows_of("llama", ["r3", None, "r8"], lambda ref: run(ref, inputs, num_beams=3))
    assert torch.equal(got, want)


def test_right_padding_and_no_mask(model: PreTrainedModel) -> None:
    """transformers derives the mask from the padding; it can do so only while it sees the model's own signature."""
    for side in ("right", "left"):
        inputs = prompts(len(IDS), side=side, seed=9)
        del inputs["attention_mask"]
        got = run(model, inputs, adapter_ids=IDS)
        assert torch.equal(got, rows_of("llama", IDS, lambda ref, inputs=inputs: run(ref, inputs)))


def test_guidance_with_negative_prompts(model: PreTrainedModel) -> None:
    inputs, negative = prompts(len(IDS), seed=10), prompts(len(IDS), seed=11, length=7)
    options = {
        "guidance_scale": 2.0,
        "negative_prompt_ids": negative["input_ids"],
        "negative_prompt_attention_mask": negative["attention_mask"],
    }
    got = run(model, inputs, **options, adapter_ids=IDS)
    assert torch.equal(got, rows_of("llama", IDS, lambda reference: run(reference, inputs, **options)))


@pytest.mark.parametrize("adapter", ["r8", "r64", MIX, None])
def test_prompt_lookup(model: PreTrainedModel, adapter: Id) -> None:
    inputs = {name: tensor.repeat(1, 2) for name, tensor in prompts(1, seed=12, length=6).items()}
    options = {"max_new_tokens": 10}
    want = run(alone("llama", adapter), inputs, **options)
    assert torch.equal(run(model, inputs, **options, prompt_lookup_num_tokens=3, adapter_ids=[adapter]), want)


@pytest.mark.parametrize("adapter", ["r8", None])
def test_early_exit(model: PreTrainedModel, adapter: Id) -> None:
    inputs = prompts(1, seed=13)
    want = run(alone("llama", adapter), inputs)
    assert torch.equal(run(model, inputs, assistant_early_exit=1, adapter_ids=adapter), want)


def draft_of(model: PreTrainedModel) -> PreTrainedModel:
    """Make `model` a draft that proposes four tokens each time, however unsure it is."""
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


@pytest.mark.parametrize("adapter", ["r8", "r64", MIX, None])
def test_assisted_by_a_plain_draft(model: PreTrainedModel, adapter: Id) -> None:
    draft = draft_of(FAMILIES["llama_tied"].build())
    inputs = prompts(1, seed=14)
    want = run(alone("llama", adapter), inputs)
    assert torch.equal(run(model, inputs, assistant_model=draft, adapter_ids=[adapter]), want)


def test_assisted_sampling(model: PreTrainedModel) -> None:
    inputs = prompts(1, seed=15)
    got = run(
        model, inputs, do_sample=True, assistant_model=draft_of(FAMILIES["llama_tied"].build()), adapter_ids="r8"
    )
    draft = draft_of(FAMILIES["llama_tied"].build())
    assert torch.equal(got, run(alone("llama", "r8"), inputs, do_sample=True, assistant_model=draft))


def test_assisted_by_an_enabled_draft(model: PreTrainedModel) -> None:
    """A draft equal to the target is right with every token, but only under the target's adapter: count forwards."""
    draft = draft_of(enabled("llama", ["r3", "r64"]))  # other slots than the target's
    inputs = prompts(1, seed=16)
    options: dict[str, Any] = {"max_new_tokens": 15}
    want = run(alone("llama", "r64"), inputs, **options)

    def forwards(**ids: Id) -> int:
        with Calls(model) as calls:
            got = run(model, inputs, **options, assistant_model=draft, adapter_ids="r64", **ids)
        assert torch.equal(got, want)
        return len(calls)

    assert forwards(assistant_adapter_ids="r64") == 3  # 15 tokens, five at a time
    assert forwards() > 6  # an enabled draft without ids runs unadapted
    assert forwards(assistant_adapter_ids="r3") > 6
    assert forwards(assistant_adapter_ids=["r64"]) == 3


def test_assistant_ids_need_an_enabled_draft(model: PreTrainedModel) -> None:
    inputs = prompts(1)
    plain = FAMILIES["llama_tied"].build()
    with pytest.raises(MultiLoraError, match="assistant"):
        run(model, inputs, assistant_model=plain, adapter_ids="r8", assistant_adapter_ids="r8")
    with pytest.raises(MultiLoraError, match="assistant"):
        run(model, inputs, adapter_ids="r8", assistant_adapter_ids="r8")
    with pytest.raises(MultiLoraError, match="nosuch"):
        run(model, inputs, assistant_model=enabled("llama", ["r3"]), assistant_adapter_ids="nosuch")


def greedy_loop(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """A decoding loop such as a user writes: no cache, positions from the mask."""
    mask = model_kwargs["attention_mask"]
    for _ in range(4):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        input_ids = torch.cat([input_ids, logits[:, -1:].argmax(-1)], dim=1)
        mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
    return input_ids


@pytest.mark.parametrize("copies", [1, 2])
def test_custom_loop(model: PreTrainedModel, copies: int) -> None:
    inputs = prompts(len(IDS), seed=17)
    options = {"custom_generate": greedy_loop, "do_sample": copies > 1, "num_return_sequences": copies}
    got = run(model, inputs, **options, adapter_ids=IDS)
    assert torch.equal(got, rows_of("llama", IDS, lambda reference: run(reference, inputs, **options), copies))


@pytest.mark.parametrize("beams", [1, 3])
def test_inputs_embeds(model: PreTrainedModel, beams: int) -> None:
    """The prompt bypasses the embedding, and so the adapter's part of it; the tokens that follow do not."""
    mask = prompts(len(IDS), seed=18)["attention_mask"]
    embeds = torch.randn(*mask.shape, model.config.hidden_size, generator=torch.Generator().manual_seed(19))
    inputs = {"inputs_embeds": embeds, "attention_mask": mask}
    got = run(model, inputs, num_beams=beams, adapter_ids=IDS)
    want = rows_of("llama", IDS, lambda reference: run(reference, inputs, num_beams=beams))
    assert torch.equal(got, want)


def test_end_of_sequence(model: PreTrainedModel) -> None:
    """Rows end at different steps: each is its reference up to there, then padding."""
    inputs = prompts(len(IDS), seed=20)
    free = rows_of("llama", IDS, lambda reference: run(reference, inputs, max_new_tokens=8))
    start = inputs["input_ids"].shape[1]
    eos = free[0, start + 2].item()
    options = {"max_new_tokens": 8, "eos_token_id": eos}
    got = run(model, inputs, **options, adapter_ids=IDS)
    assert got.shape[1] > start + 3, "every row ended at once: choose another prompt"
    for row, adapter in enumerate(IDS):
        want = run(alone("llama", adapter), inputs, **options)[row]
        want = torch.nn.functional.pad(want, (0, max(0, got.shape[1] - len(want))), value=PAD)[: got.shape[1]]
        assert torch.equal(got[row], want), adapter


class Recorder(BaseStreamer):
    """Keeps what generate() puts: the prompt, then one tensor of tokens for each step."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.steps.append(value.clone())

    def end(self) -> None:
        self.ended = True


def test_streamer_of_one_row(model: PreTrainedModel) -> None:
    inputs, streamer = prompts(1, seed=21), Recorder()
    out = run(model, inputs, streamer=streamer, adapter_ids=["r16"])
    assert streamer.ended
    assert torch.equal(torch.cat([step.flatten() for step in streamer.steps]), out[0])
    assert torch.equal(out, run(alone("llama", "r16"), inputs))


def test_streamer_of_a_batch(model: PreTrainedModel) -> None:
    inputs, streamer = prompts(len(IDS), seed=22), Recorder()
    out = run(model, inputs, streamer=streamer, adapter_ids=IDS)
    assert streamer.ended
    steps = [step if step.dim() == 2 else step[:, None] for step in streamer.steps]
    assert torch.equal(torch.cat(steps, dim=1), out)
    assert torch.equal(out, rows_of("llama", IDS, lambda reference: run(reference, inputs)))


class Spy(LogitsProcessor):
    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(scores.shape))
        return scores


def test_users_processors_still_run(model: PreTrainedModel) -> None:
    spy = Spy()
    run(model, prompts(len(IDS)), logits_processor=LogitsProcessorList([spy]), adapter_ids=IDS)
    assert spy.shapes == [(len(IDS), VOCAB)] * 6


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4, 11])])
def test_logits_to_keep(model: PreTrainedModel, keep: int | torch.Tensor) -> None:
    inputs = prompts(len(IDS), seed=23)
    with torch.no_grad():
        got = model(**inputs, logits_to_keep=keep, adapter_ids=IDS).logits
        want = rows_of("llama", IDS, lambda reference: reference(**inputs, logits_to_keep=keep).logits)
    assert got.shape[1] == (3 if torch.is_tensor(keep) else keep)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beams", [1, 4])
def test_encoder_decoder_with_return_sequences(beams: int) -> None:
    model = enabled("t5")
    inputs = prompts(len(IDS), seed=24, side="right")
    options = {"do_sample": beams == 1, "num_beams": beams, "num_return_sequences": 2}
    got = run(model, inputs, **options, adapter_ids=IDS)
    assert torch.equal(got, rows_of("t5", IDS, lambda reference: run(reference, inputs, **options), 2))


def test_encoder_outputs_given() -> None:
    """The encoder may have run before, under the same ids."""
    model = enabled("t5")
    inputs = prompts(len(IDS), seed=25, side="right")
    with model.multilora.use(IDS), torch.no_grad():
        encoded = model.get_encoder()(**inputs)
    given = {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"]}
    got = run(model, given, num_beams=3, adapter_ids=IDS)
    want = rows_of("t5", IDS, lambda reference: run(reference, inputs, num_beams=3))
    assert torch.equal(got, want)


def test_gradients_are_not_in_the_way(model: PreTrainedModel) -> None:
    """A plain forward without no_grad is common in notebooks."""
    inputs = prompts(3)
    with torch.no_grad():
        want = model(**inputs, adapter_ids=["r8", None, "r3"]).logits
    assert torch.equal(model(**inputs, adapter_ids=["r8", None, "r3"]).logits, want)


def test_two_models_do_not_share(model: PreTrainedModel) -> None:
    """The same names stand for different adapters in two enabled models; one runs inside the other's use()."""
    other = enable_multilora(FAMILIES["mistral"].build(), max_lora_rank=64)
    other.load_adapter(adapters("mistral")["r3"], adapter_name="r8")
    inputs = prompts(2)
    with model.multilora.use("r8"), torch.no_grad():
        assert torch.equal(other(**inputs).logits, alone("mistral", None)(**inputs).logits)
        got = other(**inputs, adapter_ids="r8").logits
    torch.testing.assert_close(got, alone("mistral", "r3")(**inputs).logits, rtol=1e-4, atol=1e-5)
