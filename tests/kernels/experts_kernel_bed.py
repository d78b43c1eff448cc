"""Adapters over the experts of one layer, packed as the arena packs them, batches of pairs, and an fp64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from kernel_bed import TOLERANCE, pad, same_bits
from torch import Tensor

from hf_multilora.kernels.reference import META
from hf_multilora.kernels.reference_experts import lora_experts


class Pairs(NamedTuple):
    """One batch: `top` experts for each token of each row, shuffled."""

    y: Tensor
    x: Tensor
    x_rows: Tensor | None
    tokens: Tensor
    experts: Tensor
    n_tokens: int

    def to(self, device: str) -> Pairs:
        return Pairs(*(part.to(device) if isinstance(part, Tensor) else part for part in self))


class ExpertsBed:
    """`ranks[slot][projection]` are true ranks, 0: not trained.

    `shared[slot]` names the factors that all experts of the slot share: "", "a", "b" or "ab" (of every projection).
    `same_a`: slots whose second projection has the A of the first (of the same rank).
    `interleaved`: column j of projection i is i + projections * j; else projections lie side by side.
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[int]],
        in_features: int,
        widths: Sequence[int],
        n_experts: int,
        dtype: torch.dtype = torch.float32,
        *,
        shared: Sequence[str] = (),
        interleaved: bool = False,
        same_a: Sequence[int] = (),
        site: int = 2,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.in_features, self.widths, self.n_experts, self.dtype = in_features, tuple(widths), n_experts, dtype
        self.max_rank = max(1, max(max(r) for r in ranks))
        count, starts = len(widths), [sum(widths[:i]) for i in range(len(widths))]
        self.projections = [
            (site + i, i if interleaved else starts[i], count if interleaved else 1, width)
            for i, width in enumerate(widths)
        ]
        step = 64 // dtype.itemsize
        n_sites = site + count + 1
        header = pad(8 * META * n_sites, 256) // dtype.itemsize
        per_slot = header + sum(pad(n_experts * self.max_rank * n, step) for w in widths for n in (in_features, w))
        self.slot_elems = pad(per_slot, 256 // dtype.itemsize)
        self.slots = len(ranks)
        self.zero_off = self.slots * self.slot_elems
        storage = torch.zeros(
            self.zero_off * dtype.itemsize + pad(8 * max(in_features, *widths), 256), dtype=torch.uint8
        )
        data = storage.view(dtype)
        # What no offset names must never be read: NaN everywhere but in the tail.
        data[: self.zero_off] = float("nan")
        words = self.slot_elems * dtype.itemsize // 8
        meta = storage[: self.zero_off * dtype.itemsize].view(torch.int64).view(self.slots, words)
        meta[:, : META * n_sites] = 0
        self.a: dict[tuple[int, int], Tensor] = {}
        self.b: dict[tuple[int, int], Tensor] = {}
        self.where: dict[int, list[slice]] = {slot: [] for slot in range(self.slots)}
        for slot in range(self.slots):
            at = header
            common = shared[slot] if slot < len(shared) else ""
            for i, width in enumerate(widths):
                rank = ranks[slot][i]
                if rank == 0:
                    continue
                entry = meta[slot, META * (site + i) : META * (site + i + 1)]
                entry[2] = rank
                for j, (name, n) in enumerate((("a", in_features), ("b", width))):
                    if j == 0 and i > 0 and slot in same_a:
                        entry[0::3] = meta[slot, META * site : META * site + META][0::3]
                        self.a[slot, i] = self.a[slot, 0]
                        continue
                    own = 1 if name in common else n_experts
                    factor = torch.randn(own, rank, n, generator=gen) / (in_features if name == "a" else rank) ** 0.5
                    factor = factor.to(dtype)
                    where = slice(slot * self.slot_elems + at, slot * self.slot_elems + at + factor.numel())
                    data[where] = factor.view(-1)
                    entry[j], entry[3 + j] = at, 0 if own == 1 else rank * n
                    (self.a, self.b)[j][slot, i] = factor.expand(n_experts, rank, n)
                    self.where[slot].append(where)
                    at += pad(factor.numel(), step)
        self.storage = storage.to(device)
        self.data, self.floats = self.storage.view(dtype), self.storage.view(torch.float32)
        self.meta = self.storage[: self.zero_off * dtype.itemsize].view(torch.int64).view(self.slots, words)

    def poison(self, slot: int) -> None:
        """Make every factor of `slot` NaN."""
        for where in self.where[slot]:
            self.data[where] = float("nan")

    def pairs(
        self,
        n_tokens: int,
        top: int,
        dtype: torch.dtype,
        *,
        gathered: bool = True,
        sentinel: bool = True,
        seed: int = 1,
    ) -> Pairs:
        """`top` experts for each token. gathered: x has a row for each token; sentinel: some experts are others'."""
        gen = torch.Generator().manual_seed(seed)
        count = n_tokens * top
        tokens = torch.arange(count)[torch.randperm(count, generator=gen)] // top
        experts = torch.randint(self.n_experts + (2 if sentinel else 0), (count,), generator=gen)
        x = torch.randn(n_tokens if gathered else count, self.in_features, generator=gen).to(dtype)
        y = torch.randn(count, sum(self.widths), generator=gen).to(dtype)
        return Pairs(y, x, tokens if gathered else None, tokens, experts, n_tokens)

    def reference(self, p: Pairs, slots: Sequence[int]) -> Tensor:
        row_slots = torch.tensor([*slots, 7, 7], dtype=torch.int32, device=p.y.device)  # capacity beyond the rows
        sizes = (self.projections, self.slot_elems, self.zero_off, self.n_experts)
        return lora_experts(*p, self.data, self.meta, row_slots, len(slots), *sizes)

    def factors(self, p: Pairs, slots: Sequence[int], pair: int, i: int) -> tuple[Tensor, Tensor] | None:
        slot, expert = slots[int(p.tokens[pair]) // (p.n_tokens // len(slots))], int(p.experts[pair])
        if (slot, i) not in self.a or not 0 <= expert < self.n_experts:
            return None
        return self.a[slot, i][expert].double(), self.b[slot, i][expert].double()

    def check(self, got: Tensor, p: Pairs, slots: Sequence[int]) -> None:
        """Against fp64 mathematics pair by pair, within the dtype's tolerance; what has no factors bit for bit."""
        assert got.dtype == p.y.dtype and got.shape == p.y.shape
        got, p = got.detach().cpu(), p.to("cpu")
        for pair in range(len(p.tokens)):
            x = p.x[pair if p.x_rows is None else int(p.x_rows[pair])].double()
            for i, (_, first, step, width) in enumerate(self.projections):
                columns = slice(first, first + step * (width - 1) + 1, step)
                y, mine = p.y[pair, columns], got[pair, columns]
                found = self.factors(p, slots, pair, i)
                if found is None:
                    assert same_bits(mine, y)
                    continue
                a, b = found
                want, scale = y.double() + (a @ x) @ b, y.double().abs() + (a.abs() @ x.abs()) @ b.abs()
                error = ((mine.double() - want).abs() / scale.clamp(min=torch.finfo(y.dtype).smallest_normal)).max()
                assert float(error) <= TOLERANCE[y.dtype], (pair, i, float(error))
