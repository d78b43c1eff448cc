"""Decode steps of generate(): eager, compiled (static cache), and captured without the compiler (decode_graphs).

A step is (time of N new tokens - time of 1) / (N - 1), greedy, prompts of 32 tokens without padding. The bare model
and all mixes of adapters alternate within each repetition. The first call of each path is timed apart: what it took
more than the second is how long the path needs until it is ready.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .measure import Counter, alternate, busy_ms, median_ratio, milliseconds
from .models import Models, ids, sparse_ids
from .workload import BARE, prompts

PROMPT_TOKENS = 32
BUSY_STEPS = 6  # that the profiler looks at
READY_GOAL_S = 3.0
MORE_ADAPTERS_GOAL = 1.08  # 32 distinct adapters over 1, compiled
OVER_COMPILED_GOAL = 1.15  # captured without the compiler, over the compiled step with the same mix
SPARSE = 4  # rows with an adapter in the mix that is mostly base
# path -> mix -> (goal of the ratio to the bare model, batch sizes it is stated for; None: all)
GOALS: dict[str, dict[str, tuple[float, tuple[int, ...] | None]]] = {
    "eager": {"0": (1.02, None), "32": (1.15, (32,))},
    "static": {"0": (1.01, None), "1": (1.05, (1, 32)), "32": (1.10, (32,)), "sparse": (1.03, (32,))},
    "graphs": {},
}


@dataclass
class Case:
    """One thing to time: a path of one model with one mix of adapters."""

    path: str
    mix: str
    label: str
    model: Any
    rows: int
    kwargs: dict[str, Any]
    ready_s: float | None = None
    counted: dict[str, int] = field(default_factory=dict)
    timed: dict[str, int] = field(default_factory=lambda: {"compiled": 0, "captured": 0})  # while it was timed

    def generate(self, inputs: dict[str, torch.Tensor], new: int) -> None:
        self.model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, **self.kwargs)

    @property
    def name(self) -> str:
        return f"{self.path} decode, batch {self.rows}, {self.label}"


def mixes(rows: int, adapters: Sequence[int], sparse: bool) -> Iterator[tuple[str, str, list[str | None] | None]]:
    """(key, label, ids of the rows); no more distinct adapters than rows."""
    for count in adapters:
        if count <= rows:
            yield str(count), f"{count} adapters" if count else "enabled, none active", ids(rows, count)  # type: ignore
    if sparse and rows >= 8 * SPARSE:
        yield "sparse", f"{SPARSE} rows of {rows} adapted", sparse_ids(rows, SPARSE)


def static_options(device: str, compiled: bool) -> dict[str, Any]:
    """generate() compiles by itself on a GPU only; elsewhere it is told to, for smoke runs."""
    if device.startswith("cuda") or not compiled:
        return {"cache_implementation": "static"}
    from transformers import CompileConfig

    config = CompileConfig(backend="eager", mode=None)  # type: ignore[arg-type]
    config._compile_all_devices = True  # type: ignore[assignment]
    return {"cache_implementation": "static", "compile_config": config}


def cases_of(models: Models, path: str, rows: int) -> list[Case]:
    """The bare model (where it has this path), then each mix."""
    settings = models.settings
    options = {} if path == "eager" else static_options(settings.device, compiled=path == "static")
    found = [] if path == "graphs" else [Case(path, BARE, BARE, models.bare, rows, options)]
    model = models.ours(decode_graphs=path == "graphs")
    for key, label, names in mixes(rows, settings.adapters, settings.sparse):
        found.append(Case(path, key, label, model, rows, {**options, "adapter_ids": names}))
    return found


def run_decode(
    models: Models, paths: Sequence[str], rows: int, counter: Counter, seconds: float
) -> Callable[[], None]:
    """Time these paths side by side; returns what looks at the GPU's busy time afterwards.

    Without the compiled path, the captured one is compared with the bare model in eager mode.
    """
    settings = models.settings
    cases = [case for path in paths for case in cases_of(models, path, rows)]
    if paths == ["graphs"]:
        cases.insert(0, Case("eager", BARE, f"{BARE} beside captured", models.bare, rows, {}))
    inputs = prompts(models.bare, rows, PROMPT_TOKENS)
    for case in order_of_first_calls(cases):
        first_calls(models, case, inputs, counter)

    def step(case: Case) -> float:
        before = counter.now()
        longer = milliseconds(lambda: case.generate(inputs, settings.new_tokens), settings.device)
        once = milliseconds(lambda: case.generate(inputs, 1), settings.device)
        done = counter.now().since(before)
        case.timed["compiled"] += done.compiled
        case.timed["captured"] += done.captured
        return (longer - once) / (settings.new_tokens - 1)

    if "graphs" in paths and settings.cuda and not any(c.counted["captured"] for c in cases if c.path == "graphs"):
        models.results.fail("decode_graphs: no step was captured; the figures of `graphs` are those of eager steps")
    steps = {case.name: functools.partial(step, case) for case in cases}
    # What was compiled and captured before may have taken minutes: the time for repetitions begins here.
    values = alternate(steps, settings.reps, deadline_after(seconds))
    models.note(f"{' and '.join(paths)}, batch {rows}: {len(values[cases[0].name])} repetitions")
    for case in cases:
        if any(case.timed.values()):
            models.note(f"{case.name}: {case.timed} while it was timed")
    write_steps(models, cases, values)
    write_counts(models, paths, rows, cases)

    def busy() -> None:
        for case in order_of_first_calls(cases)[: 4 * len(paths)]:
            time_ms = busy_step(case, inputs)
            wall = statistics.median(values[case.name])
            models.results.add(f"{case.name}, GPU busy", time_ms, "ms", **facts(case), of_wall=time_ms / wall)

    return busy


def busy_step(case: Case, inputs: dict[str, torch.Tensor]) -> float:
    """Milliseconds a step in which the GPU is busy. Static caches keep the length of the longest call so far."""
    more, one = (busy_ms(lambda new=new: case.generate(inputs, new)) for new in (1 + BUSY_STEPS, 1))  # type: ignore[misc]
    return (more - one) / BUSY_STEPS


def order_of_first_calls(cases: Sequence[Case]) -> list[Case]:
    """The bare model first, then the largest mix and the batch without adapters: those two are the two graphs."""
    largest = str(max((int(case.mix) for case in cases if case.mix.isdigit()), default=0))
    rank = {"1": 3, BARE: 0, largest: 1, "0": 2}
    return sorted(cases, key=lambda case: rank.get(case.mix, 4))


def first_calls(models: Models, case: Case, inputs: dict[str, torch.Tensor], counter: Counter) -> None:
    """Call until the path is ready, and keep what the first call took more than the second."""
    before, tokens = counter.now(), models.settings.new_tokens
    first, second = (milliseconds(lambda: case.generate(inputs, tokens), models.settings.device) for _ in range(2))
    case.generate(inputs, 1)
    case.ready_s = max(0.0, first - second) / 1e3
    done = counter.now().since(before)
    case.counted = {"compiled": done.compiled, "captured": done.captured, "skipped": done.skipped}
    models.note(f"{case.name}: ready after {case.ready_s:.2f} s ({done.compiled} compiled, {done.captured} captured)")


def facts(case: Case) -> dict[str, Any]:
    """What the plots and tables need to know of a row."""
    adapters = int(case.mix) if case.mix.isdigit() else SPARSE if case.mix == "sparse" else None
    side = "bare" if case.mix == BARE else "ours"
    return {"path": case.path, "rows": case.rows, "side": side, "mix": case.mix, "adapters": adapters}


def write_steps(models: Models, cases: Sequence[Case], values: dict[str, list[float]]) -> None:
    """One row per case, its ratio to the bare model's within the same repetitions."""
    by_key = {(case.path, case.mix): values[case.name] for case in cases}
    for case in cases:
        times = values[case.name]
        compared = case.path if (case.path, BARE) in by_key else "static" if ("static", BARE) in by_key else "eager"
        base = None if case.mix == BARE else by_key[compared, BARE]
        bound, sizes = GOALS[case.path].get(case.mix, (None, None))
        goal = bound if models.settings.full and (sizes is None or case.rows in sizes) else None
        models.results.add(
            case.name,
            statistics.median(times),
            "ms",
            ratio=None if base is None else median_ratio(times, base),
            ratio_goal=None if base is None else goal,
            all=times,
            over=None if base is None else f"{compared} bare",
            ready_s=case.ready_s,
            **case.counted,
            **facts(case),
        )
    for case in cases:
        compiled = by_key.get(("static", case.mix))
        if case.path == "graphs" and compiled is not None:
            over_compiled(models, case, median_ratio(values[case.name], compiled))
        if case.path != "eager" and case.mix == "32" and (case.path, "1") in by_key:
            ratio = median_ratio(values[case.name], by_key[case.path, "1"])
            goal = MORE_ADAPTERS_GOAL if models.settings.full and case.path == "static" else None
            name = f"{case.path} decode, batch {case.rows}, 32 over 1 adapter"
            models.results.add(name, ratio, "x", ratio=ratio, ratio_goal=goal, rows=case.rows)


def over_compiled(models: Models, case: Case, ratio: float) -> None:
    goal = OVER_COMPILED_GOAL if models.settings.full and case.mix == "32" and case.rows == 32 else None
    models.results.add(
        f"{case.name}, over the compiled step", ratio, "x", ratio=ratio, ratio_goal=goal, rows=case.rows
    )


def write_counts(models: Models, paths: Sequence[str], rows: int, cases: Sequence[Case]) -> None:
    """Readiness, and what was compiled or captured once both graphs were there."""
    full = models.settings.full
    for path in paths:
        mine = [case for case in order_of_first_calls(cases) if case.path == path]
        own = [case for case in mine if case.mix != BARE]
        for case in mine:
            if case.mix == BARE or case in own[:2]:
                goal = READY_GOAL_S if full and path == "graphs" else None
                models.results.add(f"{case.name}, ready", case.ready_s or 0.0, "s", goal=goal, **facts(case))
        if path == "eager":
            continue
        none = [case for case in own if case.mix == "0"]
        later = [case for case in own[1:] if case not in none]
        for kind in ("compiled", "captured"):
            more = sum(case.counted[kind] for case in later) + sum(case.timed[kind] for case in own)
            name = f"{path} decode, batch {rows}, {kind} after the first mix and none"
            models.results.add(name, more, "graphs", goal=0, rows=rows)
        if path == "static" and own:
            extra = sum(case.counted["skipped"] for case in own) - sum(
                c.counted["skipped"] for c in mine if c not in own
            )
            models.results.add(f"static decode, batch {rows}, CUDA graphs skipped", extra, "skips", goal=0, rows=rows)


def reset_compiler() -> None:
    """Each batch size is compiled as in a new process: a second one would be compiled for any size."""
    torch.compiler.reset()


def deadline_after(seconds: float) -> float:
    return time.monotonic() + seconds
