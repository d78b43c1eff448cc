"""Factors on their way from a checkpoint into a block: of what ranks share, each reads its own part alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..adapters.shards import Ranges, cut, length
from ..adapters.stored import Stored
from ..errors import AdapterMatchError
from .build import Fill, Vector
from .direct import Pieces, Recipe, stored_of
from .layout import Site

if TYPE_CHECKING:
    from ..adapters.plan import Factor


def read_a(factor: Factor, site: Site) -> Fill:
    """A as the site stores it, of rank 1 or more.

    Raises: AdapterMatchError, at once or when it is read: it has another shape.
    """
    shape, parts = (factor.rank, site.whole[0]), site.parts if site.columns is None else 1
    rows, stored = range(site.part, factor.rank, parts) if parts > 1 else range(factor.rank), stored_of(factor.a)
    if stored is not None:
        _check(factor, "A", stored.shape, shape)
        if parts == 1 and site.columns is None:
            return Recipe(stored, transposed=site.kind == "embedding")
        columns = site.columns or ((0, shape[1]),)
        return _pieces([stored.stretch(row, *stretch) for row in rows for stretch in columns])

    def fill(out: torch.Tensor) -> None:
        assert factor.a is not None, "factors of rank 0 have no A"
        a = factor.a.read()
        _check(factor, "A", a.shape, shape)
        if site.kind == "embedding":
            out.copy_(a.t())
            return
        out[: len(rows)].copy_(cut(a[rows.start :: rows.step], site.columns, 1))
        out[len(rows) :].zero_()

    return fill


def _pieces(stretches: Sequence[Stored]) -> Pieces:
    """One after the other."""
    first, parts = 0, []
    for stretch in stretches:
        parts.append((first, Recipe(stretch)))
        first += math.prod(stretch.shape)
    return Pieces(tuple(parts), first)


def read_b(factor: Factor, site: Site, gain: Any) -> Fill:
    """B as the site stores it, with scaling and gain. Raises: as `read_a`."""
    shape, rows, stored = (site.whole[1], factor.rank), site.b_rows, stored_of(factor.b)
    if stored is not None:
        _check(factor, "B", stored.shape, shape)
        if gain is None and rows is None:
            return Recipe(stored, transposed=True, scale=factor.scaling)
        if gain is None and rows is not None:
            first, parts, columns = 0, [], length(rows)
            for start, stop in rows:
                parts.append((0, Recipe(stored.rows(start, stop), True, factor.scaling, first, columns)))
                first += stop - start
            return Pieces(tuple(parts), factor.rank * columns)

    def fill(out: torch.Tensor) -> None:
        assert factor.b is not None, "factors of rank 0 have no B"
        if stored is not None and rows is not None:
            pieces = [stored.rows(start, stop).read() for start, stop in rows]
            b = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        else:
            b = factor.b.read()
            _check(factor, "B", b.shape, shape)
            b = cut(b, rows, 0)
        if gain is not None:
            columns = _read_vector(factor, "gain", gain, site, rows).mul(factor.scaling)
            out.copy_(b.t().to("cpu", torch.float32) * columns)
        elif b.dtype == out.dtype and b.device.type == "cpu":
            # One pass: the product of a half-precision tensor and a number is computed in fp32 and rounded once.
            torch.mul(b.t(), factor.scaling, out=out)
        else:
            out.copy_(b.t().to(torch.float32).mul(factor.scaling))

    return fill


def vector(factor: Factor, name: str, ref: Any, site: Site) -> Vector | None:
    """A gain or a shift of a factor; None where there is none. Raises: as `read_a`.

    A shift is added to a sum over ranks once, by the first of them.
    """
    if ref is None:
        return None

    def fill(out: torch.Tensor) -> None:
        if name == "shift" and not site.first:
            out.fill_(-0.0)  # another rank adds it; all of them know that there is one
        else:
            out.copy_(_read_vector(factor, name, ref, site, site.rows))

    return ref, fill


def _read_vector(factor: Factor, name: str, ref: Any, site: Site, rows: Ranges | None) -> torch.Tensor:
    vector: torch.Tensor = ref.read()
    _check(factor, name, vector.shape, (site.whole[1],))
    return cut(vector, rows, 0).to("cpu", torch.float32)


def _check(factor: Factor, name: str, found: Sequence[int], shape: tuple[int, ...]) -> None:
    if tuple(found) != shape:
        raise AdapterMatchError(
            f"{factor.path!r}, slice {factor.slice}: {name} has shape {tuple(found)}, the layer needs {shape}."
        )
