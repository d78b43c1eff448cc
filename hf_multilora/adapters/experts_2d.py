"""A pair of factors for each expert and projection, as PEFT saved them while every expert was a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ..errors import AdapterMatchError
from .checkpoint import Checkpoint
from .config import AdapterSpec
from .convert import Pair, check_matrix, check_shapes, checked_name
from .plan import Factor
from .stacks import Gathered, shared
from .targets import ExpertBlock, ExpertPlace, TargetTable


def stem(trained: str, place: ExpertPlace) -> str:
    """What the block was called, from the name of something inside of it."""
    inside = 2 if place.expert is not None else 1 if place.name else 0
    return ".".join(trained.split(".")[:-inside]) if inside else trained


def parameter_names(place: ExpertPlace, trained: str, table: TargetTable) -> list[str]:
    """The parameters that something inside of a block trains; both, where its name does not tell."""
    block = table.blocks[place.block]
    found = {"": [block.gate_up, block.down], "down_proj": [block.down]}.get(place.name, [block.gate_up])
    return [f"{stem(trained, place)}.{name}" for name in found]


def gathered_factors(
    block: ExpertBlock,
    projections: Mapping[str, Mapping[int, Pair]],
    checkpoint: Checkpoint,
    spec: AdapterSpec,
    table: TargetTable,
    converted: Counter[str],
) -> list[Factor]:
    """One block's factors: each projection's experts stacked, with zeros for those that have none. Where ranks share
    the block these are this rank's; the rank of the factors is that of all ranks' experts.

    Args:
        projections: "gate_proj", "up_proj", "down_proj" or "gate_up_proj" -> expert -> its factors.

    Raises:
        AdapterFormatError: not factors, or not of the config's rank.
        AdapterMatchError: other sizes, or an expert that the block does not have.
    """
    factors = []
    for name, pairs in projections.items():
        down = name == "down_proj"
        inside = block.intermediate if down else block.hidden
        out = block.hidden if down else block.intermediate * (2 if name == "gate_up_proj" else 1)
        scales = _check(block, name, pairs, inside, out, checkpoint, spec, table)
        numbers = block.held
        refs_a = tuple(pairs[i].ref(checkpoint, "a") if i in pairs else None for i in numbers)
        refs_b = tuple(pairs[i].ref(checkpoint, "b") if i in pairs else None for i in numbers)
        rank = max(checkpoint.infos[pair.a.name].shape[0] for pair in pairs.values())
        same = len(set(scales.values())) == 1
        scaling = next(iter(scales.values())) if same else 1.0
        by_expert = () if same else tuple(scales.get(i, 1.0) for i in numbers)
        columns = block.columns_of(name)
        for target, rows in block.rows_of(name):
            a, b = shared(
                Gathered(refs_a, rank, _width(columns, inside), rank_last=False, widths=columns),
                Gathered(refs_b, rank, _width(rows, out), rank_last=True, scales=by_expert, widths=rows),
            )
            factors.append(Factor(f"{block.path}.{target}", 0, "experts", rank, scaling, a, b))
        converted["factors of single experts, stacked by projection"] += 1
        lacking = block.experts - len(pairs)
        if lacking:
            converted[f"{name} of a block: {lacking} of {block.experts} experts have no factors, and stay zero"] += 1
    return factors


def _width(taken: tuple[int, int, int], width: int) -> int:
    return len(range(*taken)) if taken[1] else width


def _check(
    block: ExpertBlock,
    name: str,
    pairs: Mapping[int, Pair],
    inside: int,
    out: int,
    checkpoint: Checkpoint,
    spec: AdapterSpec,
    table: TargetTable,
) -> dict[int, float]:
    """Check the factors of one projection; expert -> its scaling."""
    where = checkpoint.where
    if name.startswith("gate") and not block.has_gate:
        pair = next(iter(pairs.values()))
        raise AdapterMatchError(f"{where}: {pair.a.name}: the experts of {block.path!r} have no gate.")
    beyond = [i for i in pairs if i >= block.experts]
    if beyond:
        raise AdapterMatchError(
            f"{where}: {pairs[beyond[0]].a.name}: {block.path!r} has {block.experts} experts, counted from 0. "
            "Is it an adapter of another base?"
        )
    scales = {}
    for i, pair in pairs.items():
        for key in (pair.a, pair.b):
            check_matrix(key, checkpoint.infos[key.name], where)
        a, b = (checkpoint.infos[key.name].shape for key in (pair.a, pair.b))
        check_shapes(pair, a, b, inside, out, table, where)
        # a file of stacked parameters that was taken apart, with the config of before
        (parameter,) = parameter_names(ExpertPlace(block.path, name, i), pair.trained, table)
        said = replace(pair, trained=parameter, path=pair.trained) if spec.chooses_parameter(parameter) else pair
        scales[i] = spec.scaling(checked_name(said, a[0], spec, where), a[0])
    return scales
