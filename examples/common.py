"""What the examples share: the demo's base model, its adapters, and small random adapters for small random models."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_multilora.demo import ADAPTERS
from hf_multilora.demo.chats import answers
from hf_multilora.demo.chats import chat as chat
from hf_multilora.demo.model import demo_model_path

SENTIMENT, PIRATE, JSON = (str(ADAPTERS / name) for name in ("sentiment", "pirate", "json"))


def base_model():
    """SmolLM2-135M-Instruct and its tokenizer; fetched and converted on first use."""
    folder = demo_model_path()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def show(tokenizer, inputs, out, ids) -> None:
    """Print the answer of each row beside its adapter id."""
    for adapter_id, answer in zip(ids, answers(tokenizer, inputs, out), strict=True):
        print(f"{str(adapter_id):<36} {answer}")


def save_random_adapter(folder: str | Path, model: PreTrainedModel, seed: int, **config) -> str:
    """Save a PEFT checkpoint with random factors for `model`, as if it had been trained; returns its folder."""
    torch.manual_seed(seed)
    peft_model = get_peft_model(model, LoraConfig(init_lora_weights=False, **config))
    peft_model.save_pretrained(folder)
    peft_model.unload()
    return str(folder)
