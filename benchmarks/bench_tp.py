"""Tensor parallelism over two GPUs: decode steps with adapters beside the bare model's, which is split alike.

    torchrun --nproc-per-node 2 benchmarks/bench_tp.py

Both models are read from one checkpoint of random weights. Each path of generate() is timed with the bare model, the
enabled one without adapters, and with an adapter for each row; repetitions alternate, on all ranks in the same order.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

from hf_multilora.api import enable_multilora
from hf_multilora.bench.measure import alternate, median_ratio, milliseconds
from hf_multilora.bench.results import Results, arguments
from hf_multilora.bench.workload import (
    ALL_LINEAR,
    DTYPES,
    adapter_config,
    build_model,
    linear_shapes,
    prompts,
    random_adapter,
)

GOAL = 1.15
PROMPT = 32


def step_ms(model: Any, inputs: dict[str, torch.Tensor], new: int, device: str, **kwargs: Any) -> float:
    """Milliseconds of a decode step."""

    def generate(count: int) -> Any:
        given = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        return model.generate(**inputs, **given, **kwargs)

    one = milliseconds(lambda: generate(1), device)
    return (milliseconds(lambda: generate(1 + new), device) - one) / new


def main() -> int:
    options = arguments(__doc__ or "")
    options.set_defaults(layers=8, reps=5)
    options.add_argument("--rows", type=int, default=32)
    options.add_argument("--new-tokens", type=int, default=24)
    options.add_argument("--paths", nargs="+", default=["eager", "static"], choices=["eager", "static"])
    args = options.parse_args()
    rank, cuda = int(os.environ["RANK"]), args.device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo")
    device = f"cuda:{rank}" if cuda else "cpu"
    place = Path(tempfile.gettempdir(), "bench_tp_model")
    if rank == 0:
        build_model(args.shape, device, DTYPES[args.dtype], args.layers).save_pretrained(place)
        if cuda:
            torch.cuda.empty_cache()
    dist.barrier()
    results = Results(
        "tp", args.out if rank == 0 else tempfile.mkdtemp(), args.device, print if rank == 0 else _silent
    )
    results.settings(**vars(args), ranks=dist.get_world_size())

    def split() -> Any:
        config = DistributedConfig(tp_size=dist.get_world_size())
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            place, dtype=DTYPES[args.dtype], distributed_config=config
        )
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model.eval().requires_grad_(False)

    bare, shared = split(), split()
    shapes = linear_shapes(bare)
    shared = enable_multilora(shared, max_loras=args.rows, max_lora_rank=args.rank)
    for number in range(args.rows):
        tensors = random_adapter(shapes, args.rank, number, dtype=DTYPES[args.dtype], device=device)
        shared.multilora.load(tensors, f"a{number}", config=adapter_config(args.rank, 2.0 * args.rank, ALL_LINEAR))
    results.note(f"{args.rows} adapters, {shared.multilora.status().slot_bytes / 1e6:.0f} MB a slot on each rank")
    inputs = prompts(bare, args.rows, PROMPT)
    ids = [f"a{number}" for number in range(args.rows)]
    for path in args.paths:
        more = {"cache_implementation": "static"} if path == "static" else {}
        cases = {
            "bare": functools.partial(step_ms, bare, inputs, args.new_tokens, args.device, **more),
            "enabled, none active": functools.partial(step_ms, shared, inputs, args.new_tokens, args.device, **more),
            f"{args.rows} adapters": functools.partial(
                step_ms, shared, inputs, args.new_tokens, args.device, adapter_ids=ids, **more
            ),
        }
        for label, case in cases.items():
            results.note(f"{path}, {label}: {case():.2f} ms a step to warm up")
            case()
        times = alternate(cases, args.reps, float("inf"))
        for label, values in times.items():
            ratio = median_ratio(values, times["bare"])
            goal = GOAL if cuda and "adapters" in label else None
            results.add(
                f"{path} decode over {dist.get_world_size()} ranks, {label}", sorted(values)[len(values) // 2], "ms",
                all=values, ratio=ratio, ratio_goal=goal, rows=args.rows,
            )  # fmt: skip
    with torch.no_grad():
        plain = bare(**inputs).logits
        same = torch.equal(shared(**inputs).logits, plain)
        other = (shared(**inputs, adapter_ids=ids).logits - plain).float().norm() / plain.float().norm()
    if not same or not float(other) > 0.05:
        results.fail(f"base logits the same: {same}; adapters change them by {float(other):.3f}")
    if rank == 0:
        shutil.rmtree(place, ignore_errors=True)
    return results.finish() if rank == 0 else 0


def _silent(*args: Any) -> None:
    """Other ranks say nothing."""


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # captured graphs hold the process group
