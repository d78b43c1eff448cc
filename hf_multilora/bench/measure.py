"""Clocks and counters.

Times on a GPU repeat within a few percent, times on a CPU do not: every figure that is compared with another one is
taken in one process, with the repetitions of both alternated, and is reported as a median.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Key = TypeVar("Key")


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def milliseconds(fn: Callable[[], Any], device: str) -> float:
    """Wall time of one call, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    fn()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def alternate(cases: Mapping[Key, Callable[[], float]], reps: int, deadline: float) -> dict[Key, list[float]]:
    """Run every case once per repetition, in an order that turns; stop early (after a whole round) at the deadline.

    Garbage is collected before each case and not within one: a collection costs as much as a decode step, and would
    land on whichever case happens to cross the threshold.
    """
    names = list(cases)
    values: dict[Key, list[float]] = {name: [] for name in names}
    for rep in range(reps):
        turn = rep % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            gc.disable()
            try:
                values[name].append(cases[name]())
            finally:
                gc.enable()
        if time.monotonic() > deadline:
            break
    return values


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Median of the ratios within each repetition, which drops what drifts between repetitions."""
    return statistics.median(v / b for v, b in zip(values, base, strict=True))


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """||value - reference|| / ||reference|| in float64; NaN stays NaN."""
    value, reference = value.double(), reference.to(value.device).double()
    return float((value - reference).norm() / reference.norm())


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, length) intervals: kernels that overlap count once."""
    total, end = 0.0, float("-inf")
    for start, length in sorted(intervals):
        stop = start + length
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def busy_ms(fn: Callable[[], Any]) -> float:
    """Milliseconds in which the GPU ran a kernel or a copy during `fn`, on whatever stream, as the profiler saw it."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        fn()
        torch.cuda.synchronize()
    ran: Any = prof.profiler.kineto_results.events()
    return (
        covered(
            (event.start_ns(), event.duration_ns())
            for event in ran
            if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
        )
        / 1e6
    )


@dataclass(frozen=True)
class Counts:
    """What has been compiled and captured up to some moment."""

    compiled: int
    skipped: int
    captured: int

    def since(self, earlier: Counts) -> Counts:
        return Counts(
            self.compiled - earlier.compiled, self.skipped - earlier.skipped, self.captured - earlier.captured
        )


class Counter:
    """Counts compilations (Dynamo's own counters) and captures of CUDA graphs, whoever captures them.

    Captures are seen by a method put over `torch.cuda.CUDAGraph.capture_begin` within `counting()`.
    """

    def __init__(self) -> None:
        self._captures = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        graphs: Any = torch.cuda.CUDAGraph
        original = graphs.capture_begin

        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._captures += 1
            return original(graph, *args, **kwargs)

        graphs.capture_begin = capture_begin
        try:
            yield
        finally:
            graphs.capture_begin = original

    def now(self) -> Counts:
        from torch._dynamo.utils import counters

        return Counts(counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"], self._captures)
