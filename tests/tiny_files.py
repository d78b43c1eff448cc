"""A tiny Llama with a tokenizer of bytes, and adapters that answer differently, as files.

An adapter's *version* is a number from which its factors follow. What it is to answer is generate() of a bare model
with the version worked into its weights; nothing of this package takes part in it.
"""

from __future__ import annotations

import json
import os
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|user|>", "<|bot|>"]
VOCAB = 256 + len(SPECIAL)
HIDDEN, INNER, LENGTH = 48, 80, 256
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "<|user|>{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)
_WIDTHS = {"q_proj": (HIDDEN, HIDDEN), "v_proj": (HIDDEN, HIDDEN // 2), "o_proj": (HIDDEN, HIDDEN)}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE, model_max_length=LENGTH
    )


def build(ends: float = 1.2) -> LlamaForCausalLM:
    """The bare base model, fp32; weights large enough that adapters and prompts show.

    Args:
        ends: how likely the end token is; letters are likelier than what is no text all the same.
    """
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=256, eos_token_id=257, pad_token_id=257,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else noise * (1.0 if "embed" in name else 0.15))
        model.lm_head.weight[257].mul_(ends)
    return model.eval()


def version(number: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors under PEFT's names and the adapter_config.json of this version."""
    rank, generator = 2 + number % 5, torch.Generator().manual_seed(1000 + number)
    tensors = {}
    for layer in range(2):
        for name, (inside, out) in _WIDTHS.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            tensors[f"{stem}A.weight"] = torch.randn(rank, inside, generator=generator) * inside**-0.5
            tensors[f"{stem}B.weight"] = torch.randn(out, rank, generator=generator) * rank**-0.5
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": 2 * rank}
    return tensors, {**config, "target_modules": list(_WIDTHS)}


def write_adapter(folder: Path, number: int) -> Path:
    """This version as files in `folder`, in place of what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, config = version(number)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "new", metadata={"format": "pt"})
    os.replace(folder / "new", folder / "adapter_model.safetensors")
    return folder


@lru_cache(maxsize=32)
def alone(number: int | None, ends: float = 1.2) -> LlamaForCausalLM:
    """The bare model with this version worked into its weights."""
    model = build(ends)
    if number is not None:
        tensors, _ = version(number)
        with torch.no_grad():
            for name, a in tensors.items():
                if "lora_A" in name:
                    path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    model.get_submodule(path).weight.add_(2.0 * tensors[name.replace("lora_A", "lora_B")] @ a)
    return model


def chat_prompt(content: str) -> str:
    """What the template makes of a user's message."""
    return f"<|user|>user: {content}<|bot|>"
