"""What ranks do (see `ranks`). Each scene compares the split model with a whole one in the same process."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from models import FAMILIES, VOCAB, prompts
from one_gpu import gather_through_host
from oracle import make_adapter, relative_error, specs
from safetensors.torch import load_file, save_file
from transformers.distributed import DistributedConfig

from hf_multilora import disable_multilora, enable_multilora
from hf_multilora.adapters.dtensors import _summed as summed
from hf_multilora.errors import ModelError, MultiLoraError

NEW = 6
PATIENCE_S = 60  # where a rank is gone, NCCL waits this long, and ends the process
MODE = {"fully_sharded_loras": False}  # of the scene that is played
SCENES: dict[str, Callable[..., Any]] = {}


def scene(play: Callable[..., Any]) -> Callable[..., Any]:
    SCENES[play.__name__] = play
    return play


def sharded() -> bool:
    return MODE["fully_sharded_loras"]


def device() -> str:
    return "cpu" if os.environ["TP_DEVICE"] == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}"


def families(name: str) -> Any:
    """One of the families' models, with a vocabulary that can be shared by two ranks."""
    model = FAMILIES[name].build()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model.resize_token_embeddings(VOCAB + VOCAB % 2, mean_resizing=False)
    return model.eval()


@functools.cache
def saved(name: str, folder: str) -> tuple[Path, dict[str, Path]]:
    """The model and its adapters as files, made by rank 0."""
    place, base = Path(folder), families(name)
    kinds = {**specs(FAMILIES[name])}
    kinds["dora"] = {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": list(FAMILIES[name].attention)}
    kinds["dora_mlp"] = {**kinds["dora"], "target_modules": list(FAMILIES[name].mlp)}
    kinds["biased"] = {"r": 4, "lora_alpha": 8, "lora_bias": True, "target_modules": list(FAMILIES[name].mlp)}
    kinds["head"] = {
        "r": 2, "lora_alpha": 4, "target_modules": list(FAMILIES[name].attention), "modules_to_save": ["lm_head"],
    }  # fmt: skip
    folders = {kind: place / kind for kind in kinds}
    if dist.get_rank() == 0:
        base.save_pretrained(place / "base")
        for seed, (kind, options) in enumerate(kinds.items()):
            make_adapter(base, folders[kind], seed, **options)
    dist.barrier()
    return place / "base", folders


def split(place: Path, plan: Mapping[str, str] | None = None) -> Any:
    """The model over all ranks, by its own plan or with some of it changed."""
    given: Any = {"tp_size": dist.get_world_size()}
    if plan is not None:
        config = transformers.AutoConfig.from_pretrained(place)
        own = {f"model.{path}": style for path, style in config.base_model_tp_plan.items()}
        given["tp_plan"] = {**own, "lm_head": "colwise_gather_output", **plan}
    config = DistributedConfig(**given)
    return transformers.AutoModelForCausalLM.from_pretrained(place, distributed_config=config).eval()


def tokens(model: Any, inputs: dict[str, torch.Tensor], ids: Any, **options: Any) -> list[list[int]]:
    given = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, **options}
    out = model.generate(**inputs, adapter_ids=ids, **given)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


PACKED = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}


@scene
def packed(family: str, folder: str) -> dict[str, Any]:
    """A layer that holds gate and up: each rank has some of both."""
    return mixed(family, folder, PACKED)


@scene
def mixed(family: str, folder: str, plan: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Logits and tokens of mixed batches, more adapters than slots, as one process computes them."""
    place, folders = saved(family, folder)
    whole = enable_multilora(families(family).to(device()), max_loras=4)
    parts = split(place, plan)
    with torch.no_grad():
        bare, beside = (parts(**on(prompts(rows, seed=seed))).logits for rows, seed in ((3, 3), (5, 0)))
    own = dict(whole.named_parameters())
    assert all(torch.equal(summed(p), own[name]) for name, p in parts.named_parameters() if hasattr(p, "placements"))
    shared = enable_multilora(parts, max_loras=4, **MODE)
    refused = {}
    for name, adapter in folders.items():
        whole.multilora.load(adapter, name)
        try:
            shared.multilora.load(adapter, name)
        except MultiLoraError as error:
            refused[name] = str(error)
    kinds = [name for name in folders if name not in refused]
    errors, told, base = {}, {}, True
    for first in range(0, len(kinds), 3):
        some = kinds[first : first + 3]
        ids: list[Any] = [None, *some, some[0]]
        inputs = on(prompts(len(ids), seed=first))
        with torch.no_grad():
            want, got = (model(**inputs, adapter_ids=ids).logits for model in (whole, shared))
            plain = whole(**inputs).logits
        base = base and (first > 0 or torch.equal(got[0], beside[0]))
        for row, name in enumerate(ids):
            real = inputs["attention_mask"][row].bool()
            errors[f"{name} {row}"] = relative_error(got[row][real], want[row][real])
            if name is not None:
                told[name] = relative_error(want[row][real], plain[row][real])
    inputs = on(prompts(6, seed=9))
    ids = [kinds[0], None, kinds[1], {kinds[0]: 0.5, kinds[2]: -1.0}, kinds[2], kinds[0]]
    alike = tokens(shared, inputs, ids) == tokens(whole, inputs, ids)
    wide = [kinds[i % len(kinds)] for i in range(8)]
    waves = tokens(shared, on(prompts(8, seed=2)), wide) == tokens(whole, on(prompts(8, seed=2)), wide)
    shared.multilora.load(folders[kinds[1]], kinds[0], reload=True)
    whole.multilora.load(folders[kinds[1]], kinds[0], reload=True)
    again = tokens(shared, inputs, ids) == tokens(whole, inputs, ids)
    shared.multilora.unload(kinds[0])
    layers = {site.path: (site.in_features, site.out_features) for site in shared.multilora._layout.sites}
    slot_bytes = shared.multilora.status().slot_bytes
    estimate = shared.multilora.estimate_memory(fully_sharded_loras=True)["slot"]
    disable_multilora(shared)
    with torch.no_grad():
        undone = torch.equal(bare, shared(**on(prompts(3, seed=3))).logits)
    return {
        "errors": errors, "told": told, "alike": alike, "waves": waves, "again": again, "refused": refused,
        "undone": undone, "layers": layers, "base": base, "slot": slot_bytes,
        "estimate": estimate,
    }  # fmt: skip


@scene
def compiled(family: str, folder: str) -> dict[str, Any]:
    """The same from compiled forwards (without a backend: what Dynamo makes of it runs as it is)."""
    place, folders = saved(family, folder)
    whole = enable_multilora(families(family).to(device()), max_loras=4)
    shared = enable_multilora(split(place), max_loras=4, **MODE)
    for model in (whole, shared):
        for name in ("r8", "r3", "r1"):
            model.multilora.load(folders[name], name)
    backend = "inductor" if os.environ["TP_DEVICE"] == "cuda" else "aot_eager" if sharded() else "eager"
    step = torch.compile(shared, backend=backend)
    ids = ["r8", None, "r3", "r1"]
    inputs = on(prompts(4, seed=5))
    with torch.no_grad(), shared.multilora.use(ids):
        got = step(**inputs).logits
    with torch.no_grad():
        want = whole(**inputs, adapter_ids=ids).logits
    real = inputs["attention_mask"].bool()
    return {"error": relative_error(got[real], want[real])}


@scene
def refusals(family: str, folder: str) -> dict[str, Any]:
    """What ranks share and an adapter saves whole is refused by name."""
    place, _ = saved(family, folder)
    shared = enable_multilora(split(place), max_loras=2)
    whole, said = Path(folder, "whole"), {}
    if dist.get_rank() == 0:
        make_adapter(families(family), whole, 3, r=2, target_modules=["q_proj"], modules_to_save=["o_proj"])
        tensors = load_file(whole / "adapter_model.safetensors")
        trained = {name: t + 0.5 if "o_proj" in name else t for name, t in tensors.items()}  # no copy of the base's
        save_file(trained, whole / "adapter_model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    try:
        shared.multilora.load(whole, "whole")
    except MultiLoraError as error:
        said["saved"] = str(error)
    return said


@scene
def disagreement(family: str, folder: str) -> dict[str, Any]:
    """Ranks that do different things hear of it, and go on."""
    place, folders = saved(family, folder)
    shared, rank = enable_multilora(split(place), max_loras=4, **MODE), dist.get_rank()
    shared.multilora.load(folders["r8"], "a")
    said = {}
    for what, act in {
        "name": lambda: shared.multilora.load(folders["r8"], f"b{rank}"),
        "content": lambda: shared.multilora.load(folders["r3" if rank else "r8"], "c"),
        "ids": lambda: tokens(shared, on(prompts(2)), ["a", None] if rank else [None, "a"]),
        "unknown": lambda: tokens(shared, on(prompts(2)), "a" if rank else "nobody"),
    }.items():
        try:
            act()
        except (ModelError, MultiLoraError) as error:
            said[what] = f"{type(error).__name__}: {error}"
    good = tokens(shared, on(prompts(2)), ["a", None])
    return {"said": said, "good": good}


@scene
def gradients(family: str, folder: str) -> dict[str, Any]:
    """The same without torch.no_grad(), where transformers computes with DTensors."""
    place, folders = saved(family, folder)
    whole = enable_multilora(families(family).to(device()), max_loras=4)
    shared = enable_multilora(split(place), max_loras=4, **MODE)
    for model in (whole, shared):
        model.multilora.load(folders["r8"], "a")
    inputs, ids = on(prompts(3)), ["a", None, "a"]
    want = whole(**inputs, adapter_ids=ids).logits
    try:
        got = shared(**inputs, adapter_ids=ids).logits
    except ModelError as error:
        return {"said": str(error)}
    real = inputs["attention_mask"].bool()
    return {"error": relative_error(got[real], want[real]), "grad": got.requires_grad}


@scene
def killed(family: str, folder: str) -> dict[str, Any]:
    """Rank 1 goes away in the middle; rank 0 has an error, and no endless wait."""
    place, folders = saved(family, folder)
    shared = enable_multilora(split(place), max_loras=4, **MODE)
    shared.multilora.load(folders["r8"], "a")
    tokens(shared, on(prompts(2)), ["a", None])
    print("ready", flush=True)
    while True:
        tokens(shared, on(prompts(2)), ["a", None], max_new_tokens=200)


def on(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device()) for name, tensor in inputs.items()}


def play_one(name: str, *arguments: str) -> Any:
    """A scene, fully sharded where "@sharded" follows its name."""
    scene, _, mode = name.partition("@")
    MODE["fully_sharded_loras"] = mode == "sharded"
    return SCENES[scene](*arguments)


def main() -> None:
    name, *arguments, folder = sys.argv[1:]
    torch.set_num_threads(1)
    if os.environ["TP_DEVICE"] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(os.environ["TP_BACKEND"], timeout=timedelta(seconds=PATIENCE_S))
    if os.environ["TP_DEVICE"] == "cuda" and os.environ["TP_BACKEND"] == "gloo":
        gather_through_host()
    try:
        found = {}
        for one in name.split("+"):
            found[one] = play_one(one, *arguments, folder)
            Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: the others would wait for this one
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # what is captured or compiled may hold the group


if __name__ == "__main__":
    main()
