"""Hand-built tables of targets and random adapters in PEFT's format, for the loader's tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_multilora.adapters.load import load_plan
from hf_multilora.adapters.match import AdapterPlan
from hf_multilora.adapters.targets import Target, TargetTable

H, KV, INNER, V = 32, 16, 48, 64  # widths of every table here
LLAMA_LINEARS = {
    "self_attn.q_proj": (H, H),
    "self_attn.k_proj": (H, KV),
    "self_attn.v_proj": (H, KV),
    "self_attn.o_proj": (H, H),
    "mlp.gate_proj": (H, INNER),
    "mlp.up_proj": (H, INNER),
    "mlp.down_proj": (INNER, H),
}
PHI3_LINEARS = {
    "self_attn.qkv_proj": (H, H + 2 * KV),
    "self_attn.o_proj": (H, H),
    "mlp.gate_up_proj": (H, 2 * INNER),
    "mlp.down_proj": (INNER, H),
}
SLICES = {
    "qkv_proj": (("q_proj", H), ("k_proj", KV), ("v_proj", KV)),
    "gate_up_proj": (("gate_proj", INNER), ("up_proj", INNER)),
}


def table(
    linears: Mapping[str, tuple[int, int]],
    *,
    layers: str = "model.layers",
    n_layers: int = 2,
    embeddings: Iterable[str] = ("model.embed_tokens",),
    heads: Iterable[str] = ("lm_head",),
    base: Mapping[str, torch.Tensor] | None = None,
    modules: Iterable[str] = (),
    **fields: Any,
) -> TargetTable:
    """A table with `linears` in each layer, embeddings and heads; layers that fuse known projections get slices."""
    targets = {path: Target(path, "embedding", V, H) for path in embeddings}
    for i in range(n_layers):
        for name, (inside, out) in linears.items():
            path = f"{layers}.{i}.{name}"
            targets[path] = Target(path, "linear", inside, out, SLICES.get(name.rpartition(".")[2], ()))
    targets.update({path: Target(path, "linear", H, V) for path in heads})
    names = dict.fromkeys([*modules, *targets])
    for path in targets:
        while path := path.rpartition(".")[0]:
            names[path] = None
    fields = {"refused": {}, "untargeted": frozenset(), "base_name": "org/tiny", **fields}
    return TargetTable(targets=targets, modules=tuple(names), read_base=dict(base or {}).get, **fields)


def llama(**options: Any) -> TargetTable:
    return table(LLAMA_LINEARS, **options)


def phi3(**options: Any) -> TargetTable:
    return table(PHI3_LINEARS, **options)


def gpt2(**options: Any) -> TargetTable:
    linears = {
        "attn.c_attn": (H, 3 * H),
        "attn.c_proj": (H, H),
        "mlp.c_fc": (H, INNER),
        "mlp.c_proj": (INNER, H),
    }
    return table(linears, layers="transformer.h", embeddings=("transformer.wte",), **options)


def factors(
    path: str, inside: int, out: int, r: int = 4, *, embedding: bool = False, prefix: str = "base_model.model."
):
    """One module's A and B under PEFT's names; random, and the same for the same path and shape."""
    generator = torch.Generator().manual_seed(sum(map(ord, path)) * 31 + r)
    a, b = torch.randn(r, inside, generator=generator), torch.randn(out, r, generator=generator)
    if embedding:
        return {f"{prefix}{path}.lora_embedding_A": a, f"{prefix}{path}.lora_embedding_B": b}
    return {f"{prefix}{path}.lora_A.weight": a, f"{prefix}{path}.lora_B.weight": b}


def adapter(targets: TargetTable, names: Iterable[str], r: int = 4, **options: Any) -> dict[str, torch.Tensor]:
    """Factors for every target whose path ends with one of `names`."""
    tensors: dict[str, torch.Tensor] = {}
    endings = tuple(f".{name}" for name in names)
    for path, target in targets.targets.items():
        if f".{path}".endswith(endings):
            embedding = target.kind == "embedding"
            shape = (target.in_features, target.out_features)
            tensors.update(factors(path, *shape, r, embedding=embedding, **options))
    return tensors


def config(**fields: Any) -> dict[str, Any]:
    """A small valid config: rank 4, alpha 8."""
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": None, **fields}


def load(
    tensors: Mapping[str, torch.Tensor], targets: TargetTable, fields: Mapping[str, Any], **options
) -> AdapterPlan:
    return load_plan(dict(tensors), targets, config=fields, **{"max_lora_rank": 64, **options})


def save(folder: Path, tensors: Mapping[str, torch.Tensor], fields: Mapping[str, Any] | None = None) -> Path:
    """Write an adapter's folder; without tensors, or without fields, that file is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    if fields is not None:
        (folder / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    if tensors:
        held = {key: value.contiguous() for key, value in tensors.items()}
        save_file(held, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def deltas(plan: AdapterPlan) -> dict[tuple[str, int], torch.Tensor]:
    """scaling * B A of every site: what the plan adds to each weight."""
    return {(f.path, f.slice): f.scaling * f.b.read().double() @ f.a.read().double() for f in plan.factors}
