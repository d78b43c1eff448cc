"""The LoRA branch of layers that ranks of a tensor-parallel model share, fully sharded: shrink, a collective, expand.

    outputs split   h = gather(x · A_pᵀ)    y_p += h · Bt_p              A_p: every n-th row of A; Bt_p: y_p's columns
    inputs split    h = sum(x_p · A_pᵀ)     y_p[:, span] += h · Bt_p     A_p: x_p's columns; Bt_p: the span's columns

What is exchanged is fp32, of a shape that follows from the call's shape and the arena's largest rank alone: all ranks
exchange alike, whatever adapters the rows have, and a row's bits do not depend on its neighbours. Where inputs are
split, y_p is a part of a sum that is made later: gains are factors of all its columns, and deltas go into the span,
which is another one on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RoutingError
from . import sharded_reference
from .custom import HAS_TRITON, TRITON_DTYPES, named, slices_of, unit_stride
from .ops import LinearOp
from .reference import Runs, compute_dtype

if HAS_TRITON:
    from . import launch, launch_halves


class Ranks:
    """Processes that share a layer. What passes between them has no gradient.

    Args:
        group: of the processes.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.size = dist.get_world_size(group)

    def gather(self, h: Tensor) -> Tensor:
        """`[m, c]` of every rank as `[m, c * size]`: column `j * size + p` is column j of rank p."""
        m, c = h.shape
        found = h.new_empty(self.size * m, c)
        dist.all_gather_into_tensor(found, h.detach().contiguous(), group=self._group)
        return found.view(self.size, m, c).permute(1, 2, 0).reshape(m, c * self.size)

    def total(self, h: Tensor) -> Tensor:
        """The sum over ranks of `[m, c]`; it may be written in place."""
        h = h.detach().contiguous()
        dist.all_reduce(h, group=self._group)
        return h


class ShardedOp(LinearOp):
    """What both kinds share; the arguments that `LinearOp` has not:

    Args:
        sites: of a table of the arena; tables of other sites follow it (`memory.layout`).
        ranks: that share the layers.
        vectors: whether any adapter has gains or shifts.
    """

    __slots__ = ("ranks", "sites", "vectors")

    def __init__(self, *args: Any, sites: int, ranks: Any, vectors: Callable[[], bool], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sites, self.ranks, self.vectors = sites, ranks, vectors

    def begin(self, x: Tensor, row_slots: Tensor, rows: int, row_starts: Tensor | None = None) -> None:
        """Nothing runs beside the base layers, whose ranks communicate as well."""
        return None

    def end(
        self,
        ys: tuple[Tensor, ...],
        x: Tensor,
        h: Tensor | None,
        row_slots: Tensor,
        rows: int,
        cache: dict[Any, Any] | None = None,
        row_starts: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        if torch.compiler.is_dynamo_compiling() and not any(y.requires_grad for y in ys):
            sharded_(ys, x, row_slots, self.key, rows, row_starts)
            return ys
        return self.add(ys, x, row_slots, rows, cache, row_starts)

    def add(
        self,
        ys: Sequence[Tensor],
        x: Tensor,
        row_slots: Tensor,
        rows: int,
        cache: dict[Any, Any] | None,
        row_starts: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """As `LinearOp.__call__`, uncompiled. All ranks call it, or none."""
        n = x.numel() // self.in_features
        if n == 0 or rows == 0:
            return tuple(ys)
        if n % rows:
            raise RoutingError(f"{n} tokens do not divide into {rows} rows.")
        source, targets = x.reshape(n, -1), [y.reshape(n, -1) for y in ys]
        plain = not any(y.requires_grad or y.dtype not in TRITON_DTYPES for y in ys)
        if self._triton and plain and x.dtype in TRITON_DTYPES:
            targets = [unit_stride(target) for target in targets]
            with torch.cuda.device(self._device):
                self._launch_halves(targets, unit_stride(source), launch.Rows(row_slots, row_starts, rows))
            pairs = zip(ys, targets, strict=True)
            return tuple(y if out.data_ptr() == y.data_ptr() else out.view(y.shape) for y, out in pairs)
        slots = row_slots.view(-1)[:rows]
        runs: Runs | None = cache.get(Runs.KEY) if cache is not None else None
        if runs is None:
            found = self._computed(targets, source, slots, rows, cache, row_starts)
        else:
            parts = [target[runs.index] for target in targets]
            found = self._computed(parts, source[runs.index], runs.slots, runs.rows, runs.cache, None)
            found = [part[runs.back] for part in found]
        return tuple(out.view(y.shape) for y, out in zip(ys, found, strict=True))

    def _shrunk(
        self, x: Tensor, dtype: torch.dtype, slots: Tensor, rows: int, cache: Any, site: int, rank: int
    ) -> Any:
        """`[n * slices, rank]`."""
        where = (self.data, self.meta, self.floats, slots, rows, site, len(self.widths), rank)
        return sharded_reference.shrink(x, dtype, *where, self.slot_elems, self.zero_off, cache).flatten(0, 1)

    def _expanded(
        self, y: Tensor, h: Tensor | None, slots: Tensor, rows: int, cache: Any, starts: Any, site: int, widths: Any
    ) -> Tensor:
        where = (self.data, self.meta, self.floats, slots, rows, site, widths, self.slot_elems, self.zero_off)
        return sharded_reference.expand(y, h, *where, cache, starts)

    def _computed(
        self, ys: Sequence[Tensor], x: Tensor, slots: Tensor, rows: int, cache: Any, starts: Tensor | None
    ) -> list[Tensor]:
        """The plain torch path, which writes nothing in place; ys `[n, N_i]`."""
        raise NotImplementedError

    def _launch_halves(self, ys: Sequence[Tensor], x: Tensor, row_map: Any) -> None:
        """The kernels, in place on ys."""
        raise NotImplementedError


class OutputsOp(ShardedOp):
    """Of layers whose outputs are split, which read the same x; `widths` are this rank's."""

    __slots__ = ()

    def over(self, widths: Sequence[int], outputs: Sequence[int]) -> OutputsOp:
        arena = (self.data, self.meta, self.floats, self.slot_elems, self.zero_off, self.site)
        more = {"sites": self.sites, "ranks": self.ranks, "vectors": self.vectors}
        return OutputsOp(*arena, self.in_features, widths, self.max_rank, self.workspace, outputs, **more)

    @property
    def held(self) -> int:
        """Rows of A that a slot may have on each rank."""
        return -(-self.max_rank // self.ranks.size)

    def _computed(
        self, ys: Sequence[Tensor], x: Tensor, slots: Tensor, rows: int, cache: Any, starts: Tensor | None
    ) -> list[Tensor]:
        h = self._shrunk(x, compute_dtype(ys[0]), slots, rows, cache, self.sites + self.site, self.held)
        h = self.ranks.gather(h).view(len(x), len(self.widths), -1)
        found, first = [], 0
        for y, (site, widths) in zip(ys, self.layers, strict=True):
            own = h[:, first : first + len(widths)]
            found.append(self._expanded(y, own, slots, rows, cache, starts, site, widths))
            first += len(widths)
        return found

    def _launch_halves(self, ys: Sequence[Tensor], x: Tensor, row_map: Any) -> None:
        halves = launch_halves.Halves(self, x, ys[0].dtype, row_map)
        h = self.ranks.gather(halves.shrink(self.sites + self.site, len(self.widths), self.held))
        halves.expand(slices_of(list(ys), self.widths), h, self.site, self.held * self.ranks.size)


class InputsOp(ShardedOp):
    """Of one layer whose inputs are split.

    Args:
        widths: of the slices of its whole output.
        spans: (start, stop) of this rank's columns in each of them.
    """

    __slots__ = ("_spans",)

    def __init__(self, *args: Any, spans: Sequence[tuple[int, int]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        firsts = [sum(self.widths[:i]) for i in range(len(self.widths))]
        self._spans = tuple((first + start, first + stop) for first, (start, stop) in zip(firsts, spans, strict=True))

    def _views(self, y: Tensor) -> list[Tensor]:
        return [y[:, start:stop] for start, stop in self._spans]

    def _computed(
        self, ys: Sequence[Tensor], x: Tensor, slots: Tensor, rows: int, cache: Any, starts: Tensor | None
    ) -> list[Tensor]:
        h = self._shrunk(x, compute_dtype(ys[0]), slots, rows, cache, self.site, self.max_rank)
        h = self.ranks.total(h).view(len(x), len(self.widths), -1)
        (y,) = ys
        if self.vectors():
            y = self._expanded(y, None, slots, rows, cache, starts, 2 * self.sites + self.site, self.widths)
        pieces, end = [], 0
        for i, (view, span) in enumerate(zip(self._views(y), self._spans, strict=True)):
            site, own = self.sites + self.site + i, h[:, i : i + 1]
            new = self._expanded(view.contiguous(), own, slots, rows, cache, starts, site, (view.shape[1],))
            pieces += [y[:, end : span[0]], new]
            end = span[1]
        return [torch.cat([*pieces, y[:, end:]], 1)]

    def _launch_halves(self, ys: Sequence[Tensor], x: Tensor, row_map: Any) -> None:
        halves = launch_halves.Halves(self, x, ys[0].dtype, row_map)
        h = self.ranks.total(halves.shrink(self.site, len(self.widths), self.max_rank))
        if self.vectors():
            halves.expand(slices_of(list(ys), self.widths), h, 2 * self.sites + self.site, self.max_rank)
        halves.expand(self._views(ys[0]), h, self.sites + self.site, self.max_rank)


@torch.library.custom_op("hf_multilora::lora_sharded_", mutates_args=("ys",))
def sharded_(
    ys: Sequence[Tensor], x: Tensor, row_slots: Tensor, key: int, rows: int, row_starts: Tensor | None = None
) -> None:
    """`ShardedOp.add` in place on each y `[..., N_i]`, on any device, with its collective."""
    found = named(key).add(ys, x, row_slots, rows, None, row_starts)
    for y, out in zip(ys, found, strict=True):
        if out.data_ptr() != y.data_ptr():
            y.copy_(out)


@sharded_.register_fake
def _(*args: Any) -> None:
    return None
