"""A search over block sizes for this device; its result is a table of data that the kernels read.

Every problem (a kernel and the shape of a call) has a space of candidates, the untuned choice first. Compiling takes
longer than timing, and the number of rows makes no other kernel: problems that differ in nothing else are a family,
and take one candidate each in turn. Families come one after another, those of the largest models first, so that a
search that is stopped has finished some. The best few of a problem are timed again at its end: a single lucky timing
does not win. The table is written whenever a round ends.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..kernels.table import FORMAT
from .results import environment

FINALISTS = 3
FINAL_TIMINGS = 5
MARGIN = 0.98  # a tiling replaces the untuned one only where it takes less than this part of its time
REPLAYS = 9
MOST_LAYERS = 512  # of a timing: enough for one layer's adapter of rank 16 to be out of the L2 when its turn comes

# (hidden, columns of q, of k and v, of the MLP), the largest first.
MODELS = {
    "Llama 8B": (4096, 4096, 1024, 14336),
    "Qwen3 8B": (4096, 4096, 1024, 12288),
    "Qwen3 1.7B": (2048, 2048, 1024, 6144),
    "Qwen3 0.6B": (1024, 2048, 1024, 3072),
}
RANKS = (16, 64)
# (tokens, rows, adapters) by kernels: decode with an adapter for each row, and with few adapters; prefill.
CALLS = {
    "rows": ((32, 32, 32), (8, 8, 8), (1, 1, 1), (128, 128, 128)),
    "segments": ((32, 32, 8), (128, 128, 8)),
    "tiles": ((4096, 16, 16),),
}

Timer = Callable[["Problem", Any], float]
Space = Callable[["Problem"], Iterable[Any]]


@dataclass(frozen=True)
class Problem:
    """What is tuned for: the name of a kernel, and the shape of a call as `search_space` takes it."""

    kind: str
    shape: Mapping[str, Any]

    @property
    def family(self) -> tuple[Any, ...]:
        """What problems have in common that share compiled kernels."""
        rest = sorted((key, value) for key, value in self.shape.items() if key not in ("n", "rows", "adapters"))
        return self.kind.split("_")[-1], *rest

    def __str__(self) -> str:
        return f"{self.kind} {', '.join(f'{key}={value}' for key, value in self.shape.items())}"


@dataclass
class Search:
    """The state of one problem: what has been tried, what is left."""

    problem: Problem
    left: Iterator[Any]
    tried: list[tuple[float, Any]] = field(default_factory=list)
    failed: int = 0

    def advance(self, timer: Timer) -> bool:
        """Time the next candidate; False where none is left. One that does not compile, or fit, counts as failed."""
        for candidate in self.left:
            try:
                self.tried.append((timer(self.problem, candidate), candidate))
            except (RuntimeError, ValueError) as error:  # Triton's OutOfResources and CompilationError among them
                if not self.tried:
                    raise ConfigError(f"{self.problem}: the untuned tiling cannot be timed: {error}") from error
                self.failed += 1
                continue
            return True
        return False

    def decide(self, timer: Timer) -> dict[str, Any]:
        """The best tiling, after more timings of the untuned one and the best few: a row of the table."""
        default = self.tried[0][1]
        best = [candidate for _, candidate in sorted(self.tried[1:], key=lambda item: item[0])[:FINALISTS]]
        finals = [default, *best]
        times: list[list[float]] = [[] for _ in finals]
        for _ in range(FINAL_TIMINGS):
            for number, candidate in enumerate(finals):
                times[number].append(timer(self.problem, candidate))
        medians = [statistics.median(values) for values in times]
        winner = min(range(len(finals)), key=medians.__getitem__)
        if medians[winner] >= MARGIN * medians[0]:
            winner = 0
        return self.row(finals[winner], medians[winner], medians[0])

    def row(self, tiling: Any, time_us: float, default_us: float) -> dict[str, Any]:
        as_data = dataclasses.asdict(tiling) if dataclasses.is_dataclass(tiling) else tiling  # type: ignore[arg-type]
        return {
            "kind": self.problem.kind,
            "shape": dict(self.problem.shape),
            "tiling": as_data,
            "us": time_us,
            "untuned_us": default_us,
            "tried": len(self.tried),
            "failed": self.failed,
        }

    def so_far(self) -> dict[str, Any]:
        """The row as it stands, without further timings."""
        time_us, tiling = min(self.tried, key=lambda item: item[0])
        return self.row(tiling, time_us, self.tried[0][0])


def tune(
    seconds: float,
    out: str | Path,
    *,
    problems: Sequence[Problem] | None = None,
    space: Space | None = None,
    timer: Timer | None = None,
    device: str = "cuda",
    say: Callable[[str], Any] = print,
) -> dict[str, Any]:
    """Search for at most about `seconds`, and write the table to `out`.

    Args:
        seconds: no new candidate is tried after so many; the final timings of the family at hand come on top. Problems
            that were not reached are left out, and stay untuned.
        out: a JSON file: {"format", "device", versions, "rows": [{"kind", "shape", "tiling", "us", "untuned_us"}]}.
        problems: what to tune for; None: the layers of common models at common batch sizes.
        space: the candidates of a problem, the untuned one first; None: `kernels.tuning.search_space`.
        timer: microseconds of a problem with a candidate; None: a CUDA graph of the kernels (`kernel_timer`).

    Raises:
        ConfigError: no CUDA device; a problem without candidates; an untuned tiling that cannot be timed.
    """
    if timer is None and not torch.cuda.is_available():
        raise ConfigError("`bench tune` times Triton's kernels: it needs a CUDA device.")
    timer, space = timer or kernel_timer(), space or candidates
    path, about = Path(out), environment(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline, reached = time.monotonic() + seconds, 0
    rows: list[dict[str, Any]] = []
    wanted = common_problems() if problems is None else problems
    for _, family in itertools.groupby(wanted, key=lambda problem: problem.family):
        if rows and time.monotonic() >= deadline:
            break
        searches = [Search(problem, iter(space(problem))) for problem in family]
        reached += len(searches)
        active = list(searches)
        while active and (time.monotonic() < deadline or not all(search.tried for search in searches)):
            for search in list(active):
                if search.tried and time.monotonic() >= deadline:
                    break
                if not search.advance(timer):
                    active.remove(search)
                    if not search.tried:
                        raise ConfigError(f"{search.problem}: there is no tiling to try.")
            _write(path, about, rows + [search.so_far() for search in searches if search.tried])
        for search in searches:
            rows.append(search.decide(timer))
            row = rows[-1]
            say(f"{search.problem}: {row['us']:.2f} us, untuned {row['untuned_us']:.2f}, {row['tried']} tried")
    if reached < len(wanted):
        say(f"{len(wanted) - reached} of {len(wanted)} shapes were not reached, and stay untuned: more --seconds.")
    return _write(path, about, rows)


def gain(table: Mapping[str, Any]) -> float:
    """Geometric mean of tuned over untuned times of a table."""
    return math.exp(statistics.mean(math.log(row["us"] / row["untuned_us"]) for row in table["rows"]))


def _write(path: Path, about: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    table = {
        "format": FORMAT,
        **{key: about[key] for key in ("device", "driver", "torch", "triton")},
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "rows": rows,
    }
    fresh = path.with_suffix(f"{path.suffix}.new")
    fresh.write_text(json.dumps(table, indent=1), encoding="utf-8")
    os.replace(fresh, path)  # whoever reads it meanwhile sees the old one or the new one
    return table


def candidates(problem: Problem) -> Iterable[Any]:
    """The space that the kernels declare for this problem."""
    from ..kernels.tuning import search_space

    return search_space(problem.kind, **problem.shape)


def common_problems() -> list[Problem]:
    """The groups of layers of common models, at common batch sizes and ranks; families together.

    A table's shrink serves every group with its k: where groups share one, none is tuned at the cost of others.
    """
    found: dict[Any, Problem] = {}
    models = [
        ((hidden, (query, keys, keys)), (query, (hidden,)), (hidden, (wide, wide)), (wide, (hidden,)))
        for hidden, query, keys, wide in MODELS.values()
    ]
    groups_with = Counter(k for k, _ in set(itertools.chain(*models)))
    for groups, rank, kind in itertools.product(models, RANKS, CALLS):
        for k, widths in groups:
            for (n, rows, adapters), op in itertools.product(CALLS[kind], ("shrink", "expand")):
                if op == "shrink" and groups_with[k] > 1:
                    continue
                shape = {"n": n, "rows": rows, "adapters": adapters, "k": k, "widths": widths, "max_rank": rank}
                problem = Problem(f"{op}_{kind}", {**shape, "dtype": "bfloat16"})
                found.setdefault((problem.kind, *problem.shape.values()), problem)
    return list(found.values())


def kernel_timer(device: str = "cuda") -> Timer:
    """Microseconds of one call, shrink and expand: a graph of back-to-back calls on cold weights, replayed."""
    from ..kernels.table import tried
    from .kernels import Graph, Layers, Point

    @functools.lru_cache(maxsize=max(map(len, CALLS.values())))  # a family's
    def layers_of(n: int, rows: int, adapters: int, k: int, widths: tuple[int, ...], rank: int, dtype: str) -> Layers:
        point = Point(rows, adapters, rank, n // rows)
        return Layers([(k, widths)], point, device, getattr(torch, dtype), most=MOST_LAYERS, base=False)

    def time_us(problem: Problem, candidate: Any) -> float:
        shape = problem.shape
        sizes = (shape["n"], shape["rows"], shape["adapters"], shape["k"], tuple(shape["widths"]), shape["max_rank"])
        layers = layers_of(*sizes, shape["dtype"])
        layers.forget()
        with tried(problem.kind, shape, candidate):
            graph = Graph(lambda: layers.run(False, "in place"))
        return statistics.median(graph.times(REPLAYS)) / layers.count

    return time_us
