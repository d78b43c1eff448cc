"""A CPU: the demo's model in fp32, 16 rows, 16 adapters; the step over the base's, and PEFT's mixed batch beside it.

The adapters are random, of rank 8 on q and v like the demo's pirate. Times on a CPU do not repeat; ratios within one
process do, roughly. Nothing else should run meanwhile: two processes of two threads on two cores crawl.
Prompts are short, since only decode steps are timed: a case's time is the median step of one generate(), the figure is
the median over alternated repetitions.

    python benchmarks/bench_cpu.py --model FOLDER
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_multilora import enable_multilora
from hf_multilora.bench.measure import alternate, median_ratio, milliseconds
from hf_multilora.bench.results import Results, default_folder
from hf_multilora.bench.workload import (
    adapter_config,
    build_model,
    linear_shapes,
    load_model,
    nbytes,
    prompts,
    random_adapter,
    save_adapter,
    scratch,
    twin,
)

RATIO_GOAL = 1.3
TARGETS = ("q_proj", "v_proj")
RANK = 8


def load_base(folder: str) -> Any:
    """The model of this folder in fp32, which never ends a sequence by itself; "tiny" is a smoke run's."""
    if folder == "tiny":
        return build_model("tiny", "cpu", torch.float32)
    if folder == "demo":
        from hf_multilora.demo.model import demo_model_path

        folder = str(demo_model_path())
    return load_model(folder, "cpu", torch.float32)


def load_peft(base: Any, folders: dict[str, Path]) -> Any:
    """PEFT over the same weights, all adapters loaded."""
    from peft import PeftModel

    names = list(folders)
    model = PeftModel.from_pretrained(base, str(folders[names[0]]), adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(str(folders[name]), adapter_name=name)
    return model.eval()


class StepClock(LogitsProcessor):
    """Notes when each token's logits are there: the first after the prompt, every other one a decode step later."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def step_ms(model: Any, inputs: dict[str, torch.Tensor], new_tokens: int, **ids: Any) -> float:
    """Median time of one decode step within one generate()."""
    clock = StepClock()
    model.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=False, logits_processor=LogitsProcessorList([clock]), **ids
    )
    return statistics.median(b - a for a, b in itertools.pairwise(clock.times)) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help='a transformers folder, "demo" (default) or "tiny"')
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=13)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=200)
    parser.add_argument("--no-peft", action="store_true")
    parser.add_argument("--out", default=default_folder())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    deadline = time.monotonic() + args.budget_s
    results = Results("cpu", args.out, "cpu")

    bare = load_base(args.model)
    ours = twin(bare)
    shapes = linear_shapes(bare, TARGETS)
    enable_multilora(ours, max_loras=args.rows, max_lora_rank=16)
    config = adapter_config(RANK, 2.0 * RANK, TARGETS)
    names = [f"a{row}" for row in range(args.rows)]
    with scratch() as folder:
        folders = {}
        for seed, name in enumerate(names):
            tensors = random_adapter(shapes, RANK, seed, dtype=torch.float32)
            folders[name] = save_adapter(folder / name, tensors, config)
        load_ms = [milliseconds(lambda n=name: ours.multilora.load(str(folders[n]), n), "cpu") for name in names]
        peft = None
        if not args.no_peft:
            peft_base = twin(bare)
            start = time.perf_counter()
            peft = load_peft(peft_base, folders)
            peft_load_ms = (time.perf_counter() - start) * 1e3 / args.rows
    print("loaded", flush=True)
    inputs = prompts(bare, args.rows, args.prompt_tokens)

    def case(model: Any, **kwargs: Any) -> Callable[[], float]:
        return lambda: step_ms(model, inputs, args.new_tokens, **kwargs)

    cases = {
        "bare model": case(bare),
        "enabled, none active": case(ours),
        "1 adapter": case(ours, adapter_ids=names[0]),
        f"{args.rows} adapters": case(ours, adapter_ids=names),
    }
    if peft is not None:
        cases[f"PEFT adapter_names, {args.rows} adapters"] = case(peft, adapter_names=names)
        check = dict(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        if not torch.equal(ours.generate(**check, adapter_ids=names), peft.generate(**check, adapter_names=names)):
            results.fail("greedy tokens differ from PEFT's")
    for name, measure in cases.items():
        print(f"warming up: {name} {measure():.1f} ms", flush=True)
    values = alternate(cases, args.reps, deadline)
    base = values["bare model"]
    goals = {"enabled, none active": 1.01, "1 adapter": RATIO_GOAL, f"{args.rows} adapters": RATIO_GOAL}
    for name, times in values.items():
        ratio = None if name == "bare model" else median_ratio(times, base)
        results.add(
            f"decode step, {args.rows} rows, {name}",
            statistics.median(times),
            "ms",
            ratio=ratio,
            ratio_goal=goals.get(name),
            all=times,
            rows=args.rows,
            model=Path(args.model).name,
        )
    results.add(f"load one adapter of {nbytes(tensors) / 1e6:.1f} MB", statistics.median(load_ms), "ms", all=load_ms)
    if peft is not None:
        results.add("load one adapter into PEFT, mean", peft_load_ms, "ms")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
