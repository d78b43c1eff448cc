"""Builder: places the entries of a block one after another, then fills a block exactly as long as they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import torch

from .direct import Entry, Recipe
from .direct import fill as fill_directly
from .layout import FACTOR_ALIGN, META, Layout, align
from .pinned import host_block

Fill = Callable[[torch.Tensor], None] | Recipe  # writes an entry into its place in the block, or says how it is made
Vector = tuple[Hashable, Fill]  # a gain or a shift: what it is, and how it is written


class Builder:
    """Header, factors and vectors of one adapter on their way into a block; `ranks` has the sites placed so far."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self.ranks: dict[int, int] = {}
        self._end = layout.header_bytes
        self._places: dict[Hashable, int] = {}  # what is stored -> first byte
        self._rows: dict[int, list[int]] = {}
        self._fills: list[tuple[int, tuple[int, ...], torch.dtype, Fill]] = []

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
        a_at = self.place(a_key, a_shape, self.dtype, a)
        b_at = self.place(b_key, b_shape, self.dtype, b)
        steps = [math.prod(shape[1:]) if count > 1 else 0 for shape, count in ((a_shape, a_count), (b_shape, b_count))]
        self.ranks[site] = rank
        self._rows[site] = [a_at // self.dtype.itemsize, b_at // self.dtype.itemsize, rank, *steps]

    def add_vectors(self, site: int, gain: Vector | None, shift: Vector | None) -> None:
        """Give one site a gain or a shift, beside the factors that it has, if any."""
        self.ranks.setdefault(site, 0)
        row = self._rows.setdefault(site, [0] * META)
        for column, vector in ((3, gain), (4, shift)):
            if vector is not None:
                key, fill = vector
                at = self.place(("vector", key), (self.layout.sites[site].out_features,), torch.float32, fill)
                row[column] = at // 4

    def place(self, key: Hashable, shape: Sequence[int], dtype: torch.dtype, fill: Fill) -> int:
        """The first byte of an entry; one that has an equal key already is not stored again."""
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._end
            self._fills.append((place, tuple(shape), dtype, fill))
            self._end = align(place + math.prod(shape) * dtype.itemsize, FACTOR_ALIGN)
        return place

    # Under inference_mode the block would become an inference tensor; a parameter as source must not be recorded.
    @torch.inference_mode(False)
    @torch.no_grad()
    def build(self, pin: bool) -> torch.Tensor:
        """The filled block, uint8."""
        return host_block(self._end, self._fill, pin=pin)

    def _fill(self, block: torch.Tensor) -> None:
        stored = [Entry(place, dtype, fill) for place, _, dtype, fill in self._fills if isinstance(fill, Recipe)]
        fill_directly(block, stored, lambda: self._fill_others(block))

    def _fill_others(self, block: torch.Tensor) -> None:
        """Everything but what is made straight from stored bytes: header, padding, computed entries."""
        views = {dtype: block.view(dtype) for _, _, dtype, _ in self._fills}
        block[: self.layout.header_bytes].zero_()
        for place, shape, dtype, fill in self._fills:
            stop = place + math.prod(shape) * dtype.itemsize
            if not isinstance(fill, Recipe):
                fill(views[dtype][place // dtype.itemsize : stop // dtype.itemsize].view(shape))
            padding = align(stop, FACTOR_ALIGN)
            if padding != stop:  # the content hash covers every byte
                block[stop:padding].zero_()
        if self._rows:
            table = torch.tensor(list(self._rows.values()), dtype=torch.int64, device="cpu")
            header_of(block, self.layout)[list(self._rows)] = table


def header_of(block: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The table at the start of a block, int64 [n_sites, 5]."""
    return block[: layout.n_sites * META * 8].view(torch.int64).view(layout.n_sites, META)


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
