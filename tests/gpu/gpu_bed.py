"""A small Llama on the device, random adapters for it, and the answers of merged weights in fp32 on the CPU.

Sizes are odd on purpose: no width but the head's is a power of two, and the vocabulary breaks 16-byte alignment.
`HF_MULTILORA_GPU_TESTS_ON=cpu` runs the same tests on a CPU, to debug the tests themselves; what counts CUDA's memory,
streams or launches is then skipped.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_multilora import enable_multilora

DEVICE = os.environ.get("HF_MULTILORA_GPU_TESTS_ON", "cuda")
CUDA = DEVICE.startswith("cuda")
MARKS = [pytest.mark.gpu] if CUDA else []
needs_cuda = pytest.mark.skipif(not CUDA, reason="counts what only a CUDA device has")

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 515, 192, 328, 2, 6, 2
MAX_RANK = 64
ROWS = 8
FP32_TOLERANCE = 1e-5  # ||difference|| / ||reference|| of a row's logits, without TF32
OF_BARE = 2.0  # in bf16 and fp16: errors of a LoRA row over the bare model's own, which rounds once less per layer

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ADAPTERS: dict[str, tuple[int, float, tuple[str, ...]]] = {  # name -> rank, alpha, modules
    "r1": (1, 1.0, ("q_proj", "v_proj")),
    "r3": (3, 6.0, ATTENTION + MLP),
    "r8": (8, 16.0, (*ATTENTION, *MLP, "embed_tokens", "lm_head")),
    "r16": (16, 24.0, MLP),
    "r33": (33, 40.0, ATTENTION + MLP),
}
MIXED: tuple[str | None, ...] = ("r1", None, "r3", "r8", "r3", "r16", None, "r33")

Adapter = tuple[dict[str, torch.Tensor], dict[str, Any]]


@functools.cache
def bare(dtype: torch.dtype, device: str = DEVICE) -> Any:
    """The model that nobody may change: weights drawn on the CPU, large enough that logits differ between tokens."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for path, parameter in model.named_parameters():
        if parameter.dim() == 2:
            scale = 1.0 if "embed_tokens" in path else parameter.shape[1] ** -0.5
            parameter.data.normal_(0, scale, generator=generator)
    return model.to(device, dtype)


def fresh(dtype: torch.dtype, device: str = DEVICE) -> Any:
    return copy.deepcopy(bare(dtype)).to(device)


def enabled(dtype: torch.dtype, names: Sequence[str] = tuple(ADAPTERS), **options: Any) -> Any:
    model = enable_multilora(fresh(dtype), **{"max_loras": 8, "max_lora_rank": MAX_RANK, **options})
    for name in names:
        load(model, name, adapter(name, dtype))
    return model


def load(model: Any, name: str, weights: Adapter, **options: Any) -> Any:
    tensors, config = weights
    return model.multilora.load(tensors, name, config=config, **options)


def _shapes(targets: Sequence[str]) -> dict[str, tuple[int, int, bool]]:
    """Module path -> (width in, width out, is it the embedding)."""
    kv = HIDDEN * KV_HEADS // HEADS
    widths = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (HIDDEN, kv), "v_proj": (HIDDEN, kv), "o_proj": (HIDDEN, HIDDEN)}
    widths |= {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}
    found: dict[str, tuple[int, int, bool]] = {}
    for layer in range(LAYERS):
        for name in targets:
            if name in widths:
                block = "self_attn" if name in ATTENTION else "mlp"
                found[f"model.layers.{layer}.{block}.{name}"] = (*widths[name], False)
    if "lm_head" in targets:
        found["lm_head"] = (HIDDEN, VOCAB, False)
    if "embed_tokens" in targets:
        found["model.embed_tokens"] = (VOCAB, HIDDEN, True)
    return found


@functools.cache
def adapter(name: str, dtype: torch.dtype, seed: int = 0) -> Adapter:
    """Tensors under PEFT's keys (of values that `dtype` can hold) and the adapter_config.json."""
    rank, alpha, targets = ADAPTERS[name]
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    tensors: dict[str, torch.Tensor] = {}
    for path, (width_in, width_out, embedding) in _shapes(targets).items():
        a = torch.randn(rank, width_in, generator=generator) * (0.3 if embedding else width_in**-0.5)
        b = torch.randn(width_out, rank, generator=generator) * 0.2 * rank**-0.5
        stem = f"base_model.model.{path}."
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        tensors |= {stem + names[0]: a.to(dtype), stem + names[1]: b.to(dtype)}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    return tensors, {**config, "target_modules": list(targets)}


def merged(weights: Adapter | None, dtype: torch.dtype) -> Any:
    """The base's weights (as `dtype` holds them) plus scaling * B A, in fp32 on the CPU."""
    model = copy.deepcopy(bare(dtype)).cpu().float()
    if weights is not None:
        tensors, config = weights
        scaling = config["lora_alpha"] / config["r"]
        for key, a in tensors.items():
            if "_A" not in key:
                continue
            b = tensors[key.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B")]
            path = key.removeprefix("base_model.model.").split(".lora_")[0]
            delta = scaling * (b.float() @ a.float())
            model.get_submodule(path).weight.data += delta.T if "embedding" in key else delta
    return model


@functools.cache
def oracle(name: str | None, dtype: torch.dtype) -> Any:
    return merged(None if name is None else adapter(name, dtype), dtype)


@functools.cache
def inputs(tokens: int, rows: int = ROWS, seed: int = 0, padded: bool = False, device: str = DEVICE) -> dict[str, Any]:
    """Prompts `[rows, tokens]`; `padded`: row i begins with i padding tokens (fewer than it has)."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.randint(1, VOCAB, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(rows):
            mask[row, : min(row, tokens - 1)] = 0
        ids = ids * mask
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


@torch.no_grad()
def prefill_and_step(model: Any, batch: dict[str, Any], **ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all prompt positions `[rows, tokens, V]`, and of one more token decoded from the cache `[rows, V]`."""
    whole = model(**batch, use_cache=True, **ids)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(batch["attention_mask"][:, :1])], dim=1)
    step = model(
        input_ids=batch["input_ids"][:, -1:], attention_mask=mask, past_key_values=whole.past_key_values, **ids
    )
    return whole.logits, step.logits[:, -1]


def greedy(model: Any, batch: dict[str, Any], new: int, **options: Any) -> torch.Tensor:
    return model.generate(**batch, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options).cpu()


def error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """||value - reference|| / ||reference|| in float64; NaN stays NaN."""
    value, reference = value.detach().cpu().double(), reference.detach().cpu().double()
    return float((value - reference).norm() / reference.norm())


@functools.cache
def exact_logits(name: str | None, dtype: torch.dtype, tokens: int, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What `prefill_and_step` gives for this adapter alone: merged weights, fp32, CPU."""
    return prefill_and_step(oracle(name, dtype), inputs(tokens, padded=padded, device="cpu"))


@pytest.fixture
def whole_fp32() -> Iterator[None]:
    """No TF32 in matrix products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
