"""Where a step of continuous batching spends its time: host and device, bare and with adapters.

python benchmarks/profile_batching.py [--shape 8B] [--rows 128 32]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hf_multilora import enable_multilora
from hf_multilora.bench.serving import Shape, config_of, greedy, set_attention
from hf_multilora.bench.workload import (
    ALL_LINEAR,
    DTYPES,
    adapter_config,
    build_model,
    linear_shapes,
    random_adapter,
    twin,
)

STEPS, PROFILED, LINES, RANK, ADAPTERS = 12, 2, 8, 16, 32


def steps(model: Any, shape: Shape, names: list[str] | None, label: str) -> None:
    """Run some steps in this thread, then profile two."""
    manager = model.init_continuous_batching(
        generation_config=greedy(shape.new), continuous_batching_config=config_of(shape)
    )
    processor = manager.batch_processor = manager._create_batch_processor()
    for number, prompt in enumerate(shape.prompts(model.config.vocab_size, 1)):
        manager.add_request(prompt, **({} if names is None else {"adapter_id": names[number % len(names)]}))

    def step() -> float:
        start = time.perf_counter()
        processor.prepare_next_batch()
        processor._generation_step(model)
        processor.update_batch()
        return 1e3 * (time.perf_counter() - start)

    print(f"{label}: steps of {', '.join(f'{step():.0f}' for _ in range(STEPS))} ms")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as seen:
        wall = sum(step() for _ in range(PROFILED)) / PROFILED
    for kind, unit in (("CUDA", "self_device_time_total"), ("CPU", "self_cpu_time_total")):
        events = [event for event in seen.key_averages() if str(event.device_type).endswith(kind)]
        total = sum(getattr(event, unit) for event in events) / PROFILED / 1e3
        print(f"  profiled step {wall:.1f} ms, {kind} {total:.1f} ms")
        for event in sorted(events, key=lambda event: -getattr(event, unit))[:LINES]:
            each = getattr(event, unit) / PROFILED / 1e3
            print(f"    {each:8.2f} ms  x{event.count // PROFILED:5d}  {event.key[:90]}")
    manager.batch_processor = None
    if names is not None:
        manager.batching.close()


@torch.no_grad()
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", default="8B" if torch.cuda.is_available() else "tiny")
    options.add_argument("--rows", type=int, nargs="+", default=[128, 32])
    args = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = build_model(args.shape, device, DTYPES["bf16" if device == "cuda" else "fp32"], None)
    set_attention(base, "sdpa")
    small = args.shape == "tiny"
    sizes: tuple[Any, ...] = ((8, 24), 20, 32, 256, 16) if small else ((64, 192), 128, 128, 8192, 256)
    for rows in args.rows:
        steps(twin(base), Shape(min(rows, sizes[2]), *sizes), None, f"bare model, {rows} requests")
    model = enable_multilora(twin(base), max_loras=ADAPTERS, max_lora_rank=RANK)
    shapes = linear_shapes(base)
    for number in range(ADAPTERS):
        tensors = random_adapter(shapes, RANK, number, dtype=base.dtype, device=device)
        model.multilora.load(tensors, f"a{number}", config=adapter_config(RANK, 2.0 * RANK, ALL_LINEAR))
    for rows in args.rows:
        names = [f"a{number}" for number in range(max(1, min(ADAPTERS, rows // 4)))]
        steps(model, Shape(min(rows, sizes[2]), *sizes), names, f"{len(names)} adapters, {rows} requests")


if __name__ == "__main__":
    main()
