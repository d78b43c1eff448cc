"""Thousands of small requests through one manager: what memory grows with them, and what outlives the manager.

Adapters are drawn evenly from many more than there are slots, prompts share prefixes, and some requests are cancelled.
Memory is looked at whenever the manager has nothing to do. The bare model's manager can be put to the same, to tell
whose the growth is.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import os
import random
import statistics
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..api import enable_multilora
from .registered import RANK, Pool
from .results import Results
from .serving import Shape, Side, StuckError, set_attention
from .workload import DTYPES, adapter_config, build_model, linear_shapes, twin

SLOTS = 8
PREFIX, PREFIXES = 16, 4  # tokens, and how many prefixes there are
PROMPT, NEW = (16, 48), (8, 24)
ROWS, WINDOW = 64, 256  # requests in one batch, and under way in all
BLOCK = 16
CANCEL_EVERY = 30
HOST_GOAL_MB = 1.0  # growth per 1000 requests
CACHE_MB = 16  # less than a manager's cache: what grew to the largest batch so far may stay


@dataclass
class Look:
    """Memory when nothing runs."""

    served: int
    seconds: float
    host_mb: float
    objects: int
    allocated: int
    reserved: int


def run_soak(results: Results, args: argparse.Namespace) -> None:
    dtype = DTYPES[args.dtype]
    shape = "tiny" if args.shape == "tiny" else "small"
    base = build_model(shape, args.device, dtype, args.layers)
    set_attention(base, args.attention)
    bare = twin(base)
    model = enable_multilora(base, max_loras=SLOTS, max_lora_rank=RANK)
    shapes = linear_shapes(bare)
    pool = Pool(shapes, args.soak_adapters, dtype)
    config = adapter_config(RANK, 2.0 * RANK, sorted({path.rpartition(".")[2] for path in shapes}))
    for number in range(args.soak_adapters):
        model.multilora.load(pool[number], f"a{number}", config=config)
    results.note(f"soak: {args.soak_adapters} adapters over {SLOTS} slots")
    options = {"fairness": args.fairness, "patience": args.patience}
    sides: list[tuple[str, Any, dict[str, Any]]] = [("", model, options)]
    if args.soak_bare:
        sides.append((", bare model", bare, {}))
    for label, one, given in sides:
        soak(results, args, label, one, given)


def soak(results: Results, args: argparse.Namespace, label: str, model: Any, options: dict[str, Any]) -> None:
    traffic = Traffic(args.soak_adapters if options else 0, model.config.vocab_size)
    session(results, model, options, traffic, args.soak_every, args.soak_every)  # one comes and goes before
    before = device_bytes(args.device)
    looks, refs, counted = session(results, model, options, traffic, args.soak_requests, args.soak_every)
    after = device_bytes(args.device)
    steady = looks[1:] if len(looks) > 2 else looks  # the first thousand is the warm-up
    seconds = looks[-1].seconds - looks[0].seconds
    each = seconds / max(1, looks[-1].served - looks[0].served)
    conditions = {
        "part": "soak",
        "requests": looks[-1].served,
        "adapters": args.soak_adapters,
        "slots": SLOTS,
        "counted": counted,
    }
    title = f"soak{label}"
    results.add(f"{title}, requests a second", 1 / each if each else 0.0, "1/s", **conditions)
    host = growth(steady, "host_mb")
    looked = [vars(look) for look in looks]
    results.add(
        f"{title}, host memory per 1000 requests", host, "MB", goal=HOST_GOAL_MB, first=steady[0].host_mb, looks=looked
    )
    results.add(f"{title}, Python objects per 1000 requests", growth(steady, "objects"), "")
    results.add(f"{title}, device memory per 1000 requests", growth(steady, "allocated") / 1e6, "MB", goal=0.0)
    alive = [name for name, ref in refs.items() if ref() is not None]
    results.add(f"{title}, objects that outlive the manager", len(alive), "", goal=0, alive=alive)
    results.add(f"{title}, device memory that outlives the manager", (after - before) / 1e6, "MB", goal=0.0)
    if not options:
        return
    if counted["failed"] or counted["requests"] != counted["finished"] + counted["cancelled"]:
        results.fail(f"{title}: counts {counted}")
    if alive:
        results.fail(f"{title}: {', '.join(alive)} outlive the manager")
    if after - before > CACHE_MB * 1e6:
        results.fail(f"{title}: {(after - before) / 1e6:.1f} MB of device memory outlive the manager")


class Traffic:
    """Requests one after another: (prompt, adapter or None, new tokens)."""

    def __init__(self, adapters: int, vocabulary: int, seed: int = 0) -> None:
        self.adapters, self.vocabulary = adapters, vocabulary
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(PREFIX) for _ in range(PREFIXES)]

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(3, self.vocabulary), k=count)

    def __next__(self) -> tuple[list[int], str | None, int]:
        draw = self._random
        prompt = draw.choice(self._prefixes) + self._tokens(draw.randint(*PROMPT) - PREFIX)
        return prompt, f"a{draw.randrange(self.adapters)}" if self.adapters else None, draw.randint(*NEW)


def session(
    results: Results, model: Any, options: dict[str, Any], traffic: Traffic, requests: int, every: int
) -> tuple[list[Look], dict[str, weakref.ref[Any]], dict[str, float]]:
    """Serve so many requests through one manager: memory after each `every`, references that should die, counters."""
    shape = Shape(requests, PROMPT, NEW[1], ROWS, ROWS * PROMPT[1], BLOCK)
    looks: list[Look] = []
    start = time.perf_counter()
    with Side(model, shape, **options) as side:
        while not looks or looks[-1].served < requests:
            count = min(every, requests - (looks[-1].served if looks else 0))
            serve(side, traffic, count)
            idle(side)
            looks.append(look(count + (looks[-1].served if looks else 0), start, model.device))
            if requests > every:
                results.note(f"{looks[-1].served} requests, {looks[-1].host_mb:.0f} MB")
        counted = side.counted()
        manager = side.manager
        kept = {"manager": manager, "batch processor": manager.batch_processor, "cache": manager.batch_processor.cache}
        refs = {name: weakref.ref(one) for name, one in kept.items()}
        del manager, kept
    del side
    gc.collect()
    return looks, refs, counted


def serve(side: Side, traffic: Traffic, count: int) -> None:
    """Keep WINDOW requests under way until `count` are done or cancelled."""
    left: set[str] = set()
    asked: dict[str, int] = {}
    for number in range(count):
        while len(left) >= WINDOW:
            receive(side, left, asked)
        prompt, name, new = next(traffic)
        given = {} if name is None else {"adapter_id": name}
        request = side.manager.add_request(prompt, max_new_tokens=new, **given)
        left.add(request)
        asked[request] = new
        if number % CANCEL_EVERY == CANCEL_EVERY - 1:
            # in turn one that waits and one that runs, or is done by now
            gone = request if number % (2 * CANCEL_EVERY) < CANCEL_EVERY else next(iter(asked))
            side.manager.cancel_request(gone)
            left.remove(gone)
            del asked[gone]
    while left:
        receive(side, left, asked)


def receive(side: Side, left: set[str], asked: dict[str, int]) -> None:
    request, tokens = side.next_result(left)
    left.discard(request)
    if len(tokens) != (new := asked.pop(request)):
        raise StuckError(f"request {request} has {len(tokens)} new tokens instead of {new}")


def idle(side: Side) -> None:
    """Wait until nothing waits or runs: what was cancelled leaves after the last result."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        scheduler = side.manager.batch_processor.scheduler
        queues = (scheduler.active_requests, scheduler.waiting_requests)
        if not any(queues) and side.manager.input_queue.empty() and side.manager.cancel_queue.empty():
            time.sleep(0.2)  # the step that gave the last result may still hold its tensors
            return
        time.sleep(0.02)
    raise StuckError("requests stay in the scheduler after all results are there")


def look(served: int, start: float, device: torch.device) -> Look:
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed counts until it is given back
    host = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    seconds = time.perf_counter() - start
    cuda = device.type == "cuda"
    allocated = torch.cuda.memory_allocated(device) if cuda else 0
    reserved = torch.cuda.memory_reserved(device) if cuda else 0
    return Look(served, seconds, host, len(gc.get_objects()), allocated, reserved)


def device_bytes(device: str) -> int:
    """Allocated bytes, without cuBLAS's workspaces, of which each new stream of a manager brings another."""
    if not device.startswith("cuda"):
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def growth(looks: Sequence[Look], what: str) -> float:
    """Per 1000 requests: the median of the slopes between any two looks, which one odd look does not move."""
    pairs = itertools.combinations(looks, 2)
    slopes = [1000 * (getattr(b, what) - getattr(a, what)) / (b.served - a.served) for a, b in pairs]
    return statistics.median(slopes) if slopes else 0.0
