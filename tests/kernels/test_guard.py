"""What is not finite stays outside of the cache of packed batches, and is flagged."""

from __future__ import annotations

import math

import pytest
import torch

from hf_multilora.kernels import guard as module
from hf_multilora.kernels.guard import bound_of, guard

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def both(k, v, device):
    """Keys and values `[1, heads, T, width]` as attention makes them (transposed), guarded; and the flags."""
    k, v = (x.to(device).transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    flags = torch.zeros(k.shape[2] + 3, dtype=torch.int32, device=device)
    guard(k, v, flags[: k.shape[2]], {})
    return k.cpu(), v.cpu(), flags.cpu()


def poisoned(dtype, heads, tokens, width_k, width_v):
    generator = torch.Generator().manual_seed(tokens)
    k = torch.randn(1, heads, tokens, width_k, generator=generator).to(dtype)
    v = torch.randn(1, heads, tokens, width_v, generator=generator).to(dtype)
    k[0, heads - 1, 1, 2] = math.nan
    k[0, 0, 3, width_k - 1] = math.inf
    v[0, 0, 4, 0] = -math.inf
    v[0, heads - 1, 4, width_v - 1] = math.nan
    k[0, 0, 6, 0] = torch.finfo(dtype).max
    return k, v


def check(device, dtype, heads, tokens, width_k, width_v):
    k, v = poisoned(dtype, heads, tokens, width_k, width_v)
    got_k, got_v, flags = both(k, v, device)
    assert [i for i, flag in enumerate(flags.tolist()) if flag] == [1, 3, 4, 6]
    for before, after in ((k, got_k), (v, got_v)):
        bad = ~(before.abs() <= bound_of(dtype))
        assert bad.any() and (after[bad] == 0).all()
        assert torch.equal(after[~bad], before[~bad]), "what is finite keeps its bits"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_elements_become_zero_and_their_tokens_are_flagged(dtype):
    check("cpu", dtype, 3, 9, 5, 7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, width", [(3, 5), (8, 128), (1, 96), (32, 80)])
def test_the_kernel_does_what_the_definition_does(dtype, heads, width):
    check("cuda", dtype, heads, 9, width, width + 2)


@pytest.mark.gpu
def test_prepared_launches_are_used_again_for_other_tensors():
    recipes: dict = {}
    for seed in range(3):
        k = torch.randn(1, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
        v = torch.randn(1, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
        flags = torch.zeros(8, dtype=torch.int32, device="cuda")
        k[0, 1, seed, 3] = math.nan
        guard(k, v, flags, recipes)
        assert flags.nonzero().flatten().tolist() == [seed] and torch.isfinite(k).all()
    assert len(recipes) <= 1


def test_a_bound_leaves_room_for_products_with_queries():
    """Scores of a masked key must lose against the mask: |q . k| below the largest number, for queries up to 1e4."""
    for dtype in (torch.float32, torch.bfloat16):
        assert bound_of(dtype) * 1e4 * 256 < 0.01 * torch.finfo(dtype).max
    assert module.bound_of(torch.float16) > 4000
