"""What users get wrong, one case each, and what the message must hold: where, the next step, and the closest names.

A case without `closest` is about something that has no names to be close to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from error_bed import (
    POINTER,
    STEM,
    Bed,
    Pipeline,
    cut_off,
    of_small_rank,
    old_cache,
    other_cache,
    pin_all,
    rename,
    replaced,
    small_slot,
    three_at_once,
    wider,
)
from tiny_files import build, tokenizer, version

from hf_multilora import MultiLoraConfig, disable_multilora, enable_multilora
from hf_multilora.server import Engine, Settings


@dataclass(frozen=True)
class Case:
    title: str
    do: Callable[[Bed], Any]
    where: str
    step: str
    closest: str | None = None


CASES = [
    # Names and ids
    Case("unknown name", lambda b: b.forward("sqll"), "'sqll'", "load_adapter(", "'sql'"),
    Case(
        "unknown name, nothing loaded on demand",
        lambda b: enable_multilora(build(), on_demand=False).set_adapter("org/x"),
        "'org/x'",
        "load_adapter(",
    ),
    Case(
        "unknown name in a mix",
        lambda b: b.forward([{"sql": 1.0, "poe": 1.0}, None]),
        "'poe'",
        "load_adapter(",
        "'poet'",
    ),
    Case(
        "unload of an unknown name", lambda b: b.model.delete_adapter("poett"), "'poett'", "Correct the name", "'poet'"
    ),
    Case("one id for two rows", lambda b: b.forward(["sql"]), "2", "one id"),
    Case("an id that is a number", lambda b: b.forward([1, None]), "1", "None"),
    Case("a mix without parts", lambda b: b.forward([{}, None]), "adapter_ids[0]", "Use None"),
    Case("a weight that is none", lambda b: b.forward([{"sql": "much"}, None]), "'much'", "number"),
    Case("both spellings at once", lambda b: b.forward("sql", adapter_names="sql"), "adapter_names", "Pass one"),
    Case("several defaults", lambda b: b.model.set_adapter(["sql", "poet"]), "set_adapter", "mix"),
    Case(
        "a name that is taken",
        lambda b: b.model.load_adapter(b.folder / "poet", adapter_name="sql"),
        "'sql'",
        "reload=True",
    ),
    Case(
        "the base's word as a name",
        lambda b: b.model.multilora.load(b.folder / "poet", "__base__"),
        "'__base__'",
        "other than",
    ),
    Case(
        "tensors without a name",
        lambda b: b.model.multilora.load(version(1)[0], config=version(1)[1]),
        "Tensors in memory",
        "load(tensors, name",
    ),
    # Slots
    Case("more adapters than slots in a forward", three_at_once, "3", "max_loras"),
    Case("all slots pinned", pin_all, "'legal'", "Unpin"),
    Case("a slot that is too small", small_slot, "sql", "slot_bytes"),
    Case("a rank over the maximum", lambda b: b.broken(wider), "rank", "max_lora_rank"),
    Case(
        "a mix over the maximum rank",
        lambda b: of_small_rank(b).forward([{"sql": 0.5, "poet": 0.5}, None]),
        "rank",
        "max_lora_rank",
    ),
    # Caches
    Case("a cache of another adapter", other_cache, "Row 0", "start from an empty cache"),
    Case("a cache of an older generation", old_cache, "Row 0", "start from an empty cache"),
    # Checkpoints: tensors
    Case("a module that the model has not", lambda b: b.broken(rename), "q_projj", "another base", "q_proj'"),
    Case(
        "a tensor that means nothing",
        lambda b: b.broken(lambda t, c: t.update({"base_model.model.extra.weight": torch.ones(2)})),
        "extra.weight",
        "without it",
    ),
    Case(
        "B is missing",
        lambda b: b.broken(lambda t, c: t.pop(STEM.format(0, "v_proj", "B"))),
        "v_proj",
        "download it again",
    ),
    Case(
        "a wrong width",
        lambda b: b.broken(lambda t, c: t.update({STEM.format(0, "q_proj", "A"): torch.ones(5, 40)})),
        "layers.0.self_attn.q_proj",
        "another base",
    ),
    Case("no tensors", lambda b: b.broken(lambda t, c: t.clear()), "legal", "Copy it again"),
    # Checkpoints: config
    Case(
        "a field of the future",
        lambda b: b.broken(lambda t, c: c.update(lora_alfa=3)),
        "lora_alfa",
        "set it to null",
        "'lora_alpha'",
    ),
    Case("another PEFT method", lambda b: b.broken(lambda t, c: c.update(peft_type="VERA")), "VERA", "merge it"),
    Case(
        "an init that cannot be computed again",
        lambda b: b.broken(lambda t, c: c.update(init_lora_weights="corda")),
        "corda",
        "PEFT converts it",
    ),
    Case(
        "layer replication",
        lambda b: b.broken(lambda t, c: c.update(layer_replication=[[0, 2], [1, 2]])),
        "layer_replication",
        "Load it with PEFT",
    ),
    Case(
        "DoRA without magnitudes",
        lambda b: b.broken(lambda t, c: c.update(use_dora=True)),
        "use_dora",
        "download it again",
    ),
    Case("a rank of 0", lambda b: b.broken(lambda t, c: c.update(r=0)), "r=0", "at least 1"),
    # Checkpoints: files
    Case(
        "a folder that is not there",
        lambda b: b.model.load_adapter(str(b.folder / "poett"), adapter_name="x"),
        "poett",
        "'org/name'",
        "'poet'",
    ),
    Case("a folder without weights", lambda b: b.missing_file("adapter_model.safetensors"), "legal", "Copy them"),
    Case("a folder without a config", lambda b: b.missing_file("adapter_config.json"), "legal", "Copy it"),
    Case(
        "a file that is cut off",
        lambda b: b.file("adapter_model.safetensors", cut_off(b)),
        "adapter_model.safetensors",
        "download it again",
    ),
    Case(
        "a pointer of git LFS",
        lambda b: b.file("adapter_model.safetensors", POINTER),
        "adapter_model.safetensors",
        "git lfs pull",
    ),
    Case(
        "a config that is no JSON",
        lambda b: b.file("adapter_config.json", b"{r: 8"),
        "adapter_config.json",
        "download it again",
    ),
    # Options and models
    Case("an unknown option", lambda b: enable_multilora(build(), max_lora=4), "'max_lora'", "Closest", "'max_loras'"),
    Case("an option out of range", lambda b: MultiLoraConfig(max_loras=0), "max_loras=0", "at least 1"),
    Case(
        "fewer in host memory than slots",
        lambda b: MultiLoraConfig(max_loras=8, max_cpu_loras=4),
        "max_cpu_loras=4",
        "Raise max_cpu_loras",
    ),
    Case("a dtype that is none", lambda b: MultiLoraConfig(lora_dtype="int8"), "'int8'", "bfloat16"),
    Case(
        "targets that match nothing",
        lambda b: enable_multilora(build(), target_modules=["q_prj"]),
        "'q_prj'",
        "Closest",
        "'q_proj'",
    ),
    Case(
        "config and options",
        lambda b: enable_multilora(build(), MultiLoraConfig(), max_loras=2),
        "max_loras",
        "not both",
    ),
    Case("enabled twice", lambda b: enable_multilora(b.model), "enabled already", "disable_multilora("),
    Case("disabled without being enabled", lambda b: disable_multilora(build()), "not enabled", "nothing to disable"),
    Case("no model of transformers", lambda b: enable_multilora(torch.nn.Linear(2, 2)), "Linear", "PreTrainedModel"),
    Case(
        "a compiled model",
        lambda b: enable_multilora(torch.compile(build())),
        "OptimizedModule",
        "enable_multilora(model)",
    ),
    Case("in training mode", lambda b: enable_multilora(build().train()), "training mode", "model.eval()"),
    Case("a layer that was replaced", replaced, "layers.0.self_attn.q_proj", "disable_multilora("),
    Case("a resized vocabulary", lambda b: b.model.resize_token_embeddings(300), "vocabulary", "disable_multilora("),
    Case("add_adapter", lambda b: b.model.add_adapter(object()), "add_adapter", "load_adapter, or"),
    Case(
        "a pipeline instead of its model",
        lambda b: enable_multilora(Pipeline()),
        "Pipeline",
        "the model inside of it",
    ),
    # Server
    Case(
        "a server's folder that is not there", lambda b: Settings(adapters=b.folder / "nowhere"), "nowhere", "Name one"
    ),
    Case("a server's limit out of range", lambda b: Settings(max_queue=0), "max_queue=0", "above 0"),
    Case(
        "a server over a model that is not enabled",
        lambda b: Engine(build(), tokenizer()),
        "enable",
        "enable_multilora(",
    ),
]
