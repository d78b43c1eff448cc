"""Shards: what of a layer's weight, or of a block of experts, one rank of a model holds. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Ranges = tuple[tuple[int, int], ...]  # (start, stop) one after the other, ascending


@dataclass(frozen=True)
class Shard:
    """What one rank computes of a layer; None: all of it.

    Args:
        rank: of this process among those that share the layer.
        rows: outputs that are this rank's alone.
        columns: inputs that this rank sees. What it computes is a part of a sum over all ranks.
    """

    rank: int
    rows: Ranges | None = None
    columns: Ranges | None = None


@dataclass(frozen=True)
class BlockShard:
    """What one rank holds of a block of experts, as (start, stop) among all of them.

    Args:
        experts: numbers of its experts.
        intermediate: of the intermediate width: outputs of gate and up, inputs of down.
        rank: of this process among those that share the block.
        outputs: of down, that this rank has B for; None: all of them.
    """

    experts: tuple[int, int]
    intermediate: tuple[int, int]
    rank: int = 0
    outputs: tuple[int, int] | None = None


def ranges_of(numbers: torch.Tensor) -> Ranges:
    """Ascending numbers as ranges.

    Example:
        >>> ranges_of(torch.tensor([0, 1, 2, 8, 9]))
        ((0, 3), (8, 10))
    """
    found: list[tuple[int, int]] = []
    for number in numbers.tolist():
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)


def length(ranges: Ranges) -> int:
    """How many numbers ranges hold."""
    return sum(stop - start for start, stop in ranges)


def within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """What of ranges lies in [start, stop), counted from there.

    Example:
        >>> within(((0, 4), (8, 12)), 2, 10)
        ((0, 2), (6, 8))
    """
    cut_off = ((max(first, start) - start, min(last, stop) - start) for first, last in ranges)
    return tuple((first, last) for first, last in cut_off if first < last)


def part_of(width: int, rank: int, ranks: int) -> tuple[int, int]:
    """(start, stop) of one rank's part of a width that no plan of the base splits.

    Example:
        >>> [part_of(7, rank, 2) for rank in range(2)]
        [(0, 3), (3, 7)]
    """
    return width * rank // ranks, width * (rank + 1) // ranks


def cut(tensor: torch.Tensor, ranges: Ranges | None, dim: int) -> torch.Tensor:
    """What of a tensor lies in ranges of one dimension; a view where that is one stretch."""
    if ranges is None:
        return tensor
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
