"""Tiny random transformers models, one per family that the tests compare with PEFT.

fp32, two layers, fixed seeds. Weights are drawn here and not by the models' own initialisation: with transformers'
default of 0.02 the logits of so small a model are nearly flat, and an adapter that is missing would hardly show.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import transformers as tf

VOCAB = 113
HIDDEN = 48
INNER = 80
PAD = 0
LENGTH = 12  # tokens of the longest prompt of `prompts`; longer than the sliding windows below

_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    **_TOKENS,
}
_LLAMA: dict[str, Any] = {**_COMMON, "intermediate_size": INNER, "num_key_value_heads": 2}


def _llama(tied: bool, **changes: Any) -> tf.PreTrainedModel:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**_LLAMA, **changes}, tie_word_embeddings=tied))


def _qwen3() -> tf.PreTrainedModel:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**_LLAMA, head_dim=16, tie_word_embeddings=False))


def _mistral() -> tf.PreTrainedModel:
    return tf.MistralForCausalLM(tf.MistralConfig(**_LLAMA, sliding_window=8))


def _gemma3() -> tf.PreTrainedModel:
    config = tf.Gemma3TextConfig(
        **_LLAMA,
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    )
    return tf.Gemma3ForCausalLM(config)


def _phi3() -> tf.PreTrainedModel:
    return tf.Phi3ForCausalLM(tf.Phi3Config(**_LLAMA))


def _gpt2() -> tf.PreTrainedModel:
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=128, **_TOKENS)
    )


def _opt() -> tf.PreTrainedModel:
    return tf.OPTForCausalLM(tf.OPTConfig(**_COMMON, ffn_dim=INNER, word_embed_proj_dim=HIDDEN))


def _neox() -> tf.PreTrainedModel:
    return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_COMMON, intermediate_size=INNER))


def _falcon() -> tf.PreTrainedModel:
    config = tf.FalconConfig(**_COMMON, new_decoder_architecture=False, multi_query=True, alibi=False)
    return tf.FalconForCausalLM(config)


def _bloom() -> tf.PreTrainedModel:
    return tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=2, n_head=4, **_TOKENS))


def _t5() -> tf.PreTrainedModel:
    config = tf.T5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=12,
        d_ff=INNER,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=PAD,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    return tf.T5ForConditionalGeneration(config)


@dataclass(frozen=True)
class Family:
    """How to build one tiny model, and what people train in it (suffixes of module paths)."""

    name: str
    make: Callable[[], tf.PreTrainedModel]
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    embedding: tuple[str, ...]
    head: str = "lm_head"
    layer: str = r"layers\.1"  # regex of the second layer's path, for rank and alpha patterns
    encoder_decoder: bool = False

    def build(self) -> tf.PreTrainedModel:
        """A fresh copy, always with the same weights, in eval mode."""
        return copy.deepcopy(_built(self.name))


_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")
_BIG = ("dense_h_to_4h", "dense_4h_to_h")

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", lambda: _llama(False), _QKVO, _GATED, ("embed_tokens",)),
        Family("llama_tied", lambda: _llama(True), _QKVO, _GATED, ("embed_tokens",)),
        Family("qwen3", _qwen3, _QKVO, _GATED, ("embed_tokens",)),
        Family("mistral", _mistral, _QKVO, _GATED, ("embed_tokens",)),
        Family("gemma3", _gemma3, _QKVO, _GATED, ("embed_tokens",)),
        Family("phi3", _phi3, ("qkv_proj", "o_proj"), ("gate_up_proj", "down_proj"), ("embed_tokens",)),
        # mlp.c_proj must be named in full: the attention's output is a c_proj too.
        Family("gpt2", _gpt2, ("attn.c_attn", "attn.c_proj"), ("c_fc", "mlp.c_proj"), ("wte",), layer=r"h\.1"),
        Family("opt", _opt, ("q_proj", "k_proj", "v_proj", "out_proj"), ("fc1", "fc2"), ("embed_tokens",)),
        Family("neox", _neox, ("query_key_value", "attention.dense"), _BIG, ("embed_in",)),
        Family(
            "falcon", _falcon, ("query_key_value", "self_attention.dense"), _BIG, ("word_embeddings",), layer=r"h\.1"
        ),
        Family(
            "bloom", _bloom, ("query_key_value", "self_attention.dense"), _BIG, ("word_embeddings",), layer=r"h\.1"
        ),
        Family(
            "t5",
            _t5,
            ("q", "k", "v", "o"),
            ("wi", "wo"),
            ("embed_tokens",),
            layer=r"block\.1\.layer\.\d",
            encoder_decoder=True,
        ),
    )
}
# For tests that compile, where a second layer only takes as long again; not one of the families that are compared.
ONE_LAYER = "llama_of_one_layer"
BUILDS = {
    **FAMILIES,
    ONE_LAYER: replace(
        FAMILIES["llama"],
        name=ONE_LAYER,
        make=lambda: _llama(False, num_hidden_layers=1),
        layer=r"layers\.0",
    ),
}


@cache
def _built(name: str) -> tf.PreTrainedModel:
    family = BUILDS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family.make()
        generator = torch.Generator().manual_seed(1)
        for path, parameter in model.named_parameters():
            _draw(path, parameter, generator)
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def _draw(path: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() == 1:
        parameter.add_(0.1 * noise)
    elif parameter.shape[0] == VOCAB or "embed" in path or "wpe" in path:
        parameter.copy_(0.15 * noise)
    else:
        parameter.copy_(noise / math.sqrt(HIDDEN))


def cache_argument(model: Any) -> str:
    """What a forward calls its cache: `cache` since transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def prompts(rows: int, *, side: str | None = "left", seed: int = 0, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """`rows` random prompts, `input_ids` and `attention_mask` [rows, length].

    Row 0 fills the whole length, the others are shorter and padded on `side`; side=None pads nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if side is not None:
        for row in range(1, rows):
            gap = 1 + (3 * row) % (length - 3)
            mask[row, slice(0, gap) if side == "left" else slice(length - gap, length)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def forward_inputs(family: Family, rows: int, *, side: str | None = "left", seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of a plain forward: `prompts`, and the decoder's tokens where the family has an encoder."""
    inputs = prompts(rows, side=side, seed=seed)
    if family.encoder_decoder:
        generator = torch.Generator().manual_seed(seed + 1)
        inputs["decoder_input_ids"] = torch.randint(1, VOCAB, (rows, 5), generator=generator)
    return inputs


IMAGE = 98  # llava's token for an image


def llava(layers: int = 2) -> tf.LlavaForConditionalGeneration:
    """A model of images and text."""
    config = tf.LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 32,
        },
        text_config={
            "model_type": "llama", "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
        image_token_index=IMAGE,
    )  # fmt: skip
    torch.manual_seed(0)
    return tf.LlavaForConditionalGeneration(config).eval()
