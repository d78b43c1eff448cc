"""Tensor parallelism over two GPUs: decode steps with adapters beside the bare model's, which is split alike, and
prefill with fully sharded adapters beside those that are split as the base is.

    torchrun --nproc-per-node 2 benchmarks/bench_tp.py
    torchrun --nproc-per-node 2 benchmarks/bench_tp.py --paths prefill

All models are read from one checkpoint of random weights. Each path of generate() is timed with the bare model, the
enabled one without adapters, and with an adapter for each row; repetitions alternate, on all ranks in the same order.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
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


def enabled(model: Any, rows: int, rank: int, dtype: torch.dtype, device: str, **options: Any) -> Any:
    """The model with an adapter for each row, "a0" and so on."""
    shapes = linear_shapes(model)
    model = enable_multilora(model, max_loras=rows, max_lora_rank=rank, **options)
    for number in range(rows):
        tensors = random_adapter(shapes, rank, number, dtype=dtype, device=device)
        model.multilora.load(tensors, f"a{number}", config=adapter_config(rank, 2.0 * rank, ALL_LINEAR))
    return model


@torch.no_grad()
def prefill(args: Any, split: Callable[[], Any], results: Results, device: str) -> None:
    """One forward over long prompts with an adapter for each row, in both ways of splitting adapters."""
    rows, rank = args.prefill_rows, args.prefill_rank
    models = {"bare": split()}
    for label, fully in (("default", False), ("fully sharded", True)):
        options = {"fully_sharded_loras": fully}
        models[label] = enabled(split(), rows, rank, DTYPES[args.dtype], device, **options)
        slot = models[label].multilora.status().slot_bytes
        results.add(f"slot of one rank, {label}, r={rank}", slot / 1e6, "MB", rank=rank)
    inputs = prompts(models["bare"], rows, args.prefill_tokens // rows)
    given = {label: {} if label == "bare" else {"adapter_ids": [f"a{i}" for i in range(rows)]} for label in models}

    def forward(label: str) -> torch.Tensor:
        logits: torch.Tensor = models[label](**inputs, use_cache=False, logits_to_keep=1, **given[label]).logits
        return logits.float()

    cases = {
        label: functools.partial(milliseconds, functools.partial(forward, label), args.device) for label in models
    }
    found = {label: [forward(label), forward(label)][1] for label in models}  # twice, to warm up
    for label, values in alternate(cases, args.reps, float("inf")).items():
        if label == "default":
            default = values
        against = median_ratio(values, default) if label == "fully sharded" else None
        results.add(
            f"prefill {args.prefill_tokens} tokens over {dist.get_world_size()} ranks, {label}, r={rank}",
            sorted(values)[len(values) // 2], "ms", all=values, ratio=against, rows=rows, rank=rank,
        )  # fmt: skip
    size = found["default"].norm()
    apart = float((found["fully sharded"] - found["default"]).norm() / size)
    told = float((found["default"] - found["bare"]).norm() / size)
    # In bf16, 32 layers of random weights make some percent of what is rounded differently in the first.
    if not (apart < (1e-5 if args.dtype == "fp32" else 0.1 * told) and told > 0.05):
        results.fail(f"prefill: the ways differ by {apart:.2e}, and adapters change logits by {told:.2e}")


def main() -> int:
    options = arguments(__doc__ or "")
    options.set_defaults(reps=5)
    options.add_argument("--rows", type=int, default=32)
    options.add_argument("--new-tokens", type=int, default=64)
    ways = ["eager", "static", "prefill"]
    options.add_argument("--paths", nargs="+", default=ways, choices=ways, help="decode steps of two kinds; prefill")
    options.add_argument("--prefill-tokens", type=int, default=4096, help="of all rows together")
    options.add_argument("--prefill-rows", type=int, default=4)
    options.add_argument("--prefill-rank", type=int, default=64)
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

    if "prefill" in args.paths:
        prefill(args, split, results, device)
    decode_paths = [path for path in args.paths if path != "prefill"]
    if decode_paths:
        decode(args, decode_paths, split, results, device)
    if rank == 0:
        shutil.rmtree(place, ignore_errors=True)
    return results.finish() if rank == 0 else 0


def decode(args: Any, paths: list[str], split: Callable[[], Any], results: Results, device: str) -> None:
    """Steps of generate(): of the bare model, and of the enabled one without adapters and with one for each row."""
    bare, cuda = split(), args.device.startswith("cuda")
    shared = enabled(split(), args.rows, args.rank, DTYPES[args.dtype], device)
    results.note(f"{args.rows} adapters, {shared.multilora.status().slot_bytes / 1e6:.0f} MB a slot on each rank")
    inputs = prompts(bare, args.rows, PROMPT)
    ids = [f"a{number}" for number in range(args.rows)]
    for path in paths:
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


def _silent(*args: Any) -> None:
    """Other ranks say nothing."""


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # captured graphs hold the process group
