"""LoRA on blocks of experts that ranks split by their widths, fully sharded: shrink, a collective, expand.

    into the experts      h = gather(x · A_pᵀ)    y_p += h · Bt_p              A_p: every n-th row of each A
    out of the experts    h = sum(x_p · A_pᵀ)     y_p[:, span] += h · Bt_p     A_p: x_p's columns; Bt_p: the span's

as `sharded` has it for linear layers. All ranks see the same tokens and send them to the same experts, so pairs are
the same ones in the same order, and h has a row for each pair: slots, which may differ, decide nothing about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference_experts
from .custom import HAS_TRITON, runs_triton
from .experts_op import ExpertsOp, Pairs, Projection
from .reference import compute_dtype

if HAS_TRITON:
    from . import experts as kernels
    from . import launch


class ShardedExpertsOp(ExpertsOp):
    """The arguments that `ExpertsOp` has not:

    Args:
        sites: of a table of the arena; a table of what a rank holds of A follows it (`memory.layout`).
        ranks: that share the block.
        span: (start, stop) of this rank's columns of what comes out of the experts.
    """

    __slots__ = ("ranks", "sites")

    def __init__(self, *args: Any, sites: int, ranks: Any, span: tuple[int, int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sites, self.ranks = sites, ranks
        self.down = tuple((site, span[0], 1, span[1] - span[0]) for site, *_ in self.down)

    def add(self, y: Tensor, x: Tensor, pairs: Pairs, up: bool) -> Tensor:
        """All ranks call it, or none."""
        if runs_triton(y, self.data) and not y.requires_grad and y.is_contiguous():
            with torch.cuda.device(y.device):
                self._launch(y, x.contiguous(), pairs, up)
            return y
        projections, sites, held = self._half(up)
        slots = pairs.row_slots.view(-1)[: pairs.rows]
        found = reference_experts.entries(pairs.tokens, pairs.experts, pairs.count, slots, pairs.rows, self.experts)
        arena = (self.data, self.meta, self.slot_elems, self.zero_off)
        h = reference_experts.shrink(x, None, len(y), compute_dtype(y), found, sites, held, *arena)
        return reference_experts.expand(y, self._together(h, up), found, projections, *arena)

    def _half(self, up: bool) -> tuple[Sequence[Projection], list[int], int]:
        """Projections, the sites by which A is found, and how many of its rows a rank may hold."""
        if up:
            return self.up, [site + self.sites for site, *_ in self.up], -(-self.max_rank // self.ranks.size)
        return self.down, [site for site, *_ in self.down], self.max_rank

    def _launch(self, y: Tensor, x: Tensor, pairs: Pairs, up: bool) -> None:
        """The kernels, in place on y."""
        projections, sites, held = self._half(up)
        rows, arena = launch.Rows(pairs.row_slots, None, pairs.rows), self.arena._replace(max_rank=held)
        call = (pairs.tokens, pairs.experts, arena, rows, pairs.count)
        pairs.buckets = kernels.buckets_of(*call, self.experts, pairs.buckets)
        planes, shrink = kernels.prepare_shrink(x, None, *call, sites, self.experts, pairs.buckets)
        kernels.run(shrink)
        h = self._together(planes[0] if len(planes) == 1 else planes.sum(0), up)
        kernels.run(kernels.prepare_expand(y, h[None], *call, projections, self.experts, pairs.buckets))

    def _together(self, h: Tensor, up: bool) -> Tensor:
        """Every rank's h `[S, projections, columns]`, one behind the other by columns or added up."""
        flat = h.flatten(0, 1)
        return (self.ranks.gather(flat) if up else self.ranks.total(flat)).view(*h.shape[:2], -1)
