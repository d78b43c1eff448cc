"""What the examples share: the demo's base model, its adapters, and small random adapters for small random models."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_multilora.demo import ADAPTERS
from hf_multilora.demo.model import demo_model_path

SENTIMENT, PIRATE, JSON = (str(ADAPTERS / name) for name in ("sentiment", "pirate", "json"))


def base_model():
    """SmolLM2-135M-Instruct and its tokenizer; fetched and converted on first use."""
    folder = demo_model_path()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def chat(tokenizer, prompts: list[str]):
    """Tokens of one padded batch, one row for each prompt."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)


def show(tokenizer, inputs, out, ids) -> None:
    """Print the answer of each row beside its adapter id."""
    answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for adapter_id, answer in zip(ids, answers, strict=True):
        print(f"{str(adapter_id):<36} {answer.strip()}")


def save_random_adapter(folder: str | Path, model: PreTrainedModel, seed: int, **config) -> str:
    """Save a PEFT checkpoint with random factors for `model`, as if it had been trained; returns its folder."""
    torch.manual_seed(seed)
    peft_model = get_peft_model(model, LoraConfig(init_lora_weights=False, **config))
    peft_model.save_pretrained(folder)
    peft_model.unload()
    return str(folder)
