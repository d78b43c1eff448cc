"""Requests for adapters by popularity, and the batches that are formed from those that wait."""

from __future__ import annotations

import itertools
import random
from collections import deque

ROWS = 32
DISTINCT = 8
WAITING = 2000


class Traffic:
    """A queue that always holds `waiting` requests, each for one of `adapters` by Zipf's law of exponent 1.0.

    A batch has at most `rows` rows, and names at most `distinct` adapters: those of the oldest requests first, as many
    of these as leave places enough for the adapters that most requests wait for to fill the rows; each has one row,
    and further rows go by age. After each batch as many requests arrive as left. The rule knows nothing of slots.
    """

    def __init__(
        self, adapters: int, seed: int, *, rows: int = ROWS, distinct: int = DISTINCT, waiting: int = WAITING
    ) -> None:
        self.adapters, self.rows, self.distinct = adapters, rows, distinct
        self._random = random.Random(seed)
        self._weights = list(itertools.accumulate(1 / rank for rank in range(1, adapters + 1)))
        self._arrivals = itertools.count()
        self._waiting: dict[int, deque[int]] = {}  # adapter -> arrival numbers
        self._arrive(waiting)

    def _arrive(self, count: int) -> None:
        for adapter in self._random.choices(range(self.adapters), cum_weights=self._weights, k=count):
            self._waiting.setdefault(adapter, deque()).append(next(self._arrivals))

    def batch(self) -> list[int]:
        """The adapters of the next batch's rows, as numbers below `adapters` (0 is the most popular)."""
        named = self._choose()
        taken = [self._waiting[adapter].popleft() for adapter in named]
        rows = list(zip(taken, named, strict=True))
        more = sorted((arrival, adapter) for adapter in named for arrival in self._waiting[adapter])
        for arrival, adapter in more[: self.rows - len(rows)]:
            assert self._waiting[adapter].popleft() == arrival
            rows.append((arrival, adapter))
        for adapter in named:
            if not self._waiting[adapter]:
                del self._waiting[adapter]
        self._arrive(len(rows))
        return [adapter for _, adapter in sorted(rows)]

    def _choose(self) -> list[int]:
        places = min(self.distinct, self.rows)
        count = {adapter: len(arrivals) for adapter, arrivals in self._waiting.items()}
        oldest = sorted(count, key=lambda adapter: self._waiting[adapter][0])
        popular = sorted(count, key=lambda adapter: (-count[adapter], self._waiting[adapter][0]))
        for kept in range(places, 0, -1):
            named = oldest[:kept]
            named += itertools.islice((a for a in popular if a not in named), places - kept)
            if sum(count[adapter] for adapter in named) >= self.rows:
                break
        return named
