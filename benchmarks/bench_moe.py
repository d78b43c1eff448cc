"""Adapters on routed experts: decode and prefill beside the bare model, and what they take of a slot.

The shape is that of Qwen3-MoE at 24 layers (128 experts, 8 for each token, hidden 2048, expert 768), random bf16
weights; adapters of r=16 on experts and attention, or on attention alone. All slots hold copies of one adapter, which
the kernels cannot know.

    python benchmarks/bench_moe.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from hf_multilora import enable_multilora
from hf_multilora.bench.measure import alternate, median_ratio, milliseconds
from hf_multilora.bench.results import Results, arguments
from hf_multilora.bench.workload import DTYPES, prompts, twin
from hf_multilora.memory.registry import Loaded

SIZES: dict[str, dict[str, int]] = {
    "8B": dict(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=24, num_experts=128,
        num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
    ),
    "tiny": dict(
        hidden_size=48, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_experts=8,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=512,
    ),
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# (distinct adapters, which) -> goal over the bare model
DECODE_GOALS = {(8, "experts"): 1.35, (8, "attention"): 1.1}
PREFILL_GOALS = {(8, "experts"): 1.25, (8, "attention"): 1.1}


def build(shape: str, device: str, dtype: torch.dtype, layers: int | None) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes: dict[str, Any] = {**SIZES[shape], **({} if layers is None else {"num_hidden_layers": layers})}
    config = Qwen3MoeConfig(**sizes, norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=16384)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def adapter(
    model: Any, rank: int, experts: bool, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors as PEFT's target_modules and target_parameters write them."""
    generator = torch.Generator(model.device).manual_seed(7)
    tensors: dict[str, torch.Tensor] = {}

    def put(stem: str, a_shape: tuple[int, int], b_shape: tuple[int, int]) -> None:
        for name, shape, gain in (("A", a_shape, a_shape[1] ** -0.5), ("B", b_shape, 0.2 * rank**-0.5)):
            values = torch.randn(shape, generator=generator, device=model.device) * gain
            tensors[f"base_model.model.{stem}lora_{name}.weight"] = values.to(dtype).cpu()

    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        if last in ATTENTION:
            put(f"{path}.", (rank, module.in_features), (module.out_features, rank))
        elif last == "experts" and experts:
            count, width, hidden = module.gate_up_proj.shape
            put(f"{path}.base_layer.", (count * rank, hidden), (width, rank * count))
            put(f"{path}.", (count * rank, width // 2), (hidden, rank * count))
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": list(ATTENTION), "peft_version": "0.21.2",
    }  # fmt: skip
    return tensors, config | ({"target_parameters": ["gate_up_proj", "down_proj"]} if experts else {})


def ids(rows: int, count: int, which: str) -> list[str] | None:
    return [f"{which}{row % count}" for row in range(rows)] if count else None


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32], help="distinct ones (default: 1 8 32)")
    parser.add_argument("--new-tokens", type=int, default=17)
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of one forward over 16 rows")
    args = parser.parse_args()
    results, dtype = Results("moe", args.out, args.device), DTYPES[args.dtype]
    results.settings(shape=args.shape, layers=args.layers, model=None, rank=args.rank)
    bare = build(args.shape, args.device, dtype, args.layers)
    files = {which: adapter(bare, args.rank, which == "experts", dtype) for which in ("experts", "attention")}
    most = max(args.adapters)
    probe = enable_multilora(twin(bare), max_loras=1, max_lora_rank=args.rank)
    layout, plain = probe.multilora.store.layout, probe.multilora.store.arena.slot_bytes
    whole = layout.packed_bytes(dict.fromkeys(range(layout.n_sites), args.rank), dtype)
    results.add("slot for attention, head and embeddings", plain / 1e6, "MB")
    results.add("adapter with experts, if all trained", whole / 1e6, "MB")
    del probe
    model = enable_multilora(twin(bare), max_loras=most, max_lora_rank=args.rank, slot_bytes=whole + (1 << 20))
    full = args.device.startswith("cuda") and args.shape == "8B" and args.layers is None
    for which, (tensors, config) in files.items():
        took = milliseconds(lambda w=which, t=tensors, c=config: model.multilora.load(t, f"{w}0", config=c), "cpu")  # type: ignore[misc]
        packed = model.multilora.store.entry(f"{which}0").packed
        assert packed is not None
        results.add(f"load an adapter on {which} from memory", took, "ms")
        results.add(f"adapter on {which}", packed.nbytes / 1e6, "MB")
        for number in range(1, most):
            model.multilora.store.register(f"{which}{number}", lambda p=packed: Loaded(p, source="memory"))  # type: ignore[misc]
    results.note("adapters are loaded")

    wanted: list[tuple[int, str]] = [(0, "none"), *((n, w) for w in files for n in args.adapters)]
    batch = prompts(bare, args.batch, 32)
    long = prompts(bare, 16, max(1, args.prefill // 16))

    def decode(count: int | None, which: str) -> Callable[[], float]:
        runs, extra = (bare, {}) if count is None else (model, {"adapter_ids": ids(args.batch, count, which)})

        def run(new: int) -> None:
            runs.generate(**batch, max_new_tokens=new, min_new_tokens=new, do_sample=False, **extra)

        def step() -> float:
            run(1)  # other cases may have taken the slots
            more = milliseconds(lambda: run(args.new_tokens), args.device)
            return (more - milliseconds(lambda: run(1), args.device)) / (args.new_tokens - 1)

        return step

    @torch.no_grad()
    def prefill(count: int | None, which: str) -> float:
        runs, extra = (bare, {}) if count is None else (model, {"adapter_ids": ids(16, count, which)})
        return milliseconds(lambda: runs(**long, use_cache=False, logits_to_keep=1, **extra), args.device)

    for what, goals in (("decode", DECODE_GOALS), ("prefill", PREFILL_GOALS)):
        cases: dict[tuple[int | None, str], Callable[[], float]] = {}
        for count, which in [(None, "bare"), *wanted]:
            if what == "prefill" and count is not None and count > 16:
                continue
            one = decode(count, which) if what == "decode" else (lambda c=count, w=which: prefill(c, w))  # type: ignore[misc]
            cases[count, which] = one
            one()
        values = alternate(cases, args.reps, time.monotonic() + args.budget_s / 2)
        base = values[None, "bare"]
        size = f"batch {args.batch}" if what == "decode" else f"{args.prefill} tokens"
        for (count, which), times in values.items():
            label = (
                "bare model" if count is None else f"{count} adapters on {which}" if count else "enabled, none active"
            )
            goal = goals.get((count or 0, which)) if full else None
            ratio = None if count is None else median_ratio(times, base)
            results.add(
                f"eager {what}, {size}, {label}",
                statistics.median(times),
                "ms",
                ratio=ratio,
                ratio_goal=goal,
                all=times,
            )
        results.note(f"{what}: {len(base)} repetitions")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
