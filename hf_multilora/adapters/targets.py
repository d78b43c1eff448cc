"""TargetTable: what a model offers to adapters, as plain data.

The table is built once when a model is enabled, and by hand in tests. It holds names and shapes, so that the loader
knows no layer; everything derived from it is computed once and kept, because hundreds of adapters are matched
against one table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from .shards import BlockShard, Shard

# Projections that some models fuse into one layer: name of the fused layer -> its parts, in the order of its rows.
# Only layouts that simply stack their parts belong here (the query_key_value of GPT-NeoX, Falcon and BLOOM interleaves
# them by head, and exists only fused).
FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


_ALL = (0, 0, 1)


@dataclass(frozen=True)
class Target:
    """One layer that can carry an adapter.

    Args:
        path: module path in the model, such as "model.layers.0.self_attn.q_proj".
        kind: "linear" (nn.Linear, Conv1D and their subclasses), "embedding", or "experts": one projection of a
            block of experts, whose weights are stacked parameters. Its path is that of the block and the name of the
            projection, "model.layers.0.mlp.experts.gate_proj" (up_proj, down_proj), whatever the parameter's name is.
        in_features: width of the input; for an embedding the rows of its table.
        out_features: width of the output.
        slices: for layers that fuse several projections, (name, width) of each in the order of the output's
            columns, such as (("q_proj", 64), ("k_proj", 32), ("v_proj", 32)); empty: one slice.
        scale: what the layer multiplies its output by (Gemma's embed_scale); the loader folds it into the scaling.
        transposed: its weight is stored as [in, out] (GPT-2's Conv1D).
        has_bias: it adds a bias of its own, the parameter or buffer "bias".
        experts: how many there are; 0 for anything but experts.
        shard: what this rank computes of it; None: all. Widths and slices are those of the whole layer.
    """

    path: str
    kind: str
    in_features: int
    out_features: int
    slices: tuple[tuple[str, int], ...] = ()
    scale: float = 1.0
    transposed: bool = False
    has_bias: bool = False
    experts: int = 0
    shard: Shard | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "embedding", "experts"):
            raise ValueError(f"{self.path}: kind={self.kind!r}, expected 'linear', 'embedding' or 'experts'.")
        if (self.kind == "experts") != (self.experts > 0):
            raise ValueError(f"{self.path}: experts={self.experts} with kind={self.kind!r}.")
        if self.slices and sum(width for _, width in self.slices) != self.out_features:
            raise ValueError(f"{self.path}: slices {self.slices} do not add up to out_features={self.out_features}.")

    @property
    def widths(self) -> tuple[int, ...]:
        """Output columns of each slice."""
        return tuple(width for _, width in self.slices) or (self.out_features,)


@dataclass(frozen=True)
class ExpertBlock:
    """A block of experts, whose weights are stacked in one parameter for gate and up, and one for down.

    Args:
        path: of the block.
        gate_up, down: names of its parameters; "up_proj" where there is no gate.
        experts, hidden, intermediate: how many there are, and their widths.
        transposed: the parameters are [E, in, out] rather than [E, out, in].
        interleaved: gate and up alternate in the output, where otherwise up follows all of gate.
        has_gate: whether there is a gate.
        swapped: PEFT takes the parameters for [E, out, in], though they are transposed, since nothing says so.
        shard: what this rank holds of it; None: all. Numbers and widths are those of the whole block.
    """

    path: str
    gate_up: str
    down: str
    experts: int
    hidden: int
    intermediate: int
    transposed: bool = False
    interleaved: bool = False
    has_gate: bool = True
    swapped: bool = False
    shard: BlockShard | None = None

    @property
    def whole(self) -> ExpertBlock:
        """The block of all ranks together."""
        return replace(self, shard=None)

    @property
    def local(self) -> ExpertBlock:
        """The block that this rank has: its experts, with its part of the intermediate width."""
        if self.shard is None:
            return self
        numbers = [stop - start for start, stop in (self.shard.experts, self.shard.intermediate)]
        return replace(self, experts=numbers[0], intermediate=numbers[1], shard=None)

    @property
    def held(self) -> range:
        """Numbers of the experts that this rank has."""
        return range(*self.shard.experts) if self.shard else range(self.experts)

    @property
    def projections(self) -> tuple[str, ...]:
        """Last names of its targets."""
        return ("gate_proj", "up_proj", "down_proj") if self.has_gate else ("up_proj", "down_proj")

    @property
    def targets(self) -> tuple[Target, ...]:
        """What carries adapters: its projections, in the order of their sites, of the experts that this rank has."""
        found = []
        for name in self.projections:
            widths = (self.intermediate, self.hidden) if name == "down_proj" else (self.hidden, self.intermediate)
            path, experts = f"{self.path}.{name}", len(self.held)
            found.append(Target(path, "experts", *widths, experts=experts, shard=self._shard_of(name)))
        return tuple(found)

    def _shard_of(self, name: str) -> Shard | None:
        """What this rank computes of each expert's projection; None: all."""
        if self.shard is None or self.shard.intermediate == (0, self.intermediate):
            return None
        mine = (self.shard.intermediate,)
        return Shard(self.shard.rank, **({"columns": mine} if name == "down_proj" else {"rows": mine}))

    @property
    def names(self) -> tuple[str, ...]:
        """All that a list of modules may call it by: itself, its projections, its parameters."""
        return tuple(
            dict.fromkeys((self.path, *(f"{self.path}.{n}" for n in (*self.projections, self.gate_up, self.down))))
        )

    def rows_of(self, name: str) -> list[tuple[str, tuple[int, int, int]]]:
        """The projections in the output of "gate_up_proj", "gate_proj", "up_proj" or "down_proj".

        Each with its (start, stop, step) of the rows of B that this rank has; (0, 0, 1): all.
        """
        if name == "down_proj":
            outputs = None if self.shard is None else self.shard.outputs
            return [(name, _ALL if outputs is None else (*outputs, 1))]
        if name != "gate_up_proj" and self.shard is None:
            return [(name, _ALL)]
        start, stop = self.shard.intermediate if self.shard else (0, self.intermediate)
        if name != "gate_up_proj":
            return [(name, (start, stop, 1))]
        if self.interleaved:
            return [("gate_proj", (2 * start, 2 * stop, 2)), ("up_proj", (2 * start + 1, 2 * stop, 2))]
        half = self.intermediate
        return [("gate_proj", (start, stop, 1)), ("up_proj", (half + start, half + stop, 1))]

    def columns_of(self, name: str) -> tuple[int, int, int]:
        """(start, stop, step) of the columns of a projection's A that this rank has; (0, 0, 1): all."""
        return (*self.shard.intermediate, 1) if name == "down_proj" and self.shard is not None else _ALL


# What a checkpoint with a matrix for each expert calls a projection: names of its own, or of Mixtral's kind.
EXPERT_NAMES = {
    "gate_proj": "gate_proj",
    "up_proj": "up_proj",
    "down_proj": "down_proj",
    "gate_up_proj": "gate_up_proj",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}
# The same, where the expert's number comes last (GPT-OSS in bitsandbytes' four bits).
_LISTED_NAMES = {"gate_up_projs": "gate_up_proj", "down_projs": "down_proj"}


@dataclass(frozen=True)
class ExpertPlace:
    """What a module name means inside of a block of experts.

    Args:
        block: path of the block.
        name: "": the parameter on the outside; "base_layer": the one inside of it (PEFT nests them); else a
            projection, "gate_proj", "up_proj", "down_proj" or, of gate and up together, "gate_up_proj".
        expert: which one; None: all of them.
    """

    block: str
    name: str
    expert: int | None = None


@dataclass(frozen=True)
class Part:
    """A stretch of output rows that belongs to one site: rows [start, stop) of a checkpoint's B."""

    path: str
    slice: int
    start: int
    stop: int


@dataclass(frozen=True)
class TargetTable:
    """Everything that the loader asks about a model.

    Args:
        targets: module path -> Target, in the order of the model.
        refused: module path -> why that module cannot carry an adapter, one sentence.
        untargeted: paths that enable's target_modules left out.
        modules: every module path of the model, for the closest names in errors.
        base_name: the base model's own name (config._name_or_path), None where it has none.
        read_base: parameter name -> the base model's tensor, or None where there is none to read.
        read_dequantised: path of a quantised layer -> the weight [out, in] that it computes with; raises ValueError
            with the reason where that cannot be told.
        prefixes: regex renamings (pattern, replacement) from older checkpoint names of this architecture.
        parameters: name of every parameter of the model -> its shape.
        tied: names of parameters that share their storage with another one.
        blocks: blocks of experts by their paths.
        unused: module path -> why what an adapter saves of that module might never be used.
    """

    targets: dict[str, Target]
    refused: dict[str, str]
    untargeted: frozenset[str]
    modules: tuple[str, ...]
    base_name: str | None
    read_base: Callable[[str], torch.Tensor | None]
    prefixes: tuple[tuple[str, str], ...] = ()
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tied: frozenset[str] = frozenset()
    blocks: Mapping[str, ExpertBlock] = field(default_factory=dict)
    read_dequantised: Callable[[str], torch.Tensor] | None = None
    unused: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def parts(self) -> dict[str, tuple[Part, ...]]:
        """Module name that a checkpoint may use -> the sites that its B is spread over.

        Beside every target's own name these are the names of the other layout: "…q_proj" where the model has a fused
        "…qkv_proj", and "…qkv_proj" where it has three separate layers.
        """
        found: dict[str, tuple[Part, ...]] = {}
        for path, target in self.targets.items():
            found[path] = tuple(_stack([(path, i, width) for i, width in enumerate(target.widths)]))
        for path, target in self.targets.items():
            for i, (name, width) in enumerate(target.slices):
                found.setdefault(_sibling(path, name), (Part(path, i, 0, width),))
        for path in self.targets:
            for fused, names in FUSED.items():
                if path.rpartition(".")[2] != names[0]:
                    continue
                layers = [self.targets.get(_sibling(path, name)) for name in names]
                if all(layer and not layer.slices and layer.kind == "linear" for layer in layers):
                    rows = [(layer.path, 0, layer.out_features) for layer in layers if layer]
                    found.setdefault(_sibling(path, fused), tuple(_stack(rows)))
        return found

    @cached_property
    def left_out(self) -> frozenset[str]:
        """`untargeted`, also under the names of the other layout."""
        names = set(self.untargeted)
        for path in self.untargeted:
            last = path.rpartition(".")[2]
            for fused, parts in FUSED.items():
                if last == fused:
                    names.update(_sibling(path, part) for part in parts)
                elif last in parts:
                    names.add(_sibling(path, fused))
        return frozenset(names.difference(self.parts))

    @cached_property
    def known(self) -> frozenset[str]:
        """Every name that means a layer here: carried, left out or refused, in either layout."""
        return frozenset(self.parts).union(self.left_out, self.refused)

    def knows(self, name: str) -> bool:
        """Whether a name means a layer here, or something of a block of experts."""
        return name in self.known or self.expert_place(name) is not None

    def expert_place(self, name: str) -> ExpertPlace | None:
        """What a name means inside of a block of experts, one that carries adapters or one that is refused."""
        blocks = self._expert_blocks
        if name in blocks:
            return ExpertPlace(name, "")
        head, _, last = name.rpartition(".")
        if head in blocks:
            # the projection of all experts at once: a target, or a stack under its name
            inside = last == "base_layer" or last in EXPERT_NAMES
            return ExpertPlace(head, EXPERT_NAMES.get(last, last)) if inside else None
        block, _, middle = head.rpartition(".")
        if block not in blocks:
            return None
        if middle.isdecimal() and last in EXPERT_NAMES:
            return ExpertPlace(block, EXPERT_NAMES[last], int(middle))
        if last.isdecimal() and middle in _LISTED_NAMES:
            return ExpertPlace(block, _LISTED_NAMES[middle], int(last))
        return ExpertPlace(block, f"{middle}.{last}") if middle == last == "base_layer" else None

    @cached_property
    def _expert_blocks(self) -> frozenset[str]:
        """Blocks that the table describes, and those that it refuses, as a whole or by projection."""
        named = {path for path in self.refused if path.rpartition(".")[2] == "experts"}
        heads = (path.rpartition(".")[0] for path in self.refused if path.rpartition(".")[2] in EXPERT_NAMES)
        named.update(head for head in heads if head.rpartition(".")[2] == "experts")
        return frozenset(named.union(self.blocks))

    @cached_property
    def roots(self) -> tuple[str, ...]:
        """Top-level modules that hold others ("model", "transformer"): where a headless model would sit."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.parts if "." in name))

    @cached_property
    def position(self) -> dict[tuple[str, int], int]:
        """Site (path, slice) -> its number, in the order of the model."""
        sites = [(path, i) for path, target in self.targets.items() for i in range(len(target.widths))]
        return {site: i for i, site in enumerate(sites)}


def is_head(path: str) -> bool:
    """Whether a layer turns hidden states into logits, going by where heads are kept: outside of the stack."""
    return "." not in path or path.endswith(".lm_head")


def _sibling(path: str, name: str) -> str:
    """The module called `name` beside `path`."""
    parent, dot, _ = path.rpartition(".")
    return parent + dot + name


def _stack(rows: list[tuple[str, int, int]]) -> list[Part]:
    """Parts of the given widths, one under the other."""
    parts, start = [], 0
    for path, index, width in rows:
        parts.append(Part(path, index, start, start + width))
        start += width
    return parts
