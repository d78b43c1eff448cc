"""The configs met in public (tests/data/wild_configs), each with a case here: what is loaded, or the error by name.

An adapter that asks for what is not served must be refused, never loaded as something else. Tensors are made for the
modules that PEFT itself would have wrapped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_bed import H, V, factors, gpt2, llama, phi3, save, table
from experts_bed import block, hand, moe_table, three_d
from peft.tuners.tuners_utils import check_target_module_exists

from hf_multilora.adapters.load import load_plan
from hf_multilora.adapters.targets import Target, TargetTable
from hf_multilora.errors import AdapterFormatError, AdapterMatchError, UnsupportedAdapterError

WILD = Path(__file__).parents[1] / "data" / "wild_configs"
SQUARE = (H, H)


def linears(*names: str, **options: Any) -> Callable[[], TargetTable]:
    """A model whose layers hold square linears of these names."""
    return lambda: table(dict.fromkeys(names, SQUARE), **options)


phi = linears("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense", "mlp.fc1", "mlp.fc2")
remote_phi = linears("mixer.Wqkv", "mixer.out_proj", "mlp.fc1", "mlp.fc2", layers="layers")
baichuan = linears("self_attn.W_pack", "self_attn.o_proj")
chatglm = linears("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
fused_heads = linears(
    "self_attention.query_key_value",
    "self_attention.dense",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
    layers="transformer.h",
    embeddings=("transformer.word_embeddings",),
)
t5 = linears(
    "layer.0.SelfAttention.q",
    "layer.0.SelfAttention.o",
    "layer.1.EncDecAttention.k",
    "layer.1.EncDecAttention.v",
    "layer.2.DenseReluDense.wi_0",
    "layer.2.DenseReluDense.wo",
    layers="decoder.block",
    embeddings=("shared",),
)
whisper = linears(
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")), "fc1", "fc2", layers="model.decoder.layers"
)
bert = linears(
    *(f"attention.self.{name}" for name in ("query", "key", "value")),
    layers="bert.encoder.layer",
    heads=(),
    modules=("classifier",),
    base={"classifier.weight": torch.zeros(2, H), "classifier.bias": torch.zeros(2)},
)
distilbert = linears("attention.q_lin", "attention.k_lin", "attention.v_lin", layers="distilbert.transformer.layer")
hybrid = linears(
    "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_z",
    "linear_attn.out_proj",
    "self_attn.q_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
    layers="model.language_model.layers",
)
unet = linears("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", layers="mid_block", embeddings=(), heads=())
EXPERTS = {
    f"model.layers.{i}.mlp.experts": block(f"model.layers.{i}.mlp.experts", experts=2, hidden=H, intermediate=H)
    for i in range(2)
}


def mixtral() -> TargetTable:
    made = linears(*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate", blocks=EXPERTS)()
    for path, item in EXPERTS.items():
        targets = [Target(f"{path}.{name}", "experts", H, H, experts=2) for name in item.projections]
        made.targets.update({target.path: target for target in targets})
    return made


old_mixtral = linears(
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    "block_sparse_moe.gate",
    *(f"block_sparse_moe.experts.{e}.w{i}" for e in range(2) for i in (1, 2, 3)),
)
qwen2vl_text = {"layers": "model.language_model.layers", "embeddings": ("model.language_model.embed_tokens",)}


def qwen2vl_trained() -> TargetTable:
    trained = llama(**qwen2vl_text)
    trained.targets.update(table({"attn.qkv": SQUARE, "attn.proj": SQUARE}, layers="model.visual.blocks").targets)
    return trained


def qwen2vl() -> TargetTable:
    tower = [path for path in qwen2vl_trained().targets if "visual" in path]
    return llama(**qwen2vl_text, refused=dict.fromkeys(tower, "it is outside of the text model."))


@dataclass
class Case:
    """Trained on `trained` (default: `model`), loaded on `model`; accepted, or refused with `error` and `words`."""

    model: Callable[[], TargetTable] = llama
    trained: Callable[[], TargetTable] | None = None
    error: type[Exception] | None = None
    words: str = ""
    extra: dict[str, torch.Tensor] = field(default_factory=dict)  # further tensors
    drop: str = ""  # tensors whose name holds this are left out
    layers: dict[str, str] = field(default_factory=dict)  # replacements in the tensors' names
    check: Callable[[Any], bool] = lambda plan: True


def refused(words: str, error: type[Exception] = UnsupportedAdapterError, **options: Any) -> Case:
    return Case(error=error, words=words, **options)


def paths(plan) -> set[str]:
    return {factor.path for factor in plan.factors}


def has_experts(plan) -> bool:
    return sum(factor.a.shape[0] == 2 for factor in plan.factors if factor.kind == "experts") == 6


STACKED = {}
for i in range(2):
    STACKED |= three_d(hand(i, r=16), block(f"model.layers.{i}.mlp.experts"))
HEAD = {("classifier", "weight"), ("classifier", "bias")}
SCORE = {"base_model.model.score.weight": torch.ones(1, H)}
EMBED = {"base_model.model.model.embed_tokens.weight": torch.ones(V, H)}
CLASSIFIER = {
    "base_model.model.classifier.weight": torch.ones(2, H),
    "base_model.model.classifier.bias": torch.ones(2),
}
CASES = {
    "01_peft02_enable_lora_null_llama": Case(check=lambda plan: any("enable_lora" in text for text in plan.ignored)),
    "03_peft05_phi15_Wqkv_remote_code": refused("Wqkv.*Closest", AdapterMatchError, model=phi, trained=remote_phi),
    "04_peft05_baichuan2_W_pack": Case(baichuan, check=lambda plan: len(plan.factors) == 2),
    "06_peft11_glm4_fused_query_key_value": Case(chatglm),
    "07_peft11_phi3_fused_qkv_gate_up": Case(phi3, check=lambda plan: len(plan.factors) == 2 * (3 + 1 + 2 + 1)),
    "08_peft11_bnb4bit_base_int_dropout": Case(check=lambda plan: plan.rank == 64),
    "10_peft14_flan_t5_one_letter_targets": Case(
        t5, check=lambda plan: not any("wo" in p or "wi" in p for p in paths(plan))
    ),
    "12_peft15_whisper_auto_mapping": Case(whisper),
    "13_peft17_bert_seqcls_head_saved": Case(
        bert, extra=CLASSIFIER, check=lambda plan: {(s.path, s.name) for s in plan.saved} == HEAD
    ),
    "15_peft18_task_type_key_absent_whisper": Case(whisper, check=lambda plan: len(plan.factors) == 12),
    "16_peft18_qwen35_hybrid_16_targets_dotted": Case(hybrid, check=lambda plan: len(plan.factors) == 12),
    "18_peft18_rank1_alpha1_mistral": Case(check=lambda plan: plan.factors[0].scaling == 1 and plan.rank == 1),
    "20_peft19_unsloth_fixed_llama3": Case(),
    "22_peft19_unet_dotted_targets": refused("none of its", AdapterMatchError, trained=unet),
    "24_peft19_distilbert_seqcls": refused(
        "SEQ_CLS, to be loaded on a model with that head", model=distilbert, extra=CLASSIFIER
    ),
    "25_peft20_base_empty_string_headless_LlamaModel": Case(
        layers={"model.model.": "model."}, check=lambda plan: len(plan.factors) == 14 and plan.base_model is None
    ),
    "27_peft21_revision_sha_new_null_fields": Case(),
    "30_mc_target_modules_null_dora": refused("use_dora=true.*magnitude", AdapterFormatError),
    "32_mc_bdlora": Case(),
    "34_mc_init_mica": Case(),
    "35_mc_minimal_old_fields": Case(),
    "40_quoted_msswift_lookahead_regex": Case(check=lambda plan: len(plan.factors) == 14),
    "42_quoted_rank_alpha_pattern_lookahead": Case(
        hybrid,
        check=lambda plan: (
            {(f.rank, f.scaling) for f in plan.factors if "up_proj" in f.path} == {(4, 3.0)}
            and {(f.rank, f.scaling) for f in plan.factors if "up_proj" not in f.path} == {(8, 4.0)}
        ),
    ),
    "44_quoted_target_parameters_moe_regex": Case(
        moe_table,
        extra=STACKED,
        check=lambda plan: sum(f.kind == "experts" and f.rank == 16 for f in plan.factors) == 6,
    ),
    "46_quoted_trainable_token_rows_both_ends": refused("trainable_token_indices.*no rows", AdapterFormatError),
    "47_quoted_targets_include_lm_head_embed": Case(
        check=lambda plan: {"lm_head", "model.embed_tokens"} < paths(plan)
    ),
    "49_quoted_gpt2_conv1d_layers_to_transform": Case(
        gpt2, check=lambda plan: paths(plan) == {"transformer.h.0.attn.c_attn"}
    ),
    "51_doc_layer_replication": refused("layer_replication"),
    "52_doc_alora_invocation": Case(check=lambda plan: plan.invocation == (2,)),
    "54_doc_lora_bias_true": refused("lora_bias=true.*the bias of B", AdapterFormatError),
    "60_made_mixtral_pre_v5_experts": Case(mixtral, old_mixtral, check=has_experts),
    "62_made_peft02_mergedlinear_enable_lora_list": refused("enable_lora", model=gpt2),
    "70_foreign_no_peft_type": refused("not a PEFT LoRA", AdapterFormatError),
    "71_foreign_mlx_v1": refused("MLX adapter.*lora_alpha = scale", AdapterFormatError),
    "73_foreign_adapter_hub_bottleneck": refused("AdapterHub", AdapterFormatError),
    "74_made_adalora": refused("peft_type='ADALORA'"),
    "76_foreign_git_lfs_pointer": refused("git lfs pull", AdapterFormatError),
    "77_made_truncated": refused("adapter_config.json: the file is cut off", AdapterFormatError),
    "80_hub_mixtral_fan_in_fan_out_null": Case(mixtral, old_mixtral, check=has_experts),
    "82_hub_mixtral_lm_head_lora": Case(mixtral, old_mixtral, check=has_experts),
    "84_hub_gpt2_conv1d_flag_true": Case(gpt2),
    "86_hub_falcon40b_enable_lora_null": Case(fused_heads),
    "87_hub_falcon_init_false": refused(
        "never taken as zero", AdapterFormatError, model=fused_heads, drop="h.1.self_attention.query_key_value.lora_B"
    ),
    "89_hub_llama3_embed_saved_revision_word": Case(
        lambda: llama(base={"model.embed_tokens.weight": torch.zeros(V, H)}),
        extra=EMBED,
        check=lambda plan: [s.path for s in plan.saved] == ["model.embed_tokens"],
    ),
    "91_hub_qwen2vl_negative_regex_head_saved": refused("visual.*outside", model=qwen2vl, trained=qwen2vl_trained),
    "93_hub_reward_score_saved": refused(
        "score.weight is a saved module.*to be loaded on a model with that head", extra=SCORE
    ),
    "95_hub_gpt2_reward_wrong_head_name": Case(
        gpt2, check=lambda plan: any("scores" in text for text in plan.ignored)
    ),
    "96_hub_four_keys_only": Case(check=lambda plan: {f.scaling for f in plan.factors} == {2.0}),
    "98_hub_bloom_r11_alpha6": Case(
        fused_heads, check=lambda plan: plan.factors[0].scaling == 6 / 11 and plan.rank == 11
    ),
    "9a_hub_phi3_remote_code_unfused_targets": Case(
        phi3, trained=llama, check=lambda plan: {f.slice for f in plan.factors if "qkv" in f.path} == {0, 1, 2}
    ),
    "9c_hub_longlora_base_path_mismatch": Case(
        check=lambda plan: "trainable_params.bin" in plan.warnings[0] and "llama-2-13b" in plan.warnings[1]
    ),
    "9e_hub_gptq_base": Case(mixtral),
}
# Accepted as soon as the tensors that need a later feature are not there.
ALSO = {
    "87_hub_falcon_init_false": ("nothing", fused_heads),
}
FILES = {path.stem: path for path in sorted(WILD.iterdir()) if path.name not in ("README.md", "MANIFEST.json")}


def test_every_file_has_its_case() -> None:
    manifest = json.loads((WILD / "MANIFEST.json").read_text())
    assert set(CASES) == set(FILES) == {Path(name).stem for name in manifest["files"]}


def trained_modules(fields: dict[str, Any], table: TargetTable) -> Iterable[str]:
    """The modules that PEFT would wrap; all of a layer's where the config leaves the choice to PEFT."""
    names = ("exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "target_parameters")
    config = SimpleNamespace(**{name: fields.get(name) for name in names}, target_modules=fields.get("target_modules"))
    for path in table.targets:
        if (config.target_modules is None and "layers" in path) or (
            config.target_modules is not None and check_target_module_exists(config, path)
        ):
            yield path


def make(folder: Path, file: Path, case: Case) -> Path:
    shutil.copy(file, folder / "adapter_config.json")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        fields = {}
    trained = (case.trained or case.model)()
    tensors = dict(case.extra)
    for path in trained_modules(fields, trained) if "r" in fields else ():
        target = trained.targets[path]
        rank = next(
            (r for key, r in (fields.get("rank_pattern") or {}).items() if path.endswith(key[-7:])), fields["r"]
        )
        made = factors(path, target.in_features, target.out_features, rank, embedding=target.kind == "embedding")
        for name, value in made.items():
            for old, new in case.layers.items():
                name = name.replace(old, new)
            if not case.drop or case.drop not in name:
                tensors[name] = value
    if file.stem.startswith("9c"):
        torch.save({}, folder / "trainable_params.bin")
    return save(folder, tensors or {"x.lora_A.weight": torch.ones(1, 1)})


@pytest.mark.parametrize("name", CASES)
def test_wild_config(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = make(tmp_path, FILES[name], case)
    if case.error is not None:
        with pytest.raises(case.error, match=case.words):
            load_plan(folder, case.model(), max_lora_rank=64)
        return
    with load_plan(folder, case.model(), max_lora_rank=64) as plan:
        assert plan.factors
        assert case.check(plan), (plan.ignored, plan.warnings, [(f.path, f.rank, f.scaling) for f in plan.factors])


@pytest.mark.parametrize("name", ALSO)
def test_wild_config_without_what_comes_later(name: str, tmp_path: Path) -> None:
    drop, model = ALSO[name]
    folder = make(tmp_path, FILES[name], Case(model, CASES[name].trained, drop=drop))
    assert load_plan(folder, model(), max_lora_rank=64).factors
