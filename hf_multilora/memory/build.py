"""Builder: places the entries of a block one after another, then fills a block exactly as long as they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import torch

from .direct import Entry, Pieces, Recipe
from .direct import fill as fill_directly
from .layout import FACTOR_ALIGN, META, SLOT_ALIGN, Layout, align
from .pinned import host_block

# Writes an entry into its place in the block, or says how it is made.
Fill = Callable[[torch.Tensor], None] | Recipe | Pieces
Vector = tuple[Hashable, Fill]  # a gain or a shift: what it is, and how it is written


class Builder:
    """Headers, factors and vectors of one adapter on their way into a block; `ranks` has the sites placed so far."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self.ranks: dict[int, int] = {}
        self._ends = [layout.header_bytes] * layout.n_groups  # bytes of each part so far
        self._places: dict[Hashable, int] = {}  # (group, what is stored) -> first byte in its part
        self._rows: dict[int, list[int]] = {}
        self._fills: list[tuple[int, int, tuple[int, ...], torch.dtype, Fill]] = []  # group, place in its part, ...

    def add(
        self,
        site: int,
        rank: int,
        a_key: Hashable,
        a: Fill,
        b_key: Hashable,
        b: Fill,
        experts: tuple[int, int] | None = None,
    ) -> None:
        """Give one site its factors; what has an equal key already is not stored again.

        Args:
            experts: at a site of experts, how many As and how many Bs there are; 1: all share it.
        """
        where, (a_count, b_count) = self.layout.sites[site], experts or (0, 0)
        a_shape, b_shape = where.a_shape(rank, a_count), where.b_shape(rank, b_count)
        a_at = self.place(a_key, a_shape, self.dtype, a, where.group)
        b_at = self.place(b_key, b_shape, self.dtype, b, where.group)
        steps = [math.prod(shape[1:]) if count > 1 else 0 for shape, count in ((a_shape, a_count), (b_shape, b_count))]
        self.ranks[site] = rank
        self._rows[site] = [a_at // self.dtype.itemsize, b_at // self.dtype.itemsize, rank, *steps]

    def add_vectors(self, site: int, gain: Vector | None, shift: Vector | None) -> None:
        """Give one site a gain or a shift, beside the factors that it has, if any."""
        self.ranks.setdefault(site, 0)
        row = self._rows.setdefault(site, [0] * META)
        for column, vector in ((3, gain), (4, shift)):
            if vector is not None:
                (key, fill), where = vector, self.layout.sites[site]
                at = self.place(("vector", key), (where.out_features,), torch.float32, fill, where.group)
                row[column] = at // 4

    def place(self, key: Hashable, shape: Sequence[int], dtype: torch.dtype, fill: Fill, group: int = 0) -> int:
        """The first byte of an entry in its group's part; one that has an equal key there is not stored again."""
        place = self._places.get((group, key))
        if place is None:
            place = self._places[group, key] = self._ends[group]
            self._fills.append((group, place, tuple(shape), dtype, fill))
            self._ends[group] = align(place + math.prod(shape) * dtype.itemsize, FACTOR_ALIGN)
        return place

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(first byte, end) of each group's part of the block."""
        parts, start = [], 0
        for end in self._ends:
            parts.append((start, start + end))
            start = align(start + end, SLOT_ALIGN)
        return tuple(parts)

    # Under inference_mode the block would become an inference tensor; a parameter as source must not be recorded.
    @torch.inference_mode(False)
    @torch.no_grad()
    def build(self, pin: bool) -> torch.Tensor:
        """The filled block, uint8."""
        return host_block(self.parts[-1][1], self._fill, pin=pin)

    def _fill(self, block: torch.Tensor) -> None:
        starts = [start for start, _ in self.parts]
        stored: list[Entry] = []
        for group, place, _, dtype, fill in self._fills:
            parts = fill.parts if isinstance(fill, Pieces) else ((0, fill),) if isinstance(fill, Recipe) else ()
            stored += [Entry(starts[group] + place + first * dtype.itemsize, dtype, part) for first, part in parts]
        fill_directly(block, stored, lambda: self._fill_others(block))

    def _fill_others(self, block: torch.Tensor) -> None:
        """Everything but what is made straight from stored bytes: headers, padding, computed entries."""
        views = {dtype: block.view(dtype) for *_, dtype, _ in self._fills}
        parts, end = self.parts, 0
        for start, stop in parts:
            block[end:start].zero_()
            block[start : start + self.layout.header_bytes].zero_()
            end = stop
        for group, place, shape, dtype, fill in self._fills:
            place += parts[group][0]
            stop = place + math.prod(shape) * dtype.itemsize
            values = views[dtype][place // dtype.itemsize : stop // dtype.itemsize]
            if isinstance(fill, Pieces):
                values[fill.filled :].zero_()
            elif not isinstance(fill, Recipe):
                fill(values.view(shape))
            padding = align(stop, FACTOR_ALIGN)
            if padding != stop:  # the content hash covers every byte
                block[stop:padding].zero_()
        for group, (start, stop) in enumerate(parts):
            rows = {site: row for site, row in self._rows.items() if self.layout.sites[site].group == group}
            if rows:
                table = torch.tensor(list(rows.values()), dtype=torch.int64, device="cpu")
                self._write(block[start:stop], list(rows), table)

    def _write(self, part: torch.Tensor, sites: list[int], table: torch.Tensor) -> None:
        header_of(part, self.layout)[sites] = table
        if self.layout.tables > 1:
            derived = [self.layout.sites[site].derived(row) for site, row in zip(sites, table.tolist(), strict=True)]
            for number, rows in enumerate(zip(*derived, strict=True), start=1):
                header_of(part, self.layout, number)[sites] = torch.tensor(rows, dtype=torch.int64, device="cpu")


def header_of(block: torch.Tensor, layout: Layout, table: int = 0) -> torch.Tensor:
    """A table at the start of a block, or of a part, int64 [n_sites, 5]."""
    nbytes = layout.n_sites * META * 8
    return block[table * nbytes : (table + 1) * nbytes].view(torch.int64).view(layout.n_sites, META)


def copied(source: torch.Tensor) -> Fill:
    """A fill that copies, cast to the entry's dtype."""

    def fill(out: torch.Tensor) -> None:
        out.copy_(source)

    return fill


def concatenated(sources: list[torch.Tensor], dim: int, weights: list[float] | None = None) -> Fill:
    """A fill with several tensors side by side, each multiplied by its weight in fp32 before it is rounded."""

    def fill(out: torch.Tensor) -> None:
        pieces = out.split([source.shape[dim] for source in sources], dim)
        for i, (piece, source) in enumerate(zip(pieces, sources, strict=True)):
            piece.copy_(source if weights is None else source.to(torch.float32).mul(weights[i]))

    return fill
