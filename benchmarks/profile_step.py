"""Where a decode step's time goes: the device's kernels by name, launches per layer, and the host's functions.

One eager decode step (a plain forward with one new token per row on a filled cache), the bare model beside the enabled
one. The host's cost per wrapper is the difference of the two steps' wall times over the wrapped layers that adapters
touch; it means something where the step is bound by launches, as eager decode is.

    python benchmarks/profile_step.py
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_multilora import enable_multilora
from hf_multilora.bench.measure import alternate, median_ratio, milliseconds, synchronize
from hf_multilora.bench.results import Results, arguments
from hf_multilora.bench.workload import (
    DTYPES,
    adapter_config,
    build_model,
    linear_shapes,
    prompts,
    random_adapter,
    twin,
)


def stepper(model: Any, rows: int, ids: list[str] | None) -> Callable[[], Any]:
    """A function that decodes one token of each row; the ids are given with each call."""
    inputs = prompts(model, rows, 32)
    kwargs = {} if ids is None else {"adapter_ids": ids}
    cache = model(**inputs, use_cache=True, logits_to_keep=1, **kwargs).past_key_values
    token = inputs["input_ids"][:, :1]

    def step() -> Any:
        return model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1, **kwargs)

    return step


def device_profile(step: Callable[[], Any], device: str, count: int) -> dict[str, tuple[float, float]]:
    """Kernel name -> (launches, microseconds) per step."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(count):
            step()
        synchronize(device)
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in prof.events():
        if event.device_type == DeviceType.CUDA:
            total[event.name][0] += 1 / count
            total[event.name][1] += event.time_range.elapsed_us() / count
    return {name: (launches, time_us) for name, (launches, time_us) in total.items()}


def print_kernels(what: str, kernels: dict[str, tuple[float, float]], top: int) -> None:
    launches, busy = (sum(column) for column in zip(*kernels.values(), strict=True))
    print(f"\n{what}: {launches:.0f} launches, {busy / 1e3:.3f} ms busy in a step")
    for name, (count, time_us) in sorted(kernels.items(), key=lambda item: -item[1][1])[:top]:
        print(f"  {count:7.1f} x {time_us / count:8.2f} us = {time_us:9.1f} us  {name[:90]}")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--top", type=int, default=18, help="lines of each table")
    args = parser.parse_args()
    start = time.monotonic()
    results = Results("profile", args.out, args.device)
    model = build_model(args.shape, args.device, DTYPES[args.dtype], args.layers)
    layers = model.config.num_hidden_layers
    shapes = linear_shapes(model)
    bare = twin(model)
    enable_multilora(model, max_loras=args.adapters, max_lora_rank=args.rank)
    for number in range(args.adapters):
        tensors = random_adapter(shapes, args.rank, number, dtype=DTYPES[args.dtype], device=args.device)
        model.multilora.load(tensors, f"a{number}", config=adapter_config(args.rank, 2.0 * args.rank))
    print(f"[{time.monotonic() - start:.0f} s] ready", flush=True)
    mixed = [f"a{row % args.adapters}" for row in range(args.batch)]
    with torch.no_grad():
        bare_step = stepper(bare, args.batch, None)
        none_step = stepper(model, args.batch, None)
        mixed_step = stepper(model, args.batch, mixed)
        with model.multilora.use(mixed):
            inner_step = stepper(model, args.batch, None)

        def wall(step: Callable[[], Any]) -> Callable[[], float]:
            def measure() -> float:
                return milliseconds(lambda: [step() for _ in range(args.steps)], args.device) / args.steps

            return measure

        def inside() -> float:
            with model.multilora.use(mixed):
                return wall(inner_step)()

        cases = {
            "bare": wall(bare_step),
            "enabled, none active": wall(none_step),
            "mixed": wall(mixed_step),
            "mixed, ids named once": inside,
        }
        for measure in cases.values():
            measure()
        values = alternate(cases, args.reps, start + args.budget_s)
        base = statistics.median(values["bare"])
        for name, times in values.items():
            middle = statistics.median(times)
            results.add(f"forward of one token, {name}", middle, "ms", ratio=median_ratio(times, values["bare"]))
            if name != "bare":
                results.add(f"host time added per wrapped layer, {name}", (middle - base) / len(shapes) * 1e3, "us")

        if args.device.startswith("cuda"):
            tables = {}
            for name, step in (("bare", bare_step), ("none active", none_step), ("mixed", mixed_step)):
                tables[name] = device_profile(step, args.device, 3)
                print_kernels(name, tables[name], args.top)
            launches = {name: sum(count for count, _ in table.values()) for name, table in tables.items()}
            busy = {name: sum(time_us for _, time_us in table.values()) for name, table in tables.items()}
            for name in ("none active", "mixed"):
                results.add(f"launches added per layer, {name}", (launches[name] - launches["bare"]) / layers, "")
                results.add(f"device time added per step, {name}", (busy[name] - busy["bare"]) / 1e3, "ms")

        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(args.steps):
            mixed_step()
        profiler.disable()
        synchronize(args.device)
    listing = Path(args.out) / "profile_step_host.txt"
    with listing.open("w", encoding="utf-8") as file:
        stats = pstats.Stats(profiler, stream=file).strip_dirs()
        stats.sort_stats("tottime").print_stats(60)
        stats.sort_stats("cumtime").print_stats("hf_multilora|ops|linear|routing|mixin|store|base", 40)
    print(f"\nhost, {args.steps} steps of the mixed batch (cProfile roughly doubles small calls; all in {listing}):")
    pstats.Stats(profiler, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(args.top)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
