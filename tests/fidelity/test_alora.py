"""aLoRA: an adapter counts from its invocation tokens on, and what lies before is the base model's, bit for bit."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fidelity.bed import INVOCATION, batch, build, enabled, folder_of, kinds, logits, reference, wanted
from models import LENGTH, VOCAB
from oracle import assert_row
from peft.tuners.lora import LoraLayer
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hf_multilora import CacheMismatchError, RoutingError, UnsupportedAdapterError, disable_multilora

FAMILIES = ["llama", "gpt2", "gemma3"]
STARTS = [0, 3, 8]  # where rows invoke; None: they do not


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Iterator[PreTrainedModel]:
    model = enabled(family, ["alora", "alora_single", "plain", "dora"])
    yield model
    disable_multilora(model)


def invoked(
    starts: list[int | None], *, length: int = LENGTH, pad: list[int] | None = None
) -> dict[str, torch.Tensor]:
    """Prompts whose rows invoke at these tokens; no other token is one of the invocation's."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(20, VOCAB, (len(starts), LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row, start in enumerate(starts):
        if start is not None:
            ids[row, start : start + len(INVOCATION)] = torch.tensor(INVOCATION)
        if pad is not None:
            mask[row, : pad[row]] = 0
            ids[row, : pad[row]] = 0
    return {"input_ids": ids, "attention_mask": mask}


@contextmanager
def from_token(family: str, starts: list[int | None]) -> Iterator[Any]:
    """The mathematics, written once more: the bare model with hooks that add s B A x from each row's start on.

    Beams are rows too: every start stands for as many rows in a row as there are.
    """
    trained = reference(family, "alora")
    factors = {
        path.removeprefix("base_model.model."): (
            module.lora_A["default"].weight,
            module.lora_B["default"].weight * module.scaling["default"],
        )
        for path, module in trained.named_modules()
        if isinstance(module, LoraLayer) and "default" in module.lora_A
    }
    model = build(family)
    seen = {"past": 0}

    def add(a: torch.Tensor, b: torch.Tensor) -> Any:
        def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            x = args[0]
            position = seen["past"] + torch.arange(x.shape[1])
            each = x.shape[0] // len(starts)
            first = torch.tensor([10**6 if start is None else start for start in starts for _ in range(each)])
            return output + (x @ a.T @ b.T) * (position[None] >= first[:, None])[..., None]

        return hook

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        seen["past"] = 0 if cache is None else cache.get_seq_length()

    hooks = [model.get_submodule(path).register_forward_hook(add(a, b)) for path, (a, b) in factors.items()]
    hooks.append(model.register_forward_pre_hook(note, with_kwargs=True))
    yield model
    for hook in hooks:
        hook.remove()


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]


def test_forward_is_the_mathematics_and_peft(family: str, model: PreTrainedModel) -> None:
    starts = [*STARTS, None, LENGTH - len(INVOCATION)]
    inputs = invoked(starts)
    got = logits(model, inputs, adapter_ids="alora")
    by_peft = logits(reference(family, "alora"), inputs)
    with from_token(family, starts) as mathematics:
        by_hand = logits(mathematics, inputs)
    for row in range(len(starts)):
        assert_row(got[row, :, :VOCAB], by_hand[row], "alora", f"row {row}")
        assert_row(got[row, :, :VOCAB], by_peft[row], "alora", f"row {row} (PEFT)")


def test_before_the_start_the_base_s_bits(family: str, model: PreTrainedModel) -> None:
    """Logits, keys and values of the tokens before."""
    starts = [3, 8, None, 5]
    names = ["alora", "alora", "alora", None]
    inputs = invoked(starts)
    with torch.no_grad():
        got = model(**inputs, adapter_ids=names, use_cache=True)
        want = reference(family, None)(**inputs, use_cache=True)
    for row, (name, start) in enumerate(zip(names, starts, strict=True)):
        end = LENGTH if name is None or start is None else start
        assert torch.equal(got.logits[row, :end, :VOCAB], want.logits[row, :end])
        for ours, theirs in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
            if ours.keys.shape[-2] < LENGTH:  # a sliding window: it has let go of these tokens
                continue
            assert torch.equal(ours.keys[row, :, :end], theirs.keys[row, :, :end])
            assert torch.equal(ours.values[row, :, :end], theirs.values[row, :, :end])
        if end < LENGTH:
            assert not torch.equal(got.logits[row, end:, :VOCAB], want.logits[row, end:])


def test_mixed_with_other_kinds(family: str, model: PreTrainedModel) -> None:
    names = ["alora", None, "plain", "alora_single", "dora", "alora"]
    inputs = batch(family, names, seed=5)
    got = logits(model, inputs, adapter_ids=names)
    for row, want in enumerate(wanted(family, names, inputs, logits)):
        assert_row(got[row, :, :VOCAB], want, names[row], f"row {row}")


def test_the_last_occurrence_counts(family: str, model: PreTrainedModel) -> None:
    inputs = invoked([2])
    inputs["input_ids"][0, 7:10] = torch.tensor(INVOCATION)
    got = logits(model, inputs, adapter_ids="alora")
    want = logits(reference(family, "alora"), inputs)
    base = logits(reference(family, None), inputs)
    assert_row(got[0, :, :VOCAB], want[0], "alora")
    assert torch.equal(got[0, :7, :VOCAB], base[0, :7])


@pytest.mark.parametrize("pad", [[0, 0, 0, 0], [2, 0, 5, 3]])
def test_greedy_with_left_padding(family: str, model: PreTrainedModel, pad: list[int]) -> None:
    starts: list[int | None] = [3, 8, 6, None]
    inputs = invoked(starts, pad=pad)
    got = generate(model, inputs, adapter_ids="alora")
    assert torch.equal(got, generate(reference(family, "alora"), inputs))
    with from_token(family, starts) as mathematics:
        assert torch.equal(got, generate(mathematics, inputs))


def test_beams(family: str, model: PreTrainedModel) -> None:
    starts: list[int | None] = [3, None, 6, 8]
    inputs = invoked(starts, pad=[0, 2, 4, 0])
    got = generate(model, inputs, num_beams=3, num_return_sequences=2, adapter_ids="alora")
    with from_token(family, starts) as mathematics:
        want = generate(mathematics, inputs, num_beams=3, num_return_sequences=2)
    assert torch.equal(got, want)


def test_beams_from_a_generation_config(family: str, model: PreTrainedModel) -> None:
    starts: list[int | None] = [3, 8]
    inputs = invoked(starts)
    config = GenerationConfig(num_beams=2, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    got = model.generate(**inputs, generation_config=config, adapter_ids=["alora", "alora"])
    with from_token(family, starts) as mathematics:
        assert torch.equal(got, mathematics.generate(**inputs, generation_config=config))


def test_return_sequences(family: str) -> None:
    model = enabled(family, ["alora"], extra_vocab_size=0)  # torch draws other numbers for other widths
    starts: list[int | None] = [3, None, 8]
    names = ["alora", "alora", "alora"]
    inputs = invoked(starts)
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 2, "top_k": 5}
    torch.manual_seed(3)
    got = generate(model, inputs, adapter_ids=names, **options)
    torch.manual_seed(3)
    with from_token(family, starts) as mathematics:
        assert torch.equal(got, generate(mathematics, inputs, **options))


def test_never_invoked_is_the_base(family: str, model: PreTrainedModel) -> None:
    inputs = invoked([None, None])
    assert torch.equal(
        logits(model, inputs, adapter_ids="alora")[..., :VOCAB], logits(reference(family, None), inputs)
    )
    base = reference(family, None)
    for options in ({}, {"num_beams": 2}):
        assert torch.equal(
            generate(model, inputs, adapter_ids=["alora", None], **options), generate(base, inputs, **options)
        )


def test_only_the_prompt_invokes(family: str, model: PreTrainedModel) -> None:
    """Tokens that are generated never do, as in PEFT: here a processor forces the invocation out of the model."""
    inputs = invoked([None, None])
    prompt = inputs["input_ids"].shape[1]

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = ids.shape[1] - prompt
        if step < len(INVOCATION):
            scores = torch.full_like(scores, -math.inf)
            scores[:, INVOCATION[step]] = 0
        return scores

    got = generate(model, inputs, adapter_ids="alora", logits_processor=[force])
    assert got[0, :3].tolist() == INVOCATION
    assert torch.equal(got, generate(reference(family, None), inputs, logits_processor=[force]))


def test_partial_invocation_is_none(family: str, model: PreTrainedModel) -> None:
    inputs = invoked([None])
    inputs["input_ids"][0, -2:] = torch.tensor(INVOCATION[:2])
    assert torch.equal(
        logits(model, inputs, adapter_ids="alora")[..., :VOCAB], logits(reference(family, None), inputs)
    )


def test_a_single_prompt_and_a_single_token(family: str, model: PreTrainedModel) -> None:
    inputs = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    got = logits(model, inputs, adapter_ids="alora_single")
    assert_row(got[0, :, :VOCAB], logits(reference(family, "alora_single"), inputs)[0], "alora_single")
    assert torch.equal(
        generate(model, inputs, adapter_ids=["alora_single"]), generate(reference(family, "alora_single"), inputs)
    )


def test_chunked_prefill(family: str, model: PreTrainedModel) -> None:
    starts: list[int | None] = [3, 8, None]
    inputs = invoked(starts)
    got = generate(model, inputs, adapter_ids="alora", prefill_chunk_size=5)
    with from_token(family, starts) as mathematics:
        assert torch.equal(got, generate(mathematics, inputs))


def test_prompt_lookup(family: str, model: PreTrainedModel) -> None:
    inputs = invoked([3])
    got = generate(model, inputs, adapter_ids=["alora"], prompt_lookup_num_tokens=3)
    assert torch.equal(got, generate(reference(family, "alora"), inputs))


def test_embeddings_are_refused(family: str, model: PreTrainedModel) -> None:
    embeds = torch.randn(2, LENGTH, 48)
    with pytest.raises(RoutingError, match="input_ids"):
        model(inputs_embeds=embeds, adapter_ids=["alora", None])
    with pytest.raises(RoutingError, match="input_ids"):
        model.generate(inputs_embeds=embeds, adapter_ids=["alora", None], max_new_tokens=2)
    model(inputs_embeds=embeds, adapter_ids=["plain", None])


def cache_of(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> DynamicCache:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **options).past_key_values


def test_a_base_cache_goes_on_under_an_alora(family: str, model: PreTrainedModel) -> None:
    starts = [6, 7]
    ids = invoked(starts)["input_ids"]
    cache = cache_of(model, ids[:, :6])
    with torch.no_grad():
        got = model(input_ids=ids[:, 6:], past_key_values=cache, adapter_ids="alora").logits
    want = logits(reference(family, "alora"), {"input_ids": ids})
    for row in range(2):
        assert_row(got[row, :, :VOCAB], want[row, 6:], "alora", f"row {row}")


def test_generate_from_a_base_cache(family: str, model: PreTrainedModel) -> None:
    inputs = invoked([6, 7])
    cache = cache_of(model, inputs["input_ids"][:, :6])
    got = generate(model, inputs, adapter_ids="alora", past_key_values=cache)
    assert torch.equal(got, generate(reference(family, "alora"), inputs))


def test_a_base_cache_that_reaches_into_the_invocation(family: str, model: PreTrainedModel) -> None:
    """Tokens that the adapter should have seen were the base's."""
    inputs = invoked([4, 7])
    cache = cache_of(model, inputs["input_ids"][:, :6])
    with pytest.raises(CacheMismatchError):
        generate(model, inputs, adapter_ids="alora", past_key_values=cache)


def test_a_base_cache_under_another_kind_raises(family: str, model: PreTrainedModel) -> None:
    ids = invoked([6])["input_ids"]
    for name in ("plain", "dora"):
        with pytest.raises(CacheMismatchError):
            model(input_ids=ids[:, 6:], past_key_values=cache_of(model, ids[:, :6]), adapter_ids=name)


def test_an_alora_cache_goes_on_only_under_itself(family: str, model: PreTrainedModel) -> None:
    ids = invoked([3])["input_ids"]
    cache = cache_of(model, ids[:, :8], adapter_ids="alora")
    for other in (None, "plain", "alora_single"):
        with pytest.raises(CacheMismatchError):
            model(input_ids=ids[:, 8:], past_key_values=copy.deepcopy(cache), adapter_ids=[other])
    with torch.no_grad():
        got = model(input_ids=ids[:, 8:], past_key_values=cache, adapter_ids="alora").logits
    assert_row(got[0, :, :VOCAB], logits(reference(family, "alora"), {"input_ids": ids})[0, 8:], "alora")


def test_a_cache_before_the_invocation_is_the_base_s(family: str, model: PreTrainedModel) -> None:
    """Under an aLoRA that was not invoked yet the cache is the base's, and goes on under another aLoRA."""
    ids = invoked([6])["input_ids"]
    cache = cache_of(model, ids[:, :6], adapter_ids="alora_single")
    with torch.no_grad():
        got = model(input_ids=ids[:, 6:], past_key_values=cache, adapter_ids="alora").logits
    assert_row(got[0, :, :VOCAB], logits(reference(family, "alora"), {"input_ids": ids})[0, 6:], "alora")


def test_a_cropped_cache() -> None:
    """Cropped to before the start it is the base's again."""
    model = enabled("llama", ["alora"])
    ids = invoked([6])["input_ids"]
    cache = cache_of(model, ids, adapter_ids="alora")
    cache.crop(6 - LENGTH)
    with torch.no_grad():
        got = model(input_ids=ids[:, 6:], past_key_values=cache, adapter_ids=[None]).logits
    assert_row(got[0, :, :VOCAB], logits(reference("llama", None), {"input_ids": ids})[0, 6:], "base")


def test_a_second_turn(family: str, model: PreTrainedModel) -> None:
    """The cache of the first turn goes on, active from where it was."""
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    inputs = invoked([3, 8])
    first = model.generate(**inputs, adapter_ids="alora", return_dict_in_generate=True, **options)
    ids = torch.cat([first.sequences, torch.tensor([[30, 31], [32, 33]])], 1)
    turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    got = model.generate(**turn, adapter_ids="alora", past_key_values=first.past_key_values, **options)
    assert torch.equal(got, reference(family, "alora").generate(**turn, **options))


def test_a_second_turn_that_invokes_again(family: str, model: PreTrainedModel) -> None:
    """The last occurrence counts: keys and values between the two are not the base's."""
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    first = model.generate(**invoked([3]), adapter_ids="alora", return_dict_in_generate=True, **options)
    ids = torch.cat([first.sequences, torch.tensor([INVOCATION])], 1)
    with pytest.raises(CacheMismatchError, match="alora"):
        model.generate(input_ids=ids, adapter_ids="alora", past_key_values=first.past_key_values, **options)


def test_a_decoding_loop_by_hand(family: str, model: PreTrainedModel) -> None:
    ids = invoked([3])["input_ids"]
    with model.multilora.use("alora"), torch.no_grad():
        output = model(input_ids=ids, use_cache=True)
        tokens = [output.logits[:, -1].argmax(-1, keepdim=True)]
        for _ in range(3):
            output = model(input_ids=tokens[-1], past_key_values=output.past_key_values, use_cache=True)
            tokens.append(output.logits[:, -1].argmax(-1, keepdim=True))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    want = reference(family, "alora").generate(input_ids=ids, **options)
    assert torch.equal(torch.cat(tokens, 1), want[:, LENGTH:])


@pytest.mark.parametrize(
    "options", [{"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}]
)
def test_other_caches(family: str, model: PreTrainedModel, options: dict[str, Any]) -> None:
    inputs = invoked([3, 8, None])
    got = generate(model, inputs, adapter_ids=["alora"] * 3, **options)
    assert torch.equal(got, generate(reference(family, "alora"), inputs))


def test_threads(family: str, model: PreTrainedModel) -> None:
    """Starts belong to a call: several at once do not see each other's."""
    starts = [[3], [6], [8], [None]]
    want = [generate(model, invoked(start), adapter_ids=["alora"]) for start in starts]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(4):
            if not torch.equal(generate(model, invoked(starts[number]), adapter_ids=["alora"]), want[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(starts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_use_block(family: str, model: PreTrainedModel) -> None:
    inputs = invoked([3, 8])
    with model.multilora.use(["alora", None]):
        got = logits(model, inputs)
    assert_row(got[0, :, :VOCAB], logits(reference(family, "alora"), inputs)[0], "alora")
    assert torch.equal(got[1, :, :VOCAB], logits(reference(family, None), inputs)[1])


def test_as_the_default_adapter(family: str, model: PreTrainedModel) -> None:
    inputs = invoked([3, None])
    model.set_adapter("alora")
    try:
        assert torch.equal(generate(model, inputs), generate(reference(family, "alora"), inputs))
    finally:
        model.disable_adapters()


def test_mixes_are_refused(family: str, model: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedAdapterError, match="aLoRA"):
        model(**invoked([3]), adapter_ids=[{"alora": 0.5, "plain": 0.5}])


def test_kinds_exist() -> None:
    assert {"alora", "alora_single"} <= set(kinds("llama"))
    assert folder_of("llama", "alora").is_dir()
