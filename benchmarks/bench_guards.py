"""What Dynamo's guards cost the host in each compiled step: the bare model, enabled without and with adapters.

    python benchmarks/bench_guards.py [--layers 32]

A tiny Llama of many layers on one CPU thread, compiled by a backend that returns what it returned before, so that a
step is the host's work around a graph. Steps are timed as they are, and with no guard evaluated (a stance of
torch.compiler). "all guards": compiled as transformers compiles a model, and a user their own.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

from hf_multilora import enable_multilora
from hf_multilora.bench.measure import alternate, milliseconds
from hf_multilora.bench.results import Results, arguments
from hf_multilora.bench.workload import adapter_config, linear_shapes, random_adapter, twin
from hf_multilora.generation.compiled import CompiledSteps

ROWS, RANK = 4, 4


class Backend:
    """Runs each graph until it has its outputs, then returns those."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        found: list[Any] = []

        def run(*args: Any) -> Any:
            if not found:
                found.append(graph.forward(*args))
            return found[0]

        return run

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return self


def main() -> int:
    parser = arguments(__doc__)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("guards", args.out, "cpu")
    layers = args.layers or 32
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    shapes, bare = linear_shapes(model), twin(model)
    enable_multilora(model, max_loras=ROWS, max_lora_rank=RANK)
    ids = [f"a{row}" for row in range(ROWS)]
    for number, name in enumerate(ids):
        tensors = random_adapter(shapes, RANK, number, dtype=torch.float32, device="cpu")
        model.multilora.load(tensors, name, config=adapter_config(RANK, 2.0 * RANK))
    compile_config = CompileConfig(backend=Backend(), mode=None, fullgraph=True)  # type: ignore[arg-type]
    compile_config._compile_all_devices = True  # type: ignore[assignment]
    prompt = torch.randint(256, (ROWS, 8))
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}

    def generate(served: Any, new: int, **options: Any) -> None:
        served.generate(
            **inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, cache_implementation="static",
            max_cache_len=64, compile_config=compile_config, pad_token_id=0, **options,
        )  # fmt: skip

    def step(served: Any, skip: bool, **options: Any) -> float:
        with torch.compiler.set_stance(skip_guard_eval_unsafe=skip):
            longer = milliseconds(lambda: generate(served, 41, **options), "cpu")
            return (longer - milliseconds(lambda: generate(served, 1, **options), "cpu")) / 40

    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "bare": (bare, {}),
        "none active": (model, {"adapter_ids": None}),
        f"{ROWS} adapters": (model, {"adapter_ids": ids}),
    }

    def measure(name: str, served: Any, options: dict[str, Any]) -> None:
        torch.compiler.reset()
        for _ in range(2):
            generate(served, 8, **options)
        ways = {skip: functools.partial(step, served, skip, **options) for skip in (False, True)}
        times = alternate(ways, args.reps, time.monotonic() + args.budget_s)
        spent = [(guarded - free) * 1e3 for guarded, free in zip(times[False], times[True], strict=True)]
        what = f"guards of a step, {layers} layers, {name}"
        results.add(what, statistics.median(spent), "us", all=spent, step_ms=statistics.median(times[False]))

    for name, (served, options) in cases.items():
        with mock.patch.object(CompiledSteps, "begin", lambda steps, model, plain: plain):
            measure(f"{name}, all guards", served, options)
        if served is model:
            measure(f"{name}, as generate() compiles", served, options)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
