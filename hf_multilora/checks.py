"""What an adapter holds, and whether a model would take it: read from files, without the model's weights in memory."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from .adapters.checkpoint import Checkpoint, open_checkpoint
from .adapters.config import AdapterSpec, parse_config, read_config
from .adapters.keys import FACTORS, parse_keys
from .adapters.load import load_plan
from .adapters.source import Request, resolve
from .config import MultiLoraConfig
from .errors import ModelError, UnsupportedAdapterError
from .inject import survey
from .memory.layout import Layout
from .report import abridge, count, describe, megabytes, summarise_modules


@dataclass
class Inspection:
    """What is in an adapter's files, before any model is asked."""

    source: str
    base_model: str | None
    peft_version: str | None
    rank: int  # largest rank of a stored factor
    r: int | None  # as the config says; None where the config is refused
    alpha: float | None
    use_rslora: bool | None
    modules: dict[str, int]  # module path in the checkpoint -> rank of its stored factors
    dtypes: dict[str, int]  # dtype -> tensors
    nbytes: int
    other_tensors: list[str]  # neither A nor B of a module
    ignored: list[str]
    warnings: list[str]
    refused: str | None  # why no model would be given this adapter

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        title = f"{self.source}: rank {self.rank}, {count(len(self.modules), 'module')}, {megabytes(self.nbytes)}"
        scaling = f"r={self.r}, alpha={self.alpha:g}{', rank-stabilised' if self.use_rslora else ''}" if self.r else ""
        rows = [
            ("base", self.base_model or "not named"),
            ("modules", summarise_modules(self.modules)),
            ("tensors", ", ".join(f"{n} {dtype}" for dtype, n in self.dtypes.items())),
            ("config", ", ".join(filter(None, [scaling, f"PEFT {self.peft_version or 'of an unknown version'}"]))),
            ("other", abridge(self.other_tensors)),
            ("ignored", abridge(self.ignored)),
            *(("warning", warning) for warning in self.warnings),
            ("refused", self.refused or ""),
        ]
        return describe(title, [row for row in rows if row[1]])


@dataclass
class Check:
    """How an adapter fits a model."""

    source: str
    model: str
    modules: dict[str, int]  # module path in the model -> rank
    rank: int
    sites: int  # slices of wrapped layers that the adapter fills
    sites_of_model: int
    slot_bytes: int  # of one slot at `max_lora_rank` and `dtype`
    max_lora_rank: int
    dtype: str  # that the model's config names
    ignored: list[str]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            ("adapter", f"rank {self.rank}, {self.sites} of {self.sites_of_model} places that can carry one"),
            ("modules", summarise_modules(self.modules)),
            ("slot", f"{megabytes(self.slot_bytes)} at max_lora_rank={self.max_lora_rank}, {self.dtype}"),
            ("ignored", abridge(self.ignored)),
            *(("warning", warning) for warning in self.warnings),
        ]
        return describe(f"{self.source} fits {self.model}", [row for row in rows if row[1]])


def inspect_adapter(source: str, **where: Any) -> Inspection:
    """Read an adapter's config and the names and shapes of its tensors.

    Args:
        source: folder or hub id.
        where: revision, token, subfolder, local_files_only.

    Raises:
        AdapterNotFoundError, AdapterFormatError: there is none, or it cannot be read. What can be read but not served
            is no error here: `refused` says why.
    """
    files = resolve(Request(source, **where))
    fields = read_config(files.config)
    spec: AdapterSpec | None = None
    refused = None
    try:
        spec = parse_config(fields, str(files.config))
    except UnsupportedAdapterError as error:
        refused = str(error)
    checkpoint = open_checkpoint(files.weights)
    try:
        modules, other = _stored_modules(checkpoint)
        infos = checkpoint.infos.values()
        return Inspection(
            source=files.label,
            base_model=fields.get("base_model_name_or_path"),
            peft_version=fields.get("peft_version"),
            rank=max(modules.values(), default=0),
            r=spec.r if spec else None,
            alpha=spec.alpha if spec else None,
            use_rslora=spec.use_rslora if spec else None,
            modules=modules,
            dtypes=dict(Counter(str(info.dtype).removeprefix("torch.") for info in infos)),
            nbytes=sum(info.dtype.itemsize * _numel(info.shape) for info in infos),
            other_tensors=other,
            ignored=list(spec.ignored) if spec else [],
            warnings=[*files.warnings, *(spec.warnings if spec else ())],
            refused=refused,
        )
    finally:
        checkpoint.close()


def check_adapter(
    source: str, model: str, *, max_lora_rank: int = 64, strict_base: bool = False, **where: Any
) -> Check:
    """Match an adapter against a model that is known by its config alone.

    The model is built without memory for its weights; the answer is that of `model.load_adapter`. Only base weights
    that a checkpoint carries along are read, one at a time, from the safetensors files beside the config.

    Args:
        source: folder or hub id of the adapter; `where` as for `inspect_adapter`.
        model: folder or hub id of the base model; its config is enough for most adapters.

    Raises:
        ModelError: the model's config cannot be read, or names an unknown architecture, or weights are needed.
        MultiLoraError: what `load_adapter` would raise.
    """
    config, base = _empty_model(model)
    seen = survey(base, MultiLoraConfig(max_lora_rank=max_lora_rank))
    table = replace(seen.table, read_base=_BaseReader(model, base))
    dtype = getattr(config, "dtype", None) or torch.float32
    with load_plan(source, table, max_lora_rank=max_lora_rank, strict_base=strict_base, **where) as plan:
        modules: dict[str, int] = {}
        for factor in plan.factors:
            modules[factor.path] = max(modules.get(factor.path, 0), factor.rank)
        layout = Layout.from_targets(table.targets)
        return Check(
            source=plan.source,
            model=model,
            modules=modules,
            rank=plan.rank,
            sites=len(plan.factors),
            sites_of_model=layout.n_sites,
            slot_bytes=layout.default_slot_bytes(max_lora_rank, dtype),
            max_lora_rank=max_lora_rank,
            dtype=str(dtype).removeprefix("torch."),
            ignored=list(plan.ignored),
            warnings=list(plan.warnings),
        )


def _stored_modules(checkpoint: Checkpoint) -> tuple[dict[str, int], list[str]]:
    modules: dict[str, int] = {}
    other = []
    for key in parse_keys(checkpoint.infos, checkpoint.where):
        if key.role in FACTORS:
            shape = checkpoint.infos[key.name].shape
            if key.role in ("A", "embedding_A") and shape:
                modules[key.path] = shape[0]
            modules.setdefault(key.path, 0)
        else:
            other.append(key.name)
    return modules, other


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _empty_model(model: str) -> tuple[PretrainedConfig, PreTrainedModel]:
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{model}: no config of a transformers model can be read there: {error}") from error
    names = getattr(config, "architectures", None) or []
    model_class = getattr(transformers, names[0], None) if names else None
    try:
        with torch.device("meta"):
            built = model_class(config) if model_class else AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError) as error:
        what = names[0] if names else config.model_type
        raise ModelError(f"{model}: {what} cannot be built from its config: {error}") from error
    built.config._name_or_path = model
    return config, built.eval()


class _BaseReader:
    """Reads single tensors of the base model from the safetensors files beside its config."""

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        self._name = name
        self._tied = getattr(model, "all_tied_weights_keys", {})
        self._known = set(model.state_dict())
        self._files: dict[str, Path] = {}
        config = cached_file(name, CONFIG_NAME, local_files_only=True)  # it was read a moment ago
        folder = Path(config).parent if config else Path(name)
        if (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._files = {tensor: folder / file for tensor, file in weight_map.items()}
        elif (file := folder / SAFE_WEIGHTS_NAME).is_file():
            with safe_open(file, "pt") as opened:
                self._files = dict.fromkeys(opened.keys(), file)

    def __call__(self, name: str) -> torch.Tensor | None:
        stored = name if name in self._files else self._tied.get(name, name)
        if stored in self._files:
            with safe_open(self._files[stored], "pt") as opened:
                return opened.get_tensor(stored)
        if name in self._known:
            raise ModelError(
                f"The adapter carries {name} along, which has to equal the base's own, and no safetensors file beside "
                f"the config of {self._name} holds it. Check against a folder with the base's weights."
            )
        return None
