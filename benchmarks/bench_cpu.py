"""A CPU: the demo's model in fp32, 16 rows, 16 adapters; the step over the base's, and PEFT's mixed batch beside it.

The adapters are random, of rank 8 on q and v like the demo's pirate. Times on a CPU do not repeat; ratios within one
process do, roughly. Nothing else should run meanwhile.

    python benchmarks/bench_cpu.py --model FOLDER
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Results, alternate, median_ratio, milliseconds
from workload import adapter_config, build_model, linear_shapes, prompts, random_adapter, save_adapter, scratch, twin

from hf_multilora import enable_multilora

RATIO_GOAL = 1.3
TARGETS = ("q_proj", "v_proj")
RANK = 8


def load_base(folder: str) -> Any:
    """The model of this folder in fp32, which never ends a sequence by itself; "tiny" is a smoke run's."""
    if folder == "tiny":
        return build_model("tiny", "cpu", torch.float32)
    from transformers import AutoModelForCausalLM

    if folder == "demo":
        from hf_multilora.demo.model import demo_model_path

        folder = str(demo_model_path())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def load_peft(base: Any, folders: dict[str, Path]) -> Any:
    """PEFT over the same weights, all adapters loaded."""
    from peft import PeftModel

    names = list(folders)
    model = PeftModel.from_pretrained(base, str(folders[names[0]]), adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(str(folders[name]), adapter_name=name)
    return model.eval()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help='a transformers folder, "demo" (default) or "tiny"')
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=200)
    parser.add_argument("--no-peft", action="store_true")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
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
    inputs = prompts(bare, args.rows, 32)

    def case(model: Any, **kwargs: Any) -> Callable[[], float]:
        def run(new: int) -> None:
            model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, **kwargs)

        def measure() -> float:
            many = milliseconds(lambda: run(args.new_tokens), "cpu")
            return (many - milliseconds(lambda: run(1), "cpu")) / (args.new_tokens - 1)

        return measure

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
    for measure in cases.values():
        measure()
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
    results.add("load one adapter (1.8 MB of fp32 on the demo model)", statistics.median(load_ms), "ms", all=load_ms)
    if peft is not None:
        results.add("load one adapter into PEFT, mean", peft_load_ms, "ms")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
