"""Factors of experts as stacks [E, ...], read from the matrices that a checkpoint spreads them over.

Two layouts: `Stack`, where one matrix holds all experts, and `Gathered`, where each expert has a matrix of its own.
Both are read when asked for and equal where they mean the same numbers, and both can tell whether all experts have the
same factor, which is then handed over once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .checkpoint import TensorRef
from .stored import Stored

_ROWS = 256  # rows compared at once
_ALL = (0, 0, 1)


@dataclass(frozen=True)
class Stack:
    """The factors of all experts out of one matrix.

    PEFT's lora_A is [E * rank, width], one expert after the other; its lora_B is [width, rank * E], in which the
    expert is the faster index (ParamWrapper in its tuners/lora/layer.py).

    Args:
        ref: the matrix, whole.
        experts: factors that it holds; 1 where it stores one for all.
        on_rows: experts and ranks are its rows; False: its columns.
        expert_first: in columns, the expert is the slower index.
        widths: (start, stop, step) of the other dimension; stop 0: all of it.
        ranks: (start, stop) of each expert's ranks; stop 0: all.
        rank_last: give [E, width, rank] rather than [E, rank, width].
        one: give the first expert's alone, for all have the same.
        held: numbers of the experts that are taken, where the matrix has a factor for each; None: all.
    """

    ref: TensorRef
    experts: int
    on_rows: bool
    expert_first: bool = False
    widths: tuple[int, int, int] = _ALL
    ranks: tuple[int, int] = (0, 0)
    rank_last: bool = False
    one: bool = False
    held: range | None = None

    @property
    def rank(self) -> int:
        """Ranks of each expert in the matrix."""
        return self.ref.shape[0 if self.on_rows else 1] // self.experts

    @property
    def places(self) -> range:
        """The rows or columns of the matrix that are taken."""
        start, stop, step = self.widths
        return range(start, stop or self.ref.shape[1 if self.on_rows else 0], step)

    @property
    def numbers(self) -> range:
        """The experts that are taken."""
        taken = range(self.experts) if self.held is None or self.experts == 1 else self.held
        return taken[:1] if self.one else taken

    @property
    def shape(self) -> tuple[int, ...]:
        rank, width = (self.ranks[1] - self.ranks[0]) or self.rank, len(self.places)
        return (len(self.numbers), *((width, rank) if self.rank_last else (rank, width)))

    @property
    def dtype(self) -> torch.dtype:
        return self.ref.dtype

    def stored(self) -> Stored | None:
        """The same as bytes, where they lie one after the other."""
        if not self.on_rows or self.rank_last or self.ranks[1] or self.widths != _ALL:
            return None
        found = self._taken().stored()
        return None if found is None else replace(found, shape=self.shape)

    def read(self) -> torch.Tensor:
        """The stack, in the dtype of the file; it may be a view: do not write to it."""
        ranks = slice(*self.ranks) if self.ranks[1] else slice(None)
        if self.on_rows:
            matrix = self._taken().read()
            stack = matrix.reshape(self.shape[0], self.rank, matrix.shape[1])
            stack = stack[:, ranks, slice(self.places.start, self.places.stop, self.places.step)]
            return stack.transpose(1, 2) if self.rank_last else stack
        rows = self._rows(self.places.start, self.places.stop)[:: self.places.step]
        stack = self._by_expert(rows)[:, :, ranks]
        return stack if self.rank_last else stack.transpose(1, 2)

    def same_for_all(self) -> bool:
        """Whether all experts have the same factor; reads no further than the first difference."""
        if len(self.numbers) == 1:
            return True
        if self.on_rows:
            first, *others = (self._of_expert(i) for i in self.numbers)
            factor = first.read()
            return all(torch.equal(factor, other.read()) for other in others)
        return all(bool((stack == stack[:1]).all()) for stack in self._pieces())

    def zero_at(self, start: int, stop: int) -> bool:
        """Whether the ranks [start, stop) of every expert are zeros, in a matrix with experts in its columns."""
        return not any(bool(stack[:, :, start:stop].any()) for stack in self._pieces())

    def _taken(self) -> TensorRef:
        """The rows of the experts that are taken."""
        numbers = self.numbers
        return (
            self.ref
            if len(numbers) == self.experts
            else self._ref(numbers[0] * self.rank, (numbers[-1] + 1) * self.rank)
        )

    def _of_expert(self, i: int) -> TensorRef:
        return self._ref(i * self.rank, (i + 1) * self.rank)

    def _ref(self, start: int, stop: int) -> TensorRef:
        return TensorRef(self.ref.checkpoint, self.ref.key, (start, stop))

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        return self._ref(start, stop).read()

    def _by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a matrix with experts in its columns, as [E, rows, rank]."""
        numbers = slice(self.numbers.start, self.numbers.stop)
        if self.expert_first:
            return rows.reshape(len(rows), self.experts, self.rank).permute(1, 0, 2)[numbers]
        return rows.reshape(len(rows), self.rank, self.experts).permute(2, 0, 1)[numbers]

    def _pieces(self) -> Iterator[torch.Tensor]:
        """The places of a matrix with experts in its columns, [E, rows, rank]: one row at first, then many at once."""
        start, stop, step = self.places.start, self.places.stop, self.places.step
        for begin in (start, *range(start + step, stop, _ROWS * step)):
            end = begin + 1 if begin == start else min(stop, begin + _ROWS * step)
            yield self._by_expert(self._rows(begin, end)[::step])


@dataclass(frozen=True)
class Gathered:
    """The factors of all experts, each out of a matrix of its own: A [rank, width], B [width, rank].

    Ranks below the largest are filled up with zeros, and so is an expert without factors.

    Args:
        refs: by expert; None: no factors.
        rank: the largest.
        width: of the other dimension.
        rank_last: B.
        scales: what each is multiplied by; empty: nothing.
        widths: (start, stop, step) of the rows of each B, or the columns of each A, that are taken; stop 0: all.
        one: give the first expert's alone, for all that there are have the same.
    """

    refs: tuple[TensorRef | None, ...]
    rank: int
    width: int
    rank_last: bool
    scales: tuple[float, ...] = ()
    widths: tuple[int, int, int] = _ALL
    one: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        own = (self.width, self.rank) if self.rank_last else (self.rank, self.width)
        return (1 if self.one else len(self.refs), *own)

    @property
    def dtype(self) -> torch.dtype:
        found = {ref.dtype for ref in self.refs if ref is not None}
        return found.pop() if len(found) == 1 and not self.scales else torch.float32

    def read(self) -> torch.Tensor:
        """The stack; a new tensor on the CPU."""
        stack = torch.zeros(self.shape, dtype=self.dtype)
        if self.one:
            matrix = self._matrix(next(ref for ref in self.refs if ref is not None))
            stack[0, : matrix.shape[0], : matrix.shape[1]] = matrix
            return stack
        for i, ref in enumerate(self.refs):
            if ref is None:
                continue
            matrix = self._matrix(ref).to("cpu", self.dtype)
            if self.scales and self.scales[i] != 1:
                matrix = matrix * self.scales[i]
            stack[i, : matrix.shape[0], : matrix.shape[1]] = matrix
        return stack

    def same_for_all(self) -> bool:
        """Whether all experts that have factors have the same; reads no further than the first difference."""
        refs = [ref for ref in self.refs if ref is not None]
        if self.scales or len({(ref.shape, ref.dtype) for ref in refs}) != 1:
            return False
        first = self._matrix(refs[0])
        return all(torch.equal(first, self._matrix(ref)) for ref in refs[1:])

    def _matrix(self, ref: TensorRef) -> torch.Tensor:
        start, stop, step = self.widths
        if not stop:
            return ref.read()
        if self.rank_last:
            return TensorRef(ref.checkpoint, ref.key, (start, stop)).read()[::step]
        return ref.read()[:, start:stop:step]


@dataclass(frozen=True)
class Held:
    """What a rank takes of a stack that is stored as such, [E, ...]: experts, and a stretch of one other dimension.

    Args:
        ref: the experts that are taken.
        dim: the dimension that is cut.
        widths: (start, stop) of it.
    """

    ref: TensorRef
    dim: int
    widths: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.ref.shape)
        shape[self.dim] = self.widths[1] - self.widths[0]
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.ref.dtype

    def read(self) -> torch.Tensor:
        """The stack; a view: do not write to it."""
        return self.ref.read().narrow(self.dim, self.widths[0], self.shape[self.dim])


def shared(a: Stack | Gathered, b: Stack | Gathered) -> tuple[Stack | Gathered, Stack | Gathered]:
    """The same pair, with a factor that all experts have in common handed over once.

    An expert without factors has zeros in both, so that one of them is enough to keep it out.
    """
    everyone = isinstance(a, Stack) or None not in a.refs
    if a.same_for_all():
        a = replace(a, one=True)
    if (everyone or not a.one) and b.same_for_all():
        b = replace(b, one=True)
    return a, b
