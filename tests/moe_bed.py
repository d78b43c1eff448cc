"""Tiny mixtures of experts, and adapters on them made by hand: each as files in several formats, and merged.

No two of the widths are equal (experts, ranks, hidden, intermediate, twice that), so that no transposition can hide.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers as tf

from hf_multilora import enable_multilora

VOCAB, HIDDEN, INNER, EXPERTS, HEAD = 97, 40, 24, 5, 14
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
_WITH_HEAD: dict[str, Any] = {**_COMMON, "head_dim": HEAD}
_QWEN: dict[str, Any] = {"intermediate_size": 44, "moe_intermediate_size": INNER, "num_experts": EXPERTS}


def _qwen3_moe() -> Any:
    return tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**_WITH_HEAD, **_QWEN, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1)
    )


def _qwen2_moe() -> Any:
    shared = {"shared_expert_intermediate_size": 28, "decoder_sparse_step": 1, "num_experts_per_tok": 2}
    return tf.Qwen2MoeForCausalLM(tf.Qwen2MoeConfig(**_COMMON, **_QWEN, **shared))


def _mixtral() -> Any:
    return tf.MixtralForCausalLM(
        tf.MixtralConfig(**_COMMON, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=2)
    )


def _deepseek_v3() -> Any:
    latent = {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
    routed = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    common = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 44, "moe_intermediate_size": INNER}
    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**common, **latent, **routed, first_k_dense_replace=1))


def _olmoe() -> Any:
    return tf.OlmoeForCausalLM(
        tf.OlmoeConfig(**_COMMON, intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=3)
    )


def _gpt_oss() -> Any:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    return tf.GptOssForCausalLM(
        tf.GptOssConfig(
            **_WITH_HEAD, **layers, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=2
        )
    )


def _llama4() -> Any:
    layers = {"interleave_moe_layer_step": 1, "no_rope_layers": [1, 1], "intermediate_size_mlp": 44}
    return tf.Llama4ForCausalLM(
        tf.Llama4TextConfig(
            **_WITH_HEAD, **layers, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=1
        )
    )


def _qwen3_next() -> Any:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    routed = {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 28, "decoder_sparse_step": 1}
    layers = {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 8}
    return tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**_WITH_HEAD, **_QWEN, **linear, **routed, **layers))


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": _qwen3_moe, "qwen2_moe": _qwen2_moe, "mixtral": _mixtral, "deepseek_v3": _deepseek_v3,
    "olmoe": _olmoe, "gpt_oss": _gpt_oss, "llama4": _llama4, "qwen3_next": _qwen3_next,
}  # fmt: skip


@cache
def _base(family: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = FAMILIES[family]().eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.8 * parameter.shape[-1] ** -0.5 if "embed" not in name else 0.5)
            elif "bias" in name:
                parameter.normal_(std=0.1)
    return model


def bare(family: str, implementation: str = "batched_mm") -> Any:
    model = copy.deepcopy(_base(family))
    if family != "llama4":
        model.set_experts_implementation(implementation)
    return model


def blocks(model: Any) -> dict[str, Any]:
    """Path -> block of experts."""
    return {path: module for path, module in model.named_modules() if path.rpartition(".")[2] == "experts"}


def _transposed(family: str) -> bool:
    return family in ("gpt_oss", "llama4")


@dataclass
class Adapter:
    """Factors by hand, scaling in none of them.

    Attributes:
        experts: (path of a block, projection) -> A `[E, r, in]`, B `[E, out, r]`.
        linear: module path -> A `[r, in]`, B `[out, r]`.
    """

    rank: int
    alpha: int
    experts: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    linear: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


def made(family: str, rank: int, seed: int, *parts: str, shared: bool = False) -> Adapter:
    """An adapter on some of "experts", "attention", "router", "shared"; `shared`: A of gate and up, and B of down, are
    one for all experts."""
    generator = torch.Generator().manual_seed(seed)
    adapter, base = Adapter(rank, 2 * rank), _base(family)

    def factors(n_in: int, n_out: int, *count: int) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.randn(*count, rank, n_in, generator=generator) * n_in**-0.5
        return a, torch.randn(*count, n_out, rank, generator=generator) * 0.4 * rank**-0.5

    if "experts" in parts:
        for path, block in blocks(base).items():
            count = block.down_proj.shape[0]
            a, gate = factors(HIDDEN, INNER, count)
            _, up = factors(HIDDEN, INNER, count)
            a_down, down = factors(INNER, HIDDEN, count)
            if shared:
                a, down = a[:1].expand_as(a).clone(), down[:1].expand_as(down).clone()
            adapter.experts |= {
                (path, "gate_proj"): (a, gate), (path, "up_proj"): (a, up), (path, "down_proj"): (a_down, down)
            }  # fmt: skip
    for path, module in base.named_modules():
        last = path.rpartition(".")[2]
        attention = "attention" in parts and last in ("q_proj", "o_proj")
        beside = "shared" in parts and ".shared_expert" in path and last in ("gate_proj", "up_proj", "down_proj")
        if attention or beside:
            adapter.linear[path] = factors(module.in_features, module.out_features)
        if (
            "router" in parts
            and last in ("gate", "router")
            and isinstance(getattr(module, "weight", None), torch.Tensor)
        ):
            adapter.linear[path] = factors(*reversed(module.weight.shape))
    return adapter


def merged(family: str, adapter: Adapter | None, implementation: str = "batched_mm") -> Any:
    """The model with the adapter worked into its weights."""
    model = bare(family, implementation)
    if adapter is None:
        return model
    with torch.no_grad():
        for path, (a, b) in adapter.linear.items():
            model.get_submodule(path).weight.add_(adapter.scaling * (b @ a))
        for (path, name), (a, b) in adapter.experts.items():
            block = model.get_submodule(path)
            delta = adapter.scaling * (b @ a)
            delta = delta.transpose(1, 2) if _transposed(family) else delta
            if name == "down_proj":
                block.down_proj.add_(delta)
                continue
            outputs = block.gate_up_proj.transpose(1, 2) if _transposed(family) else block.gate_up_proj
            delta = delta.transpose(1, 2) if _transposed(family) else delta
            up = name == "up_proj"
            if family == "gpt_oss":
                outputs[:, int(up) :: 2] += delta
            else:
                outputs[:, INNER * up : INNER * (up + 1)] += delta
    return model


def config(adapter: Adapter, **more: Any) -> dict[str, Any]:
    common = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True}
    return {**common, "r": adapter.rank, "lora_alpha": adapter.alpha, "peft_version": "0.21.2", **more}


def two_d(family: str, adapter: Adapter, leave_out: tuple[int, ...] = ()) -> tuple[dict[str, torch.Tensor], Any]:
    """As written before transformers 5: a pair of factors for each expert and projection."""
    tensors = _linear(adapter)
    old = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if family == "mixtral" else {}
    for (path, name), (a, b) in adapter.experts.items():
        path = path.replace(".mlp.", ".block_sparse_moe.") if old else path
        for expert in range(a.shape[0]):
            if expert not in leave_out:
                stem = f"base_model.model.{path}.{expert}.{old.get(name, name)}"
                tensors |= {f"{stem}.lora_A.weight": a[expert].clone(), f"{stem}.lora_B.weight": b[expert].clone()}
    targets = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    return tensors, config(adapter, target_modules=sorted(targets))


def three_d(family: str, adapter: Adapter) -> tuple[dict[str, torch.Tensor], Any]:
    """As PEFT's target_parameters: one pair for gate and up, one for down."""
    tensors, rank = _linear(adapter), adapter.rank
    for path in {path for path, _ in adapter.experts}:
        a, gate = adapter.experts[path, "gate_proj"]
        up = adapter.experts[path, "up_proj"][1]
        a_down, down = adapter.experts[path, "down_proj"]
        both = torch.cat([gate, up], 1)
        if family == "gpt_oss":
            both = torch.stack([gate, up], 2).flatten(1, 2)
        for stem, first, second in (("base_layer.", a, both), ("", a_down, down)):
            if family == "llama4":  # PEFT multiplies from the other side there
                first, second = second.transpose(1, 2), first.transpose(1, 2)
            count, rank, inside = first.shape
            name = f"base_model.model.{path}.{stem}lora_"
            tensors[f"{name}A.weight"] = first.reshape(count * rank, inside).contiguous()
            tensors[f"{name}B.weight"] = second.permute(1, 2, 0).reshape(second.shape[1], -1).contiguous()
    parameters = {"target_parameters": ["gate_up_proj", "down_proj"]} if adapter.experts else {}
    return tensors, config(adapter, target_modules=sorted(adapter.linear) or None, **parameters)


def _linear(adapter: Adapter) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path, (a, b) in adapter.linear.items():
        tensors |= {
            f"base_model.model.{path}.lora_A.weight": a.clone(),
            f"base_model.model.{path}.lora_B.weight": b.clone(),
        }
    return tensors


# name -> (adapter, how its file is written)
FORMATS = {"2-D": two_d, "3-D": three_d}
ROWS: list[str | None] = ["3-D", None, "2-D", "shared outer", "attention", "all", None]


@cache
def adapters(family: str) -> dict[str, tuple[Adapter, Any]]:
    beside = "3-D" if family in ("llama4", "gpt_oss") else "2-D"
    found = {
        "3-D": (made(family, 3, 1, "experts"), "3-D"),
        "2-D": (made(family, 4, 2, "experts"), beside),
        "shared outer": (made(family, 6, 3, "experts", shared=True), beside),
        "attention": (made(family, 2, 4, "attention"), beside),
        "all": (made(family, 5, 5, "experts", "attention", "router", "shared"), beside),
    }
    return {name: (adapter, FORMATS[how](family, adapter)) for name, (adapter, how) in found.items()}


def enabled(family: str, implementation: str = "batched_mm", **options: Any) -> Any:
    options = {"max_loras": 5, "max_lora_rank": 8, "slot_bytes": 4 << 20, **options}
    model = enable_multilora(bare(family, implementation), **options)
    for name, (_, (tensors, config)) in adapters(family).items():
        model.multilora.load(dict(tensors), name, config=config)
    return model


@cache
def batch(tokens: int, rows: int = len(ROWS)) -> dict[str, torch.Tensor]:
    """Prompts, left-padded by different lengths."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : min(row % 3, tokens - 1)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@torch.no_grad()
def logits(model: Any, tokens: int, **ids: Any) -> torch.Tensor:
    return model(**batch(tokens), **ids).logits
