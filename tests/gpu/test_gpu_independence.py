"""Rows are tenants: neighbours change no bit of a row, and poison stays in its own rows."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_bed import ADAPTERS, MARKS, MIXED, ROWS, adapter, enabled, inputs, load, prefill_and_step

pytestmark = MARKS

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("tokens", [1, 5, 24, 150])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_change_no_bit(dtype, tokens):
    """The same row at the same place, other adapters and other prompts around it."""
    model = enabled(dtype)
    for row, name in ((2, "r3"), (5, "r33"), (0, "r8"), (7, None)):
        expected = None
        for seed in range(6):
            rng = random.Random(seed)
            ids = [rng.choice([None, *ADAPTERS]) for _ in range(ROWS)] if seed else [None] * ROWS
            ids[row] = name
            batch = {key: value.clone() for key, value in inputs(tokens, seed=seed).items()}
            batch["input_ids"][row] = inputs(tokens)["input_ids"][row]
            whole, step = prefill_and_step(model, batch, adapter_ids=ids)
            found = (whole[row], step[row])
            expected = expected or found
            assert torch.equal(found[0], expected[0]), f"prefill of row {row} ({name}) among {ids}"
            assert torch.equal(found[1], expected[1]), f"step of row {row} ({name}) among {ids}"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [1, 24])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_stays_in_its_rows(dtype, tokens, value):
    model = enabled(dtype, max_loras=6)
    tensors, config = adapter("r33", dtype)
    load(model, "poison", ({key: torch.full_like(t, value) for key, t in tensors.items()}, config))
    batch = inputs(tokens)
    ids = [name if row != 4 else "r16" for row, name in enumerate(MIXED)]
    clean = prefill_and_step(model, batch, adapter_ids=ids)
    ids[4] = "poison"
    poisoned = prefill_and_step(model, batch, adapter_ids=ids)
    for before, after in zip(clean, poisoned, strict=True):
        assert not after[4].isfinite().all()
        for row in (row for row in range(ROWS) if row != 4):
            assert torch.equal(before[row], after[row]), f"row {row} ({ids[row]})"


def test_nothing_of_an_evicted_adapter_remains():
    """One slot that held NaN at rank 33 on all layers serves rank 1 on two, then the poison's own name again."""
    model = enabled(torch.float32, names=(), max_loras=1)
    tensors, config = adapter("r33", torch.float32)
    load(model, "poison", ({key: torch.full_like(t, float("nan")) for key, t in tensors.items()}, config))
    load(model, "r1", adapter("r1", torch.float32))
    other = enabled(torch.float32, names=("r1", "r33"))
    batch = inputs(24)
    for _ in range(2):
        assert prefill_and_step(model, batch, adapter_ids="poison")[0].isnan().any()
        for ours, expected in zip(
            prefill_and_step(model, batch, adapter_ids="r1"),
            prefill_and_step(other, batch, adapter_ids="r1"),
            strict=True,
        ):
            assert torch.equal(ours, expected)
    load(model, "poison", adapter("r33", torch.float32), reload=True)
    for ours, expected in zip(
        prefill_and_step(model, batch, adapter_ids="poison"),
        prefill_and_step(other, batch, adapter_ids="r33"),
        strict=True,
    ):
        assert torch.equal(ours, expected)
