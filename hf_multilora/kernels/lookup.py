"""Device functions that every kernel shares: which adapter a row uses, and where its factors lie.

The arena's table holds META int64 per slot and site: offset of A, offset of Bt (both in elements from the slot's first
byte), rank, offset of gain, offset of shift (both in fp32 elements; 0 = absent). Factors, gains and shifts start at
multiples of 64 bytes and slots at multiples of 256; saying so is what lets the compiler load them 16 bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import reference

META = tl.constexpr(reference.META)


@triton.jit
def table_entry(meta_ptr, meta_stride, slot, site):
    """Address of (offset of A, offset of Bt, rank, offset of gain, offset of shift) of `site` in `slot`."""
    return meta_ptr + slot.to(tl.int64) * meta_stride + META * site


@triton.jit
def factor_start(data_ptr, slot, slot_elems, offset, ALIGN: tl.constexpr):
    """Address of a factor; ALIGN = elements in 64 bytes."""
    return data_ptr + tl.multiple_of(slot.to(tl.int64) * slot_elems + offset, ALIGN)


@triton.jit
def vector_start(floats_ptr, slot, slot_elems, offset, ALIGN: tl.constexpr):
    """Address of a gain or shift; `slot_elems` counts elements of which ALIGN make 64 bytes, `offset` fp32 ones."""
    return floats_ptr + tl.multiple_of(slot.to(tl.int64) * slot_elems // (ALIGN // 16) + offset, 16)


@triton.jit
def sharing_slice(first_entry, i, a_off, rank, N_SLICES: tl.constexpr):
    """The lowest slice of the layer that stores the same A as slice `i`: only that one is shrunk."""
    src = i
    for back in tl.static_range(1, N_SLICES):
        j = N_SLICES - 1 - back
        same = (tl.load(first_entry + META * j) == a_off) & (tl.load(first_entry + META * j + 2) == rank) & (j < i)
        src = tl.where(same, j, src)
    return src


@triton.jit
def slice_columns(i, w0, w1, w2, w3, N_SLICES: tl.constexpr):
    """First column and width of slice `i`."""
    start, width = 0, w0
    if N_SLICES > 1:
        start = tl.where(i == 0, 0, w0)
        width = tl.where(i == 0, w0, w1)
    if N_SLICES > 2:
        start = tl.where(i == 2, w0 + w1, start)
        width = tl.where(i == 2, w2, width)
    if N_SLICES > 3:
        start = tl.where(i == 3, w0 + w1 + w2, start)
        width = tl.where(i == 3, w3, width)
    return start, width
