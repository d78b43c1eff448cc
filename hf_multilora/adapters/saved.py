"""Weights that are no factors: modules that were saved whole, biases, and copies of the base's own.

A copy that equals the base changes nothing and is named in the report. What differs takes the base's place for the
rows of this adapter: the bias of a linear layer as a shift of its output, everything else as a whole parameter. PEFT
would write most of it into the base, for every row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..errors import AdapterFormatError, AdapterMatchError, UnsupportedAdapterError, closest
from .base import Base, is_plain
from .checkpoint import Checkpoint, TensorRef
from .complete import saved_root, within
from .config import AdapterSpec
from .dtensors import gathered
from .keys import Key, foreign_format
from .plan import Readable, SavedParam
from .targets import Part, TargetTable
from .vocabulary import Vocabulary

_CHUNK = 1 << 24  # elements compared at once: bounds the memory that casting takes
_HEADS = ("score", "classifier", "v_head", "qa_outputs")


@dataclass
class Others:
    """What the tensors that are no factors come to.

    Args:
        saved: parameters that replace the base's.
        biases: site -> the bias that replaces the base's there.
        rows: embedding or head of the vocabulary that is saved whole -> its rows.
        shared: those of them that stand for the base's own table, also where other modules share it.
        ignored, warnings, converted: for the report.
    """

    saved: list[SavedParam] = field(default_factory=list)
    biases: dict[tuple[str, int], Readable] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    shared: dict[str, TensorRef] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)


def sort_others(
    keys: list[Key],
    names: dict[str, str],
    spec: AdapterSpec,
    checkpoint: Checkpoint,
    base: Base,
    vocabulary: Vocabulary,
) -> Others:
    """Find the place of every tensor that is no factor.

    Args:
        keys: those of role "base", "param" and "original".
        names: module path in the checkpoint -> in the model.

    Raises:
        AdapterFormatError: two tensors for one parameter, or numbers that are none.
        AdapterMatchError: a tensor that means nothing here, or of another shape.
        UnsupportedAdapterError: a module that this model does not have, or that cannot be replaced.
    """
    others = Others()
    taken: dict[str, Key] = {}
    unannounced: list[str] = []
    for key in sorted(keys, key=_inner_copy):
        if key.role == "original":
            others.ignored.append(f"{key.name}: the base's own, which the saved module replaces")
            continue
        path = names[key.path]
        name = f"{path}.{key.leaf}"
        if name in taken and _inner_copy(key):
            others.ignored.append(f"{key.name}: another copy of {taken[name].name}")
            continue
        if name in taken:
            raise AdapterFormatError(f"{checkpoint.where}: {taken[name].name} and {key.name} mean the same parameter.")
        taken[name] = key
        info = checkpoint.infos[key.name]
        if not info.dtype.is_floating_point:
            raise _not_numbers(key, path, spec, checkpoint, base.table)
        root = saved_root(path, spec)
        parts = base.table.parts.get(path, ())
        resized = path in vocabulary and info.shape != (parts[-1].stop,) if parts else False
        if key.leaf == "bias" and root is None and _is_linear(path, base) and not resized:
            _take_bias(key, info.shape, parts, checkpoint, base, others)
            differs = (parts[0].path, parts[0].slice) in others.biases
            said = spec.bias != "none"
        else:
            differs = _take_whole(key, path, root or path, name, spec, checkpoint, base, vocabulary, others)
            said = root is not None or key.leaf == "bias" and spec.bias == "all" or path in vocabulary
        if differs and not said:
            unannounced.append(key.name)
    spread_shared(others, vocabulary)
    for item in others.saved:
        path = f"{item.path}.{item.name}".rpartition(".")[0]
        if path in base.table.unused:
            raise UnsupportedAdapterError(
                f"{checkpoint.where}: it saves {path!r} whole, which is not served: {base.table.unused[path]}."
            )
    if unannounced:
        others.warnings.append(
            f"{', '.join(unannounced[:4])}{' and more' if len(unannounced) > 4 else ''}: not the base's numbers. The "
            "config names neither such a module nor biases; they count all the same, for this adapter alone."
        )
    return others


def _inner_copy(key: Key) -> bool:
    """Whether it was saved out of PEFT's wrapper, as save_embedding_layers does beside the module's own key."""
    return "modules_to_save" in key.name.split(".")


def _is_linear(path: str, base: Base) -> bool:
    parts = base.table.parts.get(path, ())
    return bool(parts) and base.table.targets[parts[0].path].kind == "linear" and base.has_bias(parts[0].path)


def _take_bias(
    key: Key, shape: tuple[int, ...], parts: tuple[Part, ...], checkpoint: Checkpoint, base: Base, others: Others
) -> None:
    """A bias of a layer that can carry an adapter: a shift, spread over the layer's sites like the rows of a B."""
    if shape != (parts[-1].stop,):
        raise AdapterMatchError(f"{checkpoint.where}: {key.name} has the shape {shape}, the layer's {parts[-1].stop}.")
    whole = checkpoint.read(key.name)
    dtypes = set()
    for part in parts:
        old = base.table_bias(part.path, key.name)[slice(*base.rows(part))]
        dtypes.add((same_numbers(whole[part.start : part.stop], old), old.dtype))
    if any(same is None for same, _ in dtypes):
        for part in parts:
            rows = None if len(parts) == 1 else (part.start, part.stop)
            others.biases[part.path, part.slice] = TensorRef(checkpoint, key.name, rows)
        return
    _note_copy(key, dtypes, others)


def _take_whole(
    key: Key,
    path: str,
    root: str,
    name: str,
    spec: AdapterSpec,
    checkpoint: Checkpoint,
    base: Base,
    vocabulary: Vocabulary,
    others: Others,
) -> bool:
    """Anything else: a copy of the base's, or a whole parameter of its own. Returns whether it is the latter."""
    known = base.shape(name)
    if known is None:
        raise _stranger(key, path, spec, checkpoint, base.table)
    shape = checkpoint.infos[key.name].shape
    if shape != known:
        labels = path not in vocabulary and "." not in root and path == _last(root, path, base.table)
        if shape[1:] != known[1:] or not shape or not (labels or path in vocabulary):
            raise AdapterMatchError(
                f"{checkpoint.where}: {key.name} has the shape {shape}, the model's {name} has {known}. Is it an "
                "adapter of another base, or of another size of it?"
            )
    tensor = base.table.read_base(name)
    if not is_plain(tensor):
        raise UnsupportedAdapterError(
            f"{checkpoint.where}: {key.name} takes the place of {name}, unless it is a copy, and that cannot be "
            "told: the model's own is quantised or offloaded, and can neither be compared nor replaced."
        )
    if shape == known:
        assert tensor is not None
        same = same_numbers(checkpoint.read(key.name), gathered(tensor))
        if same is not None:
            _note_copy(key, {(same, tensor.dtype)}, others)
            return False
    ref = TensorRef(checkpoint, key.name)
    others.saved.append(SavedParam(root, name.removeprefix(f"{root}."), ref))
    if path in vocabulary and key.leaf == "weight":
        others.rows[path] = shape[0]
        if saved_root(path, spec) is None:
            others.shared[path] = ref
    return True


def spread_shared(others: Others, vocabulary: Vocabulary) -> None:
    """The base's own table under another value (no module_to_save, which is a copy): every module that shares it."""
    for path, ref in others.shared.items():
        for other in vocabulary.same_table(path):
            if other not in others.rows:
                others.saved.append(SavedParam(other, "weight", ref))
                others.rows[other] = ref.shape[0]
                others.converted.append(f"{ref.key}: for {other}, which shares the weight, too")
    # T5 and its like keep the table once more outside of the stacks that use it
    for path, rows in list(others.rows.items()):
        if rows == vocabulary.size or path not in vocabulary.embeddings:
            continue
        for other in vocabulary.same_table(path):
            outside = path.startswith(other.rpartition(".")[0]) and path.count(".") > other.count(".")
            if outside and other in vocabulary.embeddings and other not in others.rows:
                same = next(item.ref for item in others.saved if (item.path, item.name) == (path, "weight"))
                others.saved.append(SavedParam(other, "weight", same))
                others.rows[other] = rows


def move_biases(others: Others, base: Base) -> None:
    """The bias of a layer whose weight is saved belongs to that layer: a parameter, and no shift of the base's output.

    Raises:
        UnsupportedAdapterError: a bias that is fused otherwise than the layer.
    """
    full = {f"{item.path}.{item.name}" for item in others.saved}
    for path in dict.fromkeys(path for path, _ in others.biases if f"{path}.weight" in full):
        held = [others.biases.pop((path, i), None) for i in range(len(base.table.targets[path].widths))]
        ref = held[0]
        same = isinstance(ref, TensorRef) and all(isinstance(r, TensorRef) and r.key == ref.key for r in held)
        if (
            not isinstance(ref, TensorRef)
            or not same
            or ref.checkpoint.infos[ref.key].shape != base.shape(f"{path}.bias")
        ):
            raise UnsupportedAdapterError(f"{base.where}: the weight of {path!r} as a whole, and its bias in parts.")
        others.saved.append(SavedParam(path, "bias", TensorRef(ref.checkpoint, ref.key)))


def _last(root: str, path: str, table: TargetTable) -> str:
    """The last module with parameters in a head: the one whose outputs are the labels."""
    inside = [name.rpartition(".")[0] for name in table.parameters if name.startswith(f"{root}.")]
    return inside[-1] if inside else path


def _note_copy(key: Key, dtypes: set[tuple[torch.dtype | None, torch.dtype]], others: Others) -> None:
    others.ignored.append(f"{key.name}: a copy of the base's own {key.leaf}")
    for same, dtype in dtypes:
        if same != dtype:
            others.warnings.append(f"{key.name}: equals the base's {dtype} {key.leaf} when that is rounded to {same}.")


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


def _not_numbers(key: Key, path: str, spec: AdapterSpec, checkpoint: Checkpoint, table: TargetTable) -> Exception:
    if path not in table.modules:
        return _stranger(key, path, spec, checkpoint, table)
    return UnsupportedAdapterError(
        f"{checkpoint.where}: {key.name} has the dtype {checkpoint.infos[key.name].dtype}: a quantised or integer "
        f"weight of {path!r}, which cannot take the place of the base's."
    )


def _stranger(key: Key, path: str, spec: AdapterSpec, checkpoint: Checkpoint, table: TargetTable) -> Exception:
    """The error for a tensor that has no counterpart in the base."""
    where = checkpoint.where
    if path in table.parts and path not in table.modules:
        return UnsupportedAdapterError(
            f"{where}: {key.name} saves {path!r} as a whole, which this model has as a part of a fused layer."
        )
    if any(within(name, key.path) for name in (*spec.modules_to_save, *_HEADS)) and path not in table.modules:
        return UnsupportedAdapterError(
            f"{where}: {key.name} is a saved module that this model does not have: an adapter for "
            f"{spec.task_type or 'another task'}, to be loaded on a model with that head."
        )
    if path in table.modules:
        return AdapterMatchError(
            f"{where}: {key.name} belongs to nothing in the model: {path!r} has no parameter {key.leaf!r} that can be "
            "read."
        )
    owner = foreign_format(key.name)
    hint = f" It looks like {owner}, not PEFT's LoRA." if owner else closest(path, table.modules)
    return AdapterMatchError(
        f"{where}: {key.name} belongs to nothing in the model, and would be left over.{hint} Was it trained on "
        "another base? If it is no part of the adapter, save the file without it."
    )
