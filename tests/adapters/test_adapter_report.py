"""What a plan, `inspect` and `check` say about an adapter: what is used and converted, and what matched nothing."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from adapter_bed import H, V, adapter, config, llama, load, phi3
from peft_bed import make, saved
from test_adapter_dora import base_of, with_magnitudes

from hf_multilora import enable_multilora
from hf_multilora.checks import check_adapter, inspect_adapter

OPTIONS = {
    "use_dora": True,
    "target_modules": ["q_proj", "nothing"],
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [3, 5],
    "alpha_pattern": {r".*\.0\..*": 3, "o_proj": 5},
}


def test_facts() -> None:
    targets = llama(base=base_of(llama()))
    tensors = with_magnitudes(adapter(targets, ["q_proj"]))
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_velora_embed"] = torch.ones(3)
    tensors["base_model.model.lm_head.weight"] = torch.ones(V, H)
    tensors["base_model.model.model.embed_tokens.weight"] = base_of(llama())["model.embed_tokens.weight"]
    plan = load(tensors, targets, config(use_dora=True, target_modules=["q_proj", "x"], rank_pattern={"y.*": 3}))
    facts = plan.facts()
    assert facts["tensors"] == len(tensors) - 2 and len(plan.ignored) == 2
    assert facts["features"] == ["DoRA (2)", "saved modules (lm_head)"]
    assert facts["scalings"] == {f"model.layers.{i}.self_attn.q_proj": 2.0 for i in (0, 1)}
    assert facts["saved"] == {"lm_head.weight": [V, H]} and facts["vocab_size"] is None
    assert facts["unmatched"] == ["target_modules: 'x'", "rank_pattern: 'y.*'"]
    assert json.loads(json.dumps(facts)) == facts


def test_other_layouts_are_converted() -> None:
    plan = load(adapter(phi3(), ["qkv_proj"]), llama(), config())
    assert plan.converted == ["qkv_proj: dealt out to q_proj, k_proj, v_proj (2 x)"]
    plan = load(adapter(llama(), ["q_proj"]), phi3(), config())
    assert plan.converted == ["q_proj: a part of qkv_proj (2 x)"]


def test_inspect_check_and_load_agree(tmp_path: Path) -> None:
    base = make("llama")
    base.save_pretrained(tmp_path / "base")
    folder = tmp_path / "adapter"
    saved(base, folder, lambda model: model.peft_config["default"].target_modules.add("nothing"), **OPTIONS)
    found = inspect_adapter(str(folder))
    assert found.refused is None and found.features == ["DoRA (2)", "whole modules (lm_head)", "token rows"]
    assert found.unmatched == ["target_modules: 'nothing'", "alpha_pattern: 'o_proj'"]
    assert "DoRA (2)" in str(found) and "'nothing'" in str(found)
    checked = check_adapter(str(folder), str(tmp_path / "base"))
    assert checked.features == ["DoRA (2)", "saved modules (lm_head)", "token rows (model.embed_tokens)"]
    assert checked.scalings == {f"model.layers.{i}.self_attn.q_proj": (0.75, 1.5)[i] for i in (0, 1)} == found.scalings
    assert checked.tokens == {"model.embed_tokens": [3, 5]} and json.loads(json.dumps(checked.to_dict()))
    text = str(checked)
    for words in ("0.75 (1), 1.5 (1)", "lm_head.weight 64x32", "'nothing'", "8 used"):
        assert words in text, text
    enable_multilora(base, max_loras=2, max_lora_rank=16, slot_bytes=1 << 20)
    report = base.multilora.load(folder, "a")
    for field in ("tensors", "features", "scalings", "saved", "tokens", "unmatched", "converted", "vocab_size"):
        assert getattr(report, field) == getattr(checked, field), field
    assert report.nbytes == checked.nbytes
    assert "lm_head.weight 64x32" in str(report) and "lm_head.weight 64x32" in report._repr_html_()


def test_a_slot_that_is_too_small_is_said(tmp_path: Path) -> None:
    base = make("llama")
    base.save_pretrained(tmp_path / "base")
    saved(base, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["mlp"])
    checked = check_adapter(str(tmp_path / "adapter"), str(tmp_path / "base"), max_lora_rank=4)
    assert checked.nbytes > checked.slot_bytes and f"it needs slot_bytes={checked.nbytes}" in str(checked)
