"""Slots and host memory: one adapter's copy into a slot, its load from a warm file, and more adapters than slots.

python benchmarks/bench_memory.py
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import Results, alternate, arguments, median_ratio, milliseconds, synchronize
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
)

from hf_multilora import enable_multilora

SLOTS = 8
COPY_GOAL_MS = 1.7  # 84 MB over a bus of 55 GB/s needs 1.52
LOAD_GOAL_MS = 100.0
LOAD_GOAL_RATIO = 3.0  # over a plain copy of the file's bytes from page cache to pinned memory
LARGE_COPY = 1 << 20


def slot_of(model: Any, name: str) -> int | None:
    return model.multilora.adapters[name].slot


def bring_in(model: Any, name: str, device: str) -> None:
    """Start the copy of an adapter into a slot, and wait for it."""
    model.multilora.prefetch([name])
    synchronize(device)


def bench_copy(results: Results, args: Any, model: Any, names: list[str], size: int) -> None:
    """Bring adapters into full slots; the file's bytes stand for the block's (which has a header more)."""
    device = args.device
    for name in names[:SLOTS]:
        bring_in(model, name, device)
    out = [name for name in names if slot_of(model, name) is None]
    times = []
    for _ in range(args.reps * 2):
        name = out.pop(0)
        times.append(milliseconds(lambda n=name: bring_in(model, n, device), device))
        if slot_of(model, name) is None:
            results.fail(f"prefetch left {name} outside the slots")
        out += [other for other in names if slot_of(model, other) is None and other not in out]
    if not device.startswith("cuda"):
        results.add("bring an adapter into a slot", statistics.median(times), "ms", all=times)
        return
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    plain = [milliseconds(lambda: target.copy_(source, non_blocking=True), device) for _ in range(args.reps * 2)]
    results.add("plain copy of the same bytes, pinned to device", statistics.median(plain), "ms", all=plain)
    full = args.shape == "8B" and args.layers is None
    results.add(
        "bring an adapter into a slot (wall, with eviction)",
        statistics.median(times),
        "ms",
        goal=COPY_GOAL_MS if full else None,
        ratio=median_ratio(times, plain),
        all=times,
    )
    profile_copy(results, model, out[0], full, size)


def profile_copy(results: Results, model: Any, name: str, full: bool, size: int) -> None:
    """Count the copies of one activation and take their time from the profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        bring_in(model, name, str(model.device))
    events = [event for event in prof.events() if event.device_type == DeviceType.CUDA]
    copies = sorted((e.time_range.elapsed_us() for e in events if "memcpy" in e.name.lower()), reverse=True)
    for event in events:
        print(f"  {event.time_range.elapsed_us():10.1f} us  {event.name}")
    if not copies:
        results.fail("the profiler saw no copy")
        return
    # a bus of 64 GB/s moves less than `size / 64` bytes in this time: anything that long is a copy of weights
    large = [time_us for time_us in copies if time_us > LARGE_COPY / 64e3]
    results.add("copies of 1 MB and more for one activation", len(large), "copies", goal=1 if full else None)
    results.add("device operations for one activation", len(events), "ops")
    results.add("slot copy on the device", copies[0] / 1e3, "ms", goal=COPY_GOAL_MS if full else None)
    results.add("slot copy, bandwidth", size / copies[0] / 1e3, "GB/s")


def read_pinned(path: Path, target: torch.Tensor) -> None:
    with path.open("rb", buffering=0) as file:
        view = memoryview(target.numpy())
        while len(view):
            view = view[file.readinto(view) :]


def bench_load(results: Results, args: Any, model: Any, folder: Path, size: int) -> None:
    """From a file in the page cache to registered: into new host memory, and into memory that an unload gave back."""
    path = folder / "adapter_model.safetensors"
    cuda = args.device.startswith("cuda")
    path.read_bytes()
    plain: list[float] = []
    again: list[float] = []
    target = torch.empty(path.stat().st_size, dtype=torch.uint8, pin_memory=cuda)
    read_pinned(path, target)
    allocate = milliseconds(lambda: torch.empty(size + (16 << 20), dtype=torch.uint8, pin_memory=cuda), "cpu")
    handle = model.multilora
    fresh = [milliseconds(lambda n=f"fresh{i}": handle.load(str(folder), n), "cpu") for i in range(5)]
    for i in range(5):
        handle.unload(f"fresh{i}")
    for _ in range(5):
        plain.append(milliseconds(lambda: read_pinned(path, target), "cpu"))
        again.append(milliseconds(lambda: handle.load(str(folder), "again"), "cpu"))
        handle.unload("again")
    full = args.shape == "8B" and args.layers is None
    results.add("plain copy of the file, page cache to pinned", statistics.median(plain), "ms", all=plain)
    results.add("allocation of that much pinned memory, once", allocate, "ms")
    goal, ratio_goal = (LOAD_GOAL_MS, LOAD_GOAL_RATIO) if full and cuda else (None, None)
    base = statistics.median(plain)
    for what, times in (("load from a warm file", fresh), ("load from a warm file, host memory reused", again)):
        middle = statistics.median(times)
        results.add(what, middle, "ms", goal=goal, ratio=middle / base, ratio_goal=ratio_goal, all=times)
    results.add("largest of the loads", max(fresh + again), "ms")


def bench_thrash(results: Results, args: Any, model: Any, names: list[str], deadline: float) -> None:
    """16 adapters over 8 slots: halves in turn, so that each call brings in 8; and all 16 in one batch (two waves)."""
    handle, tokens = model.multilora, 8
    halves = [names[:SLOTS], names[SLOTS : 2 * SLOTS]]
    inputs = prompts(model, SLOTS, 32)
    double = {key: torch.cat([value, value]) for key, value in inputs.items()}

    def generate(batch: dict[str, torch.Tensor], ids: list[str]) -> torch.Tensor:
        return model.generate(**batch, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, adapter_ids=ids)

    expected = [generate(inputs, half) for half in halves]
    turn = 0

    def stay() -> float:
        generate(inputs, halves[turn])
        return milliseconds(lambda: generate(inputs, halves[turn]), args.device)

    def swap() -> float:
        nonlocal turn
        generate(inputs, halves[turn])
        turn = 1 - turn
        result: list[torch.Tensor] = []
        time_ms = milliseconds(lambda: result.append(generate(inputs, halves[turn])), args.device)
        if not torch.equal(result[0], expected[turn]):
            results.fail(f"tokens changed after {SLOTS} adapters were swapped in (half {turn})")
        return time_ms

    def waves() -> float:
        return milliseconds(lambda: generate(double, names[: 2 * SLOTS]), args.device)

    swap(), stay()
    before = handle.status().resident
    values = alternate({"stay": stay, "swap": swap, "waves": waves}, args.reps, deadline)
    after = handle.status().resident
    stayed, swapped = statistics.median(values["stay"]), statistics.median(values["swap"])
    results.add(f"{SLOTS} rows, {tokens} tokens, all resident", stayed, "ms", all=values["stay"])
    results.add(f"{SLOTS} rows, {tokens} tokens, {SLOTS} adapters swapped in", swapped, "ms", ratio=swapped / stayed)
    results.add("added per adapter brought in", (swapped - stayed) / SLOTS, "ms")
    results.add(f"{2 * SLOTS} rows, {2 * SLOTS} adapters, two waves", statistics.median(values["waves"]), "ms")
    results.add("evictions counted meanwhile", after.evictions - before.evictions, "")
    both = generate(double, names[: 2 * SLOTS])
    if not torch.equal(both, torch.cat(expected)):
        results.fail("two waves gave other tokens than the two halves alone")


def main() -> int:
    args = arguments(__doc__).parse_args()
    start = time.monotonic()
    results = Results("memory", args.out, args.device)
    dtype = DTYPES[args.dtype]
    model = build_model(args.shape, args.device, dtype, args.layers)
    shapes = linear_shapes(model)
    enable_multilora(model, max_loras=SLOTS, max_lora_rank=args.rank)
    config = adapter_config(args.rank, 2.0 * args.rank)
    names = [f"a{number}" for number in range(2 * SLOTS)]
    for number, name in enumerate(names):
        tensors = random_adapter(shapes, args.rank, number, dtype=dtype, device=args.device)
        model.multilora.load(tensors, name, config=config)
    print(f"[{time.monotonic() - start:.0f} s] ready; {nbytes(tensors) / 1e6:.1f} MB an adapter", flush=True)
    bench_copy(results, args, model, names, nbytes(tensors))
    with scratch() as folder:
        bench_load(results, args, model, save_adapter(folder / "adapter", tensors, config), nbytes(tensors))
    print(f"[{time.monotonic() - start:.0f} s] loads", flush=True)
    bench_thrash(results, args, model, names, start + args.budget_s)
    print(f"[{time.monotonic() - start:.0f} s] thrash", flush=True)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
