"""A base whose weights lie elsewhere between forwards (accelerate, CPU and disk): every kind of adapter, mixed.

What is right is what the same model gives with its weights in place, to the bit: no kernel is another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from models import FAMILIES, prompts
from moe_bed import ROWS as MOE_ROWS
from moe_bed import adapters as moe_adapters
from moe_bed import bare as bare_moe
from moe_bed import enabled as enabled_moe
from moe_bed import logits as moe_logits
from oracle import adapters, make_adapter, workspace
from transformers import PreTrainedModel

from hf_multilora import disable_multilora, enable_multilora

IDS = ["lora", None, "dora", "head", "tokens", "norms", "biases", "tables"]
LINEAR = ["q_proj", "v_proj", "gate_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "dora": {"r": 4, "use_dora": True, "target_modules": [*LINEAR, "lm_head"]},
    "head": {"r": 3, "target_modules": LINEAR, "modules_to_save": ["lm_head"]},
    "tokens": {"r": 3, "target_modules": LINEAR, "trainable_token_indices": {"embed_tokens": [3, 9, 50]}},
    "norms": {"r": 2, "target_modules": LINEAR[:1], "modules_to_save": ["norm", "input_layernorm", "embed_tokens"]},
    "biases": {"r": 2, "target_modules": ["query_key_value"], "bias": "all"},
    "tables": {"r": 5, "target_modules": ["embed_tokens", "lm_head", "up_proj"]},
}
OPTIONS: dict[str, Any] = {"max_loras": 8, "max_lora_rank": 16, "slot_bytes": 1 << 21}


@cache
def folders(family: str) -> dict[str, Path]:
    """Adapters of every kind that the family can have."""
    base = FAMILIES[family].build()
    found = {"lora": adapters(family)["r8"]}
    for seed, (name, kind) in enumerate(KINDS.items()):
        fused = any("query_key_value" in path for path, _ in base.named_modules())
        if fused == (name == "biases"):
            found[name] = saved_and_moved(base, workspace() / "offload" / family / name, 50 + seed, kind)
    return found


def saved_and_moved(base: PreTrainedModel, folder: Path, seed: int, kind: dict[str, Any]) -> Path:
    """An adapter as PEFT saves it, with what it saved whole (else the base's own) and its biases moved."""
    from safetensors.torch import load_file, save_file

    make_adapter(base, folder, seed, save={"save_embedding_layers": False}, **kind)
    file, generator = folder / "adapter_model.safetensors", torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".lora_" not in name:
            scale = 0.1 * tensor.std() if tensor.dim() > 1 or "magnitude" in name else torch.tensor(0.1)
            tensors[name] = tensor + scale * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, file)
    return folder


def offload_to_cpu(model: PreTrainedModel, folder: Path) -> None:
    cpu_offload(model, execution_device=torch.device("cpu"))


def offload_with_buffers(model: PreTrainedModel, folder: Path) -> None:
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)


def offload_to_disk(model: PreTrainedModel, folder: Path) -> None:
    disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def dispatch(model: PreTrainedModel, folder: Path) -> None:
    """As from_pretrained(device_map=) does it: some parts in place, others on the disk, and whole layers at a time."""
    places = {path: "cpu" for path, module in model.named_modules() if next(module.children(), None) is None}
    last = [path for path in places if ".1." in path or "head" in path or "embed" in path]
    places |= dict.fromkeys(last, "disk")
    dispatch_model(model, device_map=places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


def offload_whole_layers(model: PreTrainedModel, folder: Path) -> None:
    """A layer's weights come in when the layer begins: its linears have no hooks of their own."""
    kinds = [type(module).__name__ for module in model.modules() if "Layer" in type(module).__name__]
    cpu_offload(model, execution_device=torch.device("cpu"), preload_module_classes=sorted(set(kinds) - {"LayerNorm"}))


WAYS: list[Callable[[PreTrainedModel, Path], None]] = [
    offload_to_cpu, offload_with_buffers, offload_to_disk, dispatch, offload_whole_layers,
]  # fmt: skip


def load(model: PreTrainedModel, family: str) -> list[str | None]:
    found = folders(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, folder in found.items():
            model.load_adapter(folder, adapter_name=name)
    return [name for name in IDS if name is None or name in found]


@torch.no_grad()
def answers(model: PreTrainedModel, ids: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a mixed batch, and tokens that it generates."""
    batch = prompts(len(ids))
    logits = model(**batch, adapter_ids=ids).logits
    return logits, model.generate(**batch, adapter_ids=ids, max_new_tokens=4, do_sample=False)


@cache
def in_place(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    model = enable_multilora(FAMILIES[family].build(), **OPTIONS)
    return answers(model, load(model, family))


CASES = [(family, way) for family in ("llama", "llama_tied") for way in WAYS]
CASES += [("neox", offload_to_cpu), ("neox", dispatch), ("gemma3", offload_to_disk), ("gemma3", offload_whole_layers)]


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(("family", "way"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_every_kind(family: str, way: Callable[..., None], order: str, tmp_path: Path) -> None:
    model = FAMILIES[family].build()
    if order == "before":
        way(model, tmp_path)
    enable_multilora(model, **OPTIONS)
    if order == "after":
        way(model, tmp_path)
    assert any(parameter.device.type == "meta" for parameter in model.parameters()), "nothing was offloaded"
    ids = load(model, family)
    got, want = answers(model, ids), in_place(family)
    for row, name in enumerate(ids):
        assert torch.equal(got[0][row], want[0][row]), f"logits of {name}: {(got[0][row] - want[0][row]).abs().max()}"
        assert torch.equal(got[1][row], want[1][row]), f"tokens of {name}"
    assert any(parameter.device.type == "meta" for parameter in model.parameters()), "weights have stayed"
    disable_multilora(model)
    bare = FAMILIES[family].build()
    with torch.no_grad():
        assert torch.equal(model(**prompts(2)).logits, bare(**prompts(2)).logits)
    remove_hook_from_submodules(model)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts(family: str, implementation: str, tmp_path: Path) -> None:
    want = moe_logits(enabled_moe(family, implementation), 6, adapter_ids=MOE_ROWS)
    for way in (offload_to_cpu, offload_to_disk):
        model = bare_moe(family, implementation)
        way(model, tmp_path)
        enable_multilora(model, max_loras=5, max_lora_rank=8, slot_bytes=4 << 20)
        for name, (_, (tensors, config)) in moe_adapters(family).items():
            model.multilora.load(dict(tensors), name, config=config)
        assert torch.equal(moe_logits(model, 6, adapter_ids=MOE_ROWS), want), way.__name__
        assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_waves_and_evictions(tmp_path: Path) -> None:
    """Slots stay where the layers compute, whatever happens to the base's weights."""
    model = FAMILIES["llama"].build()
    offload_to_disk(model, tmp_path)
    enable_multilora(model, **{**OPTIONS, "max_loras": 2, "max_cpu_loras": 3})
    ids, want = load(model, "llama"), in_place("llama")[1]
    for _ in range(2):
        got = model.generate(**prompts(len(ids)), adapter_ids=ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(got, want)
    assert model.multilora.status().resident.evictions > 4


@pytest.mark.parametrize("order", ["before", "after"])
def test_hooks_are_as_they_were(order: str) -> None:
    """After disable_multilora the hooks are the base's, and taking them off gives its weights back."""
    model = FAMILIES["llama"].build()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if order == "after":
        enable_multilora(model, **OPTIONS)
    offload_to_cpu(model, Path())
    if order == "before":
        hooks = {path: module.__dict__.get("_hf_hook") for path, module in model.named_modules()}
        forwards = {path: module.__dict__.get("forward") for path, module in model.named_modules()}
        enable_multilora(model, **OPTIONS)
    answers(model, load(model, "llama"))
    disable_multilora(model)
    if order == "before":
        for path, module in model.named_modules():
            assert module.__dict__.get("_hf_hook") is hooks[path], path
            assert module.__dict__.get("forward") is forwards[path] or path == "", path
    remove_hook_from_submodules(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    with torch.no_grad():
        assert torch.equal(model(**prompts(2)).logits, FAMILIES["llama"].build()(**prompts(2)).logits)


def test_a_tied_pair_that_was_set_apart() -> None:
    """What the config says of ties is not believed where the values differ."""
    from hf_multilora.survey import tied_groups

    model = FAMILIES["llama_tied"].build()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
    offload_to_cpu(model, Path())
    assert tied_groups(model) == {}
    tied = FAMILIES["llama_tied"].build()
    offload_to_cpu(tied, Path())
    assert set(tied_groups(tied)) == {"lm_head.weight", "model.embed_tokens.weight"}
