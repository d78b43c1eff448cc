"""Mixed batches on the device against merged weights in fp32 on the CPU, and base rows against the bare model."""

from __future__ import annotations

import pytest
import torch
from gpu_bed import (
    ADAPTERS,
    DEVICE,
    FP32_TOLERANCE,
    MARKS,
    MIXED,
    OF_BARE,
    ROWS,
    adapter,
    bare,
    enabled,
    error,
    exact_logits,
    fresh,
    greedy,
    inputs,
    load,
    oracle,
    prefill_and_step,
)

from hf_multilora import enable_multilora

pytestmark = MARKS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def models():
    """dtype -> the enabled model, built when first asked for."""
    built: dict[torch.dtype, torch.nn.Module] = {}

    def get(dtype: torch.dtype):
        if dtype not in built:
            built[dtype] = enabled(dtype)
        return built[dtype]

    return get


# 1: every forward is a decode step. 5: several tokens a row, too few for a tile. 150: no multiple of any block.
@pytest.mark.parametrize(("tokens", "padded"), [(1, False), (5, False), (24, True), (150, False)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_batch_equals_merged_weights(models, dtype, tokens, padded):
    batch = inputs(tokens, padded=padded)
    ours = prefill_and_step(models(dtype), batch, adapter_ids=list(MIXED))
    base = prefill_and_step(bare(dtype), batch)
    base_exact = exact_logits(None, dtype, tokens, padded)
    for row, name in enumerate(MIXED):
        exact = exact_logits(name, dtype, tokens, padded)
        real = batch["attention_mask"][row].bool().cpu()
        for kind in ("prefill", "step"):
            # logits at padding positions mean nothing, to the bare model neither
            got, own, want, want_base = (
                logits[0][row].cpu()[real] if kind == "prefill" else logits[1][row].cpu()
                for logits in (ours, base, exact, base_exact)
            )
            if name is None:
                assert torch.equal(got, own), f"row {row}, {kind}: not the bare model's bits"
            bare_error, found = error(own, want_base), error(got, want)
            limit = FP32_TOLERANCE if dtype == torch.float32 else OF_BARE * bare_error
            assert found <= limit, f"row {row} ({name}), {kind}: {found:.2e}, limit {limit:.2e}, bare {bare_error:.2e}"
            assert name is None or error(want, want_base) > 4 * limit, f"row {row} ({name}): would not show"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_without_adapters_is_the_bare_model(models, dtype):
    batch = inputs(24, padded=True)
    for ids in (None, [None] * ROWS, "__base__"):
        for ours, base in zip(
            prefill_and_step(models(dtype), batch, adapter_ids=ids), prefill_and_step(bare(dtype), batch), strict=True
        ):
            assert torch.equal(ours, base)


@pytest.mark.parametrize("padded", [False, True])
def test_greedy_tokens_are_the_oracle_s(models, padded):
    batch, host = inputs(11, padded=padded), inputs(11, padded=padded, device="cpu")
    ours = greedy(models(torch.float32), batch, 10, adapter_ids=list(MIXED))
    for row, name in enumerate(MIXED):
        exact = greedy(oracle(name, torch.float32), host, 10)
        assert torch.equal(ours[row], exact[row]), f"row {row} ({name})"


def test_beams_are_the_oracle_s(models):
    batch, host = inputs(9, rows=4), inputs(9, rows=4, device="cpu")
    ids = ["r3", None, "r8", "r33"]
    ours = greedy(models(torch.float32), batch, 8, num_beams=3, num_return_sequences=2, adapter_ids=ids)
    for row, name in enumerate(ids):
        exact = greedy(oracle(name, torch.float32), host, 8, num_beams=3, num_return_sequences=2)
        assert torch.equal(ours[2 * row : 2 * row + 2], exact[2 * row : 2 * row + 2]), f"row {row} ({name})"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tokens_in_a_mix_are_those_of_the_adapter_alone(models, dtype):
    batch = inputs(13)
    mixed = greedy(models(dtype), batch, 12, adapter_ids=list(MIXED))
    for name in (None, *ADAPTERS):
        alone = greedy(models(dtype), batch, 12, adapter_ids=name)
        for row in (row for row, other in enumerate(MIXED) if other == name):
            assert torch.equal(mixed[row], alone[row]), f"row {row} ({name})"


def test_a_mix_of_two_adapters_on_one_row(models):
    """A weighted mix is the sum of the weighted deltas, which on merged weights is a sum of weights."""
    parts = {"r3": 0.7, "r16": -0.4}
    exact = oracle("r3", torch.float32)
    model = fresh(torch.float32, "cpu")
    zero = dict(oracle(None, torch.float32).named_parameters())
    others = {name: dict(oracle(name, torch.float32).named_parameters()) for name in parts}
    for path, parameter in model.named_parameters():
        for name, weight in parts.items():
            parameter.data += weight * (others[name][path] - zero[path])
    batch, host = inputs(24), inputs(24, device="cpu")
    ours = prefill_and_step(models(torch.float32), batch, adapter_ids=[parts, "r3", *[None] * (ROWS - 2)])
    for kind in (0, 1):
        assert error(ours[kind][0], prefill_and_step(model, host)[kind][0]) <= FP32_TOLERANCE
        assert error(ours[kind][1], prefill_and_step(exact, host)[kind][1]) <= FP32_TOLERANCE


def test_a_model_enabled_on_the_cpu_and_moved():
    model = enable_multilora(fresh(torch.float32, "cpu"), max_loras=8, max_lora_rank=64)
    for name in ADAPTERS:
        load(model, name, adapter(name, torch.float32))
    model(**inputs(5, device="cpu"), adapter_ids=list(MIXED))  # the slots hold something before the move
    model.to(DEVICE)
    ours = prefill_and_step(model, inputs(24), adapter_ids=list(MIXED))
    there = prefill_and_step(enabled(torch.float32), inputs(24), adapter_ids=list(MIXED))
    assert torch.equal(ours[0], there[0]) and torch.equal(ours[1], there[1])
