"""An enabled model, and ways to use it wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_files import build, version, write_adapter
from transformers import DynamicCache

from hf_multilora import disable_multilora, enable_multilora

Tensors = dict[str, torch.Tensor]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 100\n"
STEM = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"


class Bed:
    """An enabled model with the adapters `sql` and `poet`, and a folder for broken ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = enable_multilora(build(), max_loras=2, max_lora_rank=8)
        for number, name in enumerate(("sql", "poet")):
            self.model.load_adapter(write_adapter(folder / name, number), adapter_name=name)
        self.ids = torch.arange(1, 9).view(2, 4)

    def forward(self, ids: Any, **more: Any) -> Any:
        with torch.no_grad():
            return self.model(input_ids=self.ids, adapter_ids=ids, **more)

    def broken(self, change: Callable[[Tensors, dict[str, Any]], Any] = lambda tensors, config: None) -> None:
        """Load an adapter whose tensors or config were changed; called `legal`."""
        tensors, config = version(3)
        change(tensors, config)
        folder = write_adapter(self.folder / "legal", 3)
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        self.model.load_adapter(folder, adapter_name="legal")

    def file(self, name: str, content: bytes) -> None:
        """Load an adapter one of whose files is this."""
        folder = write_adapter(self.folder / "legal", 3)
        (folder / name).write_bytes(content)
        self.model.load_adapter(folder, adapter_name="legal")

    def missing_file(self, name: str) -> None:
        folder = write_adapter(self.folder / "legal", 3)
        (folder / name).unlink()
        self.model.load_adapter(folder, adapter_name="legal")


def rename(tensors: Tensors, config: Any) -> None:
    for layer in (0, 1):
        for factor in "AB":
            tensors[STEM.format(layer, "q_projj", factor)] = tensors.pop(STEM.format(layer, "q_proj", factor))


def other_cache(bed: Bed) -> None:
    cache = DynamicCache()
    bed.forward(["sql", None], past_key_values=cache, use_cache=True)
    bed.forward(["poet", None], past_key_values=cache, use_cache=True)


def old_cache(bed: Bed) -> None:
    cache = DynamicCache()
    bed.forward(["sql", None], past_key_values=cache, use_cache=True)
    bed.model.multilora.reload("sql", bed.folder / "poet")
    bed.forward(["sql", None], past_key_values=cache, use_cache=True)


def pin_all(bed: Bed) -> None:
    bed.model.multilora.load(write_adapter(bed.folder / "legal", 3), "legal")
    for name in ("sql", "poet", "legal"):
        bed.model.multilora.pin(name)


def three_at_once(bed: Bed) -> None:
    bed.model.multilora.load(write_adapter(bed.folder / "legal", 3), "legal")
    bed.ids = torch.arange(1, 13).view(3, 4)
    bed.forward(["sql", "poet", "legal"])


def small_slot(bed: Bed) -> None:
    model = enable_multilora(build(), max_loras=1, max_lora_rank=8, slot_bytes=2048)
    model.load_adapter(bed.folder / "sql", adapter_name="sql")


def replaced(bed: Bed) -> None:
    attention = bed.model.model.layers[0].self_attn
    attention.q_proj = torch.nn.Linear(48, 48)
    bed.forward("sql")


class Pipeline:
    model = build()


def wider(tensors: Tensors, config: dict[str, Any]) -> None:
    for name, tensor in list(tensors.items()):
        shape = (12, tensor.shape[1]) if "lora_A" in name else (tensor.shape[0], 12)
        tensors[name] = torch.ones(shape)
    config["r"] = 12


def cut_off(bed: Bed) -> bytes:
    whole = write_adapter(bed.folder / "legal", 3) / "adapter_model.safetensors"
    assert load_file(whole)
    return whole.read_bytes()[:-100]


def of_small_rank(bed: Bed) -> Bed:
    """The bed with slots that hold one of its adapters."""
    disable_multilora(bed.model)
    bed.model = enable_multilora(bed.model, max_loras=2, max_lora_rank=4)
    for name in ("sql", "poet"):
        bed.model.load_adapter(bed.folder / name, adapter_name=name)
    return bed
