"""What an adapter holds, and whether a model would take it: read from files, without the model's weights in memory."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from .adapters.checkpoint import Checkpoint, open_checkpoint
from .adapters.config import AdapterSpec, parse_config, read_config
from .adapters.keys import FACTORS, Key, parse_keys
from .adapters.load import load_plan
from .adapters.plan import AdapterPlan
from .adapters.select import unmatched
from .adapters.source import Request, resolve
from .config import MultiLoraConfig
from .errors import ModelError, UnsupportedAdapterError
from .memory.layout import FACTOR_ALIGN, Layout, align
from .reading import Reader, check_plan
from .report import abridge, content_rows, count, describe, megabytes, summarise_modules
from .survey import survey


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
    features: list[str] = field(default_factory=list)  # what it has beside plain LoRA, in words
    scalings: dict[str, float] = field(default_factory=dict)  # module path in the checkpoint -> by the config
    unmatched: list[str] = field(default_factory=list)  # names and patterns of the config that mean no module of it

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        title = f"{self.source}: rank {self.rank}, {count(len(self.modules), 'module')}, {megabytes(self.nbytes)}"
        scaling = f"r={self.r}, alpha={self.alpha:g}{', rank-stabilised' if self.use_rslora else ''}" if self.r else ""
        rows = [
            ("base", self.base_model or "not named"),
            ("modules", summarise_modules(self.modules)),
            ("beside", "; ".join(self.features)),
            ("tensors", ", ".join(f"{n} {dtype}" for dtype, n in self.dtypes.items())),
            ("config", ", ".join(filter(None, [scaling, f"PEFT {self.peft_version or 'of an unknown version'}"]))),
            ("other", abridge(self.other_tensors)),
            ("unmatched", abridge(self.unmatched)),
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
    nbytes: int = 0  # of the adapter in a slot
    tensors: int = 0  # of the file that are used; the fields from here on are those of LoadReport
    features: list[str] = field(default_factory=list)
    scalings: dict[str, float] = field(default_factory=dict)
    saved: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    invocation: list[int] = field(default_factory=list)
    vocab_size: int | None = None
    converted: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        larger = f"; it needs slot_bytes={self.nbytes}" if self.nbytes > self.slot_bytes else ""
        rows = [
            ("adapter", f"rank {self.rank}, {self.sites} of {self.sites_of_model} places that can carry one"),
            ("modules", summarise_modules(self.modules)),
            *content_rows(self),
            ("slot", f"{megabytes(self.slot_bytes)} at max_lora_rank={self.max_lora_rank}, {self.dtype}{larger}"),
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
        keys = parse_keys(checkpoint.infos, checkpoint.where)
        modules, other = _stored_modules(keys, checkpoint, spec)
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
            nbytes=sum(info.dtype.itemsize * math.prod(info.shape) for info in infos),
            other_tensors=other,
            ignored=list(spec.ignored) if spec else [],
            warnings=[*files.warnings, *(spec.warnings if spec else ())],
            refused=refused,
            features=_found_in(keys, spec),
            scalings={p: spec.scaling(_named(p, modules, spec), r) for p, r in modules.items() if r} if spec else {},
            unmatched=unmatched(spec, modules) if spec else [],
        )
    finally:
        checkpoint.close()


def check_adapter(
    source: str,
    model: str,
    *,
    max_lora_rank: int = 64,
    extra_vocab_size: int = 0,
    strict_base: bool = False,
    **where: Any,
) -> Check:
    """Match an adapter against a model that is known by its config alone.

    The model is built without memory for its weights; the answer is that of `model.load_adapter`. Only base weights
    that a checkpoint carries along are read, one at a time, from the safetensors files beside the config.

    Args:
        source: folder or hub id of the adapter; `where` as for `inspect_adapter` (`token` and `local_files_only` are
            for the model, too).
        model: folder or hub id of the base model; its config is enough for most adapters.
        max_lora_rank, extra_vocab_size: as it would be enabled with.

    Raises:
        ModelError: the model's config cannot be read, or names an unknown architecture, or weights are needed.
        MultiLoraError: what `load_adapter` would raise.
    """
    config, base = _empty_model(model, where.get("token"), bool(where.get("local_files_only")))
    options = MultiLoraConfig(max_lora_rank=max_lora_rank, extra_vocab_size=extra_vocab_size)
    Reader.check(base, options)
    seen = survey(base, options)
    table = replace(seen.table, read_base=_BaseReader(model, base))
    dtype = getattr(config, "dtype", None) or torch.float32
    with load_plan(source, table, max_lora_rank=max_lora_rank, strict_base=strict_base, **where) as plan:
        check_plan(plan, base, seen.found, options)
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
            nbytes=_block_bytes(plan, layout, dtype),
            **plan.facts(),
        )


def _block_bytes(plan: AdapterPlan, layout: Layout, dtype: torch.dtype) -> int:
    """Bytes of the block that the adapter would be packed into, from shapes alone."""
    stored: dict[object, int] = {}
    for factor in plan.factors:
        if factor.a is not None and factor.b is not None:
            stored[factor.a] = math.prod(factor.a.shape) * dtype.itemsize
            stored[factor.b, factor.gain] = math.prod(factor.b.shape) * dtype.itemsize
        stored.update({v: math.prod(v.shape) * 4 for v in (factor.gain, factor.shift) if v is not None})
    for item in plan.saved:
        stored["saved", item.ref] = math.prod(item.ref.shape) * dtype.itemsize
    for rows in plan.tokens:
        stored["ids", rows.ids] = len(rows.ids) * 8
        stored["rows", rows.ref] = math.prod(rows.ref.shape) * dtype.itemsize
    return layout.header_bytes + sum(align(nbytes, FACTOR_ALIGN) for nbytes in stored.values())


def _found_in(keys: list[Key], spec: AdapterSpec | None) -> list[str]:
    """What the tensors, and the config where only it says so, have beside plain LoRA."""
    n = Counter(key.role for key in keys)
    saved = [key.path for key in keys if key.role in ("param", "base") and key.leaf != "bias"]
    biases = sum(key.role in ("param", "base") and key.leaf == "bias" for key in keys)
    words = [
        (n["dora"], f"DoRA ({n['dora']})"),
        (n["bias_B"], f"biases of B ({n['bias_B']})"),
        (biases, f"biases ({biases})"),
        (saved, f"whole modules ({', '.join(dict.fromkeys(saved))})"),
        (n["tokens"], "token rows"),
        (n["kasa"], "KaSA's base"),
    ]
    if spec is not None:
        words += [
            (spec.altered in ("pissa", "olora"), f"{spec.altered}: served from the clean base at twice the rank"),
            (spec.invocation, f"aLoRA, invoked by {list(spec.invocation)}"),
            (spec.blocks > 1, f"block-diagonal factors of {spec.blocks} blocks (BD-LoRA)"),
        ]
    return [text for there, text in words if there]


_STACKED = re.compile(r"(.*\bexperts)(\.base_layer)?")


def _named(path: str, modules: Collection[str], spec: AdapterSpec) -> str:
    """What the config's patterns call a stored pair: that of stacked experts by its parameter."""
    match = _STACKED.fullmatch(path)
    if match is None:
        return path
    block = match[1]
    into = next((n for n in ("gate_up_proj", "up_proj") if spec.chooses_parameter(f"{block}.{n}")), "gate_up_proj")
    outer = f"{block}.base_layer" in modules or spec.chooses_parameter(f"{block}.down_proj")
    return f"{block}.{'down_proj' if outer and not match[2] else into}"


def _stored_modules(
    keys: list[Key], checkpoint: Checkpoint, spec: AdapterSpec | None
) -> tuple[dict[str, int], list[str]]:
    modules = dict.fromkeys((key.path for key in keys if key.role in FACTORS), 0)
    other = []
    for key in keys:
        if key.role in FACTORS:
            shape = checkpoint.infos[key.name].shape
            if key.role in ("A", "embedding_A") and shape:
                stacked = spec is not None and _STACKED.fullmatch(key.path) is not None
                rank = spec.rank(_named(key.path, modules, spec)) if spec is not None and stacked else 0
                modules[key.path] = rank if rank and shape[0] % rank == 0 else shape[0]
        else:
            other.append(key.name)
    return modules, other


def _empty_model(
    model: str, token: str | bool | None, local_files_only: bool
) -> tuple[PretrainedConfig, PreTrainedModel]:
    try:
        config = AutoConfig.from_pretrained(model, token=token, local_files_only=local_files_only)
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
