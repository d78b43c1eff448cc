"""Scenes of ranks that share mixtures of experts (see `ranks`): split by their widths, or by their numbers."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import moe_bed
import torch
import torch.distributed as dist
import transformers as tf
from models import VOCAB, prompts
from moe_bed import HIDDEN, INNER, Adapter
from oracle import relative_error
from safetensors.torch import save_file
from scenes import MODE, device, main, on, scene, sharded, tokens
from transformers.distributed import DistributedConfig
from transformers.integrations import moe

from hf_multilora import disable_multilora, enable_multilora
from hf_multilora.adapters.header import read_header
from hf_multilora.adapters.stored import FileBytes, Stored
from hf_multilora.errors import MultiLoraError

# As in moe_bed, but for numbers that two ranks can share.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB + VOCAB % 2, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 10, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    **_COMMON, "intermediate_size": 44, "moe_intermediate_size": INNER, "num_experts": 6, "decoder_sparse_step": 1,
}  # fmt: skip
_LOCAL: dict[str, Any] = {**_COMMON, "intermediate_size": INNER, "num_local_experts": 6}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_LLAMA4 = {"interleave_moe_layer_step": 1, "no_rope_layers": [1, 1], "intermediate_size_mlp": 44}
CONFIGS = {
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**_QWEN, norm_topk_prob=True),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(**_QWEN, shared_expert_intermediate_size=28),
    "mixtral": lambda: tf.MixtralConfig(**_LOCAL),
    "gpt_oss": lambda: tf.GptOssConfig(**_LOCAL, **_LAYERS),
    "llama4": lambda: tf.Llama4TextConfig(**{**_LOCAL, **_LLAMA4, "num_experts_per_tok": 1}),
}
ENABLED = {"max_loras": 3, "max_lora_rank": 12, "slot_bytes": 1 << 20}
DISPATCHES = "ep_size" in inspect.signature(DistributedConfig).parameters  # 5.21 and later


def split(place: Path, how: str, implementation: str | None = None, plan: dict[str, str] | None = None) -> Any:
    """The model over all ranks, its experts by their widths ("tp"), or by their numbers ("ep")."""
    given: dict[str, Any] = {"tp_size": dist.get_world_size()}
    if how != "tp" and DISPATCHES:
        given["ep_size"] = given["tp_size"]
    elif how != "tp":
        given["enable_expert_parallel"] = True
    if implementation is not None:
        given["ep_implementation"] = implementation
    if plan is not None:
        given["tp_plan"] = {
            f"model.{path}": style for path, style in CONFIGS["qwen3_moe"]().base_model_tp_plan.items()
        }
        given["tp_plan"] |= plan
    return tf.AutoModelForCausalLM.from_pretrained(place, distributed_config=DistributedConfig(**given)).eval()


def adapters(family: str) -> dict[str, tuple[dict[str, torch.Tensor], Any]]:
    """Of all formats that a family has, more than there are slots."""
    made, two, three = moe_bed.made, moe_bed.two_d, moe_bed.three_d
    both = made(family, 3, 2, "experts", "attention")
    kinds = {
        "three": three(family, made(family, 4, 1, "experts", "router", "shared")),
        "shared": three(family, made(family, 2, 3, "experts", shared=True)),
        "dense": three(family, made(family, 4, 4, "attention", "router")),
        "other": three(family, made(family, 5, 5, "experts", "attention")),
    }
    if family not in ("gpt_oss", "llama4"):
        kinds |= {"two": two(family, both), "few": two(family, both, (0, 2, 5)), "stacks": stacks(both)}
    return kinds


def stacks(adapter: Adapter) -> tuple[dict[str, torch.Tensor], Any]:
    """The stacks under the projections' own names."""
    tensors = {}
    for (path, name), (a, b) in adapter.experts.items():
        stem = f"base_model.model.{path}.{name}.lora_"
        tensors |= {f"{stem}A.weight": a.clone(), f"{stem}B.weight": b.clone()}
    return tensors, moe_bed.config(adapter, target_modules=sorted(f"{path}.{name}" for path, name in adapter.experts))


def saved(family: str, folder: str) -> tuple[Path, dict[str, Path]]:
    """The model and its adapters as files, made by rank 0."""
    place = Path(folder, family)
    kinds = adapters(family)
    if dist.get_rank() == 0 and not place.exists():
        moe_bed.bare(family).save_pretrained(place / "base")
        for name, (tensors, config) in kinds.items():
            write(place / name, tensors, config)
    dist.barrier()
    return place / "base", {name: place / name for name in kinds}


def write(place: Path, tensors: dict[str, torch.Tensor], config: Any) -> None:
    place.mkdir(parents=True)
    if place.name == "few":
        torch.save(tensors, place / "adapter_model.bin")
    else:
        save_file(tensors, place / "adapter_model.safetensors", metadata={"format": "pt"})
    (place / "adapter_config.json").write_text(json.dumps(config))


def tensors_of(file: Path) -> dict[str, Stored]:
    if file.suffix == ".bin" or not file.exists():
        return {}
    opened = FileBytes(file)
    try:
        return read_header(opened, str(file))
    finally:
        opened.close()


@contextmanager
def reads(file: Path) -> Iterator[dict[str, list[tuple[int, int]]]]:
    """What is read of each tensor of a file meanwhile, as (first, last + 1) of its bytes."""
    found: dict[str, list[tuple[int, int]]] = {}
    stored, plain = tensors_of(file), FileBytes.read_into

    def watched(self: FileBytes, buffers: Any, start: int) -> None:
        stop = start + sum(map(len, buffers))
        for key, where in stored.items():
            first, last = max(start, where.start), min(stop, where.start + where.nbytes)
            if first < last:
                found.setdefault(key, []).append((first - where.start, last - where.start))
        plain(self, buffers, start)

    FileBytes.read_into = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        FileBytes.read_into = plain  # type: ignore[method-assign]


def share(found: dict[str, list[tuple[int, int]]], file: Path) -> dict[str, float]:
    """Key -> the part of the tensor that was read."""
    stored, parts = tensors_of(file), {}
    for key, spans in found.items():
        taken = torch.zeros(stored[key].nbytes, dtype=torch.bool)
        for first, last in spans:
            taken[first:last] = True
        parts[key] = float(taken.float().mean())
    return parts


@scene
def mixtures(cases: str, folder: str) -> dict[str, Any]:
    """`cases`: "family:how:implementation of the experts", separated by commas; fully sharded only those by widths."""
    with unwritten():
        return {
            case: mixture(*case.split(":"), folder) for case in cases.split(",") if ":tp:" in case or not sharded()
        }


@contextmanager
def unwritten() -> Iterator[None]:
    """Grouped products leave the rows of experts that others have unwritten: NaN meanwhile, as they may be."""
    plain = moe._grouped_linear

    def poisoned(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = plain(x, weight, offs, *args, **kwargs)
        y[int(offs[-1]) :] = torch.nan
        return y

    moe._grouped_linear = poisoned
    try:
        yield
    finally:
        moe._grouped_linear = plain


def mixture(family: str, how: str, implementation: str, folder: str) -> dict[str, Any]:
    """Logits and tokens of mixed batches as one process computes them; what a rank holds and reads of an adapter."""
    place, folders = saved(family, folder)
    whole, parts = moe_bed.bare(family, implementation).to(device()), split(place, how)
    if family != "llama4":
        parts.set_experts_implementation(implementation)
    kinds = list(folders)
    ids: list[Any] = [None, *kinds[:3]]
    inputs = on(prompts(len(ids), seed=3))
    with torch.no_grad():
        bare = parts(**inputs).logits
        plain = whole(**inputs).logits
    enable_multilora(whole, **ENABLED)
    shared = enable_multilora(parts, **ENABLED, **MODE)
    read = {}
    for name, adapter in folders.items():
        whole.multilora.load(adapter, name)
        file = adapter / "adapter_model.safetensors"
        with reads(file) as found:
            shared.multilora.load(adapter, name)
        read[name] = share(found, file)
    real = inputs["attention_mask"].bool()
    errors, told, same = {}, {}, []
    for some in (kinds[:3], kinds[-3:]):
        ids = [None, *some]
        with torch.no_grad():
            want, got = (model(**inputs, adapter_ids=ids).logits for model in (whole, shared))
        for row, name in enumerate(ids):
            errors[f"{name}"] = relative_error(got[row][real[row]], want[row][real[row]])
            told[f"{name}"] = relative_error(want[row][real[row]], plain[row][real[row]])
        same.append(torch.equal(got[0], bare[0]))
    told.pop("None")
    nbytes = {
        name: (shared.multilora.store.entry(name).packed.nbytes, whole.multilora.store.entry(name).packed.nbytes)
        for name in kinds
    }
    six = on(prompts(6, seed=9))
    mixed = [kinds[0], None, kinds[1], {kinds[0]: 0.5, kinds[1]: -1.0}, kinds[1], kinds[0]]
    alike = tokens(shared, six, mixed) == tokens(whole, six, mixed)
    wide = [kinds[i % len(kinds)] for i in range(6)]
    waves = len(set(wide)) > ENABLED["max_loras"] and tokens(shared, six, wide) == tokens(whole, six, wide)
    before = tokens(shared, six, mixed)
    for model in (shared, whole):
        model.multilora.load(folders[kinds[1]], kinds[0], reload=True)
    again = tokens(shared, six, mixed)
    again = again == tokens(whole, six, mixed) and again != before
    sites = {s.path: (s.experts, s.in_features, s.out_features) for s in shared.multilora._layout.sites if s.experts}
    disable_multilora(shared)
    with torch.no_grad():
        undone = torch.equal(bare, shared(**inputs).logits)
    return {
        "errors": errors, "told": told, "same": same, "alike": alike, "waves": waves, "again": again,
        "nbytes": nbytes, "sites": sites, "undone": undone, "read": read,
    }  # fmt: skip


@scene
def refused(cases: str, folder: str) -> dict[str, Any]:
    """Experts that an adapter saves whole, and tokens that are sent to other ranks: refused, by name."""
    place, folders = saved("qwen3_moe", folder)
    said: dict[str, Any] = {}
    block = "base_model.model.model.layers.0.mlp.experts"
    own = {
        f"{block}.gate_up_proj": torch.ones(6, 2 * INNER, HIDDEN),
        f"{block}.down_proj": torch.ones(6, HIDDEN, INNER),
    }
    tensors, config = moe_bed.three_d("qwen3_moe", moe_bed.made("qwen3_moe", 2, 6, "attention"))
    try:
        shared = enable_multilora(split(place, "tp"), **ENABLED)
        shared.multilora.load({**tensors, **own}, "own", config={**config, "modules_to_save": ["mlp.experts"]})
    except MultiLoraError as error:
        said["saved"] = str(error)
    try:  # one rank with all of gate, the other with all of up
        shared = enable_multilora(split(place, "tp", plan={"model.layers.*.mlp.experts.gate_up_proj": "colwise"}))
        shared.multilora.load(folders["two"], "two")
    except MultiLoraError as error:
        said["torn"] = str(error)
    shared = enable_multilora(split(place, "ep"), fully_sharded_loras=True, **ENABLED)
    try:
        shared.multilora.load(folders["two"], "two")
    except MultiLoraError as error:
        said["sharded"] = str(error)
    if not DISPATCHES:
        return said
    shared = enable_multilora(split(place, "ep", "all_to_all"), **ENABLED)
    try:
        shared.multilora.load(folders["two"], "two")
    except MultiLoraError as error:
        said["all_to_all"] = str(error)
    shared.multilora.load(folders["dense"], "dense")
    said["dense"] = shared.multilora.store.entry("dense").packed.rank
    auto = enable_multilora(split(place, "ep"), **ENABLED)
    auto.multilora.load(folders["two"], "two")
    try:  # a part of the model, outside of its forward, with a gradient: transformers sends tokens away
        with auto.multilora.use(["two", None]):
            auto.model.layers[0].mlp(torch.ones(2, 3, HIDDEN, device=device(), requires_grad=True))
    except MultiLoraError as error:
        said["gradients"] = str(error)
    with torch.no_grad():
        said["after"] = bool(auto(**on(prompts(2)), adapter_ids=["two", None]).logits.isfinite().all())
    return said


if __name__ == "__main__":
    moe_bed.FAMILIES = {  # of this process, which is a rank's own
        name: functools.partial(lambda make: tf.AutoModelForCausalLM.from_config(make()), make)
        for name, make in CONFIGS.items()
    }
    main()
