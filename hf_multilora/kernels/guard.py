"""Guard: `x[t, e] = x[t, e] if |x[t, e]| <= bound else 0`, in place, and `flags[t] = 1` where any element was not.

For keys and values of packed batches under masked attention. There every request's probabilities for another one's
keys are 0, but 0 · NaN is NaN, and inf plus the mask is inf: one request's poison would reach all. What the guard has
changed is marked, for the host to fail that request.

    k, v    [1, heads, T, width], any strides along heads and tokens, unit stride along width; elements that may stay
            are not written
    flags   int32 [T]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .custom import HAS_TRITON, TRITON_DTYPES

if HAS_TRITON:
    import triton
    import triton.language as tl

    from . import driver

    @triton.jit(
        do_not_specialize=["k_head", "k_token", "v_head", "v_token"],
        do_not_specialize_on_alignment=["k_ptr", "v_ptr", "flags_ptr"],
    )
    def guard_tokens(
        k_ptr,
        v_ptr,
        flags_ptr,
        k_head,
        k_token,
        v_head,
        v_token,
        HEADS: tl.constexpr,
        K_WIDTH: tl.constexpr,
        V_WIDTH: tl.constexpr,
        BOUND: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One token of one of the two tensors. Grid [T, 2]."""
        t = tl.program_id(0)
        if tl.program_id(1) == 0:
            _guard(k_ptr + t.to(tl.int64) * k_token, flags_ptr + t, k_head, HEADS, K_WIDTH, BOUND, BLOCK)
        else:
            _guard(v_ptr + t.to(tl.int64) * v_token, flags_ptr + t, v_head, HEADS, V_WIDTH, BOUND, BLOCK)

    @triton.jit
    def _guard(
        row, flag, head_stride, HEADS: tl.constexpr, WIDTH: tl.constexpr, BOUND: tl.constexpr, BLOCK: tl.constexpr
    ):
        for start in range(0, HEADS * WIDTH, BLOCK):
            e = start + tl.arange(0, BLOCK)
            place = row + (e // WIDTH).to(tl.int64) * head_stride + e % WIDTH
            x = tl.load(place, mask=e < HEADS * WIDTH, other=0.0).to(tl.float32)
            bad = tl.abs(x) <= BOUND
            bad = bad == 0  # NaN compares as false
            tl.store(place, tl.zeros_like(x).to(row.dtype.element_ty), mask=bad)
            if tl.max(bad.to(tl.int32), 0) > 0:
                tl.store(flag, 1)


def bound_of(dtype: torch.dtype) -> float:
    """What keys may be, so that their products with queries are finite and lose against a mask of the lowest value.

    A bound that no model comes near: 8e28 of float32 and bfloat16, 4e3 of float16.
    """
    return float(torch.finfo(dtype).max ** 0.75)


def guard(k: Tensor, v: Tensor, flags: Tensor, recipes: dict[Any, Any]) -> None:
    """Guard keys and values in place; `recipes` keeps prepared launches."""
    if k.is_cuda and HAS_TRITON and k.dtype in TRITON_DTYPES and k.stride(-1) == v.stride(-1) == 1:
        _launch(k, v, flags, recipes)
        return
    for x in (k, v):
        bad = ~(x.abs() <= bound_of(x.dtype))
        flags |= bad.amax(dim=(0, 1, 3)).to(flags.dtype)
        x.masked_fill_(bad, 0)


def _launch(k: Tensor, v: Tensor, flags: Tensor, recipes: dict[Any, Any]) -> None:
    key = (k.shape, v.shape, k.stride(), v.stride(), k.dtype, k.device)
    recipe = recipes.get(key)
    if recipe is not None:
        recipe(torch._C._cuda_getCurrentRawStream(k.device.index), k.data_ptr(), v.data_ptr(), flags.data_ptr())
        return
    _, heads, tokens, width = k.shape
    args: tuple[Any, ...] = (k, v, flags, k.stride(1), k.stride(2), v.stride(1), v.stride(2))
    args += (heads, width, v.shape[3], bound_of(k.dtype), min(1024, triton.next_power_of_2(heads * width)))
    grid = (tokens, 2, 1)
    compiled = guard_tokens[grid](*args, num_warps=4)
    if compiled is not None:
        recipe = driver.prepare([driver.Kernel(compiled, grid, args, (0, 1, 2))])
    if recipe is not None:
        if len(recipes) >= 256:
            recipes.clear()
        recipes[key] = recipe
