"""What users get wrong, one case each, and what the message must hold: where, the next step, and the closest names.

A case without `closest` is about something that has no names to be close to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_files import build, tokenizer, version, write_adapter
from transformers import DynamicCache

from hf_multilora import MultiLoraConfig, disable_multilora, enable_multilora
from hf_multilora.server import Engine, Settings

Tensors = dict[str, torch.Tensor]
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
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
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


@dataclass(frozen=True)
class Case:
    title: str
    do: Callable[[Bed], Any]
    where: str
    step: str
    closest: str | None = None


def _rename(tensors: Tensors, config: Any) -> None:
    for layer in (0, 1):
        for factor in "AB":
            tensors[STEM.format(layer, "q_projj", factor)] = tensors.pop(STEM.format(layer, "q_proj", factor))


def _cache(bed: Bed) -> None:
    cache = DynamicCache()
    bed.forward(["sql", None], past_key_values=cache, use_cache=True)
    bed.forward(["poet", None], past_key_values=cache, use_cache=True)


def _reloaded_cache(bed: Bed) -> None:
    cache = DynamicCache()
    bed.forward(["sql", None], past_key_values=cache, use_cache=True)
    bed.model.multilora.reload("sql", bed.folder / "poet")
    bed.forward(["sql", None], past_key_values=cache, use_cache=True)


def _pins(bed: Bed) -> None:
    bed.model.multilora.load(write_adapter(bed.folder / "legal", 3), "legal")
    for name in ("sql", "poet", "legal"):
        bed.model.multilora.pin(name)


def _three_in_a_forward(bed: Bed) -> None:
    bed.model.multilora.load(write_adapter(bed.folder / "legal", 3), "legal")
    bed.ids = torch.arange(1, 13).view(3, 4)
    bed.forward(["sql", "poet", "legal"])


def _small_slot(bed: Bed) -> None:
    model = enable_multilora(build(), max_loras=1, max_lora_rank=8, slot_bytes=2048)
    model.load_adapter(bed.folder / "sql", adapter_name="sql")


def _replaced(bed: Bed) -> None:
    attention = bed.model.model.layers[0].self_attn
    attention.q_proj = torch.nn.Linear(48, 48)
    bed.forward("sql")


CASES = [
    # Names and ids
    Case("unknown name", lambda b: b.forward("sqll"), "'sqll'", "load_adapter(", "'sql'"),
    Case("unknown name, nothing loaded on demand", lambda b: enable_multilora(build(), on_demand=False).set_adapter("org/x"), "'org/x'", "load_adapter("),  # noqa: E501
    Case("unknown name in a mix", lambda b: b.forward([{"sql": 1.0, "poe": 1.0}, None]), "'poe'", "load_adapter(", "'poet'"),
    Case("unload of an unknown name", lambda b: b.model.delete_adapter("poett"), "'poett'", "Correct the name", "'poet'"),
    Case("one id for two rows", lambda b: b.forward(["sql"]), "2", "one id"),
    Case("an id that is a number", lambda b: b.forward([1, None]), "1", "None"),
    Case("a mix without parts", lambda b: b.forward([{}, None]), "adapter_ids[0]", "Use None"),
    Case("a weight that is none", lambda b: b.forward([{"sql": "much"}, None]), "'much'", "number"),
    Case("both spellings at once", lambda b: b.forward("sql", adapter_names="sql"), "adapter_names", "Pass one"),
    Case("several defaults", lambda b: b.model.set_adapter(["sql", "poet"]), "set_adapter", "mix"),
    Case("a name that is taken", lambda b: b.model.load_adapter(b.folder / "poet", adapter_name="sql"), "'sql'", "reload=True"),  # noqa: E501
    Case("the base's word as a name", lambda b: b.model.multilora.load(b.folder / "poet", "__base__"), "'__base__'", "other than"),  # noqa: E501
    Case("tensors without a name", lambda b: b.model.multilora.load(version(1)[0], config=version(1)[1]), "Tensors in memory", "load(tensors, name"),  # noqa: E501
    # Slots
    Case("more adapters than slots in a forward", _three_in_a_forward, "3", "max_loras"),
    Case("all slots pinned", _pins, "'legal'", "Unpin"),
    Case("a slot that is too small", _small_slot, "sql", "slot_bytes"),
    Case("a rank over the maximum", lambda b: b.broken(_wider), "rank", "max_lora_rank"),
    Case("a mix over the maximum rank", lambda b: enable_small(b).forward([{"sql": 0.5, "poet": 0.5}, None]), "rank", "max_lora_rank"),  # noqa: E501
    # Caches
    Case("a cache of another adapter", _cache, "Row 0", "start from an empty cache"),
    Case("a cache of an older generation", _reloaded_cache, "Row 0", "start from an empty cache"),
    # Checkpoints: tensors
    Case("a module that the model has not", lambda b: b.broken(_rename), "q_projj", "another base", "q_proj'"),
    Case("a tensor that means nothing", lambda b: b.broken(lambda t, c: t.update({"base_model.model.extra.weight": torch.ones(2)})), "extra.weight", "without it"),  # noqa: E501
    Case("B is missing", lambda b: b.broken(lambda t, c: t.pop(STEM.format(0, "v_proj", "B"))), "v_proj", "download it again"),
    Case("a wrong width", lambda b: b.broken(lambda t, c: t.update({STEM.format(0, "q_proj", "A"): torch.ones(5, 40)})), "layers.0.self_attn.q_proj", "another base"),  # noqa: E501
    Case("no tensors", lambda b: b.broken(lambda t, c: t.clear()), "legal", "Copy it again"),
    # Checkpoints: config
    Case("a field of the future", lambda b: b.broken(lambda t, c: c.update(lora_alfa=3)), "lora_alfa", "set it to null", "'lora_alpha'"),
    Case("another PEFT method", lambda b: b.broken(lambda t, c: c.update(peft_type="VERA")), "VERA", "merge it"),
    Case("an init that cannot be computed again", lambda b: b.broken(lambda t, c: c.update(init_lora_weights="corda")), "corda", "PEFT converts it"),  # noqa: E501
    Case("layer replication", lambda b: b.broken(lambda t, c: c.update(layer_replication=[[0, 2], [1, 2]])), "layer_replication", "Load it with PEFT"),  # noqa: E501
    Case("DoRA without magnitudes", lambda b: b.broken(lambda t, c: c.update(use_dora=True)), "use_dora", "download it again"),
    Case("a rank of 0", lambda b: b.broken(lambda t, c: c.update(r=0)), "r=0", "at least 1"),
    # Checkpoints: files
    Case("a folder that is not there", lambda b: b.model.load_adapter(str(b.folder / "poett"), adapter_name="x"), "poett", "'org/name'", "'poet'"),  # noqa: E501
    Case("a folder without weights", lambda b: b.missing_file("adapter_model.safetensors"), "legal", "Copy them"),
    Case("a folder without a config", lambda b: b.missing_file("adapter_config.json"), "legal", "Copy it"),
    Case("a file that is cut off", lambda b: b.file("adapter_model.safetensors", _cut(b)), "adapter_model.safetensors", "download it again"),
    Case("a pointer of git LFS", lambda b: b.file("adapter_model.safetensors", _POINTER), "adapter_model.safetensors", "git lfs pull"),  # noqa: E501
    Case("a config that is no JSON", lambda b: b.file("adapter_config.json", b"{r: 8"), "adapter_config.json", "download it again"),
    # Options and models
    Case("an unknown option", lambda b: enable_multilora(build(), max_lora=4), "'max_lora'", "Closest", "'max_loras'"),
    Case("an option out of range", lambda b: MultiLoraConfig(max_loras=0), "max_loras=0", "at least 1"),
    Case("fewer in host memory than slots", lambda b: MultiLoraConfig(max_loras=8, max_cpu_loras=4), "max_cpu_loras=4", "Raise max_cpu_loras"),  # noqa: E501
    Case("a dtype that is none", lambda b: MultiLoraConfig(lora_dtype="int8"), "'int8'", "bfloat16"),
    Case("targets that match nothing", lambda b: enable_multilora(build(), target_modules=["q_prj"]), "'q_prj'", "Closest", "'q_proj'"),  # noqa: E501
    Case("config and options", lambda b: enable_multilora(build(), MultiLoraConfig(), max_loras=2), "max_loras", "not both"),
    Case("enabled twice", lambda b: enable_multilora(b.model), "enabled already", "disable_multilora("),
    Case("disabled without being enabled", lambda b: disable_multilora(build()), "not enabled", "nothing to disable"),
    Case("no model of transformers", lambda b: enable_multilora(torch.nn.Linear(2, 2)), "Linear", "PreTrainedModel"),
    Case("a compiled model", lambda b: enable_multilora(torch.compile(build())), "OptimizedModule", "enable_multilora(model)"),  # noqa: E501
    Case("in training mode", lambda b: enable_multilora(build().train()), "training mode", "model.eval()"),
    Case("a layer that was replaced", _replaced, "layers.0.self_attn.q_proj", "disable_multilora("),
    Case("a resized vocabulary", lambda b: b.model.resize_token_embeddings(300), "vocabulary", "disable_multilora("),
    Case("add_adapter", lambda b: b.model.add_adapter(object()), "add_adapter", "load_adapter, or"),
    Case("a pipeline instead of its model", lambda b: enable_multilora(_Pipeline()), "_Pipeline", "the model inside of it"),
    # Server
    Case("a server's folder that is not there", lambda b: Settings(adapters=b.folder / "nowhere"), "nowhere", "Name one"),
    Case("a server's limit out of range", lambda b: Settings(max_queue=0), "max_queue=0", "above 0"),
    Case("a server over a model that is not enabled", lambda b: Engine(build(), tokenizer()), "enable", "enable_multilora("),
]  # fmt: skip

_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 100\n"


class _Pipeline:
    model = build()


def _wider(tensors: Tensors, config: dict[str, Any]) -> None:
    for name, tensor in list(tensors.items()):
        shape = (12, tensor.shape[1]) if "lora_A" in name else (tensor.shape[0], 12)
        tensors[name] = torch.ones(shape)
    config["r"] = 12


def _cut(bed: Bed) -> bytes:
    whole = write_adapter(bed.folder / "legal", 3) / "adapter_model.safetensors"
    assert load_file(whole)
    return whole.read_bytes()[:-100]


def enable_small(bed: Bed) -> Bed:
    """The bed with slots that hold one of its adapters."""
    disable_multilora(bed.model)
    bed.model = enable_multilora(bed.model, max_loras=2, max_lora_rank=4)
    for name in ("sql", "poet"):
        bed.model.load_adapter(bed.folder / name, adapter_name=name)
    return bed
