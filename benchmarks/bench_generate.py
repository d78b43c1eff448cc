"""generate() and prefill: the bare model, and the same weights with 0, 1, 8 and 32 adapters in the batch.

Decode is (time of N new tokens - time of 1) / (N - 1), greedy, prompts of 32 tokens. The model is built once and the
bare one shares its weights, so that both are measured in one process, with alternated repetitions. The correctness of
the same shape is checked first; a run that fails it says so and exits with 1.

    python benchmarks/bench_generate.py --static --prefill 4096 8192
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from common import Results, alternate, arguments, median_ratio, milliseconds, synchronize
from correctness import check
from workload import (
    DTYPES,
    adapter_config,
    build_model,
    linear_shapes,
    nbytes,
    prompts,
    random_adapter,
    save_adapter,
    scratch,
    twin,
)

from hf_multilora import enable_multilora

BARE = "bare"
EAGER_GOAL_MS = 35.0  # at 32 distinct adapters on the 8B shape; PEFT: 1099
EAGER_GOALS = {0: 1.01, 1: 1.15, 8: 1.15, 32: 1.15}
STATIC_GOALS = {0: 1.01, 1: 1.05, 8: 1.10, 32: 1.10}
PREFILL_GOALS = {0: 1.01, 16: 1.08}
MORE_ADAPTERS_GOAL = 1.08  # 32 distinct adapters over 1


def ids(rows: int, distinct: int) -> list[str] | None:
    """`distinct` names, one after another over the rows; None: all rows are the base."""
    return [f"a{row % distinct}" for row in range(rows)] if distinct else None


def load_adapters(results: Results, args: Any, model: Any, shapes: dict[str, tuple[int, int]], count: int) -> None:
    """Register a0, a1, ...: the first from a folder, the others from tensors in memory."""
    config = adapter_config(args.rank, 2.0 * args.rank)
    times: list[float] = []
    for number in range(count):
        tensors = random_adapter(shapes, args.rank, number, dtype=DTYPES[args.dtype], device=args.device)
        if number == 0:
            with scratch() as folder:
                save_adapter(folder / "a0", tensors, config)
                model.multilora.load(str(folder / "a0"), "a0")
            continue
        times.append(milliseconds(lambda t=tensors, n=f"a{number}": model.multilora.load(t, n, config=config), "cpu"))
    results.add(
        f"register {nbytes(tensors) / 1e6:.0f} MB from tensors in memory", statistics.median(times), "ms", count=count
    )


def decode_cases(models: Mapping[str, Any], rows: int, counts: list[int], tokens: int, **options: Any) -> dict:
    """Name -> function that measures milliseconds per decode step once."""
    inputs = prompts(models[BARE], rows, 32)

    def case(model: Any, **kwargs: Any) -> Callable[[], float]:
        def run(new: int) -> None:
            model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options, **kwargs)

        def measure() -> float:
            device = str(model.device)
            return (milliseconds(lambda: run(tokens), device) - milliseconds(lambda: run(1), device)) / (tokens - 1)

        return measure

    cases = {BARE: case(models[BARE])}
    for count in counts:
        cases[str(count)] = case(models["ours"], adapter_ids=ids(rows, count))
    return cases


def report(results: Results, what: str, values: dict[str, list[float]], goals: dict[int, float], **extra: Any) -> None:
    """One row per case; ratios are against the bare model of the same repetitions."""
    base = values[BARE]
    goal_ms = extra.pop("goal_ms", {})
    results.add(f"{what}, bare model", statistics.median(base), "ms", all=base, **extra)
    for name, times in values.items():
        if name != BARE:
            results.add(
                f"{what}, {name} adapters" if name != "0" else f"{what}, enabled, none active",
                statistics.median(times),
                "ms",
                goal=goal_ms.get(int(name)),
                ratio=median_ratio(times, base),
                ratio_goal=goals.get(int(name)),
                all=times,
                **extra,
            )
    if "1" in values and "32" in values:
        ratio = median_ratio(values["32"], values["1"])
        results.add(f"{what}, 32 over 1 adapter", ratio, "x", ratio=ratio, ratio_goal=MORE_ADAPTERS_GOAL, **extra)


def bench_decode(results: Results, args: Any, models: dict[str, Any], rows: int, deadline: float) -> None:
    cases = decode_cases(models, rows, args.adapters, args.new_tokens)
    for measure in cases.values():  # compiles kernels, fills the slots
        measure()
    full = args.shape == "8B" and args.layers is None and rows == 32
    values = alternate(cases, args.reps, deadline)
    report(
        results,
        f"eager decode, batch {rows}",
        values,
        EAGER_GOALS,
        rows=rows,
        goal_ms={32: EAGER_GOAL_MS} if full and args.device.startswith("cuda") else {},
    )


def compile_options(device: str) -> dict[str, Any]:
    """generate() compiles by itself on a GPU only; elsewhere it is told to, for smoke runs."""
    from transformers import CompileConfig

    if device.startswith("cuda"):
        return {"cache_implementation": "static"}
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def bench_static(results: Results, args: Any, models: dict[str, Any], rows: int, deadline: float) -> None:
    """The compiled decode step; also how many graphs the changes of mix cost."""
    from torch._dynamo.utils import counters

    cases = decode_cases(models, rows, args.adapters, args.new_tokens, **compile_options(args.device))
    for name in [BARE, *[str(count) for count in sorted(args.adapters, reverse=True)]]:
        before = counters["stats"]["unique_graphs"]
        start = time.perf_counter()
        cases[name]()
        cases[name]()
        print(
            f"static, {name}: warm after {time.perf_counter() - start:.1f} s, "
            f"{counters['stats']['unique_graphs'] - before} graphs",
            flush=True,
        )
        if name == BARE:
            skips = counters["inductor"]["cudagraph_skips"]
        if name == str(max(args.adapters)):
            graphs = counters["stats"]["unique_graphs"]
    allowed = 1 if 0 in args.adapters else 0
    values = alternate(cases, args.reps, deadline)
    report(results, f"static decode, batch {rows}", values, STATIC_GOALS, rows=rows)
    results.add(
        "graphs compiled after the first mix (1: none active)",
        counters["stats"]["unique_graphs"] - graphs,
        "graphs",
        goal=allowed,
    )
    results.add(
        "CUDA graphs skipped by Inductor, beyond the bare model's",
        counters["inductor"]["cudagraph_skips"] - skips,
        "skips",
        goal=0,
    )


@torch.no_grad()
def bench_prefill(results: Results, args: Any, models: dict[str, Any], tokens: int, deadline: float) -> None:
    """One forward over 16 rows, logits of the last position of each."""
    rows = 16
    inputs = prompts(models[BARE], rows, max(1, tokens // rows))

    def case(model: Any, **kwargs: Any) -> Callable[[], float]:
        return lambda: milliseconds(
            lambda: model(**inputs, use_cache=False, logits_to_keep=1, **kwargs), str(model.device)
        )

    cases = {BARE: case(models[BARE])}
    cases |= {str(count): case(models["ours"], adapter_ids=ids(rows, count)) for count in (0, 1, 16)}
    for measure in cases.values():
        measure()
        measure()
    report(results, f"prefill {tokens} tokens", alternate(cases, args.reps + 4, deadline), PREFILL_GOALS, rows=rows)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument(
        "--adapters", type=int, nargs="+", default=[0, 1, 8, 32], help="distinct adapters in the batch"
    )
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument(
        "--static", action="store_true", help="also the compiled static cache (minutes of compilation)"
    )
    parser.add_argument("--prefill", type=int, nargs="*", default=[], metavar="TOKENS", help="also these prefills")
    parser.add_argument("--no-eager", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="skip the correctness check")
    args = parser.parse_args()
    start = time.monotonic()
    deadline = start + args.budget_s
    results = Results("generate", args.out, args.device)
    if not args.no_check:
        check(results, args, rows=32)
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
        print(f"[{time.monotonic() - start:.0f} s] checked", flush=True)

    model = build_model(args.shape, args.device, DTYPES[args.dtype], args.layers)
    shapes = linear_shapes(model)
    models = {BARE: twin(model), "ours": model}
    enable_multilora(model, max_loras=32, max_lora_rank=args.rank)
    load_adapters(results, args, model, shapes, 32)
    synchronize(args.device)
    print(f"[{time.monotonic() - start:.0f} s] ready", flush=True)
    for rows in args.batch:
        if not args.no_eager:
            bench_decode(results, args, models, rows, deadline)
            print(f"[{time.monotonic() - start:.0f} s] eager, batch {rows}", flush=True)
    for tokens in args.prefill:
        bench_prefill(results, args, models, tokens, deadline)
        print(f"[{time.monotonic() - start:.0f} s] prefill {tokens}", flush=True)
    for rows in args.batch:
        if args.static:
            bench_static(results, args, models, rows, deadline)
            print(f"[{time.monotonic() - start:.0f} s] static, batch {rows}", flush=True)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
