"""Kinds of adapters in one batch: 8 rows of LoRA, 8 of DoRA, 8 with lora_bias, 8 of the base.

Against 24 rows of plain LoRA and 8 of the base. Eager decode, every row its own adapter, equal ranks; repetitions
alternate in one process.

    python benchmarks/bench_kinds.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from hf_multilora import enable_multilora
from hf_multilora.bench.measure import alternate, median_ratio, milliseconds
from hf_multilora.bench.results import Results, arguments
from hf_multilora.bench.workload import DTYPES, adapter_config, build_model, linear_shapes, prompts, random_adapter

EACH = 8
GOAL = 1.05


def kinds(model: Any, rank: int, dtype: torch.dtype) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """Name -> (tensors, config) of 24 plain adapters, 8 DoRA ones, and 8 with a bias of B."""
    shapes = linear_shapes(model)
    device = str(model.device)
    made = {}
    for number in range(5 * EACH):
        tensors = random_adapter(shapes, rank, number, dtype=dtype, device=device)
        config = adapter_config(rank, 2 * rank)
        name = f"plain{number}"
        if number >= 4 * EACH:
            name, config["lora_bias"] = f"bias{number}", True
            for path, (_, width) in shapes.items():
                tensors[f"base_model.model.{path}.lora_B.bias"] = torch.randn(width, dtype=dtype) * 0.01
        elif number >= 3 * EACH:
            name, config["use_dora"] = f"dora{number}", True
            for path in shapes:
                norm = model.get_submodule(path).weight.float().norm(dim=1).cpu()
                tensors[f"base_model.model.{path}.lora_magnitude_vector"] = norm * (1 + 0.1 * torch.randn(len(norm)))
        made[name] = (tensors, config)
    return made


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--new-tokens", type=int, default=48)
    args = parser.parse_args()
    started = time.perf_counter()
    results = Results("kinds", args.out, args.device)
    model = build_model(args.shape, args.device, DTYPES[args.dtype], args.layers)
    adapters = kinds(model, args.rank, DTYPES[args.dtype])
    enable_multilora(model, max_loras=len(adapters), max_lora_rank=args.rank)
    times: dict[str, list[float]] = {}
    for name, (tensors, config) in adapters.items():
        ms = milliseconds(lambda n=name, t=tensors, c=config: model.multilora.load(t, n, config=c), "cpu")
        times.setdefault(name.rstrip("0123456789"), []).append(ms)
    for kind, values in times.items():
        results.add(f"load one adapter, {kind}", statistics.median(values), "ms", all=values)
    names = list(adapters)
    base = [None] * EACH
    batches = {
        "24 plain, 8 base": names[: 3 * EACH] + base,
        "8 plain, 8 DoRA, 8 lora_bias, 8 base": names[:EACH] + names[3 * EACH :] + base,
    }
    inputs = prompts(model, 4 * EACH, 32)

    def case(ids: list[str | None]) -> Callable[[], float]:
        def run(new: int) -> None:
            model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, adapter_ids=ids)

        def measure() -> float:
            more = milliseconds(lambda: run(args.new_tokens), args.device)
            return (more - milliseconds(lambda: run(1), args.device)) / (args.new_tokens - 1)

        return measure

    cases = {name: case(ids) for name, ids in batches.items()}
    for measure in cases.values():
        measure()
    measured = alternate(cases, args.reps, started + args.budget_s)
    plain, mixed = measured.values()
    results.add("decode step, 24 plain, 8 base", statistics.median(plain), "ms", all=plain)
    results.add(
        "decode step, 8 plain, 8 DoRA, 8 lora_bias, 8 base",
        statistics.median(mixed),
        "ms",
        ratio=median_ratio(mixed, plain),
        ratio_goal=GOAL,
        all=mixed,
    )
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
