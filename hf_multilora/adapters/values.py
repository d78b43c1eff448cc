"""Values of a config's fields, checked for their type: null is as good as absent."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import AdapterFormatError


def short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def text(config: Mapping[str, Any], name: str) -> str | None:
    value = config.get(name)
    return str(value) if value else None


def number(config: Mapping[str, Any], name: str, default: float, where: str) -> float:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise AdapterFormatError(f"{where}: {name}={value!r}: expected a number.")
    return value


def flag(config: Mapping[str, Any], name: str, where: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise AdapterFormatError(f"{where}: {name}={value!r}: expected true, false or null.")
    return bool(value)


def bias(config: Mapping[str, Any], where: str) -> str:
    value = config.get("bias") or "none"
    if value not in ("none", "lora_only", "all"):
        raise AdapterFormatError(f"{where}: bias={value!r}: expected 'none', 'lora_only' or 'all'.")
    return str(value)


def tokens(value: Any, name: str, where: str) -> tuple[int, ...]:
    whole = isinstance(value, (list, tuple)) and all(type(item) is int and item >= 0 for item in value)
    if not whole:
        raise AdapterFormatError(f"{where}: {name}={short(value)}: expected token ids, whole numbers from 0 on.")
    return tuple(value)


def token_indices(config: Mapping[str, Any], where: str) -> dict[str, tuple[int, ...]]:
    value = config.get("trainable_token_indices") or {}
    named = value if isinstance(value, Mapping) else {"": value}
    found = {str(key): tokens(ids, "trainable_token_indices", where) for key, ids in named.items()}
    for ids in found.values():
        if len(set(ids)) != len(ids):
            raise AdapterFormatError(f"{where}: trainable_token_indices={short(value)}: one token comes twice.")
    return found


def patterns(config: Mapping[str, Any], name: str, where: str) -> dict[str, float]:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise AdapterFormatError(f"{where}: {name}={short(value)}: expected an object of patterns and numbers.")
    absent = [key for key, item in value.items() if item is None]
    if absent:
        raise AdapterFormatError(f"{where}: {name}[{absent[0]!r}]=null: expected a number.")
    return {key: number(value, key, 0, f"{where}: {name}") for key in value}


def names(config: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = config.get(name) or ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise AdapterFormatError(f"{where}: {name}={short(value)}: expected a list of names.")
    return tuple(value)


def expressions(config: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """Names that PEFT reads as regular expressions."""
    found = names(config, name, where)
    for text in found:
        _compile(text, name, where)
    return found


def selector(config: Mapping[str, Any], name: str, where: str) -> str | tuple[str, ...] | None:
    """A list of names, or one regex."""
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        return names(config, name, where)
    _compile(value, name, where)
    return value


def _compile(text: str, name: str, where: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise AdapterFormatError(f"{where}: {name}={short(text)}: not a valid regex ({error}).") from error


def layers(config: Mapping[str, Any], where: str) -> tuple[int, ...] | None:
    value = config.get("layers_to_transform")
    items = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise AdapterFormatError(f"{where}: layers_to_transform={short(value)}: expected layer numbers.")
    return tuple(items) or None
