"""Launches through CUDA's driver, with everything prepared that is the same at each call of one shape.

Triton's own launcher parses some thirty arguments at every call. Here one buffer holds what `cuLaunchKernelEx` reads:
the launch's configuration, and a cell for each parameter of the kernel. A launch writes the stream and the first few
cells, and calls the driver.

Which parameters a kernel has, and that two pointers to scratch memory follow them, is Triton's convention. The driver
knows their number and sizes: where these are not as expected, nothing is prepared.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Launch = Callable[..., None]

_SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8}
_POINTER = 8
# CUlaunchConfig: seven 32-bit numbers (grid, block, bytes of shared memory), the stream, attributes and their number.
_CONFIG = struct.Struct("=7I4x3Q")
_STREAM = 32  # where the stream lies in it
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


def prepare(compiled: Any, grid: tuple[int, int, int], args: Sequence[Any], varying: int) -> Launch | None:
    """A function that launches a compiled kernel again.

    Args:
        compiled: what Triton's launch of the kernel returned.
        args: the arguments of that launch, constants included. Tensors among the fixed ones are referred to by address
            and must stay where they are.
        varying: how many of the leading ones the function takes: as integers, addresses for tensors. It is called with
            the stream, then those, by one thread at a time.

    Returns:
        None where the kernel cannot be launched this way.
    """
    parameters = _parameters(compiled, args)
    driver = _driver()
    if parameters is None or driver is None:
        return None
    launch, info = driver
    function, metadata = ctypes.c_void_p(compiled.function), compiled.metadata
    sizes = [size for size, _ in parameters]
    if len(parameters) < varying or not _as_driver_says(info, function, sizes):
        return None

    # configuration, cells, their addresses, attributes
    cells = _CONFIG.size
    table = cells + 8 * len(parameters)
    attributes = table + 8 * len(parameters)
    buffer = ctypes.create_string_buffer(attributes + _ATTRIBUTE.size)
    start = ctypes.addressof(buffer)
    count = 1 if metadata.launch_pdl else 0
    block = (_WARP * metadata.num_warps, 1, 1)
    _CONFIG.pack_into(buffer, 0, *grid, *block, metadata.shared, 0, start + attributes, count)
    for i, (_, value) in enumerate(parameters):
        struct.pack_into("=Q", buffer, cells + 8 * i, value & (1 << 64) - 1)
        struct.pack_into("=Q", buffer, table + 8 * i, start + cells + 8 * i)
    _ATTRIBUTE.pack_into(buffer, attributes, _PROGRAMMATIC_STREAM_SERIALIZATION, 1)

    write = struct.Struct(f"=3Q{varying}Q").pack_into
    config, addresses, where = ctypes.c_void_p(start), ctypes.c_void_p(start + table), start + attributes

    def run(stream: int, *values: int) -> None:
        write(buffer, _STREAM, stream, where, count, *values)
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


def _as_driver_says(info: Any, function: ctypes.c_void_p, sizes: Sequence[int]) -> bool:
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for i, expected in enumerate(sizes):
        status = info(function, ctypes.c_size_t(i), ctypes.byref(offset), ctypes.byref(size))
        if status or size.value != expected:
            return False
    return bool(info(function, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)))
