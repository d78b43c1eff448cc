"""A small arena built by hand, the batches that tests draw over it, and an fp64 oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_multilora.kernels.reference import META

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Error of a row's output, relative to the size of its terms; one rounding of y is allowed for.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 7e-4, torch.float64: 1e-12}
# Ranks for beds with vectors: slot s has a gain if s is odd, a shift if s % 4 > 1; the last four have no delta.
RANKS_WITH_VECTORS = [[1], [3], [8], [11], [16], [33], [64], [128], [0], [0], [0], [0]]
POPULARITY = ("distinct", "identical", "uniform", "zipf", "skewed", "with_base")


def pad(n: int, step: int) -> int:
    return -(-n // step) * step


class Bed:
    """Adapters over one layer of `len(widths)` slices (or one embedding), packed as the arena packs them.

    `ranks[slot][slice]` are true ranks, 0 where the slice has no delta. With `shared_a` a slot's slices use one A.
    With `vectors` a slice has a gain, a shift, both or none, by `(slot + slice) % 4`.
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[int]],
        in_features: int,
        widths: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        site: int = 2,
        embedding: bool = False,
        shared_a: bool = False,
        vectors: bool = False,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.in_features, self.widths, self.site, self.dtype = in_features, tuple(widths), site, dtype
        self.ranks, self.embedding = [list(r) for r in ranks], embedding
        self.max_rank = max(1, max(max(r) for r in ranks))
        step = 64 // dtype.itemsize
        n_sites = site + len(widths) + 1
        header = pad(8 * META * n_sites, 256) // dtype.itemsize
        per_slot = header + sum(
            pad(self.max_rank * in_features, step) + pad(self.max_rank * width, step) + 2 * pad(8 * width, step)
            for width in widths
        )
        self.slot_elems = pad(per_slot, 256 // dtype.itemsize)
        slots = len(ranks)
        self.zero_off = slots * self.slot_elems
        tail = max(in_features if not embedding else 0, *widths)
        storage = torch.zeros(self.zero_off * dtype.itemsize + pad(tail * dtype.itemsize, 256), dtype=torch.uint8)
        data = storage.view(dtype)
        # What no offset names must never be read: NaN everywhere but in the tail.
        data[: self.zero_off] = float("nan")
        words = self.slot_elems * dtype.itemsize // 8
        meta = storage[: self.zero_off * dtype.itemsize].view(torch.int64).view(slots, words)
        meta[:, : META * n_sites] = 0
        floats = storage.view(torch.float32)
        self.a: dict[tuple[int, int], Tensor] = {}
        self.b: dict[tuple[int, int], Tensor] = {}
        self.gain: dict[tuple[int, int], Tensor] = {}
        self.shift: dict[tuple[int, int], Tensor] = {}
        for slot in range(slots):
            at = header
            first_a = None
            for i, width in enumerate(widths):
                rank = self.ranks[slot][i]
                entry = meta[slot, META * (site + i) : META * (site + i + 1)]
                for bit, kept in enumerate((self.gain, self.shift)):
                    if vectors and (slot + i) >> bit & 1:
                        kept[slot, i] = torch.randn(width, generator=gen)
                        entry[3 + bit] = at * dtype.itemsize // 4
                        start = (slot * self.slot_elems + at) * dtype.itemsize // 4
                        floats[start : start + width] = kept[slot, i]
                        at += pad(width * 4 // dtype.itemsize, step)
                if rank == 0:
                    continue
                if shared_a and first_a is not None:
                    a_off, a = first_a
                else:
                    a = (torch.randn(rank, in_features, generator=gen) / in_features**0.5).to(dtype)
                    a_off, at = self._put(data, slot, at, a.t().contiguous() if embedding else a, step)
                    first_a = (a_off, a)
                b = (torch.randn(rank, width, generator=gen) / rank**0.5).to(dtype)
                b_off, at = self._put(data, slot, at, b, step)
                entry[:3] = torch.tensor([a_off, b_off, rank])
                self.a[slot, i], self.b[slot, i] = a, b
        self.storage = storage.to(device)
        self.data, self.floats = self.storage.view(dtype), self.storage.view(torch.float32)
        self.meta = self.storage[: self.zero_off * dtype.itemsize].view(torch.int64).view(slots, words)

    def _put(self, data: Tensor, slot: int, at: int, what: Tensor, step: int) -> tuple[int, int]:
        start = slot * self.slot_elems + at
        data[start : start + what.numel()] = what.reshape(-1)
        return at, at + pad(what.numel(), step)

    def poison(self, slot: int) -> None:
        """Make every factor of `slot` NaN."""
        for (s, i), a in self.a.items():
            if s == slot:
                entry = self.meta[slot, META * (self.site + i) : META * (self.site + i) + 2].tolist()
                for off, size in zip(entry, (a.numel(), self.b[s, i].numel()), strict=True):
                    start = slot * self.slot_elems + int(off)
                    self.data[start : start + size] = float("nan")
        slot_floats = self.slot_elems * self.dtype.itemsize // 4
        for bit, kept in enumerate((self.gain, self.shift)):
            for (s, i), vector in kept.items():
                if s == slot:
                    start = slot * slot_floats + int(self.meta[slot, META * (self.site + i) + 3 + bit])
                    self.floats[start : start + vector.numel()] = float("nan")

    def touched(self, slot: int, i: int) -> bool:
        return any((slot, i) in kept for kept in (self.a, self.gain, self.shift))

    def oracle(
        self, y: Tensor, x: Tensor, slots: Sequence[int], starts: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """fp64 result on the CPU, and the size of its terms (what a relative error is relative to)."""
        y64, n = y.detach().cpu().double(), y.shape[0]
        out, scale = y64.clone(), y64.abs()
        per_row = n // len(slots)
        for row, slot in enumerate(slots):
            first = min(per_row, max(0, starts[row])) if starts is not None else 0
            span, start = slice(row * per_row + first, (row + 1) * per_row), 0
            for i, width in enumerate(self.widths):
                cols = slice(start, start + width)
                start += width
                if slot < 0:
                    continue
                if (slot, i) in self.gain:
                    out[span, cols] *= self.gain[slot, i].double()
                    scale[span, cols] *= self.gain[slot, i].double().abs()
                if (slot, i) in self.shift:
                    out[span, cols] += self.shift[slot, i].double()
                    scale[span, cols] += self.shift[slot, i].double().abs()
                if (slot, i) not in self.a:
                    continue
                a, b = self.a[slot, i].double(), self.b[slot, i].double()
                xs = x[span].detach().cpu()
                h = a.t()[xs.long()] if self.embedding else xs.double() @ a.t()
                size = a.t()[xs.long()].abs() if self.embedding else xs.double().abs() @ a.t().abs()
                out[span, cols] += h @ b
                scale[span, cols] += size @ b.abs()
        return out, scale

    def inputs(self, n: int, dtype: torch.dtype, seed: int = 1, device: str = "cpu") -> tuple[Tensor, Tensor]:
        gen = torch.Generator().manual_seed(seed)
        y = torch.randn(n, sum(self.widths), generator=gen).to(dtype)
        if self.embedding:
            x = torch.randint(self.in_features, (n,), generator=gen)
        else:
            x = torch.randn(n, self.in_features, generator=gen).to(dtype)
        return y.to(device), x.to(device)

    def check(
        self, got: Tensor, y: Tensor, x: Tensor, slots: Sequence[int], starts: Sequence[int] | None = None
    ) -> None:
        """Against the oracle, within the dtype's tolerance; what has no adapter or is before its start bit for bit."""
        want, scale = self.oracle(y, x, slots, starts)
        assert got.dtype == y.dtype and got.shape == y.shape
        # Below the smallest normal number a dtype has no relative precision.
        error = (got.cpu().double() - want).abs() / scale.clamp(min=torch.finfo(y.dtype).smallest_normal)
        assert float(error.max()) <= TOLERANCE[y.dtype], float(error.max())
        per_row = y.shape[0] // len(slots)
        for row, slot in enumerate(slots):
            first = min(per_row, max(0, starts[row])) if starts is not None else 0
            start = 0
            for i, width in enumerate(self.widths):
                idle = per_row if slot < 0 or not self.touched(slot, i) else first
                span = slice(row * per_row, row * per_row + idle)
                assert same_bits(got[span, start : start + width], y[span, start : start + width])
                start += width


def same_bits(a: Tensor, b: Tensor) -> bool:
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(as_int).cpu(), b.contiguous().view(as_int).cpu())


def draw_starts(rows: int, tokens: int, seed: int = 0) -> list[int]:
    """A row's first active token: none, some or all of its tokens come before it, and far more than it has."""
    rng = random.Random(seed)
    return [rng.choice((0, rng.randrange(tokens + 1), tokens - 1, tokens, 2**31 - 1)) for _ in range(rows)]


def draw_slots(popularity: str, rows: int, slots: int, seed: int = 0) -> list[int]:
    """One slot per row, by popularity (names as in punica's tests)."""
    rng = random.Random(seed)
    if popularity == "distinct":
        return [i % slots for i in range(rows)]
    if popularity == "identical":
        return [slots - 1] * rows
    if popularity == "uniform":
        return [rng.randrange(slots) for _ in range(rows)]
    if popularity == "zipf":
        return rng.choices(range(slots), [1 / (i + 1) for i in range(slots)], k=rows)
    if popularity == "skewed":
        return [0 if i < rows - 1 else 1 % slots for i in range(rows)]
    return [rng.choice([-1, *range(slots)]) if i else -1 for i in range(rows)]
