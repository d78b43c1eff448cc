"""Biases, saved modules, vocabularies and trained tokens: the plan on the base is the model that PEFT saved."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_bed import config, factors, load
from peft_bed import assert_same, make, saved, some_ids, table_of

from hf_multilora.adapters.load import load_plan
from hf_multilora.errors import AdapterFormatError, UnsupportedAdapterError

WB = ("weight", "bias")
Q = {"target_modules": ["q_proj"]}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("biased", {"bias": "lora_only", "target_modules": ["q_proj", "down_proj"]}),
    ("biased", {"bias": "all", **Q}),
    ("biased", {"bias": "all", "use_dora": True, "target_modules": ["q_proj", "up_proj"]}),
    ("qwen2", {"bias": "all", **Q}),
    ("gpt2", {"bias": "all", "target_modules": ["c_attn"]}),
    ("gpt2", {"bias": "lora_only", "use_dora": True, "target_modules": ["c_attn", "c_fc"]}),
    ("bert-cls", {"bias": "all", "target_modules": ["query"]}),
    ("llama", {"modules_to_save": ["lm_head"], **Q}),
    ("llama", {"modules_to_save": ["embed_tokens", "norm"], **Q}),
    ("llama", {"modules_to_save": ["embed_tokens", "lm_head"], **Q}),
    ("llama", {"modules_to_save": ["layers.1.mlp"], **Q}),
    ("tied", {"modules_to_save": ["lm_head"], **Q}),
    ("tied", {"modules_to_save": ["embed_tokens"], **Q}),
    ("tied", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True, **Q}),
    ("gemma", {"modules_to_save": ["embed_tokens"], **Q}),
    ("gpt2", {"modules_to_save": ["ln_f", "wpe"], "target_modules": ["c_attn"]}),
    ("phi3", {"modules_to_save": ["input_layernorm"], "target_modules": ["qkv_proj"]}),
    ("gpt2", {"modules_to_save": ["attn.c_attn"], "target_modules": ["c_fc"]}),
    ("gpt2", {"modules_to_save": ["c_fc", "mlp.c_proj"], "target_modules": ["c_attn"]}),
    ("t5", {"modules_to_save": ["lm_head"], "target_modules": ["q"]}),
    ("llama-cls", {"task_type": "SEQ_CLS", **Q}),
    ("bert-cls", {"task_type": "SEQ_CLS", "target_modules": ["query"]}),
    ("roberta-cls", {"task_type": "SEQ_CLS", "target_modules": ["query"]}),
    ("llama", {"trainable_token_indices": [3, 60, 7], **Q}),
    ("llama", {"trainable_token_indices": {"embed_tokens": [5, 6], "lm_head": [9, 5, 8]}, **Q}),
    ("tied", {"trainable_token_indices": [3, 60, 7], **Q}),
    ("tied", {"trainable_token_indices": {"embed_tokens": [5, 6], "lm_head": [5, 6]}, **Q}),
    ("tied", {"trainable_token_indices": {"embed_tokens": [5, 6], "lm_head": [9, 8]}, **Q}),
    ("tied", {"trainable_token_indices": {"lm_head": [9, 8]}, **Q}),
    ("gemma", {"trainable_token_indices": [3, 4], **Q}),
    ("gpt2", {"trainable_token_indices": {"wte": [3, 4]}, "target_modules": ["c_attn"]}),
    ("t5", {"trainable_token_indices": {"shared": [3, 4]}, "target_modules": ["q"]}),
    ("llama", {"trainable_token_indices": [3, 60, 7], "target_modules": ["q_proj", "lm_head"]}),
    ("tied", {"trainable_token_indices": [3, 60, 7], "target_modules": ["q_proj", "lm_head"]}),
    ("tied", {"trainable_token_indices": {"embed_tokens": [5]}, "target_modules": ["lm_head"], "use_rslora": True}),
    ("gpt2", {"trainable_token_indices": [3, 60, 7], "target_modules": ["c_attn", "lm_head"]}),
]


@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_as_peft(family: str, options: dict, tmp_path: Path) -> None:
    base = make(family)
    theirs = saved(base, tmp_path, **options)
    table = table_of(base)
    with load_plan(tmp_path, table, max_lora_rank=16) as plan:
        assert_same(theirs, base, plan, table)
        assert plan.vocab_size is None and not plan.warnings


def test_token_rows_under_a_head_with_lora(tmp_path: Path) -> None:
    """PEFT's LoRA of the head comes on top of the trained rows; no more than A and B is served there."""
    base = make("tied")
    options: dict[str, Any] = {"trainable_token_indices": [3, 7], "target_modules": ["lm_head"]}
    saved(base, tmp_path / "a", **options)
    with load_plan(tmp_path / "a", table_of(base), max_lora_rank=16) as plan:
        rows = {item.path: item.ref.read() for item in plan.tokens}
        (factor,) = plan.factors
        assert factor.a is not None and factor.b is not None
        update = factor.scaling * factor.b.read()[[3, 7]] @ factor.a.read()
        torch.testing.assert_close(rows["lm_head"], rows["model.embed_tokens"] + update)
    for name, more in (("DoRA", {"use_dora": True}), ("a bias of B", {"lora_bias": True})):
        saved(base, tmp_path / name, **options, **more)
        with pytest.raises(UnsupportedAdapterError, match=f"{name}, on 'lm_head'.*trainable_token_indices"):
            load_plan(tmp_path / name, table_of(base), max_lora_rank=16)


def test_incomplete_conv1d() -> None:
    """Its weight is [in, out]: widths are compared at the outputs, also where enabling left it out."""
    full = table_of(make("gpt2"))
    path = "transformer.h.0.mlp.c_fc"
    rest = {key: target for key, target in full.targets.items() if key != path}
    for table in (full, replace(full, targets=rest, untargeted=frozenset({path}))):
        own = {f"base_model.model.{path}.{leaf}": torch.randn(table.parameters[f"{path}.{leaf}"]) for leaf in WB}
        tensors = factors("transformer.h.0.attn.c_attn", 32, 96)
        fields = config(modules_to_save=[path])
        assert {item.path for item in load(tensors | own, table, fields).saved} == {path}
        del own[f"base_model.model.{path}.bias"]
        with pytest.raises(AdapterFormatError, match="c_fc.bias: it is incomplete"):
            load(tensors | own, table, fields)


RESIZED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"modules_to_save": ["embed_tokens", "lm_head"], **Q}),
    ("llama", Q),
    ("tied", Q),
    ("tied", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True, **Q}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_dora": True, "use_rslora": True}),
    ("gpt2", {"target_modules": ["c_attn"]}),
    ("t5", {"target_modules": ["q"]}),
    ("llama", {"trainable_token_indices": [65, 3, 67], **Q}),
    ("tied", {"trainable_token_indices": [65, 3, 67], **Q}),
    ("gpt2", {"trainable_token_indices": {"wte": [66]}, "target_modules": ["c_attn"]}),
]


@pytest.mark.parametrize(("family", "options"), RESIZED, ids=str)
@pytest.mark.parametrize("more", [4, 7])
def test_resized(family: str, options: dict, more: int, tmp_path: Path) -> None:
    base = make(family)
    larger = copy.deepcopy(base)
    larger.resize_token_embeddings(64 + more, mean_resizing=False)
    theirs = saved(larger, tmp_path, save_embedding_layers=True, **options)
    table = table_of(base)
    with load_plan(tmp_path, table, max_lora_rank=16) as plan:
        assert plan.vocab_size == 64 + more
        assert_same(theirs, base, plan, table, some_ids(64 + more))


def test_added_tokens_of_a_tied_model(tmp_path: Path) -> None:
    """Nothing but the new rows is saved, and the head has them as well."""
    base = make("tied")
    larger = copy.deepcopy(base)
    larger.resize_token_embeddings(68, mean_resizing=False)
    theirs = saved(larger, tmp_path, save_embedding_layers=False, trainable_token_indices=[64, 65, 66, 67, 2], **Q)
    table = table_of(base)
    with load_plan(tmp_path, table, max_lora_rank=16) as plan:
        assert plan.vocab_size == 68 and {rows.path for rows in plan.tokens} == {"model.embed_tokens", "lm_head"}
        assert_same(theirs, base, plan, table, some_ids(68))


def test_alora_config(tmp_path: Path) -> None:
    base = make("llama")
    saved(base, tmp_path, alora_invocation_tokens=[5, 6, 7], **Q)
    with load_plan(tmp_path, table_of(base), max_lora_rank=16) as plan:
        assert plan.invocation == (5, 6, 7)
