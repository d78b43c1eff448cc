"""adapter_config.json -> AdapterSpec: every field is honoured, known to be harmless, or refused by name.

The rules for ranks and scalings are PEFT's (tuners/lora/layer.py and utils/other.py of PEFT 0.21).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import AdapterFormatError, UnsupportedAdapterError, closest
from . import values
from .damage import text_damage
from .fields import (
    DEFAULTS,
    HONOURED,
    LEGACY,
    METADATA,
    NO_EFFECT,
    PLAIN_INITS,
    RECOMPUTED_INITS,
    REFUSED,
    REWRITING_INITS,
    foreign_config,
)
from .patterns import PatternTable


@dataclass(frozen=True)
class AdapterSpec:
    """What a config says that matters at inference.

    Args:
        r, alpha: defaults for modules without a pattern of their own.
        use_rslora: alpha / sqrt(r) instead of alpha / r.
        use_dora, lora_bias: whether modules have a magnitude, or a bias of B; the tensors decide.
        altered: "pissa", "olora" or "kasa": the base that it was trained on had lost a part; "": the base itself.
        blocks: blocks of block-diagonal factors (BD-LoRA); group: inputs that QALoRA pools; 1: neither.
        bias: "none", "lora_only" or "all": whose biases were trained; the tensors decide.
        invocation: aLoRA's token sequence.
        token_indices: layer name -> tokens whose rows were trained; under "" those of the input embedding.
        rank_pattern, alpha_pattern: per-module exceptions.
        target_modules, exclude_modules, layers_to_transform, layers_pattern: which modules PEFT wrapped in training.
        target_parameters: parameters (of experts, of routers) that PEFT wrapped, as endings of their names.
        expert_first: in lora_B of stacked experts the expert is the slower index (as older Unsloth trained it).
        modules_to_save: modules that the adapter claims to replace as a whole.
        base_model, task_type, peft_version: as the file says; None where it does not.
        ignored: fields that are set but change nothing at inference.
        warnings: fields whose effect a reader should know.
    """

    r: int = 8
    alpha: float = 8
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    altered: str = ""
    blocks: int = 1
    group: int = 1
    bias: str = "none"
    invocation: tuple[int, ...] = ()
    token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rank_pattern: PatternTable = field(default_factory=lambda: PatternTable({}))
    alpha_pattern: PatternTable = field(default_factory=lambda: PatternTable({}))
    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    expert_first: bool = False
    modules_to_save: tuple[str, ...] = ()
    base_model: str | None = None
    task_type: str | None = None
    peft_version: str | None = None
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def rank(self, name: str) -> int:
        """The rank of the module that was called `name` in training."""
        return int(self.rank_pattern.get(name, self.r))

    def chooses_parameter(self, name: str) -> bool:
        """Whether target_parameters names this parameter: as a whole, or by the end of its name."""
        return any(name == key or name.endswith(f".{key}") for key in self.target_parameters)

    def scaling(self, name: str, rank: int) -> float:
        """alpha / rank or alpha / sqrt(rank) of the module that was called `name` in training."""
        return self.alpha_pattern.get(name, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(path: str | Path) -> dict[str, Any]:
    """Read an adapter_config.json.

    Raises:
        AdapterFormatError: empty, a git-lfs pointer, an HTML page, with a byte-order mark, or not a JSON object.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise AdapterFormatError(f"{path}: cannot be read ({error.strerror or error}).") from error
    damage = text_damage(raw)
    if damage:
        raise AdapterFormatError(f"{path}: {damage}")
    try:
        config = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise AdapterFormatError(f"{path}: not a UTF-8 text ({error}). Is it the right file?") from error
    except json.JSONDecodeError as error:
        cut = error.pos >= len(raw.decode("utf-8").rstrip()) or "Unterminated" in error.msg
        why = "the file is cut off" if cut else "not valid JSON"
        raise AdapterFormatError(
            f"{path}: {why} (line {error.lineno}, column {error.colno}: {error.msg}). Copy or download it again."
        ) from error
    if not isinstance(config, dict):
        raise AdapterFormatError(f"{path}: expected a JSON object with PEFT's fields, got a {type(config).__name__}.")
    return config


def parse_config(config: Mapping[str, Any], where: str) -> AdapterSpec:
    """Check every field of a config and keep what matters.

    Args:
        config: the fields, as read from JSON or as `PeftConfig.to_dict()` gives them.
        where: file name for errors.

    Raises:
        AdapterFormatError: not a PEFT config, or a value of the wrong type.
        UnsupportedAdapterError: another PEFT method, a feature that is not served, an unknown field that is set.
    """
    config = {key: _plain(value) for key, value in config.items()}
    _check_type(config, where)
    ignored = _check_fields(config, where)
    warnings = []
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() == "lora_ga":
        warnings.append(
            "init_lora_weights='lora_ga': trained against a base that LoRA-GA had changed, unless it was converted "
            "when saved. PEFT loads such adapters onto the plain base, and so does this."
        )
    rank = values.number(config, "r", 8, where)
    if rank != int(rank) or rank < 1:
        raise AdapterFormatError(f"{where}: r={config['r']!r}: expected a whole number of at least 1.")
    ranks = values.patterns(config, "rank_pattern", where)
    for key, value in ranks.items():
        if value != int(value) or value < 1:
            raise AdapterFormatError(f"{where}: rank_pattern[{key!r}]={value!r}: expected a whole number, at least 1.")
    return AdapterSpec(
        r=int(rank),
        alpha=values.number(config, "lora_alpha", 8, where),
        use_rslora=values.flag(config, "use_rslora", where),
        use_dora=values.flag(config, "use_dora", where),
        lora_bias=values.flag(config, "lora_bias", where),
        altered=_altered(config, where),
        blocks=_blocks(config, where),
        group=int(values.number(config, "qalora_group_size", 16, where))
        if values.flag(config, "use_qalora", where)
        else 1,
        bias=values.bias(config, where),
        invocation=values.tokens(config.get("alora_invocation_tokens") or (), "alora_invocation_tokens", where),
        token_indices=values.token_indices(config, where),
        rank_pattern=PatternTable(ranks, f"{where}: rank_pattern"),
        alpha_pattern=PatternTable(values.patterns(config, "alpha_pattern", where), f"{where}: alpha_pattern"),
        target_modules=values.selector(config, "target_modules", where),
        exclude_modules=values.selector(config, "exclude_modules", where),
        layers_to_transform=values.layers(config, where),
        layers_pattern=values.expressions(config, "layers_pattern", where),
        target_parameters=values.names(config, "target_parameters", where),
        expert_first=_expert_first(config, where),
        modules_to_save=values.expressions(config, "modules_to_save", where),
        base_model=values.text(config, "base_model_name_or_path"),
        task_type=values.text(config, "task_type"),
        peft_version=values.text(config, "peft_version"),
        ignored=tuple(ignored),
        warnings=tuple(warnings),
    )


def _plain(value: Any) -> Any:
    """Enum members as their value, sets as sorted lists: what JSON would have made of a live PeftConfig's fields."""
    value = getattr(value, "value", value)
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else value


def _check_type(config: Mapping[str, Any], where: str) -> None:
    kind = config.get("peft_type")
    if kind is None:
        raise AdapterFormatError(f"{where}: not a PEFT LoRA: {foreign_config(config)}")
    if not isinstance(kind, str) or kind.rpartition(".")[2].upper() != "LORA":
        raise UnsupportedAdapterError(
            f"{where}: peft_type={kind!r}: only LORA is served. This method computes something else with tensors of "
            "its own; merge it into a copy of the base with PEFT to use it."
        )


def _check_fields(config: Mapping[str, Any], where: str) -> list[str]:
    """Refuse by name what is not served; return what is ignored, each with its reason."""
    known = {*HONOURED, *METADATA, *NO_EFFECT, *REFUSED}
    ignored = []
    for name, value in config.items():
        if _unset(name, value):
            if name in LEGACY or name not in known:
                ignored.append(f"{name}={values.short(value)}: {LEGACY.get(name, 'unknown, and not set')}")
        elif name in REFUSED:
            raise UnsupportedAdapterError(f"{where}: {name}={values.short(value)}: {REFUSED[name]}")
        elif name in NO_EFFECT:
            ignored.append(f"{name}={values.short(value)}: {NO_EFFECT[name]}")
        elif name == "init_lora_weights":
            _check_init(value, where)
        elif name not in known:
            raise UnsupportedAdapterError(
                f"{where}: unknown field {name}={values.short(value)}, which may change what the adapter computes."
                f"{closest(name, known)} If it does not matter at inference, set it to null."
            )
    return ignored


def _unset(name: str, value: Any) -> bool:
    """null, False, empty, or the field's default: as good as absent."""
    return value is None or value is False or value in ("", [], {}, ()) or DEFAULTS.get(name, None) == value


def _check_init(value: Any, where: str) -> None:
    if value is True:
        return
    name = str(value).lower()
    if name in RECOMPUTED_INITS:
        return
    for word, why in REWRITING_INITS.items():
        if name.startswith(word):
            raise UnsupportedAdapterError(f"{where}: init_lora_weights={value!r}: {why}")
    if name not in PLAIN_INITS:
        raise UnsupportedAdapterError(
            f"{where}: init_lora_weights={value!r}: unknown, and some initialisations change the base."
            f"{closest(name, [*PLAIN_INITS, *RECOMPUTED_INITS, *REWRITING_INITS])}"
        )


def _altered(config: Mapping[str, Any], where: str) -> str:
    init = str(config.get("init_lora_weights")).lower()
    found = [init] if init in RECOMPUTED_INITS else []
    found += ["kasa"] if config.get("kasa_config") else []
    if len(found) > 1:
        raise UnsupportedAdapterError(
            f"{where}: init_lora_weights={init!r} and kasa_config: each alters the base, and PEFT does not say in "
            "which order."
        )
    return "".join(found)


def _blocks(config: Mapping[str, Any], where: str) -> int:
    value = config.get("use_bdlora")
    if not value:
        return 1
    n = value.get("nblocks", 1) if isinstance(value, Mapping) else getattr(value, "nblocks", None)
    if type(n) is not int or n < 1:
        raise AdapterFormatError(f"{where}: use_bdlora={values.short(value)}: expected a number of blocks, nblocks.")
    if config.get("use_qalora"):
        raise UnsupportedAdapterError(f"{where}: use_bdlora and use_qalora: PEFT does not combine them.")
    return n


def _expert_first(config: Mapping[str, Any], where: str) -> bool:
    """Unsloth's note on the columns of lora_B in stacked experts; without it they are PEFT's."""
    layouts = {"rank_major": False, "grouped_by_expert": True}
    value = config.get("lora_B_layout") or "rank_major"
    if value not in layouts:
        raise UnsupportedAdapterError(
            f"{where}: lora_B_layout={values.short(value)}: unknown. Known are {', '.join(map(repr, layouts))}."
        )
    return layouts[value]
