"""Device functions that every kernel shares: which adapter a row uses, where its factors lie, who waits for whom.

The arena's table holds META int64 per slot and site: offset of A, offset of Bt (both in elements from the slot's first
byte), rank, offset of gain, offset of shift (both in fp32 elements; 0 = absent). Factors, gains and shifts start at
multiples of 64 bytes and slots at multiples of 256; saying so is what lets the compiler load them 16 bytes at a time.

Dependent launches (PDL, from compute capability 9.0 on): a kernel may begin before the one in front of it has ended.
What it reads before `wait_for_input` must have been there for longer: factors, the table, the rows' slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import reference

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton for other devices: nothing is ever launched as dependent there
    gdc_launch_dependents = gdc_wait = None

META = tl.constexpr(reference.META)


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """The kernel behind this one may begin, as far as there is room."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_input(PDL: tl.constexpr):
    """Everything in front of this kernel has ended and is visible. Every program of a dependent launch calls it."""
    if PDL:
        gdc_wait()


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
    """The lowest slice of the group that stores the same A as slice `i`: only that one is shrunk."""
    src = i
    for back in tl.static_range(1, N_SLICES):
        j = N_SLICES - 1 - back
        same = (tl.load(first_entry + META * j) == a_off) & (tl.load(first_entry + META * j + 2) == rank) & (j < i)
        src = tl.where(same, j, src)
    return src


@triton.jit
def minus_zeros(shape: tl.constexpr):
    """-0.0, which added to any number leaves its bits. (Triton takes the literal for 0.0.)"""
    return tl.full(shape, -2147483648, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def pick(i, v0, v1, v2, v3, N_SLICES: tl.constexpr):
    """The `i`-th of up to four values."""
    v = v0
    if N_SLICES > 1:
        v = tl.where(i == 1, v1, v)
    if N_SLICES > 2:
        v = tl.where(i == 2, v2, v)
    if N_SLICES > 3:
        v = tl.where(i == 3, v3, v)
    return v


@triton.jit
def pick_pointer(i, p0, p1, p2, p3, N_SLICES: tl.constexpr, ALIGNED: tl.constexpr):
    """The `i`-th of up to four addresses; ALIGNED: all are multiples of 16 bytes, which a choice would lose."""
    if N_SLICES == 1:
        return p0
    a0, a1 = p0.to(tl.int64, bitcast=True), p1.to(tl.int64, bitcast=True)
    a2, a3 = p2.to(tl.int64, bitcast=True), p3.to(tl.int64, bitcast=True)
    size: tl.constexpr = p0.dtype.element_ty.primitive_bitwidth // 8
    offset = (pick(i, a0, a1, a2, a3, N_SLICES) - a0) // size
    if ALIGNED:
        offset = tl.multiple_of(offset, 16 // size)
    return p0 + offset


@triton.jit
def gain_and_shift(
    floats_ptr, slot, slot_elems, gain_off, shift_off, c, width, ALIGN: tl.constexpr, SKIP: tl.constexpr
):
    """The columns' gain and shift, 1 and -0.0 where there are none (or where they are to be skipped)."""
    gain_ptr = vector_start(floats_ptr, slot, slot_elems, gain_off, ALIGN)
    shift_ptr = vector_start(floats_ptr, slot, slot_elems, shift_off, ALIGN)
    wanted = (c < width) & (not SKIP)
    gain = tl.load(gain_ptr + c, mask=wanted & (gain_off != 0), other=1.0)
    shift = tl.load(shift_ptr + c, mask=wanted & (shift_off != 0), other=-0.0)
    return gain, shift
