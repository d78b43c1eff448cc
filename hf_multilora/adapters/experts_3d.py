"""Factors of stacked parameters, as PEFT's target_parameters saves them: one pair of matrices for all experts.

A parameter's name is not in the keys. PEFT wraps the module once for each parameter, so that with two of them the
inner one's keys say "base_layer"; with one, only shapes and the config tell which it is.

Of [E, out, in], PEFT since 0.19.1 has A act on the input. Earlier versions took the two dimensions as they came, and
0.19.0 exchanged the wrong ones, so that A acts on the output side: W_e += (B_e A_e)^T. Llama 4's parameters are
[E, in, out] and do not say so, with the same outcome in reverse. Which of the two a file has shows in its shapes,
except where a parameter is square; then the version decides, or nothing does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import AdapterFormatError, AdapterMatchError, UnsupportedAdapterError
from .checkpoint import Checkpoint, TensorRef
from .config import AdapterSpec
from .convert import Pair, check_matrix, checked_name
from .experts_2d import stem
from .plan import Factor
from .stacks import Held, Stack, shared
from .targets import ExpertBlock, ExpertPlace

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(\.dev|[ab.]|rc)?")


@dataclass(frozen=True)
class Stacked:
    """The factors of one parameter of a block.

    Args:
        name: "" for the outer wrapper's keys, "base_layer" for the inner one's, or a projection's name.
    """

    block: ExpertBlock
    name: str
    pair: Pair

    @property
    def trained(self) -> str:
        """What the block was called in training."""
        return stem(self.pair.trained, ExpertPlace(self.block.path, self.name))


@dataclass(frozen=True)
class Reading:
    """What a pair of matrices may be: factors of gate and up, or of down; with A on the output's side, or not."""

    down: bool
    flipped: bool


def stacked_factors(
    whole: Sequence[Stacked], checkpoint: Checkpoint, spec: AdapterSpec, converted: Counter[str]
) -> list[Factor]:
    """The factors of all blocks; what one of them leaves open, another one may decide."""
    factors = []
    for item, reading in _readings(whole, checkpoint, spec):
        factors += _factors(item, reading, checkpoint, spec, converted)
    return factors


def named_factor(block: ExpertBlock, name: str, pair: Pair, checkpoint: Checkpoint, spec: AdapterSpec) -> Factor:
    """Tensors of three dimensions under a projection's own name: the stacks themselves, A [E, r, in], B [E, out, r].

    1 in place of E stands for all experts.
    """
    where = checkpoint.where
    a, b = (checkpoint.infos[key.name] for key in (pair.a, pair.b))
    inside, out = (block.intermediate, block.hidden) if name == "down_proj" else (block.hidden, block.intermediate)
    rank = a.shape[1]
    counts = {1, block.experts}
    fits = len(b.shape) == 3 and a.shape[0] in counts and b.shape[0] in counts
    if name not in block.projections or not fits or a.shape[2] != inside or b.shape[1:] != (out, rank):
        raise AdapterMatchError(
            f"{where}: {pair.a.name} {a.shape} and {pair.b.name} {b.shape} do not fit {block.path!r}, which has "
            f"{', '.join(block.projections)}: expected (experts, rank, {inside}) and (experts, {out}, rank) with "
            f"{block.experts} experts or one for all."
        )
    if not (a.dtype.is_floating_point and b.dtype.is_floating_point):
        raise AdapterFormatError(f"{where}: {pair.a.name} has the dtype {a.dtype}: expected floating-point factors.")
    scaling = spec.scaling(checked_name(pair, rank, spec, where), rank)
    ((_, rows),) = block.rows_of(name)
    parts = [
        _held(block, pair.ref(checkpoint, which), dim, widths)
        for which, dim, widths in (("a", 2, block.columns_of(name)), ("b", 1, rows))
    ]
    return Factor(f"{block.path}.{name}", 0, "experts", rank, scaling, *parts)


def _held(block: ExpertBlock, ref: TensorRef, dim: int, widths: tuple[int, int, int]) -> TensorRef | Held:
    """What this rank has of a stack; `widths` of the dimension `dim`."""
    if ref.shape[0] == block.experts > len(block.held):
        ref = replace(ref, rows=(block.held.start, block.held.stop))
    return Held(ref, dim, widths[:2]) if widths[1] else ref


def _readings(whole: Sequence[Stacked], checkpoint: Checkpoint, spec: AdapterSpec) -> list[tuple[Stacked, Reading]]:
    where = checkpoint.where
    found: list[tuple[Stacked, list[Reading]]] = []
    for block in dict.fromkeys(item.block for item in whole):
        items = {item.name: item for item in whole if item.block == block}
        if "base_layer.base_layer" in items:
            name = items["base_layer.base_layer"].pair.a.name
            raise UnsupportedAdapterError(f"{where}: {name}: three parameters of experts (biases?) are not served.")
        if "base_layer" in items and "" not in items:
            raise AdapterFormatError(
                f"{where}: {items['base_layer'].pair.a.name} is the inner one of two parameters, and the outer one "
                f"(….experts.lora_A) is missing: the file is incomplete, copy or download it again."
            )
        found += [(item, _possible(item, items, checkpoint, spec)) for item in items.values()]
    # one writer wrote them all
    for style in {(item.block.transposed, item.block.swapped) for item, _ in found}:
        here = [readings for item, readings in found if (item.block.transposed, item.block.swapped) == style]
        sides = set.intersection(*({reading.flipped for reading in readings} for readings in here))
        if len(sides) == 1:
            for readings in here:
                readings[:] = [reading for reading in readings if reading.flipped in sides]
    return [(item, _decided(item, readings, spec, where)) for item, readings in found]


def _possible(item: Stacked, items: dict[str, Stacked], checkpoint: Checkpoint, spec: AdapterSpec) -> list[Reading]:
    """What a pair can be, going by its shapes and by what stands beside it."""
    block, pair = item.block, item.pair
    for key in (pair.a, pair.b):
        check_matrix(key, checkpoint.infos[key.name], checkpoint.where)
    both = checkpoint.infos[pair.a.name].shape[1], checkpoint.infos[pair.b.name].shape[0]
    wide = block.intermediate * (2 if block.has_gate else 1)
    sizes = {False: (block.hidden, wide), True: (block.intermediate, block.hidden)}
    fitting = [
        Reading(down, flipped)
        for down, size in sizes.items()
        for flipped in (False, True)
        if both == (size[::-1] if flipped else size)
    ]
    if not fitting:
        raise AdapterMatchError(
            f"{checkpoint.where}: {pair.a.name} and {pair.b.name} were trained on experts of {both[0]} inputs and "
            f"{both[1]} outputs; those of {block.path!r} have {block.hidden} and {wide} ({block.gate_up}), "
            f"{block.intermediate} and {block.hidden} ({block.down}). Is it an adapter of another base?"
        )
    if item.name in ("", "base_layer") and {"", "base_layer"} <= items.keys():
        wanted = item.name == ""
    elif item.name in (block.gate_up, block.down):
        wanted = item.name == block.down
    elif item.name:
        raise UnsupportedAdapterError(
            f"{checkpoint.where}: {pair.a.name} {checkpoint.infos[pair.a.name].shape}: one matrix for a projection of "
            f"all experts, where this model has the parameters {block.gate_up} and {block.down}, is not served."
        )
    else:
        chosen = [spec.chooses_parameter(f"{item.trained}.{name}") for name in (block.gate_up, block.down)]
        if sum(chosen) != 1:
            return fitting
        wanted = chosen[1]
    # PEFT nests them in the order of the module; shapes have the last word
    return [reading for reading in fitting if reading.down == wanted] or fitting


def _decided(item: Stacked, readings: list[Reading], spec: AdapterSpec, where: str) -> Reading:
    if len(readings) > 1:
        flipped = flipped_by(spec.peft_version, item.block)
        readings = [reading for reading in readings if reading.flipped == flipped]
    if len(readings) != 1:
        raise UnsupportedAdapterError(
            f"{where}: {item.pair.a.name} can be read in more than one way: its shapes fit both with A on the input "
            f"and with A on the output (as PEFT before 0.19.1 wrote it), and peft_version={spec.peft_version!r} does "
            "not decide. Set peft_version in adapter_config.json to the version that trained it, and "
            "target_parameters to what it trained."
        )
    return readings[0]


def flipped_by(version: str | None, block: ExpertBlock) -> bool | None:
    """Whether this version of PEFT puts A on the output's side of such a parameter; None: not known."""
    says_transposed = block.transposed and not block.swapped
    match = _VERSION.match(version or "")
    if match is None:
        # of those that say so only 0.19.0 has it wrong, which writes its number
        return False if says_transposed and not version else None
    number = tuple(map(int, match.groups()[:3]))
    if match[4] and (0, 18, 0) < number < (0, 19, 2):
        return None
    exchanged = number >= (0, 19) and says_transposed == (number == (0, 19, 0))
    return exchanged == block.transposed


def _factors(
    item: Stacked, reading: Reading, checkpoint: Checkpoint, spec: AdapterSpec, converted: Counter[str]
) -> list[Factor]:
    block, where = item.block, checkpoint.where
    parameter = block.down if reading.down else block.gate_up
    ref_a, ref_b = item.pair.ref(checkpoint, "a"), item.pair.ref(checkpoint, "b")
    rank, of_a, of_b = _sizes(item, ref_a.shape[0], ref_b.shape[1], where)
    named = replace(item.pair, trained=f"{item.trained}.{parameter}", path=f"{block.path}.{parameter}")
    scaling = spec.scaling(checked_name(named, rank, spec, where), rank)
    rows, columns = Stack(ref_a, of_a, on_rows=True), Stack(ref_b, of_b, on_rows=False, expert_first=spec.expert_first)
    a, b = (columns, rows) if reading.flipped else (rows, columns)
    b = replace(b, rank_last=True)
    projection = "down_proj" if reading.down else "gate_up_proj" if block.has_gate else "up_proj"
    a, b = (replace(stack, held=block.held) for stack in (a, b))
    a = replace(a, widths=block.columns_of(projection))
    parts = [(name, a, replace(b, widths=widths)) for name, widths in block.rows_of(projection)]
    if len(parts) == 2 and rank % 2 == 0 and not reading.flipped:
        half = rank // 2
        # of all ranks' experts, so that ranks which share the block agree
        gate, up = (replace(b, widths=widths, held=None) for _, widths in block.whole.rows_of(projection))
        if gate.zero_at(half, rank) and up.zero_at(0, half):
            pieces = ((0, half), (half, rank))
            parts = [
                (name, replace(a, ranks=ranks), replace(b, ranks=ranks))
                for (name, a, b), ranks in zip(parts, pieces, strict=True)
            ]
            converted[f"{parameter} is block-diagonal: gate and up have rank {half} each"] += 1
            rank = half
    if reading.flipped:
        converted["A on the output's side: A and B exchanged"] += 1
    if spec.expert_first:
        converted["columns of lora_B one expert after the other (lora_B_layout)"] += 1
    converted["factors of all experts in one matrix, as stacks by projection"] += 1
    found = []
    for name, a, b in parts:
        once_a, once_b = shared(a, b)
        found.append(Factor(f"{block.path}.{name}", 0, "experts", rank, scaling, once_a, once_b))
    return found


def _sizes(item: Stacked, rows: int, columns: int, where: str) -> tuple[int, int, int]:
    """Rank, and how many factors A and B hold: one for each expert, or one of them a single one for all."""
    experts = item.block.experts
    if rows == columns and rows % experts == 0:
        return rows // experts, experts, experts
    if rows * experts == columns:
        return rows, 1, experts
    if columns * experts == rows:
        return columns, experts, 1
    raise AdapterMatchError(
        f"{where}: {item.pair.a.name} has {rows} rows and {item.pair.b.name} {columns} columns, of which "
        f"{item.block.path!r} with its {experts} experts makes no rank. Is it an adapter of another base?"
    )
