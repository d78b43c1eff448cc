"""PackedAdapter: an adapter as the one contiguous host block that is copied into a slot, and how it is made."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from ..errors import AdapterMatchError
from .layout import FACTOR_ALIGN, Layout, Site, align
from .pinned import host_block

if TYPE_CHECKING:
    from ..adapters.match import Factor

_HASH_CHUNK = 4 << 20


class PackedAdapter:
    """One adapter's header and factors in host memory (the bytes are described in layout.py). Never written again.

    Attributes:
        block: uint8 [nbytes] on the CPU, pinned where that was asked for and possible.
        dtype: of the factors.
        ranks: site -> rank, trained sites only.
        rank: the largest of them, 0 for an adapter that trained nothing.
        nbytes: bytes of the block, header included.
    """

    __slots__ = ("_digest", "block", "dtype", "layout", "nbytes", "rank", "ranks")

    def __init__(self, block: torch.Tensor, layout: Layout, dtype: torch.dtype, ranks: dict[int, int]) -> None:
        self.block, self.layout, self.dtype, self.ranks = block, layout, dtype, ranks
        self.nbytes = block.numel()
        self.rank = max(ranks.values(), default=0)
        self._digest: str | None = None

    def header(self) -> torch.Tensor:
        """The table, int64 [n_sites, 3] = (a_off, b_off, rank)."""
        return _header(self.block, self.layout)

    def factors(self, site: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a trained site's factors as stored (shapes: `Site.a_shape`, `Site.b_shape`)."""
        a_off, b_off, rank = self.header()[site].tolist()
        return _factor_views(self.block.view(self.dtype), self.layout.sites[site], a_off, b_off, rank)

    def digest(self) -> str:
        """Content hash in hex: sha256 over the sha256 of each 4 MiB (so that cores can share the work)."""
        if self._digest is None:
            data = self.block.numpy().data
            chunks = [data[i : i + _HASH_CHUNK] for i in range(0, len(data), _HASH_CHUNK)]
            if len(chunks) == 1:
                parts = [hashlib.sha256(chunks[0]).digest()]
            else:
                with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
                    parts = list(pool.map(lambda chunk: hashlib.sha256(chunk).digest(), chunks))
            self._digest = hashlib.sha256(b"".join(parts)).hexdigest()
        return self._digest

    def to(self, dtype: torch.dtype, *, pin: bool) -> PackedAdapter:
        """The same factors cast elementwise; self where neither dtype nor pinning asks for another block."""
        pinned = self.block.is_pinned() if pin else True
        if dtype == self.dtype and pinned:
            return self
        builder = _Builder(self.layout, dtype)
        header, data = self.header().tolist(), self.block.view(self.dtype)
        for site in self.ranks:
            a_off, b_off, rank = header[site]
            a, b = _factor_views(data, self.layout.sites[site], a_off, b_off, rank)
            builder.add(site, rank, ("a", a_off), _copy(a), ("b", b_off), _copy(b))
        return builder.build(pin)


def pack(factors: Iterable[Factor], layout: Layout, dtype: torch.dtype, *, pin: bool) -> PackedAdapter:
    """Read `factors` and lay them out for a slot, at their true ranks.

    Scaling is multiplied into B in fp32, then rounded to `dtype` once. Equal `TensorRef`s are read and stored once.

    Raises:
        AdapterMatchError: a factor whose site does not exist, comes twice, or whose tensors have another shape.
    """
    builder = _Builder(layout, dtype)
    for factor in factors:
        try:
            site = layout.site(factor.path, factor.slice)
        except KeyError:
            raise AdapterMatchError(f"{factor.path!r}, slice {factor.slice}: no such site in this model.") from None
        if site.index in builder.ranks:
            raise AdapterMatchError(f"{factor.path!r}, slice {factor.slice}: two factors for one site.")
        builder.add(
            site.index,
            factor.rank,
            ("a", factor.a, factor.rank, site.kind),
            _read_a(factor, site),
            ("b", factor.b, factor.rank, factor.scaling),
            _read_b(factor, site),
        )
    return builder.build(pin)


def compose(
    parts: Sequence[tuple[PackedAdapter, float]], layout: Layout, dtype: torch.dtype, *, pin: bool
) -> PackedAdapter:
    """Weighted mix of adapters: each site's delta is the sum of weight x delta over `parts`.

    Ranks are concatenated in the order of `parts` and weights multiplied into B in fp32, which is what PEFT's
    `add_weighted_adapter(combination_type="cat")` computes.
    """
    headers = [packed.header().tolist() for packed, _ in parts]
    data = [packed.block.view(packed.dtype) for packed, _ in parts]
    builder = _Builder(layout, dtype)
    for site in sorted({site for packed, _ in parts for site in packed.ranks}):
        here = [i for i, (packed, _) in enumerate(parts) if site in packed.ranks]
        views = [_factor_views(data[i], layout.sites[site], *headers[i][site]) for i in here]
        weights = [parts[i][1] for i in here]
        builder.add(
            site,
            sum(parts[i][0].ranks[site] for i in here),
            ("a", *((i, headers[i][site][0]) for i in here)),
            _concatenate([a for a, _ in views], 1 if layout.sites[site].kind == "embedding" else 0),
            ("b", *((i, headers[i][site][1]) for i in here)),
            _concatenate([b for _, b in views], 0, weights),
        )
    return builder.build(pin)


Fill = Callable[[torch.Tensor], None]  # writes a factor into its place in the block


class _Builder:
    """Places factors one after another, then fills a block that is exactly as long as they need."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self.ranks: dict[int, int] = {}
        self._end = layout.header_bytes
        self._places: dict[Hashable, int] = {}  # what is stored -> first byte
        self._rows: dict[int, tuple[int, int, int]] = {}
        self._fills: list[tuple[int, tuple[int, int], Fill]] = []

    def add(self, site: int, rank: int, a_key: Hashable, a: Fill, b_key: Hashable, b: Fill) -> None:
        """Give one site its factors; what has an equal key already is not stored again."""
        where = self.layout.sites[site]
        a_at = self._place(a_key, where.a_shape(rank), a)
        b_at = self._place(b_key, where.b_shape(rank), b)
        self.ranks[site] = rank
        self._rows[site] = (a_at // self.dtype.itemsize, b_at // self.dtype.itemsize, rank)

    def _place(self, key: Hashable, shape: tuple[int, int], fill: Fill) -> int:
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._end
            self._fills.append((place, shape, fill))
            self._end = align(place + shape[0] * shape[1] * self.dtype.itemsize, FACTOR_ALIGN)
        return place

    # Under inference_mode the block would become an inference tensor; a parameter as source must not be recorded.
    @torch.inference_mode(False)
    @torch.no_grad()
    def build(self, pin: bool) -> PackedAdapter:
        block = host_block(self._end, pin=pin)
        itemsize = self.dtype.itemsize
        data = block.view(self.dtype)
        block[: self.layout.header_bytes].zero_()
        for place, (rows, columns), fill in self._fills:
            stop = place + rows * columns * itemsize
            fill(data[place // itemsize : stop // itemsize].view(rows, columns))
            padding = align(stop, FACTOR_ALIGN)
            if padding != stop:  # the content hash covers every byte
                block[stop:padding].zero_()
        if self._rows:
            _header(block, self.layout)[list(self._rows)] = torch.tensor(list(self._rows.values()), device="cpu")
        return PackedAdapter(block, self.layout, self.dtype, self.ranks)


def _header(block: torch.Tensor, layout: Layout) -> torch.Tensor:
    return block[: layout.n_sites * 24].view(torch.int64).view(layout.n_sites, 3)


def _factor_views(
    data: torch.Tensor, site: Site, a_off: int, b_off: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    a = data[a_off : a_off + rank * site.in_features].view(site.a_shape(rank))
    b = data[b_off : b_off + rank * site.out_features].view(site.b_shape(rank))
    return a, b


def _read_a(factor: Factor, site: Site) -> Fill:
    def fill(out: torch.Tensor) -> None:
        a = factor.a.read()
        _check(factor, "A", a, (factor.rank, site.in_features))
        out.copy_(a.t() if site.kind == "embedding" else a)

    return fill


def _read_b(factor: Factor, site: Site) -> Fill:
    def fill(out: torch.Tensor) -> None:
        b = factor.b.read()
        _check(factor, "B", b, (site.out_features, factor.rank))
        if b.dtype == out.dtype and b.device.type == "cpu":
            # One pass: the product of a half-precision tensor and a number is computed in fp32 and rounded once.
            torch.mul(b.t(), factor.scaling, out=out)
        else:
            out.copy_(b.t().to(torch.float32).mul(factor.scaling))

    return fill


def _check(factor: Factor, name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(tensor.shape) != shape:
        raise AdapterMatchError(
            f"{factor.path!r}, slice {factor.slice}: {name} has shape {tuple(tensor.shape)}, the layer needs {shape}."
        )


def _copy(source: torch.Tensor) -> Fill:
    def fill(out: torch.Tensor) -> None:
        out.copy_(source)

    return fill


def _concatenate(sources: list[torch.Tensor], dim: int, weights: list[float] | None = None) -> Fill:
    def fill(out: torch.Tensor) -> None:
        pieces = out.split([source.shape[dim] for source in sources], dim)
        for i, (piece, source) in enumerate(zip(pieces, sources, strict=True)):
            piece.copy_(source if weights is None else source.to(torch.float32).mul(weights[i]))

    return fill
