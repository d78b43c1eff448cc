"""Mixtures of experts: adapters in every format, on attention alone, and base rows, in one batch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from moe_bed import (
    FAMILIES,
    ROWS,
    adapters,
    bare,
    batch,
    enabled,
    logits,
    merged,
)
from peft import LoraConfig, get_peft_model
from transformers import CompileConfig

from hf_multilora import disable_multilora, enable_multilora, estimate_memory
from hf_multilora.errors import ModelError, SlotError, UnsupportedAdapterError


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_is_its_adapter_merged(family, implementation):
    model = enabled(family, implementation)
    for tokens in (4, 20):
        got, plain = logits(model, tokens, adapter_ids=ROWS), logits(bare(family, implementation), tokens)
        for row, name in enumerate(ROWS):
            kept = batch(tokens)["attention_mask"][row].bool()
            if name is None:
                if implementation == "batched_mm" or family == "llama4":
                    assert torch.equal(got[row], plain[row])
                else:
                    torch.testing.assert_close(got[row][kept], plain[row][kept], rtol=1e-6, atol=2e-6)
                continue
            want = logits(merged(family, adapters(family)[name][0], implementation), tokens)[row]
            assert (want - plain[row])[kept].abs().max() > 0.1, "an adapter that changes nothing would prove nothing"
            torch.testing.assert_close(got[row][kept], want[kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_merged_weights(family):
    model, options = enabled(family), {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    got = model.generate(**batch(5), **options, adapter_ids=ROWS)
    for name in dict.fromkeys(ROWS):
        adapter = None if name is None else adapters(family)[name][0]
        want = merged(family, adapter).generate(**batch(5), **options)
        for row in [row for row, id in enumerate(ROWS) if id == name]:
            assert got[row].tolist() == want[row].tolist(), name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4"])
def test_neighbours_change_no_bit(family):
    model = enabled(family)
    for tokens in (1, 3, 18):
        for row, name in enumerate(ROWS):
            if name is None:
                continue
            alone: list[str | None] = [None] * len(ROWS)
            alone[row] = name
            assert torch.equal(
                logits(model, tokens, adapter_ids=alone)[row], logits(model, tokens, adapter_ids=ROWS)[row]
            )


def test_poison_stays_in_its_rows():
    model = enabled("qwen3_moe", max_loras=6)
    tensors, config = adapters("qwen3_moe")["all"][1]
    bad = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    model.multilora.load(bad, "nan", config=config)
    want = logits(model, 5, adapter_ids=ROWS)
    got = logits(model, 5, adapter_ids=["3-D", "nan", *ROWS[2:]])
    assert got[1].isnan().any()
    keep = [0, *range(2, len(ROWS))]
    assert torch.equal(got[keep], want[keep])


def test_mixes_and_orders():
    model = enabled("mixtral", max_lora_rank=16)
    mix = {"3-D": 0.5, "shared outer": -1.5}
    got = logits(model, 4, adapter_ids=[mix, *ROWS[1:]])
    parts = [adapters("mixtral")[name][0] for name in mix]
    both = merged("mixtral", None)
    plain = [dict(model_.named_parameters()) for model_ in (merged("mixtral", part) for part in parts)]
    with torch.no_grad():
        for name, parameter in both.named_parameters():
            base = parameter.clone()
            for weight, one in zip(mix.values(), plain, strict=True):
                parameter.add_(weight * (one[name] - base))
    torch.testing.assert_close(got[0], logits(both, 4)[0], rtol=1e-5, atol=1e-5)
    turned = logits(model, 4, adapter_ids=list(reversed(ROWS)))
    same = ROWS.index("attention")
    if ROWS[-1 - same] == "attention":
        assert torch.equal(turned[same], got[same])


def test_a_slot_of_the_usual_size_refuses_experts_by_their_bytes():
    model = enable_multilora(bare("qwen3_moe"), max_loras=2, max_lora_rank=5)
    tensors, config = adapters("qwen3_moe")["attention"][1]
    model.multilora.load(dict(tensors), "attention", config=config)
    tensors, config = adapters("qwen3_moe")["all"][1]
    with pytest.raises(SlotError, match=r"slot_bytes=\d+ or more.*experts\.gate_proj"):
        model.multilora.load(dict(tensors), "all", config=config)
    estimate = estimate_memory(bare("qwen3_moe"), max_loras=2, max_lora_rank=5)
    assert estimate["adapter"] > estimate["slot"] and "experts" in next(iter(estimate["largest"]))


def test_an_implementation_without_a_place_for_deltas():
    model = enabled("qwen3_moe")
    model.config._experts_implementation = "deepgemm"
    for layer in model.model.layers:
        layer.mlp.experts.config._experts_implementation = "deepgemm"
    with pytest.raises(ModelError, match="deepgemm"):
        logits(model, 4, adapter_ids=ROWS)
    opaque = bare("qwen3_moe")
    opaque.config._experts_implementation = "deepgemm"
    refused = enable_multilora(opaque, max_loras=2, max_lora_rank=8, slot_bytes=4 << 20)
    tensors, config = adapters("qwen3_moe")["3-D"][1]
    with pytest.raises(UnsupportedAdapterError, match="deepgemm"):
        refused.multilora.load(dict(tensors), "3-D", config=config)
    tensors, config = adapters("qwen3_moe")["attention"][1]
    refused.multilora.load(dict(tensors), "attention", config=config)


def test_disable_restores():
    want = logits(bare("deepseek_v3"), 4)
    model = enabled("deepseek_v3")
    classes = {name: type(module) for name, module in bare("deepseek_v3").named_modules()}
    disable_multilora(model)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert torch.equal(logits(model, 4), want)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_one_graph_serves_every_mix(family):
    """Experts and routers in a compiled step: fullgraph, equal tokens, nothing compiled for another mix."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()  # of what other tests have left
    model = enabled(family)
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)  # type: ignore[arg-type]
    config._compile_all_devices = True  # type: ignore[assignment]  # generate() compiles by itself on a GPU only
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    static = {**options, "cache_implementation": "static", "compile_config": config}
    mixes: list[Any] = [ROWS, list(reversed(ROWS)), "all", ["attention"] * len(ROWS)]
    made = []
    for names in mixes:
        got = model.generate(**batch(5), **static, adapter_ids=names)
        assert torch.equal(got, model.generate(**batch(5), **options, adapter_ids=names)), names
        made.append(counters["stats"]["unique_graphs"])
    assert made[0] and made == made[:1] * len(mixes) and not counters["graph_break"]


def test_experts_cost_graphs_nothing_until_an_adapter_trains_them():
    model = enable_multilora(bare("qwen3_moe"), max_loras=2, max_lora_rank=8, slot_bytes=4 << 20)
    tensors, config = adapters("qwen3_moe")["attention"][1]
    model.multilora.load(dict(tensors), "attention", config=config)
    assert not model.multilora.store.arena.rare
    tensors, config = adapters("qwen3_moe")["2-D"][1]
    model.multilora.load(dict(tensors), "2-D", config=config)
    assert model.multilora.store.arena.rare


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4"])
def test_a_peft_model_with_target_parameters_is_taken_over(family):
    base = bare(family)
    want_base = logits(base, 4)
    attention, names = ["q_proj", "o_proj"], ["gate_up_proj", "down_proj"]
    config = LoraConfig(r=3, lora_alpha=6, target_modules=attention, target_parameters=names, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = get_peft_model(base, config, adapter_name="one").eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    want = logits(theirs, 4)
    model = enable_multilora(theirs, max_loras=2, max_lora_rank=8, slot_bytes=4 << 20)
    got = logits(model, 4, adapter_ids=["one", None] * 3 + ["one"])
    torch.testing.assert_close(got[::2], want[::2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1::2], want_base[1::2], rtol=1e-6, atol=2e-6)
    assert (want - want_base)[0].abs().max() > 0.1
    disable_multilora(model)
    assert torch.equal(logits(theirs, 4), want)
