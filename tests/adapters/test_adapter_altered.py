"""PiSSA, OLoRA and KaSA on the clean base; block-diagonal factors; pooled input; leftovers of training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_bed import H, adapter, config, llama, load, phi3
from peft import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from peft.tuners.lora.variants import BlockDiagonalLinear
from peft_bed import assert_same, make, saved, some_ids, table_of
from test_adapter_dora import ALL, base_of, fuse

from hf_multilora.adapters.altered import block_diagonal
from hf_multilora.adapters.load import load_plan
from hf_multilora.errors import AdapterFormatError, SlotError, UnsupportedAdapterError

BOTH = BdLoraConfig(nblocks=2, target_modules_bd_a=["o_proj", "down_proj"], target_modules_bd_b=["q_proj", "up_proj"])
ON_B = BdLoraConfig(nblocks=4, target_modules_bd_b=["qkv_proj"])
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {"init_lora_weights": "pissa", "target_modules": ALL}, 2),
    ("llama", {"init_lora_weights": "pissa", "target_modules": ["q_proj", "lm_head"], "use_rslora": True}, 2),
    ("biased", {"init_lora_weights": "pissa", "use_dora": True, "target_modules": ["q_proj", "down_proj"]}, 2),
    ("gpt2", {"init_lora_weights": "pissa", "target_modules": ["c_attn", "c_fc"]}, 2),
    ("phi3", {"init_lora_weights": "pissa", "target_modules": "all-linear", "alpha_pattern": {"qkv_proj": 3}}, 2),
    ("llama", {"init_lora_weights": "olora", "target_modules": ALL, "rank_pattern": {"k_proj": 2}}, 2),
    ("phi3", {"init_lora_weights": "olora", "target_modules": "all-linear"}, 2),
    ("llama", {"kasa_config": KasaConfig(), "target_modules": ["q_proj", "v_proj", "down_proj"]}, 2),
    ("llama", {"use_bdlora": BOTH, "target_modules": ["o_proj", "down_proj", "q_proj", "up_proj"]}, 1),
    ("phi3", {"use_bdlora": ON_B, "target_modules": ["qkv_proj"]}, 1),
    ("llama", {"monteclora_config": MontecloraConfig(), "target_modules": ["q_proj", "v_proj"]}, 1),
    ("llama", {"velora_config": VeloraConfig(), "target_modules": ["q_proj", "v_proj"]}, 1),
    ("llama", {"init_lora_weights": "mica", "target_modules": ["q_proj", "v_proj"]}, 1),
    ("llama", {"init_lora_weights": "orthogonal", "target_modules": ["q_proj", "v_proj"]}, 1),
]  # fmt: skip


@pytest.mark.parametrize(("family", "options", "times"), CASES, ids=lambda x: str(x)[:60])
def test_as_peft(family: str, options: dict, times: int, tmp_path: Path) -> None:
    base = make(family)
    theirs = saved(base, tmp_path, **options)
    table = table_of(base)
    with load_plan(tmp_path, table, max_lora_rank=8) as plan:
        assert_same(theirs, base, plan, table)
        assert {factor.rank for factor in plan.factors} <= {2 * times, 4 * times}
        assert bool(plan.converted) == (times == 2 or "use_bdlora" in options)
        leftovers = [text for text in plan.ignored if "used in training only" in text]
        assert bool(leftovers) == ("monteclora_config" in options or "velora_config" in options)


@pytest.mark.parametrize("method", ["pissa", "olora"])
def test_fused_training_on_separate_layers(method: str) -> None:
    """What left the base is a part of the fused weight, whichever way the model keeps it."""
    base = base_of(llama())
    fused, split = phi3(base=fuse(base)), llama(base=base)
    tensors = adapter(fused, ["qkv_proj"])
    found = []
    for targets in (fused, split):
        with load(tensors, targets, config(init_lora_weights=method)) as plan:
            found.append([factor.b.read() @ factor.a.read() for factor in plan.factors])
            assert {factor.rank for factor in plan.factors} == {8} and len(plan.factors) == 6
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_twice_the_rank_must_fit() -> None:
    targets = llama(base=base_of(llama()))
    tensors = adapter(targets, ["q_proj"])
    with pytest.raises(SlotError, match="rank 8 .twice its own, for PiSSA on the clean base., over max_lora_rank=7"):
        load(tensors, targets, config(init_lora_weights="pissa"), max_lora_rank=7)


def test_what_peft_does_not_define() -> None:
    targets = llama(base=base_of(llama()))
    with pytest.raises(UnsupportedAdapterError, match="embed_tokens' is an embedding: PEFT has no PiSSA"):
        load(adapter(targets, ["embed_tokens"]), targets, config(init_lora_weights="pissa"))
    with pytest.raises(UnsupportedAdapterError, match="aLoRA.*PiSSA's base"):
        load(adapter(targets, ["q_proj"]), targets, config(init_lora_weights="pissa", alora_invocation_tokens=[3]))
    with pytest.raises(UnsupportedAdapterError, match="each alters the base"):
        load(adapter(targets, ["q_proj"]), targets, config(init_lora_weights="pissa", kasa_config={"beta": 1}))
    with pytest.raises(AdapterFormatError, match="PiSSA of rank 33 on a layer of 32 x 32"):
        load(adapter(targets, ["q_proj"], r=33), targets, config(init_lora_weights="pissa", r=33), max_lora_rank=99)
    with pytest.raises(AdapterFormatError, match="kasa_config=true.*singular values"):
        load(adapter(targets, ["q_proj"]), targets, config(kasa_config={"beta": 1}))


def test_olora_on_conv1d(tmp_path: Path) -> None:
    """PEFT decomposes the weight as it lies, [in, out], and its factors fit nothing."""
    base = make("gpt2")
    saved(base, tmp_path, target_modules=["c_attn"], init_lora_weights="olora")
    with pytest.raises(UnsupportedAdapterError, match="c_attn' is a Conv1D .* PEFT's OLoRA is not defined"):
        load_plan(tmp_path, table_of(base), max_lora_rank=16)


def test_base_that_the_file_ships() -> None:
    """A residual weight in the file is what A and B belong to: nothing has to be computed again."""
    base = base_of(llama())
    targets = llama(base=base)
    a, b = adapter(targets, ["lm_head"]).values()
    tensors = adapter(targets, ["lm_head"])
    key = "base_model.model.lm_head.base_layer.weight"
    residual = torch.randn(64, H)
    for method in ("pissa", "olora"):
        with load(tensors | {key: residual}, targets, config(init_lora_weights=method)) as plan:
            assert plan.factors == () and [item.path for item in plan.saved] == ["lm_head"]
            torch.testing.assert_close(plan.saved[0].ref.read(), residual + 2 * b @ a)
        with load(tensors | {key: base["lm_head.weight"].clone()}, targets, config(init_lora_weights=method)) as plan:
            assert plan.factors[0].rank == 4 and plan.saved == ()


HEAD = ["q_proj", "lm_head"]
SHIPPED: list[tuple[str, dict[str, Any]]] = [
    (family, options)
    for family in ("llama", "tied")
    for options in (
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa", "use_dora": True},
        {"init_lora_weights": "olora"},
        {"kasa_config": KasaConfig()},
    )
]


@pytest.mark.parametrize(("family", "options"), SHIPPED, ids=str)
def test_altered_heads(family: str, options: dict, tmp_path: Path) -> None:
    """PEFT ships the altered weight; where it is tied, the embedding changed with it."""
    base = make(family)
    theirs = saved(base, tmp_path / "with", target_modules=HEAD, **options)
    table = table_of(base)
    with load_plan(tmp_path / "with", table, max_lora_rank=8) as plan:
        assert_same(theirs, base, plan, table)
        # at run time a saved weight takes the place of all that the layer gives: no factor may count beside it
        assert {item.path for item in plan.saved}.isdisjoint(factor.path for factor in plan.factors)
    theirs = saved(base, tmp_path / "without", save_embedding_layers=False, target_modules=HEAD, **options)
    if family == "tied":
        with pytest.raises(UnsupportedAdapterError, match="'lm_head' is tied to; the file does not hold it"):
            load_plan(tmp_path / "without", table, max_lora_rank=8)
        return
    with load_plan(tmp_path / "without", table, max_lora_rank=8) as plan:
        assert_same(theirs, base, plan, table)


def test_altered_head_of_another_size(tmp_path: Path) -> None:
    base = make("tied")
    larger = copy.deepcopy(base)
    larger.resize_token_embeddings(68, mean_resizing=False)
    theirs = saved(larger, tmp_path, save_embedding_layers=True, target_modules=HEAD, init_lora_weights="pissa")
    table = table_of(base)
    with load_plan(tmp_path, table, max_lora_rank=8) as plan:
        assert plan.vocab_size == 68
        assert_same(theirs, base, plan, table, some_ids(68))


def test_base_that_cannot_be_read() -> None:
    plan = load(adapter(llama(), ["q_proj"]), llama(), config(init_lora_weights="olora"))
    with pytest.raises(UnsupportedAdapterError, match="OLoRA's part of model.layers.0.self_attn.q_proj is computed"):
        plan.factors[0].a.read()


def test_block_diagonal_is_pefts() -> None:
    layer = BlockDiagonalLinear(12, 8, nblocks=4)
    assert block_diagonal(layer.weight.detach(), 4).equal(layer.weight_as_blockdiagonal_matrix())


def test_qalora() -> None:
    """PEFT's own formula (it serves GPTQ layers alone): the mean over each group, times the number of groups."""
    targets = llama()
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    a, b = torch.randn(4, H // 8), torch.randn(H, 4)
    tensors = {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    with load(tensors, targets, config(use_qalora=True, qalora_group_size=8)) as plan:
        (factor,) = plan.factors
        x = torch.randn(5, H)
        pooled = x.view(5, H // 8, 8).mean(2) * (H // 8)
        torch.testing.assert_close(x @ factor.a.read().T @ factor.b.read().T, pooled @ a.T @ b.T)
        assert "QALoRA" in plan.converted[0]
    for fields in ({"use_qalora": True}, {"use_bdlora": {"nblocks": 2}}):
        plan = load(adapter(targets, ["q_proj"]), targets, config(**fields))
        assert plan.converted == [] and next(iter(fields)) in plan.warnings[0]
