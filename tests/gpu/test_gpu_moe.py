"""Adapters on experts on the device: rows against merged weights, bits of neighbours, captured decode steps."""

from __future__ import annotations

from typing import Any

import moe_bed
import pytest
import torch
from gpu_bed import DEVICE, MARKS, error, needs_cuda

from hf_multilora import enable_multilora

pytestmark = MARKS

FAMILIES = ["qwen3_moe", "gpt_oss", "llama4", "deepseek_v3"]
ROWS: list[str | None] = ["experts", None, "shared outer", "all", "attention", None]


def adapters(family: str) -> dict[str, moe_bed.Adapter]:
    return {
        "experts": moe_bed.made(family, 3, 1, "experts"),
        "shared outer": moe_bed.made(family, 6, 3, "experts", shared=True),
        "all": moe_bed.made(family, 17, 5, "experts", "attention", "router", "shared"),
        "attention": moe_bed.made(family, 2, 4, "attention"),
    }


def enabled(family: str, dtype: torch.dtype, implementation: str = "batched_mm", **options: Any) -> Any:
    base = moe_bed.bare(family, implementation).to(DEVICE, dtype)
    model = enable_multilora(base, max_loras=4, max_lora_rank=32, slot_bytes=8 << 20, **options)
    for name, adapter in adapters(family).items():
        tensors, config = moe_bed.three_d(family, adapter)
        model.multilora.load(tensors, name, config=config)
    return model


def batch(tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(3, moe_bed.VOCAB, (len(ROWS), tokens), generator=generator)
    return {"input_ids": ids.to(DEVICE), "attention_mask": torch.ones_like(ids).to(DEVICE)}


@torch.no_grad()
def logits(model: Any, tokens: int, **ids: Any) -> torch.Tensor:
    return model(**batch(tokens), **ids).logits


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_rows_are_merged_weights(family, tokens):
    model = enabled(family, torch.float32)
    got = logits(model, tokens, adapter_ids=ROWS)
    plain = logits(moe_bed.bare(family).to(DEVICE), tokens)
    for row, name in enumerate(ROWS):
        if name is None:
            assert torch.equal(got[row], plain[row])
            continue
        want = logits(moe_bed.merged(family, adapters(family)[name]).to(DEVICE), tokens)[row]
        assert error(got[row], want) < 2e-5 and error(want, plain[row]) > 1e-2, name


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_bf16_rows(tokens, implementation):
    """Beside the bare model in bf16: the middle of the tokens' errors, for where two experts are near to equal, bf16
    may choose another one than fp32."""
    family = "qwen3_moe"
    got = logits(enabled(family, torch.bfloat16, implementation), tokens, adapter_ids=ROWS)
    plain = logits(moe_bed.bare(family, implementation).to(DEVICE, torch.bfloat16), tokens)
    exact = logits(moe_bed.bare(family).to(DEVICE), tokens)
    for row, name in enumerate(ROWS):
        if name is None:
            assert implementation == "grouped_mm" or torch.equal(got[row], plain[row])
            continue
        want = logits(moe_bed.merged(family, adapters(family)[name]).to(DEVICE), tokens)[row]
        assert middle(got[row], want) < 3 * middle(plain[row], exact[row]) + 1e-2, name


def middle(value: torch.Tensor, reference: torch.Tensor) -> float:
    """The median over tokens of their relative errors."""
    return float(torch.tensor([error(v, r) for v, r in zip(value, reference, strict=True)]).median())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_neighbours_and_repeats_change_no_bit(family, dtype):
    model = enabled(family, dtype)
    for tokens in (1, 5, 40):
        mixed = logits(model, tokens, adapter_ids=ROWS)
        assert torch.equal(mixed, logits(model, tokens, adapter_ids=ROWS))
        for row, name in enumerate(ROWS):
            alone: list[str | None] = [None] * len(ROWS)
            alone[row] = name
            if name is not None:
                assert torch.equal(logits(model, tokens, adapter_ids=alone)[row], mixed[row]), (tokens, name)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_steps_are_eager_s(dtype):
    model = enabled("qwen3_moe", dtype, decode_graphs=True)
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    options |= {"cache_implementation": "static", "output_logits": True, "return_dict_in_generate": True}

    def steps(names: Any, **more: Any) -> list[torch.Tensor]:
        return list(model.generate(**batch(7), **options, adapter_ids=names, **more).logits)

    for names in (ROWS, list(reversed(ROWS)), "experts", None):
        got, want = steps(names), steps(names, disable_compile=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), names
    graphs = model.multilora.graphs
    assert graphs.captures == 2 and not graphs.refusals, (graphs.captures, graphs.refusals)
