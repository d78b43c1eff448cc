"""The kernels of one decoder layer (q k v, o, gate up, down), alone and over the base GEMMs, in microseconds.

A CUDA graph holds back-to-back layers, each with weights of its own, so that each finds them out of the L2 cache; x
and y are hot at decode, and take turns at prefill. "Over base" is the paired difference of two graphs with equal
numbers of calls, alternated: GEMMs with the adapters' kernels, and GEMMs alone. The kernels run in one of these ways:

    in place   behind the GEMMs, as eager forwards do
    beside     the deltas on a stream of their own beside the GEMMs, then added, as captured forwards do
    deltas     the same without the addition, which a compiled forward fuses with what comes next

The floor: each distinct adapter's A and B once, x once, y read and written, at the bandwidth that is measured first.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels import custom
from ..kernels.ops import LinearOp, Workspace
from ..kernels.reference import META
from ..kernels.segments import row_table
from .results import Results
from .workload import SHAPES

COLD_BYTES = 160 << 20
Group = tuple[int, tuple[int, ...]]  # in_features, widths of the layers that read the same x
ROUNDS = 20
WAYS = ("in place", "beside", "deltas")


def groups_of(shape: str) -> list[Group]:
    """The groups of one decoder layer."""
    sizes = SHAPES[shape]
    hidden, wide = sizes["hidden_size"], sizes["intermediate_size"]
    keys = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    return [(hidden, (hidden, keys, keys)), (hidden, (hidden,)), (hidden, (wide, wide)), (wide, (hidden,))]


@dataclass(frozen=True)
class Point:
    """One row of the table: a batch of `rows` rows of `tokens` tokens over `adapters` adapters of one rank."""

    rows: int
    adapters: int
    rank: int
    tokens: int = 1


class Layers:
    """Arena, ops, base weights, x and y of `count` decoder layers; the adapters' blocks as the package packs them.

    Args:
        shape: of a known model; or the groups that a layer is made of.
        most: layers, even where more would be needed for weights that the L2 does not hold.
        base: whether there are base weights to run.
    """

    def __init__(
        self,
        shape: str | Sequence[Group],
        point: Point,
        device: str,
        dtype: torch.dtype,
        *,
        most: int = 64,
        base: bool = True,
    ) -> None:
        self.point, self.groups = point, groups_of(shape) if isinstance(shape, str) else list(shape)
        sites = [(k, n) for k, widths in self.groups for n in widths]
        size = dtype.itemsize
        self.adapter_elems = point.rank * sum(k + n for k, n in sites)
        per_layer = size * point.adapters * self.adapter_elems
        cold = device.startswith("cuda") and point.tokens == 1
        self.count = max(2, min(most, -(-COLD_BYTES // per_layer))) if cold else 2
        table, at = [], -(-8 * META * len(sites) * self.count // 256) * 256 // size
        for k, n in sites * self.count:
            table += [at, at + point.rank * k, point.rank, 0, 0]
            at += point.rank * (k + n)
        slot_elems = -(-at // 128) * 128
        data = torch.empty(point.adapters * slot_elems, dtype=dtype, device=device).normal_(0, 0.02)
        meta = data.view(torch.int64).view(point.adapters, -1)
        meta[:, : len(table)] = torch.tensor(table, device=device)
        self.workspace, first = Workspace(), 0
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
                    self.workspace,
                    widths,
                )
                self.ops[-1].append(op)
                first += len(widths)
        table = row_table([row % point.adapters for row in range(point.rows)], point.adapters)
        self.slots = torch.tensor([table], dtype=torch.int32, device=device)
        self.tokens = point.rows * point.tokens

        def random(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device).normal_(0, 0.02)

        turns = range(1 if point.tokens == 1 else 2)
        self.x = [[random(self.tokens, k) for k, _ in self.groups] for _ in turns]
        self.ys = [[tuple(random(self.tokens, n) for n in widths) for _, widths in self.groups] for _ in turns]
        # Two sets: each of them is far larger than the L2 cache at the shapes that matter.
        self.weights = [[[random(n, k) for n in widths if base] for k, widths in self.groups] for _ in range(2)]

    def forget(self) -> None:
        """Prepare the next launches anew: their block sizes have changed."""
        self.workspace.recipes.clear()
        for op in itertools.chain(*self.ops):
            op._recipes.clear()

    def run(self, base: bool, way: str | None) -> None:
        """All layers once: the GEMMs, the adapters' kernels in one of the `WAYS`, or both."""
        rows = self.point.rows
        for number, ops in enumerate(self.ops):
            turn = number % len(self.x)
            for op, x, ys, weights in zip(ops, self.x[turn], self.ys[turn], self.weights[number % 2], strict=True):
                h = op.begin(x, self.slots, rows) if way in ("beside", "deltas") else None
                if base:
                    for y, weight in zip(ys, weights, strict=True):
                        torch.mm(x, weight.t(), out=y)
                if way == "in place":
                    op(ys, x, self.slots, rows)
                elif way == "deltas" and h is not None:
                    custom.join(h, x, op, self.slots, rows)
                elif way is not None:
                    op.end(ys, x, h, self.slots, rows)

    def floor_us(self, bandwidth: float) -> float:
        """`bandwidth` in bytes per second."""
        moved = self.point.adapters * self.adapter_elems
        moved += self.tokens * sum(k + 2 * sum(widths) for k, widths in self.groups)
        return moved * self.x[0][0].element_size() / bandwidth * 1e6


def bandwidths() -> dict[str, float]:
    """Bytes per second of the device's memory: reads alone, and a kernel that reads and writes as many."""
    source = torch.ones(1 << 29, device="cuda")
    target = torch.empty_like(source)
    copied = statistics.median(Graph(lambda: torch.add(source, 1, out=target)).times(5))
    read = statistics.median(Graph(lambda: torch.sum(source)).times(5))
    size = source.numel() * source.element_size()
    return {"read": size / read * 1e6, "read and written": 2 * size / copied * 1e6}


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
    over_base: bool = True,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """The table's rows of one batch, written at once."""
    layers = Layers(shape, point, device, dtype)
    floor = layers.floor_us(bandwidth)
    what = f"{layers.tokens} tokens in {point.rows} rows" if point.tokens > 1 else f"{point.rows} rows"
    what = f"one layer, {what}, {point.adapters} adapters, r={point.rank}"
    facts: dict[str, Any] = {"rows": point.rows, "tokens": layers.tokens, "adapters": point.adapters}
    facts |= {"rank": point.rank, "shape": shape, "floor_us": floor}

    def add(part: str, times: list[float], **more: Any) -> None:
        each = sorted(time_us / layers.count for time_us in times)
        results.add(f"{what}, {part}", statistics.median(each), "us", all=each, part=part, **more, **facts)

    add("alone", Graph(lambda: layers.run(False, "in place")).times(ROUNDS))
    if not over_base:
        return
    base = Graph(lambda: layers.run(True, None))
    ways = {way: Graph(lambda w=way: layers.run(True, w)) for way in WAYS}  # type: ignore[misc]
    pairs: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, graph in ways.items():
            pairs[way].append(-base.replay_us() + graph.replay_us())
    for way, differences in pairs.items():
        low, high = interval(differences)
        add(f"over base, {way}", differences, low=low / layers.count, high=high / layers.count)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median: order statistics of the sign test."""
    ordered, n = sorted(values), len(values)
    reach = max(0, int(n / 2 - 0.98 * n**0.5))
    return ordered[reach], ordered[n - 1 - reach]


def run(
    results: Results,
    shape: str,
    rows: Sequence[int],
    adapters: Sequence[int],
    ranks: Sequence[int],
    prefill: Sequence[int] = (),
    over_base: bool = True,
) -> None:
    """The table's rows for all of these, where a batch has as many rows as adapters.

    Args:
        prefill: instead of decode, so many tokens, in as many rows as there are adapters.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("The kernels are Triton's: `bench kernels` needs a CUDA device.")
    found = bandwidths()
    for how, value in found.items():
        results.add(f"device memory, {how}", value / 1e12, "TB/s")
    bandwidth = max(found.values())
    points = [Point(count, distinct, rank) for count in rows for distinct in adapters for rank in ranks]
    if prefill:
        points = [Point(n, n, rank, tokens // n) for tokens in prefill for n in adapters for rank in ranks]
    for point in points:
        if point.adapters <= point.rows:
            measure(results, shape, point, bandwidth, over_base)
            torch.cuda.empty_cache()
