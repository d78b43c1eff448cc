"""A Llama GGUF file to a plain transformers folder, once.

`from_pretrained(gguf_file=...)` gives the same weights bit for bit, but takes longer at every load, tags the model as
quantised (it cannot be saved), and with some versions loses the tokenizer's end and padding tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # token type of special tokens


def convert_gguf(source: Path, folder: Path, progress: Callable[[str, int, int], None]) -> None:
    """Write config, weights (bfloat16) and tokenizer of the Llama in `source` into `folder`, which exists."""
    reader = GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        weight = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if kind in heads:
            weight = _unpermute(weight, heads[kind])
        weights[_hf_name(tensor.name)] = torch.from_numpy(np.array(weight)).to(torch.bfloat16)
        progress("Converting the base model", done, len(reader.tensors))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(meta).save_pretrained(folder)
    _config(meta, tied="lm_head.weight" not in weights).save_pretrained(folder)


def _hf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("blk."):
        return f"{_NAMES[stem]}.weight"
    _, layer, kind = stem.split(".")
    return f"model.layers.{layer}.{_NAMES[kind]}.weight"


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the two rotary halves: rows `[heads, d/2, 2]` back to `[heads, 2, d/2]`."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _config(meta: dict[str, Any], tied: bool) -> LlamaConfig:
    config = LlamaConfig(
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.3g}"),  # stored as a rounded fp32
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"],
    )
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    return config


def _tokenizer(meta: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=meta["llama.context_length"],
        padding_side="left",
        **{name: tokens[meta[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()},
    )
    tokenizer.chat_template = meta["tokenizer.chat_template"]
    return tokenizer
