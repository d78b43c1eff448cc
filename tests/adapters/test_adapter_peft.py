"""Adapters that PEFT saved: the plan's modules, ranks and deltas are those of the loaded PeftModel."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_bed import SLICES
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.pytorch_utils import Conv1D

from hf_multilora.adapters.load import load_plan
from hf_multilora.adapters.targets import Target, TargetTable
from hf_multilora.errors import AdapterFormatError, UnsupportedAdapterError

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**LLAMA)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5)),
}


def table_of(model: PreTrainedModel) -> TargetTable:
    targets = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            slices = SLICES.get(path.rpartition(".")[2], ())
            targets[path] = Target(path, "linear", module.in_features, module.out_features, slices)
        elif isinstance(module, Conv1D):
            targets[path] = Target(path, "linear", module.nx, module.nf)
        elif isinstance(module, nn.Embedding):
            targets[path] = Target(path, "embedding", module.num_embeddings, module.embedding_dim)
    names = tuple(path for path, _ in model.named_modules() if path)
    return TargetTable(targets, {}, frozenset(), names, None, model.state_dict().get)


def saved(base: PreTrainedModel, folder: Path, **options: Any) -> PeftModel:
    """Train nothing, randomise B, save, and load again, all with PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**{"r": 4, "lora_alpha": 6, **options}))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter)
        model.save_pretrained(folder)
        return PeftModel.from_pretrained(copy.deepcopy(base), folder)


CASES = [
    ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    ("llama", {"target_modules": r".*\.1\..*(q|up)_proj"}),
    ("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
    ("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0], "layers_pattern": "layers"}),
    ("llama", {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
    ("tied", {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
    ("tied", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    ("gpt2", {"target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True}),
    ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    ("phi3", {"target_modules": "all-linear"}),
    ("t5", {"target_modules": ["q", "v", "o"], "task_type": "SEQ_2_SEQ_LM"}),
    ("t5", {"target_modules": ["o"], "layers_to_transform": [1], "layers_pattern": "block"}),
    (
        "llama",
        {
            "target_modules": ["q_proj", "k_proj", "up_proj"],
            "use_rslora": True,
            "rank_pattern": {r"layers\.1\..*": 7, "q_proj": 3, "model.layers.0.mlp.up_proj": 2},
            "alpha_pattern": {"up_proj": 5, r".*\.0\.(self_attn|mlp)\..*": 9},
        },
    ),
]


@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_deltas_are_pefts(family: str, options: dict, tmp_path: Path) -> None:
    base = MODELS[family]()
    theirs = saved(base, tmp_path, **options)
    expected = {}
    for name, layer in theirs.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            delta = layer.get_delta_weight("default").detach()
            wide = isinstance(layer.get_base_layer(), Conv1D | nn.Embedding)
            expected[name] = delta.T if wide else delta
    with load_plan(tmp_path, table_of(base), max_lora_rank=16) as plan:
        found: dict[str, list[torch.Tensor]] = {}
        for factor in plan.factors:
            found.setdefault(factor.path, []).append(factor.scaling * factor.b.read() @ factor.a.read())
    assert set(found) == set(expected)
    for name, delta in expected.items():
        torch.testing.assert_close(torch.cat(found[name]), delta, rtol=1e-5, atol=1e-6)
    assert len(plan.ignored) == sum("base_layer" in text for text in plan.ignored) + ("fan_in_fan_out" in options) + (
        "ensure_weight_tying" in options
    )


def test_headless(tmp_path: Path) -> None:
    """Trained on LlamaModel, served on LlamaForCausalLM."""
    base = MODELS["llama"]()
    inner = LlamaModel(base.config)
    inner.load_state_dict(base.model.state_dict())
    saved(inner, tmp_path, target_modules=["q_proj", "down_proj"], rank_pattern={"layers.1.mlp.down_proj": 2})
    plan = load_plan(tmp_path, table_of(base), max_lora_rank=16)
    assert {(factor.path, factor.rank) for factor in plan.factors} == {
        (f"model.layers.{i}.{name}", 2 if (i, name) == (1, "mlp.down_proj") else 4)
        for i in (0, 1)
        for name in ("self_attn.q_proj", "mlp.down_proj")
    }


LATER = [
    ({"init_lora_weights": "pissa_niter_2"}, "PiSSA"),
    ({"layer_replication": [[0, 2], [0, 2]]}, "layer_replication"),
]


@pytest.mark.parametrize(("options", "words"), LATER, ids=lambda x: str(x)[:40])
def test_what_comes_later_is_refused(options: dict, words: str, tmp_path: Path) -> None:
    base = MODELS["llama"]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(
            copy.deepcopy(base), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
        )
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                nn.init.normal_(parameter)
        model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedAdapterError, match=words):
        load_plan(tmp_path, table_of(base), max_lora_rank=16)


def test_saved_copies_that_were_not_trained(tmp_path: Path) -> None:
    """modules_to_save without training, or save_embedding_layers=True: copies of the base, accepted."""
    base = MODELS["llama"]()
    model = get_peft_model(copy.deepcopy(base), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.save_pretrained(tmp_path / "a")
    plan = load_plan(tmp_path / "a", table_of(base), max_lora_rank=16)
    assert plan.ignored == ["base_model.model.lm_head.weight: a copy of the base's own weight"]
    model = get_peft_model(copy.deepcopy(base), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "b", save_embedding_layers=True)
    assert len(load_plan(tmp_path / "b", table_of(base), max_lora_rank=16).ignored) == 2


def test_lost_tensors_of_a_real_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = MODELS["llama"]()
    saved(base, tmp_path, target_modules="all-linear")
    file = tmp_path / "adapter_model.safetensors"
    whole = load_file(file)
    for lost in sorted(whole):
        save_file({key: value for key, value in whole.items() if key != lost}, file)
        with pytest.raises(AdapterFormatError, match="never taken as zero"):
            load_plan(tmp_path, table_of(base), max_lora_rank=16)
    for module in sorted({key.rpartition(".lora_")[0] for key in whole}):
        save_file({key: value for key, value in whole.items() if not key.startswith(f"{module}.")}, file)
        with pytest.raises(AdapterFormatError, match=module.removeprefix("base_model.model.")):
            load_plan(tmp_path, table_of(base), max_lora_rank=16)
