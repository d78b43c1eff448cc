"""Which part of a block of experts a rank holds, by the plan of transformers that has split it.

    tensor parallel      every rank has a part of the intermediate width of all experts: of the outputs of gate and up
                         (the same of both), and of the inputs of down
    expert parallel      every rank has some of the experts, whole

In both, all ranks see all tokens and transformers sums what they compute, behind the block's own forward. Deltas are
added inside of it: they are parts of that sum, and nothing more is communicated. Fully sharded, tensor-parallel ranks
split the other factors as well (`kernels.sharded_experts`).
"""

from __future__ import annotations

from torch import nn

from .adapters.dtensors import numbers_held
from .adapters.shards import BlockShard, part_of
from .adapters.targets import ExpertBlock
from .dispatch import refusal
from .parallel import place_of, seam_of, splits

_STYLES = ("MoeExpertsParallel", "EpDispatchExpertsParallel")
_TORN = "a rank does not hold the same part of its experts' gate, up and down, so that adapters cannot follow"


_NUMBERED = "fully_sharded_loras=True is not for experts of which ranks have some each: leave the option out"


def block_shard(module: nn.Module, block: ExpertBlock, fully_sharded: bool) -> BlockShard | None:
    """What this rank holds of a block of experts; None: all of it.

    Raises:
        ValueError: it is split in a way that adapters cannot follow; the message says how.
    """
    seam = seam_of(module)
    if seam is not None and seam.dispatch is not None and (reason := refusal(seam.dispatch)) is not None:
        raise ValueError(reason)
    if not splits(module):
        return None
    if seam is None or type(seam.style).__name__ not in _STYLES:
        style = "no style of transformers" if seam is None else type(seam.style).__name__
        raise ValueError(f"its experts are split over ranks by {style}, which adapters cannot follow")
    up, down = module._parameters[block.gate_up], module._parameters[block.down]
    experts = {_stretch(numbers_held(weight, 0).tolist()) for weight in (up, down)}
    into = numbers_held(up, 2 if block.transposed else 1).tolist()
    taken = {_stretch(numbers_held(down, 1 if block.transposed else 2).tolist())}
    for _, (start, stop, step) in block.rows_of(block.gate_up):
        rows = range(start, stop or block.intermediate, step)
        taken.add(_stretch([rows.index(number) for number in into if number in rows]))
    if len(experts) > 1 or len(taken) > 1:
        raise ValueError(_TORN)
    held, inner = experts.pop(), taken.pop()
    if fully_sharded and held != (0, block.experts):
        raise ValueError(_NUMBERED)
    rank, ranks = place_of(seam)
    return BlockShard(held, inner, rank, part_of(block.hidden, rank, ranks) if fully_sharded else None)


def _stretch(numbers: list[int]) -> tuple[int, int]:
    """(start, stop) of numbers that follow each other."""
    if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise ValueError(_TORN)
    return numbers[0], numbers[-1] + 1
