"""Launches through CUDA's driver, with everything prepared that is the same at each call of one shape.

Triton's own launcher parses some thirty arguments at every call. Here one buffer holds what `cuLaunchKernelEx` reads
of kernels that run one after another: each launch's configuration, and a cell for each parameter. Parameters that
change from call to call share the first cells of all, so that one write fills them in for every kernel.

Which parameters a kernel has, and that two pointers to scratch memory follow them, is Triton's convention. The driver
knows their number and sizes: where these are not as expected, nothing is prepared.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

Launch = Callable[..., None]

_SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8}
_POINTER = 8
# CUlaunchConfig: seven 32-bit numbers (grid, block, bytes of shared memory), the stream, attributes and their number.
_CONFIG = struct.Struct("=7I4x3Q")
_STREAM = struct.Struct("=Q"), 32  # where the stream lies in it
# CUlaunchAttribute: id, then 64 bytes of value.
_ATTRIBUTE = struct.Struct("=I4xI60x")
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # what a dependent launch is called there
_WARP = 32


@functools.cache
def _driver() -> Any:
    """(cuLaunchKernelEx, cuFuncGetParamInfo), or None where there is no such driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return library.cuLaunchKernelEx, library.cuFuncGetParamInfo
    except (OSError, AttributeError):
        return None


class Kernel(NamedTuple):
    """A kernel to be launched.

    Attributes:
        compiled: what Triton's launch of it returned.
        grid: of the launch.
        args: the arguments of that launch, constants included. Tensors among the fixed ones are referred to by address
            and must stay where they are.
        varying: for each of the leading parameters, which value of a call it takes.
    """

    compiled: Any
    grid: tuple[int, int, int]
    args: Sequence[Any]
    varying: tuple[int, ...]


def prepare(kernels: Sequence[Kernel]) -> Launch | None:
    """A function that launches compiled kernels again, in order.

    It is called with the stream, then the values that the kernels share: integers, addresses for tensors; by one
    thread at a time.

    Returns:
        None where one of them cannot be launched this way.
    """
    driver = _driver()
    found = [_parameters(kernel.compiled, kernel.args) for kernel in kernels]
    if driver is None or None in found:
        return None
    launch, info = driver
    parameters: list[list[tuple[int, int]]] = [one for one in found if one is not None]
    for kernel, one in zip(kernels, parameters, strict=True):
        sizes = [size for size, _ in one]
        if len(one) < len(kernel.varying) or not _as_driver_says(info, kernel.compiled.function, sizes):
            return None

    # cells of the values, then of each kernel: its own cells, the addresses of all its cells, configuration, attribute
    values = 1 + max(max(kernel.varying, default=-1) for kernel in kernels)
    own = [16 * len(one) + _CONFIG.size + _ATTRIBUTE.size for one in parameters]
    buffer = ctypes.create_string_buffer(8 * values + sum(own))
    start = ctypes.addressof(buffer)
    streams, calls, at = [], [], 8 * values
    for kernel, one, size in zip(kernels, parameters, own, strict=True):
        metadata = kernel.compiled.metadata
        table = at + 8 * len(one)
        config = table + 8 * len(one)
        attribute = config + _CONFIG.size
        for i, (_, value) in enumerate(one):
            cell = 8 * kernel.varying[i] if i < len(kernel.varying) else at + 8 * i
            struct.pack_into("=Q", buffer, cell, value & (1 << 64) - 1)
            struct.pack_into("=Q", buffer, table + 8 * i, start + cell)
        block = (_WARP * metadata.num_warps, 1, 1)
        count = 1 if metadata.launch_pdl else 0
        _CONFIG.pack_into(buffer, config, *kernel.grid, *block, metadata.shared, 0, start + attribute, count)
        _ATTRIBUTE.pack_into(buffer, attribute, _PROGRAMMATIC_STREAM_SERIALIZATION, 1)
        streams.append(config + _STREAM[1])
        pointers = (start + config, kernel.compiled.function, start + table)
        calls.append(tuple(map(ctypes.c_void_p, pointers)))
        at += size

    write, write_stream = struct.Struct(f"={values}Q").pack_into, _STREAM[0].pack_into
    current = 0

    def run(stream: int, *given: int) -> None:
        nonlocal current
        if stream != current:
            current = stream
            for place in streams:
                write_stream(buffer, place, stream)
        write(buffer, 0, *given)
        for config, function, addresses in calls:
            status = launch(config, function, addresses, None)
            if status:
                raise RuntimeError(f"CUDA error {status} from cuLaunchKernelEx")

    return run


def _parameters(compiled: Any, args: Sequence[Any]) -> list[tuple[int, int]] | None:
    """(size, value) of what the kernel takes; None where it is not known how to pass that."""
    try:
        metadata, types = compiled.metadata, list(compiled.src.signature.values())
        plain = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
        plain = plain and not (metadata.global_scratch_size or metadata.profile_scratch_size)
    except AttributeError:
        return None
    if not plain or len(types) != len(args):
        return None
    found = []
    for kind, arg in zip(types, args, strict=True):
        if kind == "constexpr":
            continue
        size = _POINTER if isinstance(kind, str) and kind.startswith("*") else _SIZES.get(kind)
        value = arg.data_ptr() if isinstance(arg, Tensor) else arg
        if size is None or not isinstance(value, int):
            return None
        found.append((size, value))
    return [*found, (_POINTER, 0), (_POINTER, 0)]  # scratch memory, of which the kernel has none


def _as_driver_says(info: Any, address: int, sizes: Sequence[int]) -> bool:
    function = ctypes.c_void_p(address)
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for i, expected in enumerate(sizes):
        status = info(function, ctypes.c_size_t(i), ctypes.byref(offset), ctypes.byref(size))
        if status or size.value != expected:
            return False
    return bool(info(function, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)))
