"""Files that PEFT itself wrote for models with experts: the plan is the difference that PEFT's merging makes."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_bed import PREFIX, pair
from peft import PeftModel
from peft_bed import saved
from safetensors.torch import save_file
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hf_multilora.adapters.load import load_plan
from hf_multilora.adapters.plan import AdapterPlan
from hf_multilora.adapters.targets import TargetTable
from hf_multilora.config import MultiLoraConfig
from hf_multilora.survey import survey

E, H, INNER = 5, 24, 10
SMALL = {"hidden_size": H, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 2, "pad_token_id": 0}
MOE = SMALL | {"num_key_value_heads": 1, "intermediate_size": INNER, "num_experts_per_tok": 2}
QWEN = MOE | {"head_dim": 6, "intermediate_size": 14, "moe_intermediate_size": INNER, "num_experts": E}
LLAMA4 = MOE | {"head_dim": 6, "intermediate_size_mlp": 14, "interleave_moe_layer_step": 1, "num_local_experts": E}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN, mlp_only_layers=[1])),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**MOE, num_local_experts=E)),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**MOE, head_dim=6, num_local_experts=E)),
    "llama4": lambda: Llama4ForCausalLM(Llama4TextConfig(**LLAMA4 | {"num_experts_per_tok": 1})),
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def make(family: str) -> tuple[PreTrainedModel, TargetTable]:
    torch.manual_seed(len(family))
    model = FAMILIES[family]().eval()
    return model, survey(model, MultiLoraConfig()).table


def merged(theirs: nn.Module, base: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameter -> what merging changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = dict(theirs.merge_and_unload().named_parameters())
    before = dict(base.named_parameters())
    assert set(after) == set(before)
    changes = {name: (after[name] - before[name]).detach().double() for name in before}
    return {name: change for name, change in changes.items() if change.any()}


def of_plan(plan: AdapterPlan, table: TargetTable, base: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The same from a plan."""
    changes: dict[str, torch.Tensor] = {}
    for factor in plan.factors:
        assert factor.a is not None and factor.b is not None
        delta = factor.scaling * (factor.b.read().double() @ factor.a.read().double())
        if factor.kind == "linear":
            changes[f"{factor.path}.weight"] = delta
            continue
        path, _, name = factor.path.rpartition(".")
        block = table.blocks[path]
        parameter = f"{path}.{block.down if name == 'down_proj' else block.gate_up}"
        change = changes.setdefault(parameter, torch.zeros(base.get_parameter(parameter).shape).double())
        rows = change.transpose(1, 2) if block.transposed else change
        if name == "down_proj":
            rows += delta
        elif block.interleaved:
            rows[:, int(name == "up_proj") :: 2] += delta
        else:
            rows[:, block.intermediate * int(name == "up_proj") :][:, : block.intermediate] += delta
    return changes


def assert_same(theirs: nn.Module, base: PreTrainedModel, table: TargetTable, plan: AdapterPlan) -> None:
    expected, got = merged(theirs, base), of_plan(plan, table, base)
    assert set(got) == set(expected)
    for name, change in expected.items():
        torch.testing.assert_close(got[name], change, rtol=1e-4, atol=1e-5)


ROUTER = {"gpt_oss": "router.weight", "llama4": "q_proj.weight"}
OPTIONS: dict[str, dict[str, Any]] = {
    "both": {"target_parameters": EXPERTS},
    "gate_up": {"target_parameters": EXPERTS[:1], "target_modules": ["q_proj"]},
    "down": {"target_parameters": EXPERTS[1:], "use_rslora": True},
    "patterns": {
        "target_parameters": [*EXPERTS, "gate.weight"],
        "rank_pattern": {"experts.gate_up_proj": 3, "gate.weight": 2, "router.weight": 2},
        "alpha_pattern": {"experts.down_proj": 11, "gate.weight": 5, "router.weight": 5},
        "use_rslora": True,
    },
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_target_parameters(family: str, options: str, tmp_path: Path) -> None:
    base, table = make(family)
    fields = {"target_modules": [], **OPTIONS[options]}
    names = [ROUTER.get(family, name) if name == "gate.weight" else name for name in fields["target_parameters"]]
    theirs = saved(base, tmp_path, **{**fields, "target_parameters": names})
    with load_plan(tmp_path, table, max_lora_rank=16) as plan:
        assert_same(theirs, base, table, plan)
        assert plan.facts()["tensors"] == len(plan.checkpoint.infos)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("mixtral", ["q_proj", "w1", "w2", "w3"]),
        ("mixtral", "all-linear"),
        ("qwen3_moe", ["o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("qwen3_moe", "all-linear"),
        ("gpt_oss", "all-linear"),
    ],
    ids=str,
)
def test_old_names_of_experts(family: str, targets: list[str] | str, tmp_path: Path) -> None:
    """PEFT turns them into parameters, of twice the rank for gate and up."""
    base, table = make(family)
    theirs = saved(base, tmp_path, target_modules=targets)
    with load_plan(tmp_path, table, max_lora_rank=16) as plan:
        assert_same(theirs, base, table, plan)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_single_experts_and_their_conversion(family: str, tmp_path: Path) -> None:
    """A file of single experts is what PEFT makes of it; and so is the file that PEFT saves after that."""
    base, table = make(family)
    torch.manual_seed(3)
    old = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if family == "mixtral" else {}
    tensors: dict[str, torch.Tensor] = {}
    for path, block in table.blocks.items():
        stem = path.replace(".mlp.", ".block_sparse_moe.") if old else path
        for name in block.projections:
            inside, out = (INNER, H) if name == "down_proj" else (H, INNER)
            for i in range(E):
                factors = torch.randn(4, inside), torch.randn(out, 4)
                tensors |= pair(f"{stem}.{i}.{old.get(name, name)}", factors)
    q_proj = [name for name in table.targets if name.endswith("q_proj")]
    for path in q_proj:
        target = table.targets[path]
        tensors |= pair(path, (torch.randn(4, target.in_features), torch.randn(target.out_features, 4)))
    names = [old.get(name, name) for name in ("gate_proj", "up_proj", "down_proj")]
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", *names]}
    if family == "qwen3_moe":  # its second layer is dense
        fields["exclude_modules"] = r".*layers\.1\.mlp\..*"
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
        theirs.save_pretrained(tmp_path / "again")
    with load_plan(tmp_path, table, max_lora_rank=4) as plan:
        assert_same(theirs, base, table, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "again")
    # the ranks that PEFT doubled are taken apart again, or they would not fit
    with load_plan(tmp_path / "again", table, max_lora_rank=4) as plan:
        assert_same(theirs, base, table, plan)
        assert any(f"{PREFIX}{path}.base_layer.lora_A.weight" in plan.checkpoint.infos for path in table.blocks)
