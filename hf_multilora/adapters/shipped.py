"""Weights that are no factors: copies of the base's own, which PEFT ships beside trained embeddings and heads.

A copy that equals the base is accepted and named in the report. Anything else would change the base for this adapter
alone, and is refused by name.
"""

from __future__ import annotations

import torch

from ..errors import AdapterFormatError, AdapterMatchError, UnsupportedAdapterError, closest
from .checkpoint import Checkpoint
from .config import AdapterSpec
from .keys import Key, foreign_format
from .targets import TargetTable

_CHUNK = 1 << 24  # elements compared at once: bounds the memory that casting takes
_HEADS = ("score", "classifier", "v_head", "qa_outputs")


def check_copies(
    keys: list[Key], names: dict[str, str], spec: AdapterSpec, checkpoint: Checkpoint, table: TargetTable
) -> tuple[list[str], list[str]]:
    """Compare every tensor that is no factor with the base.

    Args:
        keys: those of role "base" and "param".
        names: module path in the checkpoint -> in the model.

    Returns:
        What is ignored, each with its reason, and warnings.

    Raises:
        UnsupportedAdapterError: a saved module, a bias or a resized vocabulary.
        AdapterMatchError: a tensor that means nothing here.
    """
    ignored, warnings = [], []
    for key in keys:
        base = table.read_base(f"{names[key.path]}.{key.leaf}")
        if base is None or base.is_meta or not base.is_floating_point():
            raise _stranger(key, names[key.path], spec, checkpoint, table)
        info = checkpoint.infos[key.name]
        if info.shape != tuple(base.shape):
            raise _resized(key, info.shape, tuple(base.shape), checkpoint.where)
        same = same_numbers(checkpoint.read(key.name), base)
        if same is None:
            raise _altered(key, spec, checkpoint.where)
        ignored.append(f"{key.name}: a copy of the base's own weight")
        if same != base.dtype:
            warnings.append(f"{key.name}: equals the base's {base.dtype} weight when that is rounded to {same}.")
    return ignored, warnings


def same_numbers(copy: torch.Tensor, base: torch.Tensor) -> torch.dtype | None:
    """The precision in which two tensors of one shape are equal, or None.

    That is the base's dtype where the copy, rounded to it, is the base; and the copy's dtype where the base, rounded
    to it, is the copy (an adapter trained on a half-precision load of the same base).
    """
    if copy.device != base.device:
        copy = copy.to(base.device)
    for dtype in dict.fromkeys((base.dtype, copy.dtype)):
        left, right = copy.detach().reshape(-1), base.detach().reshape(-1)
        pairs = zip(left.split(_CHUNK), right.split(_CHUNK), strict=True)
        if all(torch.equal(a.to(dtype), b.to(dtype)) for a, b in pairs):
            return dtype
    return None


def check_saved_modules(keys: list[Key], spec: AdapterSpec, table: TargetTable, where: str) -> list[str]:
    """Names in modules_to_save that neither the model nor the file knows are harmless; return them as ignored.

    Raises:
        AdapterFormatError: the model has such a module, and the file does not hold it.
    """
    ignored = []
    for name in spec.modules_to_save:
        if any(_within(name, key.path) for key in keys):
            continue
        found = next((module for module in table.modules if module == name or module.endswith(f".{name}")), None)
        if found:
            raise AdapterFormatError(
                f"{where}: modules_to_save names {name!r}, the model has {found!r}, and the file holds no tensor of "
                "it: it is incomplete. Copy or download it again."
            )
        ignored.append(f"modules_to_save={name!r}: neither the model nor the file has it")
    return ignored


def _within(name: str, path: str) -> bool:
    return f".{name}." in f".{path}."


def _altered(key: Key, spec: AdapterSpec, where: str) -> UnsupportedAdapterError:
    saved = any(_within(name, key.path) for name in spec.modules_to_save)
    if key.leaf == "bias" and not saved:
        what = "a trained bias (bias='all' or 'lora_only')"
    else:
        what = "a trained copy of the base's weight (modules_to_save), or the weight of another base"
    return UnsupportedAdapterError(f"{where}: {key.name} differs from the base: {what}, which is not served yet.")


def _resized(key: Key, shape: tuple[int, ...], base: tuple[int, ...], where: str) -> UnsupportedAdapterError:
    what = "a resized vocabulary" if shape[1:] == base[1:] else "a saved module of another shape"
    return UnsupportedAdapterError(
        f"{where}: {key.name} has the shape {shape}, the base has {base}: {what}, which is not served yet."
    )


def _stranger(key: Key, path: str, spec: AdapterSpec, checkpoint: Checkpoint, table: TargetTable) -> Exception:
    """The error for a tensor that has no counterpart in the base."""
    where = checkpoint.where
    if path in table.modules:
        return UnsupportedAdapterError(
            f"{where}: {key.name} saves {path!r}, whose weight cannot be compared with the base's (quantised "
            "or offloaded). Saved modules are not served yet."
        )
    if any(_within(name, key.path) for name in (*spec.modules_to_save, *_HEADS)):
        return UnsupportedAdapterError(
            f"{where}: {key.name} is a saved module that this model does not have: an adapter for "
            f"{spec.task_type or 'another task'}, not for generate(). Saved modules are not served yet."
        )
    owner = foreign_format(key.name)
    hint = f" It looks like {owner}, not PEFT's LoRA." if owner else closest(path, table.modules)
    return AdapterMatchError(f"{where}: {key.name} belongs to nothing in the model, and would be left over.{hint}")
