"""From what users write as `adapter_ids` to keys: None (base), a name, or a mix of names with weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RoutingError
from ..memory.lease import Key as Key
from ..report import count

BASE = "__base__"  # PEFT's word for "no adapter"


def to_key(value: Any, where: str) -> Key | None:
    """One id -> key.

    A mix `{"a": 0.7, "b": 0.3}` becomes names with weights, sorted by name; a mix of one adapter at weight 1 is that
    adapter.

    Raises:
        RoutingError: not None, a name, or a mix of names with finite weights.
    """
    if value is None or value == BASE:
        return None
    if isinstance(value, str):
        if not value:
            raise RoutingError(f"{where}: an adapter id must not be empty. Use None for the base model.")
        return value
    if isinstance(value, Mapping):
        return _mix(value, where)
    raise RoutingError(
        f"{where}: {value!r} is of type {type(value).__name__}. Expected None, an adapter's name, or a mix such as "
        "{'sql': 0.7, 'poet': 0.3}."
    )


def _mix(value: Mapping[Any, Any], where: str) -> Key:
    if not value:
        raise RoutingError(f"{where}: an empty mix names no adapter. Use None for the base model.")
    parts = []
    for name, weight in value.items():
        if not isinstance(name, str) or not name or name == BASE:
            raise RoutingError(f"{where}: a mix combines adapters by name; {name!r} is none.")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise RoutingError(f"{where}: the weight of {name!r} is {weight!r}. Expected a finite number.")
        parts.append((name, float(weight)))
    if len(parts) == 1 and parts[0][1] == 1.0:
        return parts[0][0]
    return tuple(sorted(parts))


def to_keys(ids: Any, rows: int | None) -> tuple[list[Key | None], bool]:
    """What was passed as `adapter_ids` -> (key of each prompt row, whether one id stands for all rows).

    Args:
        ids: None, one id for all rows (a name or a mix), or a list with one id per prompt row.
        rows: prompt rows of the batch, or None where they are not known before the model has seen its inputs.

    Raises:
        RoutingError: wrong length, an empty list, or an id of a wrong type.
    """
    if ids is None or isinstance(ids, (str, Mapping)):
        return [to_key(ids, "adapter_ids")] * (rows or 1), True
    if not isinstance(ids, Sequence):
        raise RoutingError(
            f"adapter_ids is of type {type(ids).__name__}. Expected one id for all rows, or a list with one id per "
            "row."
        )
    if not ids:
        raise RoutingError("adapter_ids is an empty list. Pass one id per row, or None for the base model.")
    keys = [to_key(value, f"adapter_ids[{i}]") for i, value in enumerate(ids)]
    if rows is not None and len(keys) != rows:
        raise RoutingError(
            f"adapter_ids has {count(len(keys), 'id')}, but the batch has {count(rows, 'prompt row')}. Pass one per "
            "prompt row (beams "
            "and return sequences are repeated for you), or one id for all rows."
        )
    return keys, False


def names_of(key: Key | None) -> list[str]:
    """Names of the adapters that a key needs."""
    if key is None:
        return []
    return [key] if isinstance(key, str) else [name for name, _ in key]


def one_of(adapter_ids: Any, adapter_names: Any) -> Any:
    """`adapter_ids`, or its synonym `adapter_names` (PEFT's spelling); both at once are an error."""
    if adapter_ids is not None and adapter_names is not None:
        raise RoutingError("adapter_ids and adapter_names are the same argument. Pass one of them.")
    return adapter_names if adapter_ids is None else adapter_ids
