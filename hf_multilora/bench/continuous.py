"""Continuous batching: new tokens a second with adapters, beside the bare model under transformers' own manager.

    base        the bare model
    slots32     enabled with 32 slots: requests without adapters, and for 32 of them in turn
    slots8      enabled with 8 slots: the same 32 adapters; the bare model again, with as many requests in a batch
                as 8 of the adapters have
    registered  2000 adapters of r=8 on q and v, 32 slots, adapters of requests drawn by Zipf's law
    graphs      as slots32, with use_cuda_graph
    soak        thousands of small requests for more adapters than slots: what memory grows, what stays behind

Sides that are compared share weights, the size of their caches, prompts and the order of requests; each keeps its own
manager, and repetitions alternate. A time is that from the first `add_request` to the last result.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import transformers

from ..api import enable_multilora
from . import registered
from .measure import Counter, alternate, median_ratio
from .results import Results, arguments
from .serving import Names, Served, Shape, Side, StuckError, alike, free_device, set_attention
from .soak import run_soak
from .workload import ALL_LINEAR, DTYPES, adapter_config, build_model, linear_shapes, random_adapter, twin

PARTS = ("base", "slots32", "slots8", "registered", "graphs", "soak")
SLOTS, FEW_SLOTS = 32, 8
GOALS = {"slots32": 0.90, "slots8": 0.80, "registered": 0.75}  # throughput, of the bare model's
WARM_TOKENS = 4
MASK_ELEMENTS = 1 << 30
SIZES: dict[str, dict[str, Any]] = {
    "8B": dict(
        requests=128, prompt=[64, 192], new_tokens=128, rows=128, batch_tokens=8192, block=256, registered=2000,
        zipf_requests=256, soak_requests=10_000, soak_every=1000, soak_adapters=200,
    ),
    "tiny": dict(
        requests=64, prompt=[8, 24], new_tokens=6, rows=32, batch_tokens=256, block=16, registered=100,
        zipf_requests=64, soak_requests=500, soak_every=100, soak_adapters=20,
    ),
}  # fmt: skip


@dataclass
class Case:
    """Requests of one kind on one side."""

    label: str
    side: Side
    names: Names = None
    part: str = "base"
    served: list[Served] = field(default_factory=list)
    captured: list[int] = field(default_factory=list)

    def serve(self, counter: Counter) -> float:
        """Milliseconds per new token. Repetition n has the same prompts on every side."""
        prompts = self.side.shape.prompts(self.side.model.config.vocab_size, seed=1 + len(self.served))
        before = counter.now()
        self.served.append(self.side.serve(prompts, self.names))
        self.captured.append(counter.now().since(before).captured)
        return 1e3 * self.served[-1].seconds / self.served[-1].tokens

    def warm_up(self) -> None:
        """All prompts and a few tokens; where graphs are captured, all tokens, for a graph belongs to a size."""
        prompts = self.side.shape.prompts(self.side.model.config.vocab_size, seed=0)
        self.side.serve(prompts, self.names, None if self.side.shape.graphs else WARM_TOKENS)


class Bench:
    """One run: the bare model, which all sides are twins of, and what is asked of them."""

    def __init__(self, args: argparse.Namespace, results: Results) -> None:
        self.args, self.results, self.counter = args, results, Counter()
        self.dtype = DTYPES[args.dtype]
        self.base = build_model(args.shape, args.device, self.dtype, args.layers)
        set_attention(self.base, args.attention)
        self.shape = Shape(
            args.requests, tuple(args.prompt), args.new_tokens, args.rows, args.batch_tokens, args.block
        )
        self.options = {"fairness": args.fairness, "patience": args.patience}
        results.note("the model is there")

    @property
    def full(self) -> bool:
        """Whether the goals mean anything here."""
        args = self.args
        return args.device.startswith("cuda") and args.shape == "8B" and args.layers is None

    @functools.cached_property
    def adapters(self) -> list[dict[str, Any]]:
        args, shapes = self.args, linear_shapes(self.base)
        return [
            random_adapter(shapes, args.rank, number, dtype=self.dtype, device=args.device) for number in range(SLOTS)
        ]

    def enabled(self, slots: int) -> Any:
        """The model with `slots` slots and 32 adapters."""
        rank = self.args.rank
        model = enable_multilora(twin(self.base), max_loras=slots, max_lora_rank=rank)
        for number, tensors in enumerate(self.adapters):
            model.multilora.load(tensors, f"a{number}", config=adapter_config(rank, 2.0 * rank, ALL_LINEAR))
        self.results.note(f"{slots} slots, {SLOTS} adapters")
        return model

    def names(self, requests: int) -> list[str]:
        return [f"a{number % SLOTS}" for number in range(requests)]

    def slots(self, parts: Sequence[str], deadline: float) -> None:
        with ExitStack() as open_sides:
            cases = [Case("bare model", open_sides.enter_context(Side(twin(self.base), self.shape)))]
            names = self.names(self.shape.requests)
            if "slots32" in parts:
                side = open_sides.enter_context(Side(self.enabled(SLOTS), self.shape, **self.options))
                cases.append(Case(f"{SLOTS} slots, no adapters", side, None, "slots32"))
                cases.append(Case(f"{SLOTS} slots, {SLOTS} adapters", side, names, "slots32"))
            if "slots8" in parts:
                side = open_sides.enter_context(Side(self.enabled(FEW_SLOTS), self.shape, **self.options))
                cases.append(Case(f"{FEW_SLOTS} slots, {SLOTS} adapters", side, names, "slots8"))
                rows = min(self.shape.rows, FEW_SLOTS * -(-self.shape.requests // SLOTS))
                few = replace(self.shape, rows=rows)
                side = open_sides.enter_context(Side(twin(self.base), few))
                cases.append(Case(f"bare model, {rows} requests at once", side, None, "slots8"))
            self.measure(cases, deadline)

    def graphs(self, deadline: float) -> None:
        shape = replace(self.shape, graphs=True)
        with ExitStack() as open_sides:
            bare = open_sides.enter_context(Side(twin(self.base), shape))
            ours = open_sides.enter_context(Side(self.enabled(SLOTS), shape, **self.options))
            names = self.names(shape.requests)
            cases = [
                Case("bare model, graphs", bare, None, "graphs"),
                Case(f"{SLOTS} slots, no adapters, graphs", ours, None, "graphs"),
                Case(f"{SLOTS} slots, {SLOTS} adapters, graphs", ours, names, "graphs"),
            ]
            self.measure(cases, deadline)

    def registered(self, deadline: float) -> None:
        args, results = self.args, self.results
        count, targets = args.registered, registered.TARGETS
        pool = registered.Pool(linear_shapes(self.base, targets), count, self.dtype)
        need = int(registered.HEADROOM * pool.elements * self.dtype.itemsize * count)
        if need > (free := registered.available_bytes()):
            results.fail(f"{count} adapters need {need / 1e9:.1f} GB of host memory; {free / 1e9:.1f} are free")
            return
        model = enable_multilora(
            twin(self.base), max_loras=SLOTS, max_lora_rank=registered.RANK, target_modules=list(targets)
        )
        config = adapter_config(registered.RANK, 2.0 * registered.RANK, targets)
        for number in range(count):
            model.multilora.load(pool[number], f"a{number}", config=config)
        results.note(f"{count} adapters are registered")
        shape = replace(self.shape, requests=args.zipf_requests)
        weights = list(itertools.accumulate(1 / rank for rank in range(1, count + 1)))
        drawn = random.Random(0).choices(range(count), cum_weights=weights, k=shape.requests)
        names = [f"a{number}" for number in drawn]
        label = f"{count} registered, {SLOTS} slots, {len(set(drawn))} adapters by Zipf"
        with Side(twin(self.base), shape) as bare, Side(model, shape, **self.options) as ours:
            cases = [
                Case(f"bare model, {shape.requests} requests", bare, None, "registered"),
                Case(label, ours, names, "registered"),
            ]
            self.measure(cases, deadline)

    def measure(self, cases: Sequence[Case], deadline: float) -> None:
        for case in cases:
            case.warm_up()
        self.results.note(f"{len(cases)} cases are warm")
        with self.counter.counting():
            values = alternate(
                {case.label: functools.partial(case.serve, self.counter) for case in cases}, self.args.reps, deadline
            )
        self.results.note(f"{len(values[cases[0].label])} repetitions")
        for case in cases:
            self.report(case, values[case.label], cases[0], values[cases[0].label])
            self.check(case, cases[0])

    def report(self, case: Case, times: list[float], bare: Case, bare_times: list[float]) -> None:
        """A line for the throughput; one for its ratio to the bare model's, as the time of a token."""
        served, shape = case.served, case.side.shape
        steps = sum(one.steps for one in served)
        first, whole = alike(served[0].outputs, bare.served[0].outputs)
        ratio = median_ratio(times, bare_times)
        conditions: dict[str, Any] = {
            "part": case.part, "requests": shape.requests, "new_tokens": shape.new,
            "prompt_tokens": list(shape.prompt), "rows": shape.rows, "batch_tokens": shape.batch_tokens,
            "blocks": shape.blocks, "block": shape.block, "attention": self.args.attention,
            "adapters": len(set(case.names)) if case.names else 0, "of_bare": 1 / ratio,
            "steps": steps / len(served), "tokens_a_step": sum(one.tokens for one in served) / steps,
            "step_ms": 1e3 * sum(one.seconds for one in served) / steps,
            "step_parts_ms": {part: 1e3 * sum(one.split[part] for one in served) / steps for part in served[0].split},
            "counted": {name: statistics.mean(one.status[name] for one in served) for name in served[0].status},
            "longest": case.side.longest_wait(), "captured": case.captured,
            "first_tokens_of_bare": first, "all_tokens_of_bare": whole,
        }  # fmt: skip
        rates = [1e3 / one for one in times]
        name = f"throughput, {case.label}"
        self.results.add(name, statistics.median(rates), "tokens/s", all=rates, **conditions)
        if case is not bare:
            goal = 1 / GOALS[case.part] if self.full and case.names and case.part in GOALS else None
            self.results.add(
                f"time of a token, {case.label}", ratio, "x", ratio=ratio, ratio_goal=goal, part=case.part
            )

    def check(self, case: Case, bare: Case) -> None:
        """Adapters change what is generated, enabling alone does not; and nothing is lost on the way."""
        first, whole = alike(case.served[0].outputs, bare.served[0].outputs)
        if case.names and case.part != "registered" and first > 0.5:
            self.results.fail(f"{case.label}: {first:.0%} of the first tokens are the bare model's")
        # In 16 bits a sum's order, and so the batch's shape, decides between near ties.
        if case.served[0].status and not case.names and (first < 0.9 or (self.args.dtype == "fp32" and whole < 1)):
            self.results.fail(
                f"{case.label}: {first:.0%} of the first tokens, {whole:.0%} of all are the bare model's"
            )
        for one in case.served:
            if one.status and one.status["finished"] != len(one.outputs):
                self.results.fail(f"{case.label}: counts {one.status['finished']:.0f} of {len(one.outputs)} requests")


def parser() -> argparse.ArgumentParser:
    sizes = "\n".join(f"{shape}: {json.dumps(given)}" for shape, given in SIZES.items())
    options = arguments(f"{__doc__}\nWhat is not given depends on the shape:\n{sizes}")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.set_defaults(reps=3, budget_s=480)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:4]))
    options.add_argument("--requests", type=int)
    options.add_argument("--prompt", type=int, nargs=2, help="least and most tokens of a prompt")
    options.add_argument("--new-tokens", type=int)
    options.add_argument("--rows", type=int, help="requests in one batch, at most")
    options.add_argument("--batch-tokens", type=int, help="tokens in one batch, at most")
    options.add_argument("--block", type=int, help="tokens of a block of the cache")
    options.add_argument("--attention", default="sdpa", help="as attn_implementation has it (default: sdpa)")
    options.add_argument("--fairness", default="arrival")
    options.add_argument("--patience", type=int, default=64)
    options.add_argument("--registered", type=int)
    options.add_argument("--zipf-requests", type=int)
    options.add_argument("--soak-requests", type=int)
    options.add_argument("--soak-every", type=int, help="requests between two looks at memory")
    options.add_argument("--soak-adapters", type=int)
    options.add_argument("--soak-bare", action="store_true", help="the bare model's manager too")
    return options


def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    # has a name of its own, outside of the library's
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)


def main(given: Sequence[str] | None = None) -> int:
    """Run as a script; returns the exit status (1: a check failed)."""
    args = parser().parse_args(given)
    for name, value in SIZES["tiny" if args.shape == "tiny" else "8B"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    quiet()
    started = time.monotonic()
    results = Results("continuous", args.out, args.device)
    results.settings(**vars(args))
    slots = [part for part in ("base", "slots32", "slots8") if part in args.parts]
    timed = [
        name for name, asked in (("slots", slots), *((n, n in args.parts) for n in ("registered", "graphs"))) if asked
    ]
    try:
        bench = Bench(args, results) if timed else None
        if bench and args.attention in ("sdpa", "eager") and bench.shape.mask_elements > MASK_ELEMENTS:
            results.fail(f"a mask of {bench.shape.mask_elements / 1e9:.1f} G elements: lower --batch-tokens or --rows")
            return results.finish()
        for number, name in enumerate(timed):
            assert bench is not None
            left = started + args.budget_s - time.monotonic()
            deadline = time.monotonic() + left / (len(timed) - number)
            if name == "slots":
                bench.slots(slots, deadline)
            else:
                getattr(bench, name)(deadline)
            free_device(args.device)
        del bench
        if "soak" in args.parts:
            free_device(args.device)
            run_soak(results, args)
    except StuckError as error:
        results.fail(str(error))
    return results.finish()
