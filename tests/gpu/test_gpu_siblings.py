"""Layers that are served together on the device: as one by one, to rounding, and base rows to the bit."""

from __future__ import annotations

import pytest
import torch
from gpu_bed import ADAPTERS, FP32_TOLERANCE, MARKS, MIXED, bare, enabled, error, inputs

from hf_multilora.kernels.ops import LinearOp

pytestmark = MARKS

TOLERANCE = {torch.float32: FP32_TOLERANCE, torch.bfloat16: 4e-2, torch.float16: 6e-3}


@pytest.mark.parametrize("tokens", [1, 5, 150])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_as_one_by_one(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tokens: int) -> None:
    model = enabled(dtype)
    with monkeypatch.context() as patch:
        patch.setattr("hf_multilora.wrapped.form_groups", lambda wrappers, routing: None)
        single = enabled(dtype)
    batch = inputs(tokens)
    served: list[int] = []
    call = LinearOp.__call__
    monkeypatch.setattr(LinearOp, "__call__", lambda op, ys, *a: (served.append(len(ys)), call(op, ys, *a))[1])
    for ids in (list(MIXED), [None, *MIXED[1:-1], None], [next(iter(ADAPTERS))] * len(MIXED)):
        with torch.no_grad():
            got = model(**batch, adapter_ids=ids, use_cache=False).logits
            assert 3 in served
            served.clear()
            want = single(**batch, adapter_ids=ids, use_cache=False).logits
            assert set(served) == {1}
            served.clear()
            base = bare(dtype)(**batch, use_cache=False).logits
        for row, name in enumerate(ids):
            assert error(got[row], want[row]) <= TOLERANCE[dtype], (row, name)
            if name is None:
                assert torch.equal(got[row], base[row])
    assert model.multilora._routing.open is None


def test_a_row_alone_and_among_others() -> None:
    """A row's bits depend on its adapter and the shape of the call, whatever its neighbours train."""
    model = enabled(torch.bfloat16)
    for tokens in (1, 24):
        batch = inputs(tokens)
        with torch.no_grad():
            mixed = model(**batch, adapter_ids=list(MIXED), use_cache=False).logits
            for row, name in enumerate(MIXED):
                others = [MIXED[(row + 3) % len(MIXED)]] * len(MIXED)
                others[row] = name
                got = model(**batch, adapter_ids=others, use_cache=False).logits
                assert torch.equal(got[row], mixed[row]), (tokens, name)
