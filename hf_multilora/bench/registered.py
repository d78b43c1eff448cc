"""Throughput against the number of registered adapters: Zipf traffic over few and over many, in equally few slots.

Adapters of rank 8 on q and v. Each side is an enabled model over the same weights; the traffic and its rule are those
of `traffic.Traffic`, the same for all sides. A repetition serves a stretch of batches on each side in turn, every
batch one generate(); tokens per second count new tokens over the wall time of a stretch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..api import enable_multilora
from .decode import static_options
from .measure import alternate, median_ratio, milliseconds
from .results import Results, arguments
from .traffic import DISTINCT, ROWS, WAITING, Traffic
from .workload import DTYPES, adapter_config, build_model, linear_shapes, prompts, twin

TARGETS = ("q_proj", "v_proj")
RANK = 8
GOAL = 0.90
PROMPT_TOKENS = 32
HEADROOM = 1.15  # host memory that registering takes, over the adapters' own bytes


class Pool:
    """Tensors of any number of adapters as views of one buffer, each at an offset of its own: no two are equal."""

    STEP = 64

    def __init__(self, shapes: dict[str, tuple[int, int]], count: int, dtype: torch.dtype, seed: int = 0) -> None:
        self.shapes = shapes
        self.elements = sum(RANK * (i + o) for i, o in shapes.values())
        generator = torch.Generator().manual_seed(seed)
        flat = torch.randn(self.elements + count * self.STEP, generator=generator)
        self._flat = flat.mul_(max(i for i, _ in shapes.values()) ** -0.5).to(dtype)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        at, tensors = number * self.STEP, {}
        for path, (width_in, width_out) in self.shapes.items():
            for kind, size in (("A", (RANK, width_in)), ("B", (width_out, RANK))):
                elements = size[0] * size[1]
                tensors[f"base_model.model.{path}.lora_{kind}.weight"] = self._flat[at : at + elements].view(size)
                at += elements
        return tensors


def available_bytes() -> int:
    """Host memory that a process can still take, the limit of its control group included."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit in _lines("/sys/fs/cgroup/memory.max"):
        if limit.strip().isdigit():
            used = next((int(text) for text in _lines("/sys/fs/cgroup/memory.current")), 0)
            # Pages of files count as used, and are given back when memory is short.
            cached = (
                int(x.split()[1]) for x in _lines("/sys/fs/cgroup/memory.stat") if x.startswith("inactive_file ")
            )
            free = min(free, int(limit) - used + next(cached, 0))
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


class Side:
    """One enabled model with `count` adapters registered, and its traffic."""

    def __init__(self, base: Any, count: int, args: argparse.Namespace, pool: Pool, results: Results) -> None:
        self.count, self.args = count, args
        options: dict[str, Any] = {"decode_graphs": True} if args.path == "graphs" else {}
        self.model = enable_multilora(
            base, max_loras=DISTINCT, max_lora_rank=RANK, target_modules=list(TARGETS), **options
        )
        config = adapter_config(RANK, 2.0 * RANK, TARGETS)
        start = time.perf_counter()
        for number in range(count):
            self.model.multilora.load(pool[number], f"a{number}", config=config)
        taken = (time.perf_counter() - start) * 1e3
        results.add(f"register one of {count} adapters, mean", taken / count, "ms", registered=count)
        self.traffic = Traffic(count, args.seed, rows=args.rows, waiting=args.waiting)
        self.inputs = prompts(self.model, args.rows, PROMPT_TOKENS)
        self.options = {} if args.path == "eager" else static_options(args.device, compiled=args.path == "static")
        self.served: list[tuple[int, int]] = []  # (rows, distinct adapters) of each batch

    def batch(self) -> int:
        """Serve one batch; returns its new tokens."""
        numbers = self.traffic.batch()
        new = self.args.new_tokens
        self.model.generate(
            **{key: value[: len(numbers)] for key, value in self.inputs.items()},
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            adapter_ids=[f"a{number}" for number in numbers],
            **self.options,
        )
        self.served.append((len(numbers), len(set(numbers))))
        return len(numbers) * new

    def warm_up(self) -> None:
        self.batch(), self.batch()
        self.served.clear()
        self._misses = self.misses()

    def misses(self) -> int:
        """Adapters that were brought in so far. Not asked within a timed stretch: a status lists every adapter."""
        return self.model.multilora.status().resident.misses

    def brought_in(self) -> float:
        """Adapters brought in for a batch, mean since the warm-up."""
        return (self.misses() - self._misses) / len(self.served)

    def stretch(self) -> float:
        """Milliseconds per new token over a stretch of batches."""
        tokens: list[int] = []
        taken = milliseconds(lambda: tokens.extend(self.batch() for _ in range(self.args.batches)), self.args.device)
        return taken / sum(tokens)


def parser() -> argparse.ArgumentParser:
    options = arguments(__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.set_defaults(reps=5)
    options.add_argument("--registered", type=int, nargs="+", default=[8, 2000], help="the first is compared with")
    options.add_argument("--path", choices=["eager", "static", "graphs"], default="eager")
    options.add_argument("--rows", type=int, default=ROWS)
    options.add_argument("--waiting", type=int, default=WAITING, help="requests in the queue")
    options.add_argument("--batches", type=int, default=6, help="batches of a repetition (default: 6)")
    options.add_argument("--new-tokens", type=int, default=32)
    options.add_argument("--seed", type=int, default=0)
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Run as a script; returns the exit status (1: there is not enough host memory)."""
    args = parser().parse_args(given)
    started = time.monotonic()
    results = Results("registered", args.out, args.device)
    results.settings(**vars(args))
    base = build_model(args.shape, args.device, DTYPES[args.dtype], args.layers)
    pool = Pool(linear_shapes(base, TARGETS), max(args.registered), DTYPES[args.dtype])
    each = pool.elements * DTYPES[args.dtype].itemsize
    need, free = int(HEADROOM * each * sum(args.registered)), available_bytes()
    print(
        f"adapters of {each / 1e6:.1f} MB take {need / 1e9:.1f} GB of {free / 1e9:.1f} GB of host memory", flush=True
    )
    if need > free:
        results.fail(
            f"{sum(args.registered)} adapters need {need / 1e9:.1f} GB of host memory; {free / 1e9:.1f} are free"
        )
        return results.finish()
    sides = []
    for count in args.registered:
        sides.append(Side(twin(base), count, args, pool, results))
        results.note(f"{count} registered")
    for side in sides:
        side.warm_up()
    results.note("warm")
    stretches: dict[int, Callable[[], float]] = {side.count: side.stretch for side in sides}
    values = alternate(stretches, args.reps, started + args.budget_s)
    report(results, args, sides, values)
    return results.finish()


def report(results: Results, args: argparse.Namespace, sides: list[Side], values: dict[int, list[float]]) -> None:
    first = sides[0].count
    full = args.shape == "8B" and args.layers is None and args.device.startswith("cuda")
    for side in sides:
        times = values[side.count]
        rows, distinct = (statistics.mean(column) for column in zip(*side.served, strict=True))
        conditions = {
            "path": args.path, "registered": side.count, "slots": DISTINCT, "rows": rows, "distinct": distinct,
            "brought_in": side.brought_in(), "batches": len(side.served), "new_tokens": args.new_tokens,
            "prompt_tokens": PROMPT_TOKENS, "waiting": args.waiting, "zipf": 1.0, "seed": args.seed, "rank": RANK,
        }  # fmt: skip
        name = f"{args.path} throughput, {side.count} registered, {DISTINCT} slots"
        results.add(name, 1e3 / statistics.median(times), "tokens/s", all=[1e3 / t for t in times], **conditions)
        if side.count != first:
            ratio = median_ratio(values[first], times)
            what = f"{args.path} throughput, {side.count} over {first} registered"
            # Goals bound from above: the time of a token may be 1 / 0.90 of the other side's.
            goal = 1 / GOAL if full else None
            results.add(f"{what}, time of a token", 1 / ratio, "x", ratio=1 / ratio, ratio_goal=goal, throughput=ratio)
