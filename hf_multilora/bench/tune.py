"""A search over block sizes for this device; its result is a table of data that the kernels read.

Every problem (a kind of kernel and the shape of a call) has a space of tilings, the untuned choice first. The search
takes one candidate of each problem in turn, so that it can be stopped at any time, and times the best few again at the
end: a single lucky timing does not win. The table is written whenever a round ends.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from .results import environment

FORMAT = 1
FINALISTS = 3
FINAL_TIMINGS = 5
MARGIN = 0.98  # a tiling replaces the untuned one only where it takes less than this part of its time

Timer = Callable[["Problem", Any], float]
Space = Callable[["Problem"], Iterable[Any]]


@dataclass(frozen=True)
class Problem:
    """What is tuned for: a kind of kernel, and the shape of a call as `search_space` takes it."""

    kind: str
    shape: Mapping[str, Any]

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
        seconds: no new candidate is tried after so many; the final timings come on top.
        out: a JSON file: {"format", "device", versions, "rows": [{"kind", "shape", "tiling", "us", "untuned_us"}]}.
        problems: what to tune for; None: the layers of common models at common batch sizes.
        space: the candidates of a problem, the untuned one first; None: `kernels.tuning.search_space`.
        timer: microseconds of a problem with a candidate; None: a CUDA graph of the kernel (`kernel_timer`).

    Raises:
        ConfigError: no CUDA device; a problem without candidates; an untuned tiling that cannot be timed.
    """
    if timer is None and not torch.cuda.is_available():
        raise ConfigError("`bench tune` times Triton's kernels: it needs a CUDA device.")
    timer, space = timer or kernel_timer(), space or candidates
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    searches = [Search(problem, iter(space(problem))) for problem in (problems or common_problems())]
    active = list(searches)
    while active and (time.monotonic() < deadline or not all(search.tried for search in searches)):
        for search in list(active):
            if search.tried and time.monotonic() >= deadline:
                break
            if not search.advance(timer):
                active.remove(search)
                if not search.tried:
                    raise ConfigError(f"{search.problem}: there is no tiling to try.")
        _write(path, device, [search.so_far() for search in searches if search.tried])
    rows = []
    for search in searches:
        rows.append(search.decide(timer))
        row = rows[-1]
        say(f"{search.problem}: {row['us']:.2f} us, untuned {row['untuned_us']:.2f}, {row['tried']} tried")
    return _write(path, device, rows)


def gain(table: Mapping[str, Any]) -> float:
    """Geometric mean of tuned over untuned times of a table."""
    return math.exp(statistics.mean(math.log(row["us"] / row["untuned_us"]) for row in table["rows"]))


def _write(path: Path, device: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    about = environment(device)
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
    from ..kernels import tuning

    search_space = getattr(tuning, "search_space", None)
    if search_space is None:
        raise ConfigError("This version's kernels declare no search space.")
    return search_space(problem.kind, **problem.shape)


def common_problems() -> list[Problem]:
    """The groups of layers of common models, at common batch sizes and ranks."""
    from ..kernels import tuning

    declared = getattr(tuning, "common_problems", None)
    if declared is None:
        raise ConfigError("This version's kernels declare no problems to tune for.")
    return [Problem(kind, shape) for kind, shape in declared()]


def kernel_timer() -> Timer:
    """Microseconds of one call: a graph of back-to-back calls on cold weights, replayed."""
    from ..kernels import tuning

    timer = getattr(tuning, "time_candidate", None)
    if timer is None:
        raise ConfigError("This version's kernels cannot be timed one by one.")

    def time_us(problem: Problem, candidate: Any) -> float:
        return float(timer(problem.kind, candidate, **problem.shape))

    return time_us
