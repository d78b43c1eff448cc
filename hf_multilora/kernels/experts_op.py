"""What wrapped blocks of experts call: an `ExpertsOp` for each block.

On CUDA the kernels of `experts` add in place to what the base layers returned, inside of torch.compile through a
custom op; elsewhere, and under autograd, `reference_experts` gives a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..adapters.targets import ExpertBlock
from ..errors import RoutingError
from . import custom, reference_experts
from .custom import HAS_TRITON, runs_triton
from .ops import ArenaOp, Workspace
from .reference_experts import Projection

if HAS_TRITON:
    from . import experts as kernels
    from . import launch


def projections_of(block: ExpertBlock, first: int) -> tuple[list[Projection], list[Projection], int]:
    """Those into the experts, those out of them, and the number of experts, for sites that begin at `first`."""
    sites = {name: first + place for place, name in enumerate(block.projections)}
    up = [(sites[name], start, step, block.intermediate) for name, (start, _, step) in block.rows_of(block.gate_up)]
    return up, [(sites["down_proj"], 0, 1, block.hidden)], block.experts


class Pairs:
    """Tokens and the experts that they were sent to, in the order of a block's products.

    Args:
        tokens, experts: int64 `[S]` each.
        count: tokens in all; the rows of the batch one after the other.
        row_slots, rows: as for `ops.LinearOp`.
    """

    __slots__ = ("buckets", "count", "experts", "row_slots", "rows", "tokens")

    def __init__(self, tokens: Tensor, experts: Tensor, count: int, row_slots: Tensor, rows: int) -> None:
        if rows and count % rows:
            raise RoutingError(f"{count} tokens do not divide into {rows} rows.")
        self.tokens, self.experts, self.count, self.row_slots, self.rows = tokens, experts, count, row_slots, rows
        self.buckets: Any = None


class ExpertsOp(ArenaOp):
    """The LoRA branch of a block of experts.

    Args:
        data, meta, floats, slot_elems, zero_off, max_rank, workspace: as for `LinearOp`.
        up, down: the projections into and out of the experts.
        experts: how many there are.
    """

    __slots__ = ("down", "experts", "up")

    def __init__(
        self,
        data: Tensor,
        meta: Tensor,
        floats: Tensor,
        slot_elems: int,
        zero_off: int,
        up: Sequence[Projection],
        down: Sequence[Projection],
        experts: int,
        max_rank: int,
        workspace: Workspace,
    ) -> None:
        self.up, self.down, self.experts = tuple(up), tuple(down), experts
        widths = [width for *_, width in (*up, *down)]
        super().__init__(data, meta, floats, slot_elems, zero_off, up[0][0], widths, max_rank, workspace)

    def __call__(self, y: Tensor, x: Tensor, pairs: Pairs, *, up: bool) -> Tensor:
        """`y [S, N]` with the deltas of x `[S, K]`, both in the order of the pairs; y itself on CUDA, where it can."""
        if y.shape[0] == 0 or pairs.rows == 0:
            return y
        if torch.compiler.is_dynamo_compiling():
            experts_(y, x, pairs.tokens, pairs.experts, pairs.row_slots, pairs.count, pairs.rows, self.key, up)
            return y
        return self.add(y, x, pairs, up)

    def add(self, y: Tensor, x: Tensor, pairs: Pairs, up: bool) -> Tensor:
        projections = self.up if up else self.down
        if runs_triton(y, self.data) and not y.requires_grad and y.is_contiguous():
            rows = launch.Rows(pairs.row_slots, None, pairs.rows)
            source = x if x.is_contiguous() else x.contiguous()
            with torch.cuda.device(y.device):
                pairs.buckets = kernels.launch_experts(
                    y, source, None, pairs.tokens, pairs.experts, self.arena, rows, pairs.count, projections,
                    self.experts, pairs.buckets,
                )  # fmt: skip
            return y
        slots = pairs.row_slots.view(-1)[: pairs.rows]
        arena = (self.data, self.meta, slots, pairs.rows, projections, self.slot_elems, self.zero_off, self.experts)
        return reference_experts.lora_experts(y, x, None, pairs.tokens, pairs.experts, pairs.count, *arena)


@torch.library.custom_op("hf_multilora::lora_experts_", mutates_args=("y",))
def experts_(
    y: Tensor, x: Tensor, tokens: Tensor, experts: Tensor, row_slots: Tensor, count: int, rows: int, key: int, up: bool
) -> None:
    """`ExpertsOp.add` in place, on any device."""
    out = custom.named(key).add(y, x, Pairs(tokens, experts, count, row_slots, rows), up)
    if out is not y:
        y.copy_(out)


@experts_.register_fake
def _(*args: Any) -> None:
    return None
