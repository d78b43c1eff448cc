"""Where kinds meet the rest: old key forms, odd heads, other entries to the model, half precision, copies."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from fidelity.bed import (
    EXTRA,
    LONG,
    assert_own_columns,
    batch,
    build,
    enabled,
    folder_of,
    kinds,
    known,
    logits,
    perturb,
    quietly,
    reference,
    vocabulary,
    wanted,
)
from models import _COMMON, _LLAMA, HIDDEN, INNER, LENGTH, PAD, VOCAB, _draw, prompts
from oracle import relative_error
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_multilora import RoutingError, disable_multilora, enable_multilora


def stored(family: str, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    folder = folder_of(family, kind)
    return load_file(folder / "adapter_model.safetensors"), json.loads((folder / "adapter_config.json").read_text())


def assert_serves(
    family: str, kind: str, tensors: dict[str, torch.Tensor], config: dict[str, Any], **options: Any
) -> Any:
    """These tensors are the adapter of `kind`; returns the report."""
    model = enabled(family, **options)
    report = model.multilora.load(tensors, "a", config=config)
    names = [kind, None]
    inputs = batch(family, names, side="right" if family.endswith("cls") else "left")
    got = logits(model, inputs, adapter_ids=["a", None])
    for row, want in enumerate(wanted(family, names, inputs, logits)):
        assert_own_columns(got[row], want, names[row], kind)
    return report


# Key forms in the wild


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.replace("lora_magnitude_vector", "lora_magnitude_vector.weight"),
        lambda key: key.replace("lora_magnitude_vector", "lora_magnitude_vector.default.weight"),
        lambda key: key.replace("lora_magnitude_vector", "lora_magnitude_vector.default"),
        lambda key: key.replace(".weight", ".default.weight"),
        lambda key: key.removeprefix("base_model.model."),
    ],
    ids=["weight", "default.weight", "default", "factors.default", "no prefix"],
)
def test_dora_keys(rename: Callable[[str], str]) -> None:
    tensors, config = stored("llama", "dora")
    assert_serves("llama", "dora", {rename(key): value for key, value in tensors.items()}, config)


@pytest.mark.parametrize("form", ["{}.modules_to_save.{}", "{}.modules_to_save.default.{}"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "saved_head"), ("llama", "norms"), ("llama", "saved_embedding"), ("bert_cls", "plain")],
)
def test_modules_to_save_left_in_keys(family: str, kind: str, form: str) -> None:
    tensors, config = stored(family, kind)
    renamed = {key if "lora_" in key else form.format(*key.rsplit(".", 1)): value for key, value in tensors.items()}
    assert renamed.keys() != tensors.keys()
    assert_serves(family, kind, renamed, config)


def test_the_original_module_beside_the_saved_one() -> None:
    """Some savers write both."""
    tensors, config = stored("llama", "saved_head")
    head = tensors.pop("base_model.model.lm_head.weight")
    tensors["base_model.model.lm_head.modules_to_save.default.weight"] = head
    tensors["base_model.model.lm_head.original_module.weight"] = build("llama").lm_head.weight.detach()
    report = assert_serves("llama", "saved_head", tensors, config)
    assert any("original_module" in name for name in [*report.ignored, *report.converted, *report.warnings])


def test_a_head_without_a_prefix() -> None:
    tensors, config = stored("llama", "saved_head")
    assert_serves("llama", "saved_head", {k.removeprefix("base_model.model."): v for k, v in tensors.items()}, config)


@pytest.mark.parametrize(
    "kind", ["dora", "lora_bias", "norms", "saved_head", "more_tokens_saved", "tokens", "alora", "pissa"]
)
def test_tensors_in_memory_of_other_dtypes(kind: str) -> None:
    """Half-precision files on an fp32 base: the numbers that the file holds, and PEFT's answer to them."""
    tensors, config = stored("llama", kind)
    rounded = {key: value.to(torch.bfloat16) for key, value in tensors.items()}
    model = enabled("llama", max_loras=2)
    model.multilora.load(rounded, "half", config=config)
    model.multilora.load({key: value.float() for key, value in rounded.items()}, "same", config=config)
    inputs = batch("llama", [kind] * 2)
    got = logits(model, inputs, adapter_ids=["half", "same"])
    size = vocabulary("llama", kind)
    want = logits(model, inputs, adapter_ids=["same", "half"])
    assert torch.equal(got[..., :size], want[..., :size])


def test_dora_of_split_layers_on_a_fused_model() -> None:
    """q, k and v apart, each with its magnitude, on qkv_proj."""
    fused, config = stored("phi3", "dora")
    split: dict[str, torch.Tensor] = {}
    widths = {"qkv_proj": {"q_proj": 48, "k_proj": 24, "v_proj": 24}, "gate_up_proj": {"gate_proj": 80, "up_proj": 80}}
    for key, value in fused.items():
        name = next((name for name in widths if name in key), None)
        if name is None:
            split[key] = value
            continue
        pieces = [value] * len(widths[name])
        if "lora_A" not in key:
            pieces = list(value.split(list(widths[name].values())))
        split |= {key.replace(name, part): piece.clone() for part, piece in zip(widths[name], pieces, strict=True)}
    config["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert_serves("phi3", "dora", split, config)


def test_dora_of_a_fused_layer_on_a_split_model() -> None:
    tensors, config = stored("llama", "dora")
    fused: dict[str, torch.Tensor] = {}
    widths = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
    first = {k.replace("q_proj", "{}"): v for k, v in tensors.items() if "q_proj" in k}
    for pattern, value in first.items():
        pieces = [tensors[pattern.format(name)] for name in widths]
        key = pattern.format("qkv_proj")
        if "lora_A" in key:
            fused[key] = torch.cat(pieces)
        elif "lora_B" in key:
            fused[key] = torch.block_diag(*pieces)
        else:
            fused[key] = torch.cat(pieces)
        assert value is pieces[0]
    rest = {k: v for k, v in tensors.items() if not any(name in k for name in widths)}
    config["target_modules"] = ["qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config["rank_pattern"] = {"qkv_proj": 12}
    config["alpha_pattern"] = {"qkv_proj": 18}
    assert_serves("llama", "dora", {**fused, **rest}, config)


# Other heads


def made(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    generator = torch.Generator().manual_seed(1)
    for path, parameter in model.named_parameters():
        _draw(path, parameter, generator)
    model.tie_weights()
    return model.eval()


def resized(base: PreTrainedModel, more: int) -> PreTrainedModel:
    model = copy.deepcopy(base)
    torch.manual_seed(more)
    quietly(model.resize_token_embeddings, VOCAB + more, mean_resizing=False)
    return model


ODD: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "head_with_bias": (
        lambda: tf.PhiForCausalLM(tf.PhiConfig(**{**_COMMON, "intermediate_size": INNER})),
        "q_proj",
    ),
    "capped_logits": (
        lambda: tf.Gemma2ForCausalLM(
            tf.Gemma2Config(**_LLAMA, head_dim=16, final_logit_softcapping=5.0, sliding_window=8)
        ),
        "q_proj",
    ),
    "scaled_logits": (lambda: tf.CohereForCausalLM(tf.CohereConfig(**_LLAMA, logit_scale=0.3)), "q_proj"),
    "divided_logits": (lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**_LLAMA, logits_scaling=3.0)), "q_proj"),
    "embedding_multiplier": (
        lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**_LLAMA, embedding_multiplier=3.0, residual_multiplier=0.5)),
        "q_proj",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_heads(name: str, tmp_path: Path) -> None:
    """Two vocabularies and the base in one batch, where logits are capped, scaled or have a bias."""
    make, target = ODD[name]
    base = made(make)
    model = enable_multilora(
        copy.deepcopy(base), max_loras=3, max_lora_rank=8, extra_vocab_size=EXTRA, slot_bytes=LONG
    )
    bases: list[Any] = []
    for number, more in enumerate((4, 7, 0)):
        own = resized(base, more) if more else copy.deepcopy(base)
        saves = {} if more else {"modules_to_save": ["lm_head"]}
        trained = quietly(
            get_peft_model, own, LoraConfig(r=4, target_modules=[target], task_type="CAUSAL_LM", **saves)
        )
        perturb(trained, number)
        quietly(trained.save_pretrained, tmp_path / str(more), save_embedding_layers=bool(more))
        bases.append(trained.eval())
        model.load_adapter(tmp_path / str(more), adapter_name=str(more))
    inputs = prompts(4)
    inputs["input_ids"][0, -2] = VOCAB + 3
    inputs["input_ids"][1, -2] = VOCAB + 6
    got = logits(model, inputs, adapter_ids=["4", "7", "0", None])
    for row, (own, more) in enumerate(zip([*bases, base], (4, 7, 0, 0), strict=True)):
        want = logits(own, known(inputs, VOCAB + more))[row]
        assert_own_columns(got[row], want, None if own is base else str(more), f"{name} row {row}")
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": PAD}
    tokens = model.generate(**inputs, adapter_ids=["4", "7", "0", None], **options)
    for row, (own, more) in enumerate(zip([*bases, base], (4, 7, 0, 0), strict=True)):
        assert torch.equal(
            tokens[row],
            own.generate(**known(inputs, VOCAB + more), **options)[row].where(
                torch.arange(LENGTH + 4) >= LENGTH,
                inputs["input_ids"][row].new_tensor([*inputs["input_ids"][row], 0, 0, 0, 0]),
            ),
        )


def test_a_bias_on_the_logits() -> None:
    """BART adds a buffer as wide as the base's vocabulary: extra columns are served, or refused when enabling."""
    config = tf.BartConfig(
        vocab_size=VOCAB, d_model=HIDDEN, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    base = made(lambda: tf.BartForConditionalGeneration(config))
    inputs = {**prompts(2, side="right"), "decoder_input_ids": torch.tensor([[2, 5, 7], [2, 9, 11]])}
    want = logits(base, inputs)
    try:
        model = enable_multilora(base, max_loras=1, max_lora_rank=8, extra_vocab_size=EXTRA)
    except ValueError as error:
        assert "extra_vocab_size" in str(error)
        return
    got = logits(model, inputs)
    assert torch.equal(got[..., :VOCAB], want)
    assert (got[..., VOCAB:] == -math.inf).all()


@pytest.mark.parametrize("chosen", [{"embed_tokens": [3, 17], "lm_head": [3, 17]}, {"lm_head": [3, 17]}], ids=str)
def test_trained_tokens_of_a_head_with_a_bias(chosen: dict[str, list[int]], tmp_path: Path) -> None:
    """PEFT forgets the head's bias, in every column; the mathematics keeps it."""
    base = made(ODD["head_with_bias"][0])
    options = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "trainable_token_indices": chosen}
    trained = quietly(get_peft_model, copy.deepcopy(base), LoraConfig(**options))
    perturb(trained, 1)
    quietly(trained.save_pretrained, tmp_path)
    model = enable_multilora(copy.deepcopy(base), max_loras=1, max_lora_rank=8)
    model.load_adapter(tmp_path, adapter_name="a")
    inputs = prompts(2)
    got = logits(model, inputs, adapter_ids="a")
    want = logits(trained.eval(), inputs) + base.lm_head.bias.detach()
    for row in range(2):
        assert relative_error(got[row], want[row]) <= 1e-5


# Other ways into the model


@pytest.mark.parametrize("kind", ["plain", "dora", "norms", "alora"])
@pytest.mark.parametrize("sample", [False, True])
def test_assisted_decoding(kind: str, sample: bool) -> None:
    """A bare assistant's logits are narrower than ours by extra_vocab_size."""
    model, inputs = enabled("llama", [kind]), batch("llama", [kind])
    options: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": PAD, "do_sample": sample}
    assistant = build("llama")
    if sample:
        with pytest.raises(RoutingError, match="extra_vocab_size=8"):
            model.generate(**inputs, adapter_ids=[kind], assistant_model=assistant, **options)
        enable_multilora(assistant, max_lora_rank=8, extra_vocab_size=EXTRA)
    for seed in range(4):
        torch.manual_seed(seed)
        got = model.generate(**inputs, adapter_ids=[kind], assistant_model=assistant, **options)
        assert got.shape[1] == LENGTH + 8 and got.max() < VOCAB
    if not sample:
        assert torch.equal(got, reference("llama", kind).generate(**inputs, **options))


def test_an_alora_in_a_compiled_model() -> None:
    """A compiled forward sees no tokens: right, or refused."""
    model = enabled("llama", ["alora", "plain"])
    inputs = batch("llama", [None, None, "alora"])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for ids in (["plain", None, "plain"], ["plain", None, "alora"]):
        want = logits(model, inputs, adapter_ids=ids)[..., :VOCAB]
        try:
            with model.multilora.use(ids):
                got = logits(compiled, inputs, use_cache=False)[..., :VOCAB]
        except RoutingError:
            assert "alora" in ids
            continue
        assert relative_error(got, want) <= 1e-5, ids


def test_decoder_tokens_beyond_the_vocabulary() -> None:
    """An encoder-decoder reads two kinds of prompts."""
    model = enabled("t5", ["plain"])
    inputs = batch("t5", ["plain", None])
    inputs["decoder_input_ids"][1, 2] = VOCAB
    for ids in (["plain", None], None):
        with pytest.raises(RoutingError, match=str(VOCAB)):
            model(**inputs, adapter_ids=ids)


def test_encoder_tokens_beyond_the_vocabulary() -> None:
    model = enabled("t5", ["plain"])
    inputs = batch("t5", ["plain", None])
    inputs.pop("decoder_input_ids")
    inputs["input_ids"][1, 2] = VOCAB
    for ids in (["plain", None], None):
        with pytest.raises(RoutingError, match=str(VOCAB)):
            model.generate(**inputs, adapter_ids=ids, max_new_tokens=2)


@pytest.mark.parametrize("kind", ["saved_head", "norms", "dora", "more_tokens_4", "tokens", "saved_embedding"])
def test_embeddings_as_input(kind: str) -> None:
    """What lies behind the embedding is served; the embedding is the caller's own."""
    model = enabled("llama", [kind])
    embeds = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0)) * 0.3
    with torch.no_grad():
        got = model(inputs_embeds=embeds, adapter_ids=[kind, None]).logits
        want = reference("llama", kind)(inputs_embeds=embeds).logits
        base = reference("llama", None)(inputs_embeds=embeds).logits
    assert_own_columns(got[0], want[0], kind, "")
    assert_own_columns(got[1], base[1], None, "")


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([2, 5])])
def test_logits_to_keep(keep: Any) -> None:
    names = list(kinds("llama"))
    model = enabled("llama", names)
    inputs = batch("llama", names)
    everything = logits(model, inputs, adapter_ids=names)
    part = logits(model, inputs, adapter_ids=names, logits_to_keep=keep)
    want = everything[:, -keep:] if isinstance(keep, int) else everything[:, keep]
    for row, name in enumerate(names):
        size = vocabulary("llama", name)
        assert relative_error(part[row, :, :size], want[row, :, :size]) <= 1e-5, name


@pytest.mark.parametrize("kind", ["more_tokens_saved", "norms", "tokens", "dora", "lora_bias", "saved_head"])
def test_default_adapter(kind: str) -> None:
    model = enabled("llama_tied", [kind])
    inputs = batch("llama_tied", [kind] * 3)
    model.set_adapter(kind)
    want = logits(reference("llama_tied", kind), inputs)
    got = logits(model, inputs)
    for row in range(3):
        assert_own_columns(got[row], want[row], kind, "")
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": PAD}
    assert torch.equal(
        model.generate(**inputs, **options), reference("llama_tied", kind).generate(**inputs, **options)
    )
    model.disable_adapters()


@pytest.mark.parametrize("kind", ["more_tokens_saved", "norms", "tokens", "dora", "lora_bias", "more_tokens_4"])
def test_a_cache_goes_on(kind: str) -> None:
    model = enabled("llama_tied", [kind])
    inputs = batch("llama_tied", [kind, kind], side=None)
    whole = logits(reference("llama_tied", kind), inputs)
    ids = inputs["input_ids"]
    with torch.no_grad():
        cache = model(input_ids=ids[:, :7], use_cache=True, adapter_ids=kind).past_key_values
        got = model(input_ids=ids[:, 7:], past_key_values=cache, adapter_ids=kind).logits
    for row in range(2):
        assert_own_columns(got[row], whole[row, 7:], kind, "")


def test_hidden_states_of_saved_norms() -> None:
    """What the model gives back beside logits comes from the same rows."""
    names = ["norms", None, "saved_embedding"]
    model = enabled("llama", [n for n in names if n])
    inputs = batch("llama", names)
    with torch.no_grad():
        got = model(**inputs, adapter_ids=names, output_hidden_states=True).hidden_states
        for row, name in enumerate(names):
            want = reference("llama", name)(**inputs, output_hidden_states=True).hidden_states
            for ours, theirs in zip(got, want, strict=True):
                assert relative_error(ours[row], theirs[row]) <= 1e-5


# The model as an object


def test_copies_and_files_of_an_enabled_model(tmp_path: Path) -> None:
    """Norms are wrapped when the first adapter saves them: copies, files and names do not see it."""
    model = enabled("llama_tied", ["norms", "more_tokens_saved", "dora"])
    bare = build("llama_tied")
    names = ["norms", None, "more_tokens_saved", "dora"]
    inputs = batch("llama_tied", names)
    want = logits(model, inputs, adapter_ids=names)
    assert list(model.state_dict()) == list(bare.state_dict())
    model.save_pretrained(tmp_path)
    again = type(bare).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, prompts(2)), logits(bare, prompts(2)))
    twin = copy.deepcopy(model)
    for name in ("norms", "more_tokens_saved", "dora"):
        if name not in twin.multilora.adapters:
            twin.load_adapter(folder_of("llama_tied", name), adapter_name=name)
    assert torch.equal(logits(twin, inputs, adapter_ids=names), want)
    disable_multilora(model)
    assert torch.equal(logits(twin, inputs, adapter_ids=names), want)
    assert [type(m) for m in model.modules()] == [type(m) for m in bare.modules()]
    disable_multilora(twin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """All kinds on a half-precision base: near the float32 answer, base rows bit-equal, no NaN."""
    family = "llama"
    names: list[str | None] = [None, *kinds(family), None]
    model = enable_multilora(
        build(family).to(dtype), max_loras=len(names), max_lora_rank=16, slot_bytes=LONG, extra_vocab_size=EXTRA
    )
    for name in names:
        if name is not None:
            model.load_adapter(folder_of(family, name), adapter_name=name)
    inputs = batch(family, names)
    got = logits(model, inputs, adapter_ids=names)
    bare = logits(build(family).to(dtype), known(inputs, VOCAB))
    for row, want in enumerate(wanted(family, names, inputs, logits)):
        size = want.shape[-1]
        there = inputs["attention_mask"][row].bool()
        assert not got[row].isnan().any()
        if names[row] is None:
            assert torch.equal(got[row, :, :size], bare[row])
        error = relative_error(got[row, there, :size].float(), want[there])
        assert error < (0.1 if dtype == torch.bfloat16 else 0.02), f"{names[row]}: {error:.2e}"


def test_the_report_names_every_tensor() -> None:
    """Used, converted or ignored: each tensor of each kind is accounted for."""
    for kind in kinds("llama_tied"):
        tensors, config = stored("llama_tied", kind)
        model = enabled("llama_tied")
        report = model.multilora.load(tensors, kind, config=config)
        html = report._repr_html_()
        assert kind in repr(report) and kind in str(report) and kind in html
        assert report.nbytes > 0 and report.to_dict()["name"] == kind
        if kind == "monteclora":
            assert any("monteclora" in name for name in report.ignored)
        if kind == "pissa":
            assert report.rank == 8 and report.converted
