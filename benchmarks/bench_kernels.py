"""The kernels alone, in the shape of an 8B Llama: one decoder layer (q k v o gate up down), microseconds per layer.

    python benchmarks/bench_kernels.py [--out results/kernels.json] [--only decode mix prefill host split]
    python benchmarks/bench_kernels.py --search decode|prefill      block sizes, best first

A CUDA graph holds back-to-back layers, each with weights of its own, together at least 128 MB, so that each layer
finds them out of the 60 MB L2. At decode x and y are hot (one buffer), at prefill they rotate. Median of 20 replays.
"mix" compares a batch of plain, gain (DoRA), shift (lora_bias) and base rows, a quarter each, with one of plain and
base rows; `over` is what the mix costs more, as a fraction.
The floor: the bytes that must move (each distinct adapter's A and B once, x once, y read and written) at --bandwidth.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import environment

from hf_multilora.kernels import expand, launch, shrink
from hf_multilora.kernels.ops import LinearOp, Workspace
from hf_multilora.kernels.reference import META
from hf_multilora.kernels.tuning import ExpandTiling, ShrinkTiling, expand_tiling, shrink_tiling

# (in, out) of the seven projections of a layer.
LAYER = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096))
GROUP = {"q": 0, "k": 1, "gate": 4, "down": 6}
COLD_BYTES = 160 << 20
BF16 = torch.bfloat16


class Arena:
    """Random adapters of one rank over `layers` layers, packed as the package packs them.

    With `vectors` there is room for a gain and a shift of every site, which `mix` gives to slots and takes away.
    """

    def __init__(
        self, adapters: int, rank: int, layers: int, max_rank: int | None = None, vectors: bool = False
    ) -> None:
        self.rank, self.layers, self.max_rank = rank, layers, max_rank or rank
        shapes = [shape for _ in range(layers) for shape in LAYER]
        header = -(-8 * META * len(shapes) // 256) * 128
        table, vector_table, at = [], [], header
        for k, n in shapes:
            table += [at, at + rank * k, rank, 0, 0]
            at += rank * (k + n)
            if vectors:
                vector_table += [[at // 2, at // 2 + n]]
                at += 4 * n
        self.slot_elems = -(-at // 128) * 128
        self.data = torch.empty(adapters * self.slot_elems, dtype=BF16, device="cuda").normal_(0, 0.02)
        self.floats = self.data.view(torch.float32)
        self.meta = self.data.view(torch.int64).view(adapters, -1)
        self.vectors = torch.tensor(vector_table, device="cuda")
        if vectors:
            slots = self.floats.view(adapters, -1)
            for (gain, shift), (_, n) in zip(vector_table, shapes, strict=True):
                slots[:, gain : gain + n].uniform_(0.5, 1)  # the calls add into the same y: it must not overflow
                slots[:, shift : shift + n].normal_(0, 0.02)
        self.meta[:, : len(table)] = torch.tensor(table, device="cuda")
        self.workspace = Workspace()
        self.ops = [
            LinearOp(
                self.data, self.meta, self.floats, self.slot_elems, 0, site, k, (n,), self.max_rank, self.workspace
            )
            for site, (k, n) in enumerate(shapes)
        ]

    def mix(self, gains: slice, shifts: slice) -> None:
        """Give these slots a gain and a shift at every site, and no others."""
        table = self.meta[:, : META * len(self.ops)].view(-1, len(self.ops), META)
        table[..., 3:] = 0
        table[gains, :, 3], table[shifts, :, 4] = self.vectors[:, 0], self.vectors[:, 1]


def layers_for(adapters: int, rank: int) -> int:
    per_layer = 2 * adapters * rank * sum(k + n for k, n in LAYER)
    return max(2, min(64, -(-COLD_BYTES // per_layer)))


def slots_for(rows: int, adapters: int) -> torch.Tensor:
    return torch.arange(rows, dtype=torch.int32, device="cuda") % adapters


def graph_us(run: Callable[[], Any], replays: int = 20) -> float:
    """Median microseconds of one replay of what `run` launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(replays + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times[3:])


def floor_us(rows_of_x: int, adapters: int, rank: int, bandwidth: float) -> float:
    moved = sum(adapters * rank * (k + n) + rows_of_x * (k + 2 * n) for k, n in LAYER) * 2
    return moved / bandwidth * 1e6


def bench_layers(kind: str, cases: list[tuple[int, int, int, int]], bandwidth: float) -> Iterator[dict[str, Any]]:
    """`cases`: (rows, tokens a row, adapters, rank)."""
    for rows, per_row, adapters, rank in cases:
        n = rows * per_row
        arena = Arena(adapters, rank, layers_for(adapters, rank) if per_row == 1 else 2)
        row_slots = slots_for(rows, adapters)
        sets = 1 if per_row == 1 else 2
        xs = [{k: torch.randn(n, k, dtype=BF16, device="cuda") for k in (4096, 14336)} for _ in range(sets)]
        ys = [{w: torch.zeros(n, w, dtype=BF16, device="cuda") for w in (4096, 1024, 14336)} for _ in range(sets)]

        def run(arena: Arena = arena, xs: Any = xs, ys: Any = ys, slots: Any = row_slots, rows: int = rows) -> None:
            for site, op in enumerate(arena.ops):
                turn = site // len(LAYER) % len(xs)
                op((ys[turn][op.out_features],), xs[turn][op.in_features], slots, rows)

        us = graph_us(run) / arena.layers
        floor = floor_us(n, adapters, rank, bandwidth)
        yield {"bench": kind, "rows": rows, "tokens": n, "adapters": adapters, "rank": rank, "us": us, "floor": floor}
        del arena, xs, ys
        torch.cuda.empty_cache()


def bench_mix(cases: list[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """`cases`: (rows, tokens a row, rank); every row but the base's has an adapter of its own."""
    for rows, per_row, rank in cases:
        n, part = rows * per_row, rows // 4
        arena = Arena(rows, rank, layers_for(rows, rank) if per_row == 1 else 2, vectors=True)
        row_slots = slots_for(rows, rows)
        row_slots[3 * part :] = -1
        xs = {k: torch.randn(n, k, dtype=BF16, device="cuda") for k in (4096, 14336)}
        ys = {w: torch.zeros(n, w, dtype=BF16, device="cuda") for w in (4096, 1024, 14336)}

        def run(arena: Arena = arena, xs: Any = xs, ys: Any = ys, slots: Any = row_slots, rows: int = rows) -> None:
            for op in arena.ops:
                op((ys[op.out_features],), xs[op.in_features], slots, rows)

        mixes = {"plain": (slice(0), slice(0)), "mixed": (slice(part, 2 * part), slice(2 * part, 3 * part))}
        times: dict[str, list[float]] = {name: [] for name in mixes}
        # In turns, so that a drift of the clocks meets both.
        for name in [*mixes] * 3:
            arena.mix(*mixes[name])
            for y in ys.values():
                y.zero_()
            times[name].append(graph_us(run) / arena.layers)
        us = {name: min(found) for name, found in times.items()}
        over = us["mixed"] / us["plain"] - 1
        yield {"bench": "mix", "rows": rows, "tokens": n, "rank": rank, **us, "over": over}
        del arena, xs, ys
        torch.cuda.empty_cache()


def bench_split(rows: int, adapters: int, rank: int) -> Iterator[dict[str, Any]]:
    """Shrink and expand apart, for each kind of projection."""
    arena = Arena(adapters, rank, layers_for(adapters, rank))
    row_slots = slots_for(rows, adapters)
    for name, index in GROUP.items():
        k, n = LAYER[index]
        first = shrink_tiling(rows, rows, k, rank, BF16, BF16)
        second = expand_tiling(rows, rows, n, rank, BF16, BF16)
        for op, us in time_tilings(arena, row_slots, rows, rows, index, first, second):
            yield {
                "bench": "split",
                "projection": name,
                "op": op,
                "rows": rows,
                "adapters": adapters,
                "rank": rank,
            } | {
                "us": us,
                "factor_us": 2 * adapters * rank * (k if op == "shrink" else n) / 4.26e6,
            }


def time_tilings(
    arena: Arena, row_slots: torch.Tensor, rows: int, n: int, index: int, first: ShrinkTiling | None, second: Any
) -> Iterator[tuple[str, float]]:
    """Microseconds of one shrink and one expand of projection `index`, over the arena's layers."""
    k, width = LAYER[index]
    x, y = torch.randn(n, k, dtype=BF16, device="cuda"), torch.zeros(n, width, dtype=BF16, device="cuda")
    sites = range(index, len(arena.ops), len(LAYER))
    split = first.split if first else shrink_tiling(n, rows, k, arena.max_rank, BF16, BF16).split
    planes = torch.zeros(split * n * arena.max_rank, device="cuda")
    common = (row_slots, None, planes, arena.data, arena.meta, rows)
    kinds: list[tuple[str, Callable[[int], Any]]] = []
    if first:
        kinds.append(("shrink", lambda s: shrink.prepare(x, *common, s, 1, arena.slot_elems, arena.max_rank, first)))
    if second:
        tail = (arena.floats, (width,), arena.slot_elems, arena.max_rank, split, second)
        kinds.append(("expand", lambda s: expand.prepare(y, *common, s, *tail)))
    for op, prepare in kinds:
        launches = [prepare(site) for site in sites]
        repeat = max(1, 8 // len(launches))

        def run(launches: Any = launches, repeat: int = repeat) -> None:
            for kernel, grid, args, options in launches * repeat:
                kernel[grid](*args, **options)

        yield op, graph_us(run) / (len(launches) * repeat)


def bench_host(rows: int = 32, layers: int = 32) -> Iterator[dict[str, Any]]:
    """Host microseconds of one eager call, over the 224 layers of a step; the device is idle at the start of each."""
    arena = Arena(1, 16, layers)
    row_slots = slots_for(rows, 1)
    xs = {k: torch.randn(rows, 1, k, dtype=BF16, device="cuda") for k in (4096, 14336)}
    ys = {w: torch.zeros(rows, 1, w, dtype=BF16, device="cuda") for w in (4096, 1024, 14336)}
    calls = [(op, (ys[op.out_features],), xs[op.in_features]) for op in arena.ops]
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for op, y, x in calls:
            op(y, x, row_slots, rows)
        times.append((time.perf_counter() - start) / len(calls) * 1e6)
    yield {"bench": "host", "first_us": times[0], "us": statistics.median(times[3:])} | {
        "prebuilt": bool(launch._Prebuilding.works)
    }


def search_decode(seconds: float) -> None:
    """Block sizes of the decode kernels; each configuration is timed on cold weights."""
    deadline = time.monotonic() + seconds
    for (rows, adapters, rank), index in itertools.product(
        ((32, 32, 16), (8, 8, 16), (1, 1, 16), (32, 32, 64), (128, 128, 16)), (0, 1, 4, 6)
    ):
        if time.monotonic() > deadline:
            return
        arena, row_slots = Arena(adapters, rank, layers_for(adapters, rank)), slots_for(rows, adapters)
        k, width = LAYER[index]
        found: list[tuple[float, str]] = []
        if index != 1:
            for chunk, block_k, warps in itertools.product((128, 256, 512, 1024), (128, 256, 512), (1, 2, 4, 8)):
                split = -(-k // chunk)
                if block_k > chunk or split > 64 or block_k * 16 // (warps * 32) > 128 or chunk // block_k > 4:
                    continue
                tiling = ShrinkTiling(False, split, chunk, 1, block_k, 16, 1, warps, "")
                found += attempt(arena, row_slots, rows, rows, index, tiling, None)
        if index != 6:
            for block_n, warps, block_r in itertools.product((64, 128, 256, 512), (1, 2, 4), (16, 32)):
                if block_n * block_r // (warps * 32) > 256 or block_r > rank:
                    continue
                tiling_e = ExpandTiling(False, 1, block_n, block_r, 1, warps, "")
                found += attempt(arena, row_slots, rows, rows, index, None, tiling_e)
        show(f"rows={rows} adapters={adapters} r={rank} K={k} N={width}", found)
        del arena
        torch.cuda.empty_cache()


def search_prefill(seconds: float) -> None:
    """Block sizes of the prefill kernels, at the two sizes of the goals."""
    deadline = time.monotonic() + seconds
    for (n, rows, rank), index in itertools.product(((4096, 16, 16), (8192, 16, 16), (8192, 16, 64)), (0, 4, 6)):
        if time.monotonic() > deadline:
            return
        arena, row_slots = Arena(rows, rank, 2), slots_for(rows, rows)
        k, width = LAYER[index]
        found: list[tuple[float, str]] = []
        if index != 4:
            for bm, bk, stages, warps, split in itertools.product(
                (16, 32, 64), (64, 128, 256), (3, 4, 5), (4, 8), (1, 2)
            ):
                if (bm + 16) * bk * 2 * (stages - 1) > 100_000 or bm * 16 < warps * 64:
                    continue
                chunk = -(-(k // split) // bk) * bk
                tiling = ShrinkTiling(True, split, chunk, bm, bk, max(16, rank), stages, warps, "native")
                found += attempt(arena, row_slots, rows, n, index, tiling, None)
        if index != 6:
            for bm, bn, warps, br in itertools.product((32, 64, 128), (64, 128, 256), (4, 8), (16, 32, 64)):
                if br > rank or bm * bn // (warps * 32) > 128:
                    continue
                found += attempt(
                    arena, row_slots, rows, n, index, None, ExpandTiling(True, bm, bn, br, 1, warps, "split")
                )
        show(f"tokens={n} rows={rows} r={rank} K={k} N={width}", found)
        del arena
        torch.cuda.empty_cache()


def attempt(arena: Arena, row_slots: Any, rows: int, n: int, index: int, first: Any, second: Any) -> list[Any]:
    """One configuration, or nothing where the device has no room for it."""
    with contextlib.suppress(Exception):
        return [
            (us, f"{op}: {first or second}")
            for op, us in time_tilings(arena, row_slots, rows, n, index, first, second)
        ]
    return []


def show(title: str, found: list[tuple[float, str]]) -> None:
    print(title)
    for op in ("shrink", "expand"):
        for us, what in sorted(entry for entry in found if entry[1].startswith(op))[:4]:
            print(f"  {us:8.2f} us  {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append JSON rows to this file")
    parser.add_argument("--only", nargs="+", default=["decode", "mix", "host", "split", "prefill"])
    parser.add_argument("--search", choices=("decode", "prefill"))
    parser.add_argument("--seconds", type=float, default=240, help="limit of a search")
    parser.add_argument("--bandwidth", type=float, default=4.26e12, help="bytes a second, for the floor")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels.py needs a CUDA device.")
    torch.manual_seed(0)
    if options.search:
        {"decode": search_decode, "prefill": search_prefill}[options.search](options.seconds)
        return
    decode = [(1, 1, 1, 16), (8, 1, 8, 16), (32, 1, 1, 16), (32, 1, 8, 16), (32, 1, 32, 16), (32, 1, 32, 64)]
    decode += [(64, 1, 64, 16), (128, 1, 128, 16)]
    prefill = [(1, 1024, 1, 16), (16, 64, 16, 16), (4, 1024, 4, 16), (16, 256, 16, 16), (16, 256, 16, 64)]
    prefill += [(16, 512, 16, 16), (16, 512, 16, 64)]
    parts = {
        "decode": lambda: bench_layers("decode", decode, options.bandwidth),
        "mix": lambda: bench_mix([(32, 1, 16), (32, 1, 64), (16, 256, 16)]),
        "host": bench_host,
        "split": lambda: bench_split(32, 32, 16),
        "prefill": lambda: bench_layers("prefill", prefill, options.bandwidth),
    }
    where = environment("cuda")
    print(json.dumps(where))
    for part in options.only:
        for row in parts[part]():
            print(
                "  ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True
            )
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(row | where) + "\n")


if __name__ == "__main__":
    main()
