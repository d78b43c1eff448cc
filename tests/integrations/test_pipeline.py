"""transformers' text-generation pipeline: each prompt has its own adapter, whatever the batches are."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tiny_files import build, tokenizer, version
from transformers import PreTrainedModel, pipeline

from hf_multilora import enable_multilora
from hf_multilora.errors import AdapterNotFoundError, ModelError, RoutingError
from hf_multilora.integrations.pipeline import MultiLoraTextGenerationPipeline

PROMPTS = ["one", "and two", "three of them", "4", "the fifth one"]
IDS = ["a1", None, "a2", {"a1": 0.5, "a2": 0.5}, "a3"]
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = enable_multilora(build(), max_loras=3, max_lora_rank=16)
    for number in (1, 2, 3):
        tensors, config = version(number)
        model.multilora.load(tensors, f"a{number}", config=config)
    return model


def make(model: Any, **options: Any) -> Any:
    tok = tokenizer()
    tok.pad_token = tok.eos_token
    return pipeline("text-generation", model=model, tokenizer=tok, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def pipe(model: PreTrainedModel) -> Any:
    return make(model, pipeline_class=MultiLoraTextGenerationPipeline)


def texts(answers: Any) -> list[str]:
    return [answer[0]["generated_text"] for answer in answers]


@pytest.fixture(scope="module")
def alone(pipe: Any) -> list[str]:
    """Each prompt alone through its own adapter, by transformers' way of passing arguments on."""
    answers = [
        pipe(prompt, adapter_ids="__base__" if own is None else own)[0]["generated_text"]
        for prompt, own in zip(PROMPTS, IDS, strict=True)
    ]
    assert len(set(answers)) == len(answers)
    return answers


@pytest.mark.parametrize("batch_size", [1, 2, 5, 8])
def test_each_prompt_has_its_own(pipe: Any, alone: list[str], batch_size: int) -> None:
    assert texts(pipe(PROMPTS, adapter_ids=IDS, batch_size=batch_size)) == alone
    assert texts(pipe(PROMPTS[::-1], adapter_names=IDS[::-1], batch_size=batch_size)) == alone[::-1]


def test_the_adapters_matter(model: PreTrainedModel, pipe: Any, alone: list[str]) -> None:
    """A row that had its neighbour's adapter would be seen."""
    assert not set(texts(pipe(PROMPTS, adapter_ids=[*IDS[1:], None], batch_size=2))) & set(alone)


def test_one_for_all(model: PreTrainedModel, pipe: Any) -> None:
    for batch_size in (1, 2):
        ours = texts(pipe(PROMPTS, adapter_ids="a2", batch_size=batch_size))
        assert ours == texts(pipe(PROMPTS, adapter_ids=["a2"] * 5, batch_size=batch_size))
        assert ours == texts(make(model)(PROMPTS, adapter_ids="a2", batch_size=batch_size))
        assert ours == texts(make(model, adapter_ids="a2", batch_size=batch_size)(PROMPTS))
        assert ours != texts(pipe(PROMPTS, batch_size=batch_size))


def test_a_list_at_construction_and_another_for_a_call(model: PreTrainedModel, alone: list[str]) -> None:
    pipe = make(model, pipeline_class=MultiLoraTextGenerationPipeline, adapter_ids=IDS, batch_size=2)
    assert texts(pipe(PROMPTS)) == alone
    assert pipe(PROMPTS[0], adapter_ids="a1")[0]["generated_text"] == alone[0]
    with pytest.raises(RoutingError, match="5 ids"):
        pipe(PROMPTS[0])


def test_return_sequences_keep_their_prompts_adapter(pipe: Any, alone: list[str]) -> None:
    answers = pipe(PROMPTS, adapter_ids=IDS, batch_size=2, num_beams=2, num_return_sequences=2)
    single = [pipe(p, adapter_ids=[i], num_beams=2, num_return_sequences=2) for p, i in zip(PROMPTS, IDS, strict=True)]
    assert answers == single and all(len(answer) == 2 for answer in answers)


def test_chats(pipe: Any) -> None:
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    single = [pipe(chat, adapter_ids=[own])[0]["generated_text"] for chat, own in zip(chats, IDS, strict=True)]
    assert texts(pipe(chats, adapter_ids=IDS, batch_size=3)) == single


def test_generators(pipe: Any, alone: list[str]) -> None:
    assert texts(pipe((p for p in PROMPTS), adapter_ids=iter(IDS), batch_size=2)) == alone
    for ids in (IDS[:4], [*IDS, None]):
        with pytest.raises(RoutingError, match="another length"):
            list(pipe((p for p in PROMPTS), adapter_ids=ids, batch_size=2))


@pytest.mark.parametrize(
    ("prompts", "ids", "words"),
    [
        (PROMPTS, IDS[:2], "2 ids, but there are 5 prompts"),
        (PROMPTS, [], "0 ids"),
        (PROMPTS, ["a1", "a1", 3, "a1", None], r"adapter_ids\[2\]: 3 is of type int"),
        (PROMPTS[0], ["a1", "a2"], "2 ids"),
    ],
)
def test_lists_that_do_not_fit(pipe: Any, prompts: Any, ids: Any, words: str) -> None:
    with pytest.raises(RoutingError, match=words):
        pipe(prompts, adapter_ids=ids, batch_size=2)


def test_an_unknown_name(pipe: Any) -> None:
    with pytest.raises(AdapterNotFoundError, match="a9"):
        pipe(PROMPTS[:2], adapter_ids=["a1", "a9"], batch_size=2)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_transformers_own_class_refuses_lists(model: PreTrainedModel, batch_size: int) -> None:
    """Two ids and batches of two of four prompts: each batch would have taken the first two."""
    plain = make(model)
    with pytest.raises(RoutingError, match="MultiLoraTextGenerationPipeline"):
        plain(PROMPTS[:4], adapter_ids=["a1", "a2"], batch_size=batch_size)


def test_a_model_that_is_not_enabled() -> None:
    with pytest.raises(ModelError, match="enable_multilora"):
        make(build(), pipeline_class=MultiLoraTextGenerationPipeline)


def test_what_a_caller_forgets_is_forgotten(model: PreTrainedModel) -> None:
    """Python keeps the local variables of a frame that somebody has looked into."""

    class Large:
        pass

    large = Large()
    alive = weakref.ref(large)
    model.generate(torch.tensor([[5, 6], [7, 8]]), adapter_ids=["a1", None], max_new_tokens=1, pad_token_id=0)
    del large
    assert alive() is None
