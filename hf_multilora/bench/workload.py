"""What the benchmarks run on: model shapes and adapters, both random."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

BARE = "bare model"  # what results call it

SHAPES: dict[str, dict[str, int]] = {
    "8B": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=16384,
    ),
    "small": dict(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
    ),
    "tiny": dict(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=2048,
    ),
}
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Tensors = dict[str, torch.Tensor]


def build_model(shape: str, device: str, dtype: torch.dtype, layers: int | None = None, seed: int = 0) -> Any:
    """A Llama of this shape with random weights, made on `device`; it never ends a sequence by itself."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes: dict[str, Any] = dict(SHAPES[shape])
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype, attn_implementation="sdpa")
    return _endless(model)


def load_model(name: str, device: str, dtype: torch.dtype) -> Any:
    """A causal model by folder or hub id; as random ones, it never ends a sequence by itself."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return _endless(model.to(device))


def _endless(model: Any) -> Any:
    model.eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def twin(model: nn.Module) -> Any:
    """A second model over the same parameters: the bare model to compare with, for no memory."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, memo)


def prompts(model: Any, rows: int, tokens: int, seed: int = 0) -> Tensors:
    """Random token ids `[rows, tokens]` and their mask, without padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.vocab_size, (rows, tokens), generator=generator)
    return {"input_ids": ids.to(model.device), "attention_mask": torch.ones_like(ids).to(model.device)}


def linear_shapes(model: nn.Module, suffixes: Sequence[str] = ALL_LINEAR) -> dict[str, tuple[int, int]]:
    """Module path -> (in_features, out_features) of the linear layers with these names.

    A model without any of them: of all its linear layers but the head.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    sizes: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            sizes[path] = (module.in_features, module.out_features)
        elif isinstance(module, Conv1D):
            sizes[path] = (module.nx, module.nf)
    named = {path: size for path, size in sizes.items() if path.rsplit(".", 1)[-1] in suffixes}
    return named or sizes


def adapter_config(rank: int, alpha: float, suffixes: Sequence[str] = ALL_LINEAR) -> dict[str, Any]:
    """The adapter_config.json that PEFT writes for a plain LoRA, without the fields at their defaults."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(suffixes),
        "bias": "none",
        "inference_mode": True,
    }


def random_adapter(
    shapes: Mapping[str, tuple[int, int]],
    rank: int,
    seed: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    gain: float = 0.2,
    host: bool = True,
) -> Tensors:
    """Random A and B under PEFT's keys, in host memory (or, with host=False, on `device`).

    They are views of one buffer, drawn on `device` (a GPU draws 42 M numbers at once, a CPU needs a second) and copied
    once. A has unit gain, B is such that the delta is about `gain * alpha / rank` of an input of unit variance: large
    enough that a forgotten adapter cannot hide in rounding.
    """
    generator = torch.Generator(device).manual_seed(seed)
    flat = torch.randn(sum(rank * (i + o) for i, o in shapes.values()), generator=generator, device=device)
    views: Tensors = {}
    start = 0
    for path, (width_in, width_out) in shapes.items():
        key = f"base_model.model.{path}.lora_"
        for name, size, factor in (
            ("A", (rank, width_in), width_in**-0.5),
            ("B", (width_out, rank), gain * rank**-0.5),
        ):
            view = flat[start : start + size[0] * size[1]].view(size)
            views[f"{key}{name}.weight"] = view.mul_(factor)
            start += view.numel()
    cast = flat.to(dtype)
    cast = cast.cpu() if host else cast
    return {key: cast[view.storage_offset() :][: view.numel()].view(view.shape) for key, view in views.items()}


def save_adapter(folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> Path:
    """Write a PEFT folder: adapter_config.json and adapter_model.safetensors."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(dict(config), indent=2), encoding="utf-8")
    return folder


@contextmanager
def merged(model: nn.Module, tensors: Tensors, scaling: float) -> Iterator[None]:
    """The model with `W + scaling * B A` in place of W, in W's dtype: the oracle, in fp32. Restores W itself."""
    originals: list[tuple[nn.Parameter, torch.Tensor]] = []
    try:
        for key, a in tensors.items():
            if not key.endswith(".lora_A.weight"):
                continue
            path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weight: Any = model.get_submodule(path).weight
            b = tensors[key.replace(".lora_A.", ".lora_B.")]
            originals.append((weight, weight.data))
            a, b = (t.to(weight.device, weight.dtype) for t in (a, b))
            weight.data = torch.addmm(weight.data, b, a, alpha=scaling)
        yield
    finally:
        for weight, data in originals:
            weight.data = data


def nbytes(tensors: Tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


@contextmanager
def scratch(prefix: str = "hf_multilora_bench_") -> Iterator[Path]:
    """A temporary folder, in memory where the system has such a place."""
    memory = "/dev/shm"
    parent = memory if os.path.isdir(memory) and shutil.disk_usage(memory).free > 8 << 30 else None
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        yield Path(folder)
