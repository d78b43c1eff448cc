"""Vocabularies of several sizes in one batch: each row sees its own, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fidelity.bed import (
    EXTRA,
    Kind,
    assert_own_columns,
    batch,
    build,
    enabled,
    folder_of,
    kinds,
    logits,
    quietly,
    reference,
    save,
    train,
    vocabulary,
    wanted,
)
from models import LENGTH, VOCAB, prompts
from oracle import assert_row
from peft import PeftModel
from transformers import LogitsProcessor, PreTrainedModel

from hf_multilora import AdapterMatchError, ConfigError, RoutingError, disable_multilora

FAMILIES = ["llama", "llama_tied", "gemma3", "gpt2"]
NAMES: list[str | None] = ["more_tokens_4", None, "more_tokens_7", "plain", "more_tokens_saved", "tokens", None]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Iterator[PreTrainedModel]:
    model = enabled(family, [*dict.fromkeys(name for name in NAMES if name), "embedding", "head", "saved_embedding"])
    yield model
    disable_multilora(model)


def sizes(family: str, names: list[str | None], times: int = 1) -> torch.Tensor:
    return torch.tensor([vocabulary(family, name) for name in names for _ in range(times)])


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(**inputs, **options)


def test_the_width_is_fixed(family: str, model: PreTrainedModel) -> None:
    """Base + extra_vocab_size columns, whoever is in the batch."""
    for ids in (None, [None, None], ["plain", None], ["more_tokens_4", "more_tokens_7"]):
        inputs = prompts(2)
        got = logits(model, inputs, adapter_ids=ids)
        assert got.shape[-1] == VOCAB + EXTRA
        own = sizes(family, ids if ids is not None else [None, None])
        columns = torch.arange(VOCAB + EXTRA)
        assert ((got == -math.inf) == (columns >= own[:, None])[:, None]).all()


def test_forward(family: str, model: PreTrainedModel) -> None:
    inputs = batch(family, NAMES)
    got = logits(model, inputs, adapter_ids=NAMES)
    for row, want in enumerate(wanted(family, NAMES, inputs, logits)):
        assert_own_columns(got[row], want, NAMES[row], f"row {row}")


def test_added_tokens_are_generated(family: str) -> None:
    """An adapter whose head favours its new tokens writes them, and reads what it wrote."""
    model = enabled(family, ["more_tokens_saved", "plain"])
    names = ["more_tokens_saved", None, "plain"]
    inputs = batch(family, names)
    bias = {(VOCAB + 1,): 25.0}

    class Push(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores = scores.clone()
            scores[:, VOCAB + 1] += 25.0
            return scores

    got = generate(model, inputs, adapter_ids=names, logits_processor=[Push()])
    want = generate(reference(family, "more_tokens_saved"), inputs, sequence_bias=bias)
    assert torch.equal(got[0], want[0])
    assert (got[0, LENGTH:] == VOCAB + 1).any()
    assert (got[1:, LENGTH:] < VOCAB).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 5.0},
        {"top_k": 0, "top_p": 1.0, "temperature": 50.0},
        {"min_p": 0.0, "typical_p": 0.99, "temperature": 50.0},
        {"num_beams": 3, "temperature": 20.0},
        {"num_return_sequences": 3, "temperature": 50.0},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1, "renormalize_logits": True},
        {"epsilon_cutoff": 0.0001, "temperature": 50.0, "remove_invalid_values": True},
        {"remove_invalid_values": True, "temperature": 50.0, "top_k": 0},
        {"bad_words_ids": [[3]], "encoder_repetition_penalty": 1.2, "temperature": 50.0},
        {"exponential_decay_length_penalty": (0, 1.5), "eos_token_id": 5, "temperature": 50.0},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_sampling_yields_no_foreign_token(family: str, model: PreTrainedModel, options: dict[str, Any]) -> None:
    times = max(options.get("num_return_sequences", 1), 1)
    torch.manual_seed(0)
    for seed in range(3):
        inputs = batch(family, NAMES, seed=seed)
        got = generate(model, inputs, adapter_ids=NAMES, do_sample=True, max_new_tokens=10, **options)
        assert (got[:, LENGTH:] < sizes(family, NAMES, times)[:, None]).all()


def test_a_processor_that_fills_in_finite_scores(family: str, model: PreTrainedModel) -> None:
    """Whatever a user's processor makes of -inf, ours runs last."""

    def flat(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.where(scores.isinf(), torch.tensor(1e9), scores)

    inputs = batch(family, NAMES)
    got = generate(model, inputs, adapter_ids=NAMES, logits_processor=[flat])
    assert (got[:, LENGTH:] < sizes(family, NAMES)[:, None]).all()


@pytest.mark.parametrize("beams", [1, 2])
def test_guidance_has_no_nan(family: str, model: PreTrainedModel, beams: int) -> None:
    """CFG computes with two -inf, which gives NaN: our processor comes after it."""
    inputs = batch(family, NAMES)
    got = generate(
        model,
        inputs,
        adapter_ids=NAMES,
        guidance_scale=1.7,
        num_beams=beams,
        return_dict_in_generate=True,
        output_scores=True,
    )
    own = sizes(family, NAMES, beams)
    for scores in got.scores:
        assert not scores.isnan().any()
        columns = torch.arange(scores.shape[-1])
        if beams == 1:
            assert ((scores == -math.inf) == (columns >= own[:, None])).all()
    assert (got.sequences[:, LENGTH:] < sizes(family, NAMES)[:, None]).all()


def test_guidance_is_peft_s(family: str, model: PreTrainedModel) -> None:
    inputs = batch(family, NAMES)
    got = generate(model, inputs, adapter_ids=NAMES, guidance_scale=1.7)
    want = wanted(family, NAMES, inputs, lambda own, rows: generate(own, rows, guidance_scale=1.7)[:, LENGTH:])
    wrong = [name for row, name in enumerate(NAMES) if not torch.equal(got[row, LENGTH:], want[row])]
    assert not wrong


def test_guidance_with_sampling(family: str, model: PreTrainedModel) -> None:
    inputs = batch(family, NAMES)
    torch.manual_seed(0)
    got = generate(model, inputs, adapter_ids=NAMES, guidance_scale=3.0, do_sample=True, top_k=0, temperature=30.0)
    assert (got[:, LENGTH:] < sizes(family, NAMES)[:, None]).all()


@pytest.mark.parametrize(
    ("name", "token"), [(None, VOCAB), ("plain", VOCAB), ("more_tokens_4", VOCAB + 4), ("more_tokens_7", VOCAB + 7)]
)
def test_tokens_beyond_the_row_s_vocabulary(family: str, model: PreTrainedModel, name: str | None, token: int) -> None:
    names = [None, name]
    inputs = prompts(2, side=None)
    inputs["input_ids"][1, 4] = token
    for call in (lambda: model(**inputs, adapter_ids=names), lambda: generate(model, inputs, adapter_ids=names)):
        with pytest.raises(RoutingError, match=f"Row 1.*{token}"):
            call()
    inputs["input_ids"][1, 4] = vocabulary(family, name) - 1
    generate(model, inputs, adapter_ids=names)


def test_tokens_beyond_without_ids(family: str, model: PreTrainedModel) -> None:
    inputs = prompts(2, side=None)
    inputs["input_ids"][0, 0] = VOCAB
    for call in (lambda: model(**inputs), lambda: generate(model, inputs)):
        with pytest.raises(RoutingError, match=str(VOCAB)):
            call()
    assert torch.equal(logits(model, prompts(2))[..., :VOCAB], logits(reference(family, None), prompts(2)))


def test_negative_tokens(family: str, model: PreTrainedModel) -> None:
    inputs = prompts(2, side=None)
    inputs["input_ids"][1, 4] = -3
    with pytest.raises((RoutingError, IndexError)):
        model(**inputs, adapter_ids=["more_tokens_4", "more_tokens_4"])


def test_base_generation_is_the_bare_model_s(family: str, model: PreTrainedModel) -> None:
    inputs = prompts(3)
    bare = reference(family, None)
    for options in ({}, {"num_beams": 3}):
        want = generate(bare, inputs, **options)
        assert torch.equal(generate(model, inputs, **options), want)
        assert torch.equal(generate(model, inputs, adapter_ids=[None] * 3, **options), want)
        got = generate(model, inputs, adapter_ids=[None, "more_tokens_7", None], **options)
        assert torch.equal(got[::2], want[::2])


def test_log_probabilities(family: str, model: PreTrainedModel) -> None:
    """Scores of a row are a distribution over its own tokens."""
    inputs = batch(family, NAMES)
    got = logits(model, inputs, adapter_ids=NAMES).log_softmax(-1)
    want = wanted(family, NAMES, inputs, lambda own, rows: logits(own, rows).log_softmax(-1))
    for row, own in enumerate(want):
        assert_row(got[row, :, : own.shape[-1]], own, f"{NAMES[row]} log")


def test_more_tokens_than_there_is_room(family: str) -> None:
    """Refused with the option and the number it needs."""
    model = enabled(family, extra_vocab_size=4)
    inputs = prompts(2)
    model.load_adapter(folder_of(family, "more_tokens_4"), adapter_name="a")
    with pytest.raises((ConfigError, AdapterMatchError), match="extra_vocab_size=7"):
        model.load_adapter(folder_of(family, "more_tokens_7"), adapter_name="b")
    assert model.multilora.adapters.keys() == {"a"}
    assert torch.equal(logits(model, inputs)[..., :VOCAB], logits(reference(family, None), inputs))
    bare = enabled(family)
    disable_multilora(bare)
    without = enabled(family, extra_vocab_size=0)
    with pytest.raises((ConfigError, AdapterMatchError), match="extra_vocab_size=4"):
        without.load_adapter(folder_of(family, "more_tokens_4"), adapter_name="a")
    assert torch.equal(logits(without, inputs), logits(reference(family, None), inputs))


def test_added_tokens_that_alone_were_trained(family: str, tmp_path: Path) -> None:
    """The usual recipe: new tokens, trained by their rows only; nothing else of the table is in the file."""
    ids = list(range(VOCAB, VOCAB + 4))
    names = NAMES_OF[family]
    options = {"r": 4, "target_modules": names, "trainable_token_indices": ids}
    kind = Kind(options, more_tokens=4, save={"save_embedding_layers": False})
    folder = save(train(family, kind, 5), tmp_path / "rows", kind)
    if family == "llama":  # untied: the rows of the head are the resized base's, and in no file
        with pytest.raises((AdapterMatchError, ConfigError, ValueError)):
            enabled(family).load_adapter(folder, adapter_name="rows")
        return
    model = enabled(family)
    model.load_adapter(folder, adapter_name="rows")
    inputs = prompts(3)
    inputs["input_ids"][0, -3:] = torch.tensor(ids[:3])
    own = quietly(PeftModel.from_pretrained, kind.base(family), folder).eval()
    got = logits(model, inputs, adapter_ids=["rows", None, "rows"])
    want = logits(own, inputs)
    for row in (0, 2):
        assert_own_columns(got[row], want[row], "rows", f"row {row}")


NAMES_OF = {"llama": ["q_proj"], "llama_tied": ["q_proj"], "gemma3": ["q_proj"], "gpt2": ["c_attn"]}


def test_rows_on_top_of_a_resized_vocabulary_that_is_saved(family: str, tmp_path: Path) -> None:
    """Whole tables in the file, and trained rows that replace some of theirs."""
    options = {"r": 4, "target_modules": NAMES_OF[family], "trainable_token_indices": [2, VOCAB + 1]}
    kind = Kind(options, more_tokens=3, save={"save_embedding_layers": True})
    folder = save(train(family, kind, 6), tmp_path / "rows", kind)
    model = enabled(family)
    model.load_adapter(folder, adapter_name="rows")
    inputs = prompts(2)
    inputs["input_ids"][0, -3:] = torch.tensor([VOCAB, VOCAB + 1, 2])
    own = quietly(PeftModel.from_pretrained, kind.base(family), folder).eval()
    got = logits(model, inputs, adapter_ids=["rows", None])
    assert_own_columns(got[0], logits(own, inputs)[0], "rows", "")


def test_lora_on_only_one_of_two_tied_matrices() -> None:
    """The other one stays the base's."""
    names: list[str | None] = ["embedding", "head", "saved_embedding", None, "saved_head"]
    model = enabled("llama_tied", [name for name in names if name])
    inputs = batch("llama_tied", names)
    got = logits(model, inputs, adapter_ids=names)
    for row, want in enumerate(wanted("llama_tied", names, inputs, logits)):
        assert_own_columns(got[row], want, names[row], f"row {row}")


def test_state_dict_and_config_keep_the_base_s_size(family: str, model: PreTrainedModel) -> None:
    bare = build(family)
    assert model.config.vocab_size == VOCAB
    assert model.get_input_embeddings().weight.shape == bare.get_input_embeddings().weight.shape
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in bare.state_dict().items()}


def test_labels_and_loss(family: str, model: PreTrainedModel) -> None:
    """A loss over columns of -inf is the loss over one's own."""
    inputs = prompts(2, side=None)
    with torch.no_grad():
        got = model(**inputs, labels=inputs["input_ids"], adapter_ids=[None, None]).loss
        want = reference(family, None)(**inputs, labels=inputs["input_ids"]).loss
    assert torch.allclose(got, want)


def test_kinds_cover_what_is_used() -> None:
    for name in FAMILIES:
        assert {n for n in NAMES if n} <= set(kinds(name))
