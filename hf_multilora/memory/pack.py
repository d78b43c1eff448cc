"""PackedAdapter: an adapter as the one contiguous host block that is copied into a slot, and how it is made."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from ..errors import AdapterMatchError, UnsupportedAdapterError
from .build import Builder, concatenated, copied, header_of
from .contents import check_plain
from .extras import BaseDtype, Extras, SavedTensor, place_extras
from .factors import read_a, read_b, vector
from .layout import Layout, Site

if TYPE_CHECKING:
    from ..adapters.plan import Factor, SavedParam, TokenRows

_HASH_CHUNK = 4 << 20


class PackedAdapter:
    """One adapter's header and entries in host memory (the bytes are described in layout.py). Never written again.

    Attributes:
        block: uint8 [nbytes] on the CPU, pinned where that was asked for and possible.
        dtype: of the factors.
        ranks: site -> rank, touched sites only; 0 where an adapter has a gain or a shift and no factors.
        rank: the largest of them, 0 for an adapter without factors.
        nbytes: bytes of the block, header included.
        extras: what it has beside factors, gains and shifts.
        parts: (first byte, end) of each group of sites: what a slot on that group's device holds.
    """

    __slots__ = ("_digest", "block", "dtype", "extras", "layout", "nbytes", "parts", "rank", "ranks")

    def __init__(
        self,
        block: torch.Tensor,
        layout: Layout,
        dtype: torch.dtype,
        ranks: dict[int, int],
        extras: Extras,
        parts: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.block, self.layout, self.dtype, self.ranks, self.extras = block, layout, dtype, ranks, extras
        self.parts = tuple(parts) or ((0, block.numel()),)
        self.nbytes = block.numel()
        self.rank = max(ranks.values(), default=0)
        self._digest: str | None = None

    def part(self, group: int) -> torch.Tensor:
        """The bytes of one group of sites."""
        if len(self.parts) == 1:
            return self.block
        start, stop = self.parts[group]
        return self.block[start:stop]

    def header(self) -> torch.Tensor:
        """The table, int64 [n_sites, 5] = (a_off, b_off, rank, gain_off, shift_off), with offsets into the block."""
        if len(self.parts) == 1:
            return header_of(self.block, self.layout)
        tables = torch.stack([header_of(self.part(group), self.layout) for group in range(len(self.parts))])
        groups = torch.tensor([site.group for site in self.layout.sites], device="cpu")
        table = tables[groups, torch.arange(len(groups), device="cpu")]
        starts = torch.tensor([start for start, _ in self.parts], device="cpu")[groups, None]
        table[:, :2] += torch.where(table[:, 2:3] > 0, starts // self.dtype.itemsize, 0)
        vectors = table[:, 3:].ne(0)
        vectors[self.layout.experts] = False  # elements between experts, there
        table[:, 3:] += torch.where(vectors, starts // 4, 0)
        return table

    def factors(self, site: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a touched site's factors as stored (shapes: `Site.a_shape`, `Site.b_shape`)."""
        return _factor_views(self.block.view(self.dtype), self.layout.sites[site], self.header()[site].tolist())

    def vectors(self, site: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Views of a site's gain and shift, float32 [width of the slice]; None where it has none."""
        floats, width = self.block.view(torch.float32), self.layout.sites[site].out_features
        gain, shift = (floats[at : at + width] if at else None for at in self.vector_offsets()[site].tolist())
        return gain, shift

    def vector_offsets(self) -> torch.Tensor:
        """Where gains and shifts lie, int64 [n_sites, 2]; 0 where there is none, as at all sites of experts."""
        offsets = self.header()[:, 3:].clone()
        offsets[self.layout.experts] = 0
        return offsets

    @property
    def has_vectors(self) -> bool:
        """Whether any site has a gain or a shift."""
        return bool(self.vector_offsets().any())

    def view(self, saved: SavedTensor) -> torch.Tensor:
        """A saved tensor, as a view of the block."""
        return saved.view(self.part(saved.group))

    def digest(self) -> str:
        """Content hash in hex: sha256 over the sha256 of each 4 MiB (so that cores can share the work), and extras."""
        if self._digest is None:
            data = self.block.numpy().data
            chunks = [data[i : i + _HASH_CHUNK] for i in range(0, len(data), _HASH_CHUNK)]
            if len(chunks) == 1:
                parts = [hashlib.sha256(chunks[0]).digest()]
            else:
                with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
                    parts = list(pool.map(lambda chunk: hashlib.sha256(chunk).digest(), chunks))
            if self.extras:
                parts.append(repr(self.extras).encode())
            self._digest = hashlib.sha256(b"".join(parts)).hexdigest()
        return self._digest

    def to(self, dtype: torch.dtype, *, pin: bool, base_dtype: BaseDtype | None = None) -> PackedAdapter:
        """The same with the factors cast elementwise; self where neither dtypes nor pinning ask for another block.

        Saved tensors are cast where `base_dtype` says that the base's parameter has another dtype now; vectors are
        never cast.
        """
        pinned = self.block.is_pinned() if pin else True
        if dtype == self.dtype and pinned and self.extras.follows(base_dtype):
            return self
        builder = Builder(self.layout, dtype)
        header, data = self.header().tolist(), self.block.view(self.dtype)
        vectors = self.vector_offsets().tolist()
        for site in self.ranks:
            a_off, b_off, rank, _, _ = header[site]
            if rank:
                a, b = _factor_views(data, self.layout.sites[site], header[site])
                builder.add(site, rank, ("a", a_off), copied(a), ("b", b_off), copied(b), _counts(a, b))
            gain_off, shift_off = vectors[site]
            if gain_off or shift_off:
                gain, shift = self.vectors(site)
                builder.add_vectors(
                    site,
                    None if gain is None else (gain_off, copied(gain)),
                    None if shift is None else (shift_off, copied(shift)),
                )
        return _packed(builder, pin, self.extras.packed_by(builder, self.view, base_dtype))


def pack(
    factors: Iterable[Factor],
    layout: Layout,
    dtype: torch.dtype,
    *,
    pin: bool,
    saved: Iterable[SavedParam] = (),
    tokens: Iterable[TokenRows] = (),
    invocation: Sequence[int] = (),
    vocab_size: int | None = None,
    base_dtype: BaseDtype | None = None,
) -> PackedAdapter:
    """Read `factors` and lay them out for a slot, at their true ranks.

    Scaling and gain are multiplied into B in fp32, then rounded to `dtype` once; gains and shifts are stored in fp32.
    Equal references are read and stored once. A factor of rank 0 has a gain or a shift, and no A and B.
    Saved parameters and token rows are stored in the dtype of the base's parameter of that name, which `base_dtype`
    says; without it, in their own.

    Raises:
        AdapterMatchError: a factor whose site does not exist, comes twice, or whose tensors have another shape; a
            parameter that is saved twice; token rows that do not fit their ids.
        UnsupportedAdapterError: DoRA on a layer with a bias whose inputs are split over ranks.
    """
    builder = Builder(layout, dtype)
    for factor in factors:
        try:
            site = layout.site(factor.path, factor.slice)
        except KeyError:
            raise AdapterMatchError(f"{factor.path!r}, slice {factor.slice}: no such site in this model.") from None
        if site.index in builder.ranks:
            raise AdapterMatchError(f"{factor.path!r}, slice {factor.slice}: two factors for one site.")
        gain, shift = factor.gain, factor.shift
        if site.columns is not None and gain is not None and shift is not None:
            raise UnsupportedAdapterError(
                f"{factor.path!r}: DoRA on a layer with a bias whose inputs are split over ranks is not served."
            )
        if site.kind == "experts":
            _add_experts(builder, factor, site)
        elif factor.rank:
            builder.add(
                site.index,
                factor.rank,
                ("a", factor.a, factor.rank, site.kind, site.columns, site.part, site.parts),
                read_a(factor, site),
                ("b", factor.b, factor.rank, factor.scaling, gain, site.b_rows),
                read_b(factor, site, gain),
            )
        if gain is not None or shift is not None:
            builder.add_vectors(site.index, vector(factor, "gain", gain, site), vector(factor, "shift", shift, site))
    return _packed(builder, pin, place_extras(builder, saved, tokens, invocation, vocab_size, base_dtype))


def compose(
    parts: Sequence[tuple[PackedAdapter, float]], layout: Layout, dtype: torch.dtype, *, pin: bool
) -> PackedAdapter:
    """Weighted mix of adapters: each site's delta is the sum of weight x delta over `parts`.

    Ranks are concatenated in the order of `parts` and weights multiplied into B in fp32, which is what PEFT's
    `add_weighted_adapter(combination_type="cat")` computes.

    Raises:
        UnsupportedAdapterError: a part that is not plain LoRA.
    """
    for packed, _ in parts:
        check_plain("An adapter of the mix", packed)
    headers = [packed.header().tolist() for packed, _ in parts]
    data = [packed.block.view(packed.dtype) for packed, _ in parts]
    builder = Builder(layout, dtype)
    for site in sorted({site for packed, _ in parts for site in packed.ranks}):
        here = [i for i, (packed, _) in enumerate(parts) if site in packed.ranks]
        views = [_factor_views(data[i], layout.sites[site], headers[i][site]) for i in here]
        weights, where = [parts[i][1] for i in here], layout.sites[site]
        kind, ranks = where.kind, [where.padded(parts[i][0].ranks[site]) for i in here]
        a, b = [a for a, _ in views], [_rows_to(b, rank) for (_, b), rank in zip(views, ranks, strict=True)]
        counts = None
        if kind == "experts":  # shared ones beside others: one for each expert
            counts = max(len(t) for t in a), max(len(t) for t in b)
            a, b = [t.expand(counts[0], -1, -1) for t in a], [t.expand(counts[1], -1, -1) for t in b]
        builder.add(
            site,
            sum(ranks),
            ("a", *((i, headers[i][site][0]) for i in here)),
            concatenated(a, 0 if kind == "linear" else 1),
            ("b", *((i, headers[i][site][1]) for i in here)),
            concatenated(b, 1 if kind == "experts" else 0, weights),
            counts,
        )
    return _packed(builder, pin, Extras())


def _packed(builder: Builder, pin: bool, extras: Extras) -> PackedAdapter:
    return PackedAdapter(builder.build(pin), builder.layout, builder.dtype, builder.ranks, extras, builder.parts)


def _factor_views(data: torch.Tensor, site: Site, row: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both factors by the site's row of the header."""
    a_off, b_off, rank, a_step, b_step = row
    a_shape = site.a_shape(rank, None if a_step else 1)
    b_shape = site.b_shape(rank, None if b_step else 1)
    a = data[a_off : a_off + math.prod(a_shape)].view(a_shape)
    b = data[b_off : b_off + math.prod(b_shape)].view(b_shape)
    return a, b


def _rows_to(b: torch.Tensor, rank: int) -> torch.Tensor:
    """B of a part of a mix, `[(experts,) its rank, out]`, with rows of zeros up to `rank`."""
    return b if b.shape[-2] == rank else F.pad(b, (0, 0, 0, rank - b.shape[-2]))


def _counts(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int] | None:
    return (len(a), len(b)) if a.dim() == 3 else None


def _add_experts(builder: Builder, factor: Factor, site: Site) -> None:
    """Stacked factors: A as it is, B turned, with the scaling."""
    a, b = factor.a, factor.b
    if a is None or b is None or factor.gain is not None or factor.shift is not None:
        raise AdapterMatchError(f"{factor.path!r}: experts take two factors, and neither gain nor shift.")
    counts = a.shape[0], b.shape[0]
    for name, found, shape in (
        ("A", a.shape, (factor.rank, site.in_features)),
        ("B", b.shape, (site.span[1] - site.span[0], factor.rank)),
    ):
        if tuple(found[1:]) != shape or found[0] not in (1, site.experts):
            raise AdapterMatchError(
                f"{factor.path!r}: {name} has shape {tuple(found)}, the layer needs {(site.experts, *shape)}, or 1 "
                "where all experts share it."
            )

    mine = slice(site.part, None, site.parts) if site.columns is None else slice(None)

    def fill_a(out: torch.Tensor) -> None:
        rows = a.read()[:, mine]
        out[:, : rows.shape[1]].copy_(rows)
        out[:, rows.shape[1] :].zero_()

    def fill_b(out: torch.Tensor) -> None:
        for one, turned in zip(b.read(), out, strict=True):
            turned.copy_(one.t().to("cpu", torch.float32).mul(factor.scaling))

    builder.add(
        site.index,
        factor.rank,
        ("a", a, factor.rank, site.kind, site.columns, site.part, site.parts),
        fill_a,
        ("b", b, factor.rank, factor.scaling, site.kind),
        fill_b,
        counts,
    )
