"""Errors of the logits in the model's dtype against merged weights in fp32, beside the bare model's own errors."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..api import disable_multilora, enable_multilora
from .measure import relative_error
from .results import Results
from .workload import DTYPES, adapter_config, build_model, linear_shapes, merged, prompts, random_adapter, twin

LIMIT_FP32 = 1e-5
LIMIT_OF_BARE = 1.5
"""In bf16 and fp16 a LoRA row rounds y once more (y, then y + delta): its error is a little over the bare model's."""


def _last_logits(model: Any, inputs: dict[str, torch.Tensor], **ids: Any) -> dict[str, torch.Tensor]:
    """Logits of the last position, from one forward, and from a cache with one new token (the decode kernels)."""
    whole = model(**inputs, use_cache=False, logits_to_keep=1, **ids).logits[:, -1]
    head = model(input_ids=inputs["input_ids"][:, :-1], use_cache=True, logits_to_keep=1, **ids)
    step = model(input_ids=inputs["input_ids"][:, -1:], past_key_values=head.past_key_values, **ids).logits[:, -1]
    return {"prefill": whole, "decode": step}


@torch.no_grad()
def check(results: Results, args: Any, rows: int) -> None:
    """Each of `rows` rows with an adapter of its own, but for every eighth, which is the base.

    Four layers of the shape are enough: the error of one layer does not depend on how many follow.
    """
    layers = min(args.layers or 4, 4)
    alpha = 2.0 * args.rank
    model = build_model(args.shape, args.device, DTYPES[args.dtype], layers)
    shapes = linear_shapes(model)
    bare, exact = twin(model), copy.deepcopy(model).float()
    enable_multilora(model, max_loras=rows, max_lora_rank=args.rank)
    adapters = {}
    ids: list[str | None] = [None if row % 8 == 7 else f"check{row}" for row in range(rows)]
    for row, name in enumerate(ids):
        if name is not None:
            adapters[name] = random_adapter(
                shapes, args.rank, seed=1000 + row, dtype=DTYPES[args.dtype], device=args.device
            )
            model.multilora.load(adapters[name], name, config=adapter_config(args.rank, alpha))
    inputs = prompts(model, rows, 32)
    ours, base = _last_logits(model, inputs, adapter_ids=ids), _last_logits(bare, inputs)
    exact_base = exact(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]
    references, moved = exact_base.clone(), []
    for row, name in enumerate(ids):
        if name is not None:
            with merged(exact, adapters[name], alpha / args.rank):
                one = {key: value[row : row + 1] for key, value in inputs.items()}
                references[row] = exact(**one, use_cache=False, logits_to_keep=1).logits[0, -1]
            moved.append(relative_error(references[row], exact_base[row]))
    results.add("least change of a row's logits by its adapter", min(moved), "rel", rows=rows)
    for kind in ("prefill", "decode"):
        own = max(relative_error(base[kind][row], exact_base[row]) for row in range(rows))
        error = max(relative_error(ours[kind][row], references[row]) for row in range(rows))
        fp32 = args.dtype == "fp32"
        limit = LIMIT_FP32 if fp32 else LIMIT_OF_BARE * own
        results.add(
            f"logits against fp32 merged weights, {kind} (worst row)",
            error,
            "rel",
            goal=LIMIT_FP32 if fp32 else None,
            ratio=error / own if own else None,
            ratio_goal=None if fp32 else LIMIT_OF_BARE,
            bare_error=own,
            layers=layers,
        )
        if not error <= limit:
            results.fail(f"{kind}: error {error:.3g}, the bare model's own {own:.3g}, limit {limit:.3g}")
        for row, name in enumerate(ids):
            if name is None and not torch.equal(ours[kind][row], base[kind][row]):
                results.fail(f"{kind}: base row {row} is not bit-equal to the bare model")
    disable_multilora(model)
