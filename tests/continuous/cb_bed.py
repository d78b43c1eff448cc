"""A tiny Llama, random adapters that answer differently, and what each of them answers alone.

An adapter's *version* is a number: its rank, its modules and its factors follow from it. The answer of a version is
generate() of a bare model that has the version worked into its weights; nothing of this package takes part in it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from models import FAMILIES, HIDDEN, INNER, VOCAB
from oracle import workspace
from safetensors.torch import save_file
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_multilora import enable_multilora

PAGE = 8  # tokens of one page of the cache
LONGEST = 48  # tokens of the longest answer that is kept
RANKS = (1, 2, 3, 5, 7, 8, 12, 16)
BASE = "__base__"  # the base model's label in the manager's status

Source = int | None | tuple[tuple[int, float], ...]  # a version, the base, or a mix of versions with weights
Tensors = dict[str, torch.Tensor]

_ATTENTION = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (HIDDEN, HIDDEN // 2), "v_proj": (HIDDEN, HIDDEN // 2)}
_ATTENTION |= {"o_proj": (HIDDEN, HIDDEN)}
_MLP = {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}
_WIDTHS = {f"self_attn.{name}": widths for name, widths in _ATTENTION.items()}
_WIDTHS |= {f"mlp.{name}": widths for name, widths in _MLP.items()}
_MODULES = (("q_proj", "v_proj", "o_proj"), (*_ATTENTION, *_MLP), ("up_proj", "down_proj"), ("o_proj", "gate_proj"))


def version(number: int) -> tuple[Tensors, dict[str, Any]]:
    """Tensors under PEFT's names and the adapter_config.json of this version."""
    rank, names = RANKS[number % len(RANKS)], _MODULES[number % len(_MODULES)]
    generator = torch.Generator().manual_seed(1000 + number)
    tensors: Tensors = {}
    for layer in range(2):
        for path, (inside, out) in _WIDTHS.items():
            if path.rpartition(".")[2] in names:
                stem = f"base_model.model.model.layers.{layer}.{path}.lora_"
                tensors[f"{stem}A.weight"] = torch.randn(rank, inside, generator=generator) * inside**-0.5
                tensors[f"{stem}B.weight"] = torch.randn(out, rank, generator=generator) * 0.6 * rank**-0.5
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": 2 * rank}
    return tensors, {**config, "target_modules": list(names)}


def poisoned(number: int, value: float = float("nan"), where: str = "") -> tuple[Tensors, dict[str, Any]]:
    """A version with one number that is not finite, in its first module or one whose name ends with `where`."""
    tensors, config = version(number)
    if where == "lm_head":
        config["target_modules"] += ["lm_head"]
        stem, rank = "base_model.model.lm_head.lora_", config["r"]
        tensors |= {f"{stem}A.weight": torch.ones(rank, HIDDEN), f"{stem}B.weight": torch.zeros(VOCAB, rank)}
    name = next(name for name in tensors if name.endswith(f"{where}.lora_B.weight" if where else "lora_B.weight"))
    tensors[name][3, 0] = value
    return tensors, config


def folder(number: int, at: Path | None = None) -> Path:
    """This version as files, in a folder of its own or, in place of what is there, in `at`."""
    where = at or workspace() / "continuous" / f"v{number}"
    where.mkdir(parents=True, exist_ok=True)
    tensors, config = version(number)
    (where / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, where / "new", metadata={"format": "pt"})
    os.replace(where / "new", where / "adapter_model.safetensors")
    return where


def load(model: Any, name: str, number: int, **options: Any) -> int:
    """Register a version under this name, from memory; returns its generation."""
    tensors, config = version(number)
    return model.multilora.load(tensors, name, config=config, **options).generation


def enabled(versions: Mapping[str, int] = {}, *, device: str = "cpu", **options: Any) -> Any:
    """A fresh Llama, enabled, with these versions registered under these names."""
    model = FAMILIES["llama"].build().to(device)
    model = enable_multilora(model, **{"max_loras": 4, "max_lora_rank": 32, **options})
    for name, number in versions.items():
        load(model, name, number)
    return model


@lru_cache(maxsize=128)
def alone(source: Source) -> Any:
    """The bare model with this source worked into its weights. Do not change it."""
    model = FAMILIES["llama"].build()
    parts = () if source is None else ((source, 1.0),) if isinstance(source, int) else source
    with torch.no_grad():
        for number, weight in parts:
            tensors, config = version(number)
            for name, a in tensors.items():
                if "lora_A" in name:
                    path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    delta = tensors[name.replace("lora_A", "lora_B")] @ a * (config["lora_alpha"] / config["r"])
                    model.get_submodule(path).weight.add_(weight * delta)
    return model


@cache
def _answer(prompt: tuple[int, ...], source: Source, length: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    out = alone(source).generate(ids, do_sample=False, max_new_tokens=length, attention_mask=torch.ones_like(ids))
    return tuple(out[0, len(prompt) :].tolist())


def answer(prompt: Sequence[int], source: Source, new: int) -> list[int]:
    """The first `new` tokens that generate() gives for this prompt and source alone."""
    assert new <= LONGEST
    return list(_answer(tuple(prompt), source, 8 if new <= 8 else LONGEST)[:new])


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_told_apart(prompts: Iterable[Sequence[int]], sources: Sequence[Source], new: int) -> None:
    """Each source answers each of these prompts in its own way: with a mixed-up adapter a test would fail."""
    for tokens in prompts:
        given = {tuple(answer(tokens, source, new)) for source in sources}
        assert len(given) == len(set(sources)), f"prompt {tokens[:4]}…: {len(given)} answers of {len(set(sources))}"


def assert_answer(output: Any, source: Source, new: int, others: Iterable[Source] = ()) -> None:
    """A finished request against its source; `others`: whose a wrong answer may be, for the message."""
    assert output.error is None, f"{output.request_id}: {output.error}"
    got, tokens = output.generated_tokens, output.prompt_ids
    want = answer(tokens, source, new)
    if got != want:
        far = {other: agree(answer(tokens, other, new), got) for other in dict.fromkeys([source, None, *others])}
        raise AssertionError(f"{output.request_id}: {got}, not {source}'s {want}. Tokens that agree, by source: {far}")


def agree(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


_FIELDS = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}


def batching(page: int = PAGE, **options: Any) -> ContinuousBatchingConfig:
    """A small cache, eager and in step, on every transformers: `page_size` was `block_size`, flash was no default."""
    small = {"num_blocks": 64, "max_batch_tokens": 48, "max_requests_per_batch": 16, "max_blocks_per_request": 0}
    small |= {"use_cuda_graph": False, "use_async_batching": False}
    small |= {"auto_switch_to_flash": False} if "auto_switch_to_flash" in _FIELDS else {}
    return ContinuousBatchingConfig(
        **{"page_size" if "page_size" in _FIELDS else "block_size": page, **small, **options}
    )


def greedy(new: int = 8, **options: Any) -> GenerationConfig:
    common = {"do_sample": False, "max_new_tokens": new, "eos_token_id": -1, "pad_token_id": 0}
    return GenerationConfig(**{**common, **options})


def sequences(count: int, new: int = 8) -> GenerationConfig:
    """`count` answers to each prompt. Greedy search has but one; sampling among one token is the same."""
    return greedy(new, num_return_sequences=count, do_sample=True, top_k=1)


def batch(model: Any, inputs: list[list[int]], new: int = 8, config: Any = None, **options: Any) -> list[Any]:
    """generate_batch's outputs, in the order of its inputs."""
    options = {"generation_config": greedy(new), "continuous_batching_config": config or batching(), **options}
    return list(model.generate_batch(inputs, **options).values())
