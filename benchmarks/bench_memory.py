"""Slots and host memory: one adapter's copy into a slot, loads from files, and more adapters than slots.

python benchmarks/bench_memory.py
python benchmarks/bench_memory.py --only load many
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hf_multilora import disable_multilora, enable_multilora
from hf_multilora.adapters.load import load_plan
from hf_multilora.bench.measure import alternate, median_ratio, milliseconds, synchronize
from hf_multilora.bench.results import Results, arguments
from hf_multilora.bench.workload import (
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
from hf_multilora.generation.waves import Following

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
    for _ in range(max(5, args.reps)):
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
    plans, packs = [], []
    for _ in range(max(5, args.reps)):
        began = time.perf_counter()
        with load_plan(str(folder), handle._survey.table, max_lora_rank=args.rank) as plan:
            plans.append((time.perf_counter() - began) * 1e3)
            packs.append(milliseconds(lambda p=plan: handle.store.pack(p.factors), "cpu"))
    results.add("of a load: names, shapes, config checked", statistics.median(plans), "ms", all=plans)
    results.add("of a load: read, scaled, turned, page-locked", statistics.median(packs), "ms", all=packs)


def drop_cached(path: Path) -> bool:
    """Ask the system to forget the file's pages; whether it did, as far as that can be seen."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            for part in (1, 2, 3):
                os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size * part // 4, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError:  # a file system that cannot say
            return False
    return False


def bench_cold(results: Results, args: Any, model: Any, tensors: Any, config: Any) -> None:
    """The same from a file that is not in the page cache, on the disk of the folder for temporary files."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        print("cold loads: this system cannot drop a file from its page cache", flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = save_adapter(Path(name) / "adapter", tensors, config)
        path = folder / "adapter_model.safetensors"
        target = torch.empty(path.stat().st_size, dtype=torch.uint8, pin_memory=args.device.startswith("cuda"))
        plain, cold = [], []
        for _ in range(5):
            for times, read in (
                (plain, lambda: read_pinned(path, target)),
                (cold, lambda: model.multilora.load(str(folder), "cold")),
            ):
                if not drop_cached(path):
                    print("cold loads: the file stays in the page cache here", flush=True)
                    return
                times.append(milliseconds(read, "cpu"))
            model.multilora.unload("cold")
    results.add("plain read of a cold file into pinned memory", statistics.median(plain), "ms", all=plain)
    results.add("load from a cold file", statistics.median(cold), "ms", ratio=median_ratio(cold, plain), all=cold)


def bench_many(results: Results, args: Any, model: Any, folders: list[Path]) -> None:
    """Eight warm files, one load() after the other and by load_many."""
    handle, count = model.multilora, 8
    sources = {f"many{i}": str(folders[i % len(folders)]) for i in range(count)}

    def one_by_one() -> float:
        def load() -> None:
            for name, source in sources.items():
                handle.load(source, name)

        return unloaded(milliseconds(load, "cpu"))

    def together() -> float:
        return unloaded(milliseconds(lambda: handle.load_many(sources), "cpu"))

    def unloaded(time_ms: float) -> float:
        for name in sources:
            handle.unload(name)
        return time_ms

    one_by_one(), together()
    values = alternate({"one": one_by_one, "many": together}, min(5, args.reps), time.monotonic() + args.budget_s)
    alone = values["one"]
    results.add(f"{count} warm files, one load after the other", statistics.median(alone), "ms", all=alone)
    results.add(
        f"{count} warm files, load_many",
        statistics.median(values["many"]),
        "ms",
        ratio=median_ratio(values["many"], alone),
        all=values["many"],
    )


@contextlib.contextmanager
def not_ahead() -> Iterator[None]:
    """Waves that begin to read and copy what they need when it is their turn."""
    begin = Following.begin
    Following.begin = lambda self, rows: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Following.begin = begin  # type: ignore[method-assign]


def bench_ahead(results: Results, args: Any, model: Any, folders: list[Path], deadline: float) -> None:
    """Slots: 16 adapters, 4 a call, over 8 slots. Host memory: two waves of 8 adapters where 8 blocks are kept."""
    tokens, group = 4, SLOTS // 2
    disable_multilora(model)
    enable_multilora(model, max_loras=SLOTS, max_lora_rank=args.rank, max_cpu_loras=2 * SLOTS)
    names = [f"f{i}" for i in range(2 * SLOTS)]
    sources = {name: str(folders[i % len(folders)]) for i, name in enumerate(names)}

    def generate(ids: list[str]) -> torch.Tensor:
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        return model.generate(**prompts(model, len(ids), 32), **options, adapter_ids=ids)

    model.multilora.load_many(sources)
    groups = [names[i : i + group] for i in range(0, len(names), group)]
    turn = 0

    def stay() -> float:
        generate(groups[0])
        return milliseconds(lambda: generate(groups[0]), args.device)

    def in_turn(ahead: bool) -> float:
        """The mean of a whole round."""
        nonlocal turn
        synchronize(args.device)
        began = time.perf_counter()
        for _ in groups:
            turn = (turn + 1) % len(groups)
            if ahead:
                model.multilora.prefetch(groups[(turn + 1) % len(groups)])
            generate(groups[turn])
        synchronize(args.device)
        return (time.perf_counter() - began) * 1e3 / len(groups)

    cases = {"stay": stay, "late": lambda: in_turn(False), "ahead": lambda: in_turn(True)}
    in_turn(False)
    values = alternate(cases, args.reps, deadline)
    label = f"{group} rows, {tokens} tokens, 16 adapters in turn over {SLOTS} slots"
    stayed = values["stay"]
    results.add(f"{group} rows, {tokens} tokens, all resident", statistics.median(stayed), "ms", all=stayed)
    for case, what in (("late", "copied when named"), ("ahead", "prefetched")):
        ratio = median_ratio(values[case], stayed)
        results.add(f"{label}, {what}", statistics.median(values[case]), "ms", ratio=ratio, all=values[case])

    disable_multilora(model)
    enable_multilora(model, max_loras=SLOTS, max_lora_rank=args.rank, max_cpu_loras=SLOTS)
    model.multilora.load_many(sources)

    def waves(ahead: bool) -> float:
        with contextlib.nullcontext() if ahead else not_ahead():
            return milliseconds(lambda: generate(names), args.device)

    waves(True)
    values = alternate({"ahead": lambda: waves(True), "late": lambda: waves(False)}, args.reps, deadline)
    label = f"{len(names)} rows, two waves, {SLOTS} adapters in host memory"
    results.add(f"{label}, read when named", statistics.median(values["late"]), "ms", all=values["late"])
    ratio = median_ratio(values["ahead"], values["late"])
    results.add(f"{label}, read ahead", statistics.median(values["ahead"]), "ms", ratio=ratio, all=values["ahead"])


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


PARTS = ("copy", "load", "cold", "many", "thrash", "ahead")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    args = parser.parse_args()
    start = time.monotonic()
    results = Results("memory", args.out, args.device)
    dtype = DTYPES[args.dtype]
    model = build_model(args.shape, args.device, dtype, args.layers)
    shapes = linear_shapes(model)
    enable_multilora(model, max_loras=SLOTS, max_lora_rank=args.rank)
    config = adapter_config(args.rank, 2.0 * args.rank)
    names = [f"a{number}" for number in range(2 * SLOTS)]
    several = {"copy", "thrash"}.intersection(args.only)
    for number, name in enumerate(names if several else names[:1]):
        tensors = random_adapter(shapes, args.rank, number, dtype=dtype, device=args.device)
        model.multilora.load(tensors, name, config=config)
    size = nbytes(tensors)
    results.note(f"ready; {size / 1e6:.1f} MB an adapter")
    if "copy" in args.only:
        bench_copy(results, args, model, names, size)
    if "cold" in args.only:
        bench_cold(results, args, model, tensors, config)
    with scratch() as folder:
        folders = [save_adapter(folder / "adapter", tensors, config)]
        if "load" in args.only:
            bench_load(results, args, model, folders[0], size)
            results.note("loads")
        for number in range(1, 4 if {"many", "ahead"}.intersection(args.only) else 1):
            tensors = random_adapter(shapes, args.rank, number, dtype=dtype, device=args.device)
            folders.append(save_adapter(folder / f"adapter{number}", tensors, config))
        if "many" in args.only:
            bench_many(results, args, model, folders)
            results.note("many")
        if "thrash" in args.only:
            bench_thrash(results, args, model, names, start + args.budget_s)
            results.note("thrash")
        if "ahead" in args.only:
            bench_ahead(results, args, model, folders, start + args.budget_s)
            results.note("ahead")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
