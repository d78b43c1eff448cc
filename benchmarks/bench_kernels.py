"""The kernels of one decoder layer of an 8B Llama, beside what vLLM's and SGLang's kernels take (peers.json).

    python benchmarks/bench_kernels.py [--parts decode prefill mix host] [--rows 1 32] [--ranks 16]

`decode` and `prefill` are the rows of peers.json, measured as `hf_multilora.bench.kernels` says; ratios are to the
best peer of the row. `mix` compares a batch of plain, gain (DoRA), shift (lora_bias) and base rows, a quarter each,
with one of plain and base rows. `host` is what a call of an op takes from the host in eager mode.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hf_multilora.bench.kernels import Graph, Layers, Point, bandwidths, measure
from hf_multilora.bench.results import Results, arguments
from hf_multilora.kernels.reference import META
from hf_multilora.kernels.segments import row_table

PEERS = json.loads((Path(__file__).parent / "peers.json").read_text(encoding="utf-8"))
GOALS_US = {(32, 32, 16): 29.0, (32, 32, 64): 95.0}  # rows, adapters, rank: one layer over the base


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.mean(math.log(max(value, 0.1)) for value in values))


def decode(results: Results, args: Any, bandwidth: float) -> None:
    ratios: dict[str, list[float]] = {}
    for row in PEERS["decode"]:
        point = Point(row["rows"], row["adapters"], row["rank"])
        if point.rows not in args.rows or point.rank not in args.ranks or time.monotonic() > args.deadline:
            continue
        before = len(results.rows)
        measure(results, "8B", point, bandwidth)
        best = {"over": min(row["over_vllm_tuned"], row["over_triton_v2"])}
        best["alone"] = min(row["vllm_tuned"], row["sglang_csgmv"], row["sglang_triton_v2"])
        for found in results.rows[before:]:
            peer = best["alone" if found["part"] == "alone" else "over"]
            ratios.setdefault(found["part"], []).append(found["value"] / peer)
            goal = None if found["part"] == "alone" else GOALS_US.get((point.rows, point.adapters, point.rank))
            what = f"{found['what']}, to the best peer"
            results.add(what, found["value"], "us", goal=goal, ratio=found["value"] / peer, peer_us=peer)
        torch.cuda.empty_cache()
    for part, values in ratios.items():
        mean = geometric_mean(values)
        goal = 0.60 if part.startswith("over") else None
        results.add(f"decode, {part}: geometric mean to the best peer", mean, "x", ratio=mean, ratio_goal=goal)
        results.add(f"decode, {part}: rows behind the best peer", sum(v > 1 for v in values), f"of {len(values)}")


def prefill(results: Results, args: Any, bandwidth: float) -> None:
    ratios = []
    for row in PEERS["prefill"]:
        if row["rank"] not in args.ranks or time.monotonic() > args.deadline:
            continue
        point = Point(row["adapters"], row["adapters"], row["rank"], row["tokens"] // row["adapters"])
        measure(results, "8B", point, bandwidth, over_base=False)
        peer = min(row[name] for name in ("vllm_tuned", "sglang_csgmv", "sglang_triton_v2"))
        ratios.append(results.rows[-1]["value"] / peer)
        results.add(f"{results.rows[-1]['what']}, to the best peer", results.rows[-1]["value"], "us", ratio=ratios[-1])
        torch.cuda.empty_cache()
    if ratios:
        mean = geometric_mean(ratios)
        results.add("prefill: geometric mean to the best peer", mean, "x", ratio=mean, ratio_goal=0.75)
        results.add("prefill: rows behind the best peer", sum(value > 1 for value in ratios), f"of {len(ratios)}")


def mix(results: Results) -> None:
    """Vectors of each site lie in the factors' place: what they hold does not matter here, what is read does."""
    for rows, tokens, rank in ((32, 1, 16), (32, 1, 64), (16, 256, 16)):
        part = rows // 4
        layers = Layers("8B", Point(rows, rows, rank, tokens), "cuda", torch.bfloat16)
        slots = [row if row < 3 * part else -1 for row in range(rows)]
        layers.slots.copy_(torch.tensor([row_table(slots, rows)], dtype=torch.int32))
        op = layers.ops[0][0]
        op.data.view(rows, -1).clamp_(-0.05, 0.05)
        sites = sum(len(op.widths) for ops in layers.ops for op in ops)
        table = op.meta[:, : META * sites].view(rows, sites, META)
        first = table[:, :, 0] // 2  # fp32 elements
        times: dict[str, list[float]] = {"plain": [], "mixed": []}
        for name in [*times] * 3:
            table[..., 3:] = 0
            if name == "mixed":
                table[part : 2 * part, :, 3] = first[part : 2 * part]
                table[2 * part : 3 * part, :, 4] = first[2 * part : 3 * part]
            times[name].append(statistics.median(Graph(functools.partial(layers.run, False, "in place")).times(10)))
        plain, mixed = (min(values) / layers.count for values in times.values())
        what = f"one layer, {rows} rows, {rows * tokens} tokens, r={rank}: LoRA, DoRA, lora_bias and base rows"
        results.add(what, mixed, "us", ratio=mixed / plain, ratio_goal=1.05)
        torch.cuda.empty_cache()


def host(results: Results) -> None:
    layers = Layers("8B", Point(32, 1, 16), "cuda", torch.bfloat16)
    calls = [(op, ys, x) for ops in layers.ops for op, x, ys in zip(ops, layers.x[0], layers.ys[0], strict=True)]
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for op, ys, x in calls:
            op(ys, x, layers.slots, 32)
        times.append((time.perf_counter() - start) / len(calls) * 1e6)
    results.add("host time of one op (two launches), eager", statistics.median(times[3:]), "us", first_us=times[0])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", default=["decode", "prefill", "mix", "host"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels.py needs a CUDA device.")
    args.deadline = time.monotonic() + args.budget_s
    torch.manual_seed(0)
    results = Results("kernels", args.out, args.device)
    found = bandwidths()
    for how, value in found.items():
        results.add(f"device memory, {how}", value / 1e12, "TB/s")
    parts = {
        "decode": lambda: decode(results, args, max(found.values())),
        "prefill": lambda: prefill(results, args, max(found.values())),
        "mix": lambda: mix(results),
        "host": lambda: host(results),
    }
    for part in args.parts:
        parts[part]()
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
