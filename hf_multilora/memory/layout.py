"""Which sites a model has, and how many bytes their factors take inside a slot.

A site is one slice of one wrapped layer. Sites are numbered over the whole model in the order of the targets; the
slices of one layer are consecutive, in the order of its output rows. A host block and a slot hold the same bytes:

    header   int64 [n_sites, 5] = (a_off, b_off, rank, gain_off, shift_off), padded to 256 bytes. Offsets count from
             the first byte of the slot: a_off and b_off in elements of the lora dtype, gain_off and shift_off in
             float32 elements. rank 0 = no factors, with offsets 0; gain_off or shift_off 0 = no such vector
    entries  each at a multiple of 64 bytes
             linear site:    A [rank, in] row-major;  B transposed, [rank, out] row-major, the whole scaling folded in
             embedding site: A transposed, [V, rank]; B transposed, [rank, d], the whole scaling folded in
             experts site:   A [E, rank, in], B transposed, [E, rank, out]; 1 in place of E where all experts share it.
                             In place of the two vectors the header has elements from one expert's A to the next, and
                             the same of B: 0 where they share it
             gain, shift:    float32 [width of the slice]; gain is folded into B, too

Fully sharded, ranks of a tensor-parallel model split factors of linear sites and experts by both dimensions. Where
outputs are split, rank p of n stores A's rows p, p + n, p + 2n, ..., and a row of zeros where it has one less than
rank 0. Where inputs are split, it stores B for the p-th part of the outputs. Such a header is followed by two more
tables of its shape, for the kernels of these sites; experts read the first alone, with elements from A to A:

    outputs split   (a_off, 0, rows of A, 0, 0)    and zeros
    inputs split    (a_off, b_off, rank, 0, 0)     and (0, 0, 0, gain_off, shift_off)

Where layers compute on several devices, sites are in as many *groups*. A block has a part for each group, one after
the other, at multiples of 256 bytes; each is as above, with a header of all sites (rank 0 at those of other groups)
and offsets that count from its own first byte, and is what a slot on that device holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..adapters.shards import Ranges, Shard, length, part_of, within
from ..errors import ModelError

if TYPE_CHECKING:
    from ..adapters.targets import Target

_ALL = Shard(0)
FACTOR_ALIGN = 64
SLOT_ALIGN = 256
META = 5  # entries of a site in the header
SHARDED_TABLES = 3  # of a header, fully sharded


def align(nbytes: int, to: int) -> int:
    """Return `nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class Site:
    """One slice of one wrapped layer; `out_features` is the width of the slice.

    Where ranks share the layer, features are this rank's; `whole` are (in, out) of all ranks together, `rows` and
    `columns` this rank's outputs and inputs among them (None: all), and `first` tells the rank that adds what must be
    added once to a sum over ranks. Fully sharded, it is rank `part` of `parts` that split the other factor.
    """

    index: int
    path: str
    slice: int
    kind: str  # "linear" | "embedding" | "experts"
    in_features: int  # embedding: rows of the table
    out_features: int
    experts: int = 0  # of a block of experts
    whole: tuple[int, int] = (0, 0)
    rows: Ranges | None = None
    columns: Ranges | None = None
    first: bool = True
    group: int = 0  # of the sites that lie on one device
    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        if self.whole == (0, 0):
            object.__setattr__(self, "whole", (self.in_features, self.out_features))

    def a_shape(self, rank: int, experts: int | None = None) -> tuple[int, ...]:
        """Shape of the A factor as it is stored; `experts`: factors of its own, 1 where all share one."""
        if self.kind == "experts":
            return (self.experts if experts is None else experts, self.held(rank), self.in_features)
        return (self.in_features, rank) if self.kind == "embedding" else (self.held(rank), self.in_features)

    def b_shape(self, rank: int, experts: int | None = None) -> tuple[int, ...]:
        """Shape of the B factor as it is stored."""
        start, stop = self.span
        own = (self.experts if experts is None else experts,) if self.kind == "experts" else ()
        return (*own, rank, stop - start)

    def held(self, rank: int) -> int:
        """Rows of A that each rank stores of an adapter of `rank`, padding included."""
        return -(-rank // self.parts) if self.columns is None else rank

    def padded(self, rank: int) -> int:
        """What `rank` takes of a mix, in which every rank has as many rows of A."""
        return self.held(rank) * (self.parts if self.columns is None else 1)

    @property
    def span(self) -> tuple[int, int]:
        """(start, stop) of the outputs that B is stored for, among `out_features`."""
        if self.parts == 1 or self.columns is None:
            return 0, self.out_features
        return part_of(self.out_features, self.part, self.parts)

    @property
    def b_rows(self) -> Ranges | None:
        """The rows of a checkpoint's B that are stored, None: all."""
        return (self.span,) if self.parts > 1 and self.columns is not None else self.rows

    def derived(self, row: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the two tables behind the header have for a row of it."""
        a_off, b_off, rank, gain_off, shift_off = row
        if self.columns is None:  # experts: elements from one A to the next
            return (a_off, 0, self.held(rank), gain_off if self.kind == "experts" else 0, 0), (0,) * META
        return (a_off, b_off, rank, 0, 0), (0, 0, 0, gain_off, shift_off)

    def nbytes(self, rank: int, itemsize: int) -> int:
        """Bytes of both factors at `rank`, alignment included; of experts, where each has factors of its own."""
        a, b = math.prod(self.a_shape(rank)) * itemsize, math.prod(self.b_shape(rank)) * itemsize
        return align(a, FACTOR_ALIGN) + align(b, FACTOR_ALIGN)

    @property
    def vector_bytes(self) -> int:
        """Bytes of a gain or a shift, alignment included; experts have neither."""
        return 0 if self.kind == "experts" else align(4 * self.out_features, FACTOR_ALIGN)


class Layout:
    """The sites of one model, in order.

    Attributes:
        sites: all sites; `sites[i].index == i`.
        n_sites: their number.
        experts: numbers of the sites of experts.
        header_bytes: bytes of the header, padding included.
        max_dim: the largest in_features or out_features of any site.
        group_of: module path -> the group of what is saved of it.
        n_groups: their number; more than one where the model computes on several devices.
        tables: of a header; more than one where sites are fully sharded.
    """

    def __init__(self, sites: Iterable[Site], group_of: Callable[[str], int] | None = None) -> None:
        self.sites = tuple(sites)
        self.n_sites = len(self.sites)
        self.n_groups = 1 + max((site.group for site in self.sites), default=0)
        self.group_of = group_of or (lambda path: 0)
        self.experts = [site.index for site in self.sites if site.kind == "experts"]
        self.tables = SHARDED_TABLES if any(site.parts > 1 for site in self.sites) else 1
        self.header_bytes = align(self.tables * self.n_sites * META * 8, SLOT_ALIGN)
        self.max_dim = max((max(s.in_features, s.out_features) for s in self.sites), default=1)
        self._by_key = {(s.path, s.slice): s for s in self.sites}

    @classmethod
    def from_targets(
        cls, targets: Mapping[str, Target], group_of: Callable[[str], int] | None = None, parts: int = 1
    ) -> Layout:
        """Number the slices of `targets` (module path -> Target) in the mapping's order.

        Args:
            group_of: path of a target, or of any module that may be saved -> its group; None: there is one.
            parts: ranks over which the layers that they share are fully sharded; 1: they are not.

        Raises:
            ModelError: a layer of fewer outputs than ranks, whose B they cannot split.
        """
        sites: list[Site] = []
        for target in targets.values():
            start, group = 0, group_of(target.path) if group_of else 0
            shard: Shard = getattr(target, "shard", None) or _ALL
            split = parts if shard is not _ALL and target.kind != "embedding" else 1
            for i, width in enumerate(target.widths):
                inside, experts = target.in_features, target.experts
                rows = None if shard.rows is None else within(shard.rows, start, start + width)
                site = Site(
                    len(sites),
                    target.path,
                    i,
                    target.kind,
                    inside if shard.columns is None else length(shard.columns),
                    width if rows is None else length(rows),
                    experts,
                    whole=(inside, width),
                    rows=rows,
                    columns=shard.columns,
                    first=shard.columns is None or shard.rank == 0,
                    group=group,
                    part=shard.rank if split > 1 else 0,
                    parts=split,
                )
                if split > 1 and site.columns is not None and width < split:
                    raise ModelError(
                        f"fully_sharded_loras=True: {target.path} has {width} outputs, which {split} ranks cannot "
                        "split. Leave the option out."
                    )
                sites.append(site)
                start += width
        return cls(sites, group_of)

    def site(self, path: str, slice: int = 0) -> Site:
        """Return the site of one slice of a layer.

        Raises:
            KeyError: no such layer or slice.
        """
        return self._by_key[path, slice]

    def packed_bytes(self, ranks: Mapping[int, int], dtype: torch.dtype) -> int:
        """Bytes of a plain block (no gain, no shift) whose sites have `ranks` (site -> rank) and share no factor."""
        ends = [self.header_bytes] * self.n_groups
        for i, rank in ranks.items():
            ends[self.sites[i].group] += self.sites[i].nbytes(rank, dtype.itemsize)
        return sum(align(end, SLOT_ALIGN) for end in ends[:-1]) + ends[-1]

    def default_slot_bytes(self, max_rank: int, dtype: torch.dtype, group: int = 0) -> int:
        """Bytes of a group's slot with room for every layer at `max_rank`, with a gain and a shift.

        Experts and whole saved parameters (heads, embeddings) are not in it: they would be most of it, for adapters
        that seldom have them.
        """
        sites = [site for site in self.sites if site.group == group]
        factors = sum(site.nbytes(max_rank, dtype.itemsize) for site in sites if site.kind != "experts")
        vectors = sum(2 * site.vector_bytes for site in sites)
        return align(self.header_bytes + factors + vectors, SLOT_ALIGN)
