"""What PEFT refuses to mix in one batch, or gets wrong, by name: here it works, and equals merged weights in float64.

Each test shows first what PEFT does (so that it says so when PEFT learns it), then what we do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fidelity.bed import (
    INVOCATION,
    NAMES,
    Kind,
    assert_own_columns,
    batch,
    build,
    enabled,
    folder_of,
    kinds,
    known,
    logits,
    quietly,
    reference,
    save,
    train,
    vocabulary,
    wanted,
)
from models import FAMILIES, VOCAB, prompts
from oracle import relative_error
from peft import KasaConfig, PeftModel
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from hf_multilora import AdapterMatchError, MultiLoraError, UnsupportedAdapterError, enable_multilora

TOLERANCE = 1e-5


def merged(family: str, name: str | None, base: PreTrainedModel | None = None, folder: Path | None = None) -> Any:
    """The base with the adapter in its weights, in float64; no two places share a weight."""
    if name is None:
        return build(family).double()
    model = quietly(
        PeftModel.from_pretrained, base or kinds(family)[name].base(family), folder or folder_of(family, name)
    ).double()
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = nn.Parameter(parameter.detach().clone())
    return quietly(model.merge_and_unload).eval()


def assert_merged(family: str, names: Sequence[str | None], **options: Any) -> None:
    """A mixed batch of `names` equals, row by row, the merged weights of each in float64."""
    model = enabled(family, dict.fromkeys(name for name in names if name), **options)
    inputs = batch(family, names, side="right" if NAMES[family].task.endswith("CLS") else "left")
    got = logits(model, inputs, adapter_ids=list(names))
    for row, name in enumerate(names):
        want = logits(merged(family, name), known(inputs, vocabulary(family, name)))[row]
        width = want.shape[-1]
        # In places that are padded a row's own softmax may be degenerate: they mean nothing.
        there = inputs["attention_mask"][row].bool() if got.dim() == 3 else slice(None)
        error = relative_error(got[row][there][..., :width], want[there])
        assert error <= TOLERANCE, f"row {row} {name}: {error:.1e}"
        assert (got[row][..., width:] == -math.inf).all()


def peft_mixed(family: str, names: Sequence[str]) -> Any:
    """One PeftModel with all of these adapters."""
    distinct = list(dict.fromkeys(name for name in names if name != "__base__"))
    base = kinds(family)[distinct[0]].base(family)
    model = quietly(PeftModel.from_pretrained, base, folder_of(family, distinct[0]), adapter_name=distinct[0])
    for name in distinct[1:]:
        quietly(model.load_adapter, folder_of(family, name), adapter_name=name)
    return model.eval()


def peft_mix_fails(family: str, names: Sequence[str], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        model = peft_mixed(family, names)
        inputs = batch(family, [None] * len(names))
        quietly(logits, model, inputs, adapter_names=list(names))


def ours(family: str, names: Sequence[str | None], side: str = "left") -> None:
    """A mixed batch of `names` equals, row by row, PEFT with each adapter alone."""
    model = enabled(family, dict.fromkeys(name for name in names if name))
    inputs = batch(family, names, side=side)
    got = logits(model, inputs, adapter_ids=list(names))
    for row, want in enumerate(wanted(family, names, inputs, logits)):
        assert_own_columns(got[row], want, names[row], f"row {row}")


# Refused by PEFT's mixed batch


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "phi3"])
def test_dora_in_a_mixed_batch(family: str) -> None:
    peft_mix_fails(family, ["dora", "plain"], ValueError, "DoRA")
    ours(family, ["dora", None, "plain", "dora_patterns"])
    assert_merged(family, ["dora", None, "plain", "dora_patterns"])


def test_saved_modules_in_only_some_rows() -> None:
    peft_mix_fails("llama", ["saved_head", "plain"], KeyError, "plain")
    assert_merged("llama", ["saved_head", "plain", None, "saved_embedding"])


def test_saved_norms() -> None:
    peft_mix_fails("llama", ["norms", "norms"], TypeError, "Mixed batching is only supported")
    assert_merged("llama", ["norms", "plain", None])


def test_saved_head_of_several_layers() -> None:
    peft_mix_fails("roberta_cls", ["plain", "patterns"], TypeError, "Mixed batching is only supported")
    assert_merged("roberta_cls", ["plain", "patterns", None])


def test_trained_tokens_in_only_some_rows() -> None:
    peft_mix_fails("llama", ["tokens", "plain"], KeyError, "plain|trainable_tokens")
    assert_merged("llama", ["tokens", "plain", None, "tokens_dict"])


def test_heads_of_different_widths() -> None:
    peft_mix_fails("llama_cls", ["plain", "five_labels"], RuntimeError, "size mismatch")
    assert_merged("llama_cls", ["plain", "five_labels", None, "two_labels"])


def test_vocabularies_of_different_sizes() -> None:
    peft_mix_fails("llama", ["more_tokens_4", "more_tokens_7"], RuntimeError, "size mismatch")
    assert_merged("llama", ["more_tokens_4", "more_tokens_7", None])


def test_biases_of_two_adapters() -> None:
    peft_mix_fails("qwen2", ["bias_all", "bias_lora_only"], ValueError, "bias")
    assert_merged("qwen2", ["bias_all", "bias_lora_only", None, "plain"])
    assert_merged("gpt2", ["bias_all", "bias_lora_only", None, "dora"])


def test_alora_with_beams() -> None:
    """See test_alora.py for what is right."""
    inputs = batch("llama", ["alora", "alora"])
    options: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 2, "pad_token_id": 0}
    with pytest.raises(ValueError, match="[Bb]eam"):
        peft_mixed("llama", ["alora"]).generate(**inputs, **options)
    model = enabled("llama", ["alora"])
    assert model.generate(**inputs, **options, adapter_ids=["alora", None]).shape == (2, 14)


def test_beams_in_a_generation_config() -> None:
    names = ["plain", "patterns"]
    inputs = batch("llama", names)
    config = GenerationConfig(num_beams=3, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    with pytest.raises(ValueError, match="Length"):
        peft_mixed("llama", names).generate(**inputs, generation_config=config, adapter_names=names)
    got = enabled("llama", names).generate(**inputs, generation_config=config, adapter_ids=names)
    want = wanted("llama", names, inputs, lambda own, rows: own.generate(**rows, generation_config=config))
    assert torch.equal(got, torch.stack(want))


def test_return_sequences() -> None:
    names = ["plain", "patterns"]
    inputs = batch("llama", names)
    options: dict[str, Any] = {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 4, "pad_token_id": 0}
    with pytest.raises(ValueError, match="Length"):
        peft_mixed("llama", names).generate(**inputs, **options, adapter_names=names)
    got = enabled("llama", names).generate(**inputs, **options, adapter_ids=names)
    assert got.shape == (4, 16)


def test_flattened_inputs() -> None:
    """OPT's fc1 sees [rows * tokens, hidden]."""
    from oracle import adapters, alone

    names = ["r3", None]
    inputs = prompts(2)
    model = quietly(PeftModel.from_pretrained, FAMILIES["opt"].build(), adapters("opt")["r3"], adapter_name="r3")
    with pytest.raises(ValueError, match="Length"):
        logits(model.eval(), inputs, adapter_names=["r3", "__base__"])
    model = enable_multilora(FAMILIES["opt"].build(), max_loras=1, max_lora_rank=8)
    model.load_adapter(adapters("opt")["r3"], adapter_name="r3")
    got = logits(model, inputs, adapter_ids=names)
    assert relative_error(got[0], logits(alone("opt", "r3"), inputs)[0]) <= TOLERANCE
    assert torch.equal(got[1], logits(alone("opt", None), inputs)[1])


# Wrong in PEFT: one adapter changes what others, or the base, compute


def leaks(family: str, victim: str, culprit: str) -> float:
    """How far PEFT's answer of `victim` moves when `culprit` is loaded beside it."""
    inputs = batch(family, [victim] * 2)
    model = quietly(PeftModel.from_pretrained, build(family), folder_of(family, victim), adapter_name="victim").eval()
    before = logits(model, inputs)
    quietly(model.load_adapter, folder_of(family, culprit), adapter_name="culprit")
    model.set_adapter("victim")
    return relative_error(logits(model.eval(), inputs), before)


@pytest.mark.parametrize(
    ("family", "culprit"),
    [("llama", "pissa"), ("llama", "olora"), ("qwen2", "bias_all"), ("llama", "embedding_saved_plainly")],
)
def test_another_adapter_that_changes_the_base(family: str, culprit: str, tmp_path: Path) -> None:
    if culprit == "embedding_saved_plainly":
        kind = Kind({"r": 4, "target_modules": ["q_proj"]}, save={"save_embedding_layers": True})
        model = train(family, kind, 3)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.5)  # the whole model was trained, as in a first pass of SFT
        folder = save(model, tmp_path / "whole", kind)
        inputs = batch(family, ["plain"] * 2)
        both = quietly(PeftModel.from_pretrained, build(family), folder_of(family, "plain"), adapter_name="a").eval()
        before = logits(both, inputs)
        quietly(both.load_adapter, folder, adapter_name="b")
        assert relative_error(logits(both.eval(), inputs), before) > 0.01
        served = enabled(family, ["plain"], max_loras=2)
        served.load_adapter(folder, adapter_name="whole")
        want = quietly(PeftModel.from_pretrained, build(family), folder).eval()
        got = logits(served, inputs, adapter_ids=["whole", "plain"])
        assert relative_error(got[0, :, :VOCAB], logits(want, inputs)[0]) <= TOLERANCE
        assert relative_error(got[1, :, :VOCAB], before[1]) <= TOLERANCE
        return
    assert leaks(family, "plain", culprit) > 0.01
    ours(family, ["plain", culprit, None, "plain"])


@pytest.mark.parametrize("kind", ["pissa", "olora"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_altered_bases_beside_each_other(family: str, kind: str) -> None:
    """Also beside adapters of the clean base; PEFT's order of loading decides there."""
    ours(family, [kind, "plain", None, "pissa", "olora"])


def test_kasa_beside_other_adapters(tmp_path: Path) -> None:
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "kasa_config": KasaConfig()}
    kind = Kind(options, altered=True)
    trained = train("llama", kind, 9)
    folder = save(trained, tmp_path / "kasa", kind)
    with pytest.raises(ValueError, match="[Kk]a[Ss][Aa]"):
        both = quietly(PeftModel.from_pretrained, build("llama"), folder_of("llama", "plain"), adapter_name="plain")
        quietly(both.load_adapter, folder, adapter_name="kasa")
    model = enabled("llama", ["plain"], max_loras=2)
    model.load_adapter(folder, adapter_name="kasa")
    inputs = batch("llama", ["plain"] * 3)
    want = quietly(PeftModel.from_pretrained, build("llama"), folder).eval()
    got = logits(model, inputs, adapter_ids=["kasa", "plain", None])
    assert relative_error(got[0, :, :VOCAB], logits(want, inputs)[0]) <= TOLERANCE
    assert relative_error(got[1, :, :VOCAB], logits(reference("llama", "plain"), inputs)[1]) <= TOLERANCE
    assert torch.equal(got[2, :, :VOCAB], logits(build("llama"), inputs)[2])


def test_merging_into_one_of_two_tied_matrices() -> None:
    """PEFT merges into the shared storage, and so into both."""
    inputs = batch("llama_tied", ["head", "head"])
    model = quietly(PeftModel.from_pretrained, build("llama_tied"), folder_of("llama_tied", "head")).eval()
    before = logits(model, inputs)
    assert relative_error(logits(quietly(model.merge_and_unload), inputs), before) > 0.01
    assert_merged("llama_tied", ["head", "embedding", None, "dora_head", "tying"])


def test_a_mix_with_rslora() -> None:
    """add_weighted_adapter takes use_rslora from its first part."""
    mix = {"patterns": 0.6, "plain": -0.5}
    model = enabled("llama", ["patterns", "plain"], max_loras=2, max_lora_rank=16)
    inputs = batch("llama", [None, None])
    got = logits(model, inputs, adapter_ids=[mix, None])
    want = build("llama").double()
    with torch.no_grad():
        for name, weight in mix.items():
            own, base = merged("llama", name), build("llama").double()
            for path, parameter in want.named_parameters():
                parameter.add_(weight * (own.get_parameter(path) - base.get_parameter(path)))
    assert relative_error(got[0, :, :VOCAB], logits(want, inputs)[0]) <= TOLERANCE


def test_a_bias_of_b_on_a_layer_without_one() -> None:
    """PEFT cannot merge it; here against float64 hooks."""
    with pytest.raises(RuntimeError, match="Impossible to merge"):
        merged("llama", "lora_bias")
    inputs = batch("llama", ["lora_bias"] * 2)
    trained = quietly(PeftModel.from_pretrained, build("llama").double(), folder_of("llama", "lora_bias")).double()
    got = logits(enabled("llama", ["lora_bias"]), inputs, adapter_ids=["lora_bias", None])
    assert relative_error(got[0, :, :VOCAB], logits(trained.eval(), inputs)[0]) <= TOLERANCE


def test_an_error_leaves_nothing_behind() -> None:
    """PEFT's hooks stay after an exception, and the next plain call answers through them."""

    def stop(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("user")

    names = ["plain", "patterns"]
    inputs = batch("llama", names)
    model = enabled("llama", names)
    before = logits(model, inputs)
    with pytest.raises(RuntimeError, match="user"):
        model.generate(**inputs, adapter_ids=names, logits_processor=[stop], pad_token_id=0)
    assert torch.equal(logits(model, inputs), before)


@pytest.mark.parametrize("name", ["a.b", "keys", "forward", "default", "weird name/with slash", "ü", "0"])
def test_names_are_free(name: str) -> None:
    model = enabled("llama", max_loras=1)
    model.load_adapter(folder_of("llama", "norms"), adapter_name=name)
    inputs = batch("llama", ["norms"] * 2)
    got = logits(model, inputs, adapter_ids=[name, None])
    assert relative_error(got[0, :, :VOCAB], logits(reference("llama", "norms"), inputs)[0]) <= TOLERANCE


def test_keys_that_match_nothing() -> None:
    """PEFT's load_adapter leaves such an adapter at its initial values without a word."""
    from safetensors.torch import load_file

    tensors = load_file(folder_of("llama", "plain") / "adapter_model.safetensors")
    renamed = {key.replace("layers", "blocks"): value for key, value in tensors.items()}
    config = json.loads((folder_of("llama", "plain") / "adapter_config.json").read_text())
    model = enabled("llama")
    with pytest.raises(AdapterMatchError, match="blocks"):
        model.multilora.load(renamed, "renamed", config=config)
    assert not model.multilora.adapters


# Refused here too, by name


@pytest.mark.parametrize(
    ("init", "word"), [("pissa_niter_4", "PiSSA"), ("corda", "CorDA"), ("loftq", "LoftQ"), ("PiSSA_niter_16", "PiSSA")]
)
def test_inits_that_cannot_be_recomputed(init: str, word: str, tmp_path: Path) -> None:
    """With the command that converts them in PEFT; pissa and olora in any case of letters are served."""
    folder = copied("llama", "plain", tmp_path, init_lora_weights=init)
    model = enabled("llama")
    with pytest.raises(UnsupportedAdapterError, match=word) as caught:
        model.load_adapter(folder, adapter_name="a")
    assert "save_pretrained" in str(caught.value) or "convert" in str(caught.value)
    assert not model.multilora.adapters


@pytest.mark.parametrize("init", ["PiSSA", "OLoRA", "PISSA"])
def test_spellings_of_an_init(init: str, tmp_path: Path) -> None:
    kind = init.lower()
    folder = copied("llama", kind, tmp_path, init_lora_weights=init)
    model = enabled("llama")
    model.load_adapter(folder, adapter_name="a")
    inputs = batch("llama", [kind] * 2)
    got = logits(model, inputs, adapter_ids=["a", None])
    assert relative_error(got[0, :, :VOCAB], logits(reference("llama", kind), inputs)[0]) <= TOLERANCE


def test_pissa_of_too_high_a_rank(tmp_path: Path) -> None:
    model = enabled("llama", max_lora_rank=4)
    with pytest.raises(MultiLoraError, match="max_lora_rank") as caught:
        model.load_adapter(folder_of("llama", "pissa"), adapter_name="a")
    assert "8" in str(caught.value)
    assert not model.multilora.adapters


def test_layer_replication(tmp_path: Path) -> None:
    folder = copied("llama", "plain", tmp_path, layer_replication=[[0, 2], [1, 2]])
    model = enabled("llama")
    with pytest.raises(UnsupportedAdapterError, match="layer_replication"):
        model.load_adapter(folder, adapter_name="a")


def test_arrow(tmp_path: Path) -> None:
    folder = copied("llama", "plain", tmp_path, arrow_config={"top_k": 3, "router_temperature": 1.0})
    with pytest.raises(UnsupportedAdapterError, match="[Aa]rrow"):
        enabled("llama").load_adapter(folder, adapter_name="a")


def copied(family: str, kind: str, to: Path, **config: Any) -> Path:
    """The adapter of a kind with other fields in its config."""
    source = folder_of(family, kind)
    fields = json.loads((source / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    (to / "adapter_model.safetensors").write_bytes((source / "adapter_model.safetensors").read_bytes())
    return to


def test_every_family_invokes_alike() -> None:
    assert kinds("llama")["alora"].options["alora_invocation_tokens"] == INVOCATION
