"""The decode kernels of one decoder layer (q k v, o, gate up, down), alone and over the base GEMMs, in microseconds.

A CUDA graph holds back-to-back layers, each with weights of its own, so that each finds them out of the L2 cache; x
and y are hot. "Over base" is the paired difference of two graphs with equal numbers of calls, alternated: GEMMs with
the adapters' kernels beside and after them, and GEMMs alone. The floor: each distinct adapter's A and B once, x once,
y read and written, at the bandwidth that a copy reaches on this device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels.ops import LinearOp, Workspace
from ..kernels.reference import META
from .results import Results
from .workload import SHAPES

COLD_BYTES = 160 << 20
ROUNDS = 20


def groups_of(shape: str) -> list[tuple[int, tuple[int, ...]]]:
    """(in_features, widths of the layers that read the same x) of one decoder layer."""
    sizes = SHAPES[shape]
    hidden, wide = sizes["hidden_size"], sizes["intermediate_size"]
    keys = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    return [(hidden, (hidden, keys, keys)), (hidden, (hidden,)), (hidden, (wide, wide)), (wide, (hidden,))]


@dataclass(frozen=True)
class Point:
    """One row of the table: a batch of `rows` rows, one token each, over `adapters` adapters of one rank."""

    rows: int
    adapters: int
    rank: int


class Layers:
    """Arena, ops, base weights, x and y of `count` decoder layers; the adapters' blocks as the package packs them."""

    def __init__(self, shape: str, point: Point, device: str, dtype: torch.dtype) -> None:
        self.point, self.groups = point, groups_of(shape)
        sites = [(k, n) for k, widths in self.groups for n in widths]
        size = dtype.itemsize
        self.adapter_elems = point.rank * sum(k + n for k, n in sites)
        per_layer = size * point.adapters * self.adapter_elems
        self.count = max(2, min(64, -(-COLD_BYTES // per_layer))) if device.startswith("cuda") else 2
        table, at = [], -(-8 * META * len(sites) * self.count // 256) * 256 // size
        for k, n in sites * self.count:
            table += [at, at + point.rank * k, point.rank, 0, 0]
            at += point.rank * (k + n)
        slot_elems = -(-at // 128) * 128
        data = torch.empty(point.adapters * slot_elems, dtype=dtype, device=device).normal_(0, 0.02)
        meta = data.view(torch.int64).view(point.adapters, -1)
        meta[:, : len(table)] = torch.tensor(table, device=device)
        workspace, first = Workspace(), 0
        self.ops: list[list[LinearOp]] = []
        for _ in range(self.count):
            self.ops.append([])
            for k, widths in self.groups:
                op = LinearOp(
                    data,
                    meta,
                    data.view(torch.float32),
                    slot_elems,
                    0,
                    first,
                    k,
                    widths,
                    point.rank,
                    workspace,
                    widths,
                )
                self.ops[-1].append(op)
                first += len(widths)
        self.slots = torch.arange(point.rows, dtype=torch.int32, device=device) % point.adapters

        def random(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device).normal_(0, 0.02)

        self.x = [random(point.rows, k) for k, _ in self.groups]
        self.ys = [tuple(random(point.rows, n) for n in widths) for _, widths in self.groups]
        # Two sets: each of them is far larger than the L2 cache at the shapes that matter.
        self.weights = [[[random(k, n) for n in widths] for k, widths in self.groups] for _ in range(2)]

    def run(self, base: bool, adapters: bool) -> None:
        """All layers once: the GEMMs, the adapters' kernels, or both as a wrapped layer runs them."""
        for number, ops in enumerate(self.ops):
            for op, x, ys, weights in zip(ops, self.x, self.ys, self.weights[number % 2], strict=True):
                if not base:
                    op(ys, x, self.slots, self.point.rows)
                    continue
                h = op.begin(x, self.slots, self.point.rows) if adapters else None
                for y, weight in zip(ys, weights, strict=True):
                    torch.mm(x, weight, out=y)
                if adapters:
                    op.end(ys, x, h, self.slots, self.point.rows)

    def floor_us(self, bandwidth: float) -> float:
        """`bandwidth` in bytes per second."""
        moved = self.point.adapters * self.adapter_elems
        moved += self.point.rows * sum(k + 2 * sum(widths) for k, widths in self.groups)
        return moved * self.x[0].element_size() / bandwidth * 1e6


def copy_bandwidth() -> float:
    """Bytes per second that a copy within the device moves, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    time_us = statistics.median(Graph(lambda: target.copy_(source)).times(5))
    return 2 * source.numel() / time_us * 1e6


class Graph:
    """A captured CUDA graph of what `run` launches."""

    def __init__(self, run: Callable[[], Any]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            run()
        self.replay_us()

    def replay_us(self) -> float:
        """Microseconds of one replay, from an idle device."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        self._graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3

    def times(self, replays: int) -> list[float]:
        return [self.replay_us() for _ in range(replays)]


def measure(
    results: Results,
    shape: str,
    point: Point,
    bandwidth: float,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """One row of the table, written at once."""
    layers = Layers(shape, point, device, dtype)
    alone = Graph(lambda: layers.run(base=False, adapters=True)).times(ROUNDS)
    base, both = (Graph(lambda a=a: layers.run(base=True, adapters=a)) for a in (False, True))  # type: ignore[misc]
    pairs = [(base.replay_us(), both.replay_us()) for _ in range(ROUNDS)]
    over = [(second - first) / layers.count for first, second in pairs]
    what = f"{point.rows} rows, {point.adapters} adapters, r={point.rank}"
    facts: dict[str, Any] = {"rows": point.rows, "adapters": point.adapters, "rank": point.rank, "shape": shape}
    each = [time_us / layers.count for time_us in alone]
    floor = layers.floor_us(bandwidth)
    results.add(
        f"one layer, {what}, alone", statistics.median(each), "us", all=each, floor_us=floor, part="alone", **facts
    )
    results.add(
        f"one layer, {what}, over base", statistics.median(over), "us", all=over, floor_us=floor, part="over", **facts
    )


def run(results: Results, shape: str, rows: Sequence[int], adapters: Sequence[int], ranks: Sequence[int]) -> None:
    """The table's rows for all of these, where a batch has as many rows as adapters.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("The kernels are Triton's: `bench kernels` needs a CUDA device.")
    bandwidth = copy_bandwidth()
    results.add("copy within the device, read and written", bandwidth / 1e12, "TB/s")
    for count in rows:
        for distinct in adapters:
            for rank in ranks:
                if distinct <= count:
                    measure(results, shape, Point(count, distinct, rank), bandwidth)
                    torch.cuda.empty_cache()
