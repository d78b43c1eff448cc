"""A checkpoint's pair of factors -> factors of the model's sites, whichever of the two fuses its projections.

A fused adapter on separate layers: every part keeps the one A, and takes its rows of B. A separate adapter on a fused
layer trains one slice of it. A fused adapter on a fused layer gives each slice its rows of B. A magnitude of DoRA and
the bias of B go with B's rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import AdapterFormatError, AdapterMatchError, UnsupportedAdapterError
from .altered import TITLES, check_altered, check_removable, expanded, rows_of, with_diagonal, with_removed
from .base import Base
from .checkpoint import Checkpoint, TensorInfo, TensorRef
from .computed import Computed
from .config import AdapterSpec
from .dora import gain_of, row_norms, shift_of
from .keys import Key
from .plan import Factor, Readable, SavedParam, TokenRows
from .targets import Part, TargetTable, is_head


@dataclass(frozen=True)
class Pair:
    """The factors that a checkpoint holds for one module, named `trained` there and `path` in the model.

    Beside them, where it has them: the magnitude of DoRA, the bias of B, KaSA's singular values.
    """

    trained: str
    path: str
    a: Key
    b: Key
    magnitude: Key | None = None
    b_bias: Key | None = None
    diagonal: Key | None = None

    def ref(self, checkpoint: Checkpoint, which: str) -> TensorRef:
        """The tensor of one of the keys."""
        return TensorRef(checkpoint, getattr(self, which).name)


def to_factors(
    pair: Pair,
    checkpoint: Checkpoint,
    spec: AdapterSpec,
    base: Base,
    biases: Mapping[tuple[str, int], Readable],
    converted: Counter[str],
) -> list[Factor]:
    """Check one pair's shapes and spread it over the sites that its module has in the model.

    Args:
        biases: site -> the adapter's own bias there.
        converted: what is not taken as stored -> how often; counted up.

    Raises:
        AdapterFormatError: not a pair of LoRA factors, or not of the config's rank.
        AdapterMatchError: shapes that do not fit the model's layer.
        UnsupportedAdapterError: shapes of another vocabulary.
    """
    where, parts = checkpoint.where, base.table.parts[pair.path]
    width = parts[-1].stop
    for key in (pair.a, pair.b):
        check_matrix(key, checkpoint.infos[key.name], where)
    target = base.table.targets[parts[0].path]
    _check_kind(pair, target.kind, where)
    if target.transposed and spec.chooses_parameter(f"{pair.trained}.weight"):
        raise UnsupportedAdapterError(
            f"{where}: {pair.a.name}: target_parameters on the weight of a Conv1D ([in, out]), whose factors PEFT "
            "applies the other way round, is not served. Train it with target_modules."
        )
    if spec.altered:
        check_altered(spec, base, parts, pair.trained)
    a, b, how = expanded(spec, pair.ref(checkpoint, "a"), pair.ref(checkpoint, "b"), target.in_features)
    check_shapes(pair, a.shape, b.shape, target.in_features, width, base.table, where)
    rank = a.shape[0]
    for vector in (pair.magnitude, pair.b_bias):
        if vector is not None:
            _check_vector(vector, checkpoint.infos[vector.name], width, where)
    name = checked_name(pair, rank, spec, where)
    scaling = spec.scaling(name, rank)
    b = with_diagonal(b, _diagonal(pair, rank, checkpoint))
    # a weight in the file is the altered one already
    if spec.altered and not base.shipped.issuperset(part.path for part in parts):
        check_removable(spec, base, parts, pair.trained)
        a, b = with_removed(spec, base, parts, a, b, scaling, pair.trained)
        converted[f"rank {rank} on {TITLES[spec.altered]}'s base: rank {2 * rank} on the base itself"] += 1
    for text in (how, _regrouped(pair, base.table)):
        if text:
            converted[text] += 1
    return [_factor(pair, part, a, b, scaling, checkpoint, base, biases) for part in parts]


def _factor(
    pair: Pair,
    part: Part,
    a: Readable,
    b: Readable,
    scaling: float,
    checkpoint: Checkpoint,
    base: Base,
    biases: Mapping[tuple[str, int], Readable],
) -> Factor:
    """One site's share of a pair: all of A, and its rows of everything else."""
    target = base.table.targets[part.path]
    b = rows_of(b, part.start, part.stop)
    gain = b_bias = None
    if pair.magnitude is not None:
        magnitude = rows_of(pair.ref(checkpoint, "magnitude"), part.start, part.stop)
        gain = gain_of(base, part, magnitude, a, b, scaling, pair.magnitude.name)
    if pair.b_bias is not None:
        b_bias = rows_of(pair.ref(checkpoint, "b_bias"), part.start, part.stop)
    new_bias = biases.get((part.path, part.slice))
    return Factor(
        path=part.path,
        slice=part.slice,
        kind=target.kind,
        rank=a.shape[0],
        scaling=scaling * target.scale,
        a=a,
        b=b,
        gain=gain,
        shift=shift_of(base, part, gain=gain, new_bias=new_bias, b_bias=b_bias, scaling=scaling),
    )


def _diagonal(pair: Pair, rank: int, checkpoint: Checkpoint) -> TensorRef | None:
    """KaSA's singular values, checked."""
    if pair.diagonal is None:
        return None
    _check_vector(pair.diagonal, checkpoint.infos[pair.diagonal.name], rank, checkpoint.where)
    return pair.ref(checkpoint, "diagonal")


def _regrouped(pair: Pair, table: TargetTable) -> str | None:
    parts = table.parts[pair.path]
    if len({part.path for part in parts}) > 1:
        return f"{pair.path.rpartition('.')[2]}: dealt out to {', '.join(p.path.rpartition('.')[2] for p in parts)}"
    if pair.path not in table.targets:
        return f"{pair.path.rpartition('.')[2]}: a part of {parts[0].path.rpartition('.')[2]}"
    return None


def bias_factors(factors: list[Factor], biases: Mapping[tuple[str, int], Readable], base: Base) -> list[Factor]:
    """Sites with a bias of the adapter's own and no factors: rank 0, and a shift."""
    trained = {(factor.path, factor.slice) for factor in factors}
    found = []
    for (path, index), bias in biases.items():
        if (path, index) not in trained:
            part = Part(path, index, 0, base.table.targets[path].widths[index])
            shift = shift_of(base, part, new_bias=bias)
            found.append(Factor(path, index, "linear", 0, 1.0, None, None, shift=shift))
    return found


def merged(pair: Pair, item: SavedParam, checkpoint: Checkpoint, spec: AdapterSpec, base: Base) -> SavedParam:
    """Factors on a layer whose weight the adapter has of its own: worked into that weight.

    Nothing is lost: W + scaling B A, times the gain, is what they come to; and a table of another size has factors of
    another size, for which no slot has room.

    Args:
        item: the saved weight, with its trained rows.

    Raises:
        AdapterMatchError: factors of another size.
        UnsupportedAdapterError: a bias of B; a part of the layer only.
    """
    where = checkpoint.where
    embedding = pair.a.role == "embedding_A"
    for key in (pair.a, pair.b):
        check_matrix(key, checkpoint.infos[key.name], where)
    parts, saved = base.table.parts[pair.path], item.ref
    if any(part.path != pair.path for part in parts):
        raise UnsupportedAdapterError(
            f"{where}: {pair.a.name} trains {pair.path!r}, and the file also holds the whole weight of "
            f"{parts[0].path!r}: factors on a saved weight that is fused otherwise are not served."
        )
    target = base.table.targets[pair.path]
    _check_kind(pair, target.kind, where)
    if spec.altered:
        check_altered(spec, base, parts, pair.trained)
    transposed = embedding or target.transposed
    wanted = saved.shape[::-1] if transposed else saved.shape
    a, b, _ = expanded(spec, pair.ref(checkpoint, "a"), pair.ref(checkpoint, "b"), wanted[1])
    if a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != wanted:
        raise AdapterMatchError(
            f"{where}: {pair.a.name} {a.shape} and {pair.b.name} {b.shape} do not fit the {saved.shape[0]} rows of "
            f"the weight that the file holds of {pair.path!r}."
        )
    if pair.b_bias is not None:
        raise UnsupportedAdapterError(f"{where}: {pair.b_bias.name}: a bias of B on a layer whose weight is saved.")
    if pair.magnitude is not None:
        _check_vector(pair.magnitude, checkpoint.infos[pair.magnitude.name], b.shape[0], where)
    scaling = spec.scaling(checked_name(pair, a.shape[0], spec, where), a.shape[0])
    b = with_diagonal(b, _diagonal(pair, a.shape[0], checkpoint))

    def compute() -> torch.Tensor:
        weight = saved.read().to("cpu", torch.float32)
        matrix = weight.t() if transposed else weight
        down, up = a.read().to("cpu", torch.float32), b.read().to("cpu", torch.float32)
        whole = torch.addmm(matrix, up, down, alpha=scaling)
        if pair.magnitude is not None:
            magnitude = checkpoint.read(pair.magnitude.name).to("cpu", torch.float32)
            whole *= (magnitude / row_norms(matrix, down, up, scaling))[:, None]
        return (whole.t() if transposed else whole).contiguous()

    return SavedParam(item.path, item.name, Computed(saved.shape, compute))


def with_update(rows: TokenRows, pair: Pair, checkpoint: Checkpoint, spec: AdapterSpec) -> TokenRows:
    """Token rows of a head that has factors besides: PEFT puts these on top of the rows, and so do the rows here.

    The factors were checked before.
    """
    a, b = pair.ref(checkpoint, "a"), pair.ref(checkpoint, "b")
    scaling = spec.scaling(checked_name(pair, a.shape[0], spec, checkpoint.where), a.shape[0])

    def compute() -> torch.Tensor:
        up = b.read()[list(rows.ids)].to("cpu", torch.float32)
        return torch.addmm(
            rows.ref.read().to("cpu", torch.float32), up, a.read().to("cpu", torch.float32), alpha=scaling
        )

    return TokenRows(rows.path, rows.ids, Computed(rows.ref.shape, compute))


def check_rows(pair: Pair, checkpoint: Checkpoint, spec: AdapterSpec) -> None:
    """Raises: UnsupportedAdapterError for token rows under factors that are more than A and B."""
    what = TITLES[spec.altered] if spec.altered else None
    what = what or ("DoRA" if pair.magnitude is not None else None)
    what = what or ("a bias of B" if pair.b_bias is not None else None)
    what = what or ("LoRA on the embedding" if pair.a.role == "embedding_A" else None)
    what = what or ("block-diagonal or pooled factors" if spec.blocks > 1 or spec.group > 1 else None)
    if what:
        raise UnsupportedAdapterError(
            f"{checkpoint.where}: {pair.a.name}: {what}, on {pair.path!r}, of which trainable_token_indices trains "
            "rows as well: not served."
        )


def check_matrix(key: Key, info: TensorInfo, where: str) -> None:
    if not info.dtype.is_floating_point:
        raise AdapterFormatError(f"{where}: {key.name} has the dtype {info.dtype}: expected floating-point factors.")
    if len(info.shape) < 2 or 0 in info.shape:
        raise AdapterFormatError(
            f"{where}: {key.name} has the shape {info.shape}: an empty shard, as DeepSpeed ZeRO-3 and FSDP leave it "
            "when the weights were not gathered before saving. Save again with the parameters gathered."
        )
    if len(info.shape) > 2:
        raise UnsupportedAdapterError(
            f"{where}: {key.name} has the shape {info.shape}: factors of a convolution (or of PEFT 0.2's "
            "MergedLinear), which are not served."
        )


def _check_vector(key: Key, info: TensorInfo, width: int, where: str) -> None:
    if not info.dtype.is_floating_point:
        raise AdapterFormatError(f"{where}: {key.name} has the dtype {info.dtype}: expected floating-point numbers.")
    if info.shape != (width,):
        raise AdapterMatchError(f"{where}: {key.name} has the shape {info.shape}, the layer needs {(width,)}.")


def _check_kind(pair: Pair, kind: str, where: str) -> None:
    embedding = pair.a.role == "embedding_A"
    if embedding != (kind == "embedding"):
        trained = "an embedding" if embedding else "a linear layer"
        raise AdapterMatchError(
            f"{where}: {pair.a.name} was trained on {trained}; the model's {pair.path!r} is {kind}."
        )


def check_shapes(
    pair: Pair, a: tuple[int, ...], b: tuple[int, ...], width_in: int, width_out: int, table: TargetTable, where: str
) -> None:
    if a[0] == b[1] and (a[1], b[0]) == (width_in, width_out):
        return
    if (a[0], b[1]) == (width_in, width_out):
        raise AdapterFormatError(
            f"{where}: {pair.a.name} {a} and {pair.b.name} {b} are transposed: A is (rank, in), B is (out, rank)."
        )
    if a[0] != b[1]:
        raise AdapterFormatError(
            f"{where}: {pair.a.name} {a} and {pair.b.name} {b} have no common rank: A is (rank, in), B is (out, rank)."
        )
    text = (
        f"{where}: {pair.trained!r} was trained on a layer of {a[1]} inputs and {b[0]} outputs; the model's "
        f"{pair.path!r} has {width_in} and {width_out}."
    )
    vocabularies = {target.in_features for target in table.targets.values() if target.kind == "embedding"}
    on_rows = pair.a.role == "embedding_A" and b[0] == width_out
    on_head = is_head(pair.path) and a[1] == width_in and width_out in vocabularies
    if on_rows or on_head:
        raise UnsupportedAdapterError(
            f"{text} Its vocabulary has another size, and the file does not hold the weights of that vocabulary. Save "
            "it again with save_embedding_layers=True."
        )
    raise AdapterMatchError(f"{text} Is it an adapter of another base, or of another size of it?")


def checked_name(pair: Pair, rank: int, spec: AdapterSpec, where: str) -> str:
    """The name under which the config's patterns speak of this module: that of training, else that of the model.

    Of a parameter that target_parameters chose (a router's weight), PEFT's patterns match the whole name.
    """
    names = [pair.trained, pair.path]
    if spec.chooses_parameter(f"{pair.trained}.weight"):
        names.insert(0, f"{pair.trained}.weight")
    for name in names:
        if spec.rank(name) == rank:
            return name
    key = spec.rank_pattern.key(pair.trained)
    said = f"r={spec.r}" if key is None else f"rank_pattern[{key!r}]={spec.rank(pair.trained)}"
    raise AdapterFormatError(
        f"{where}: {pair.a.name} has rank {rank}, but the config says {said}. The scaling would be wrong: does the "
        "config belong to these weights?"
    )
