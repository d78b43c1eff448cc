"""The header of a safetensors file, checked as strictly as the format's own reader does it.

    8 bytes   length of the header, little-endian
    header    JSON: tensor name -> {"dtype", "shape", "data_offsets": [first byte, end], counted from the header's end}
    data      without holes, up to the end of the file

It is read here, so that the header and the bytes come from one opening of the file, whatever replaces it meanwhile.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from ..errors import AdapterFormatError
from .stored import FileBytes, Stored

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MOST = 100_000_000  # bytes of a header, by the format's definition


def read_header(file: FileBytes, where: str) -> dict[str, Stored]:
    """Tensor name -> where its bytes lie, in the order of the bytes.

    Raises:
        AdapterFormatError: a dtype that is not known here; the file cannot be read.
        ValueError: damaged, cut off, or no safetensors file; says what is wrong.
    """
    size = file.size
    if size < 8:
        raise ValueError("shorter than a header")
    length = int.from_bytes(_bytes(file, 0, 8), "little")
    if length > min(_MOST, size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = json.loads(_bytes(file, 8, length).decode("utf-8"))
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    header.pop("__metadata__", None)
    rows = [(*_offsets(name, entry), name, entry) for name, entry in header.items()]
    rows.sort(key=lambda row: row[:2])
    found: dict[str, Stored] = {}
    end = 0
    for first, stop, name, entry in rows:
        if first != end:
            raise ValueError(f"tensor {name!r} begins at byte {first}, and what comes before it ends at {end}")
        end = stop
        if entry["dtype"] not in DTYPES:
            raise AdapterFormatError(
                f"{where}: tensor {name!r} has the dtype {entry['dtype']}, which is not known here."
            )
        stored = Stored(file, 8 + length + first, tuple(entry["shape"]), DTYPES[entry["dtype"]])
        if stored.nbytes != stop - first:
            raise ValueError(f"tensor {name!r} has the shape {stored.shape} and {stop - first} bytes")
        found[name] = stored
    if 8 + length + end != size:
        raise ValueError(f"the tensors end at byte {8 + length + end}, the file at {size}")
    return found


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    """The checked offsets of an entry, whose other fields are checked as well."""
    shape = offsets = None
    if isinstance(entry, dict):
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 and type(entry.get("dtype")) is str:
        numbers = [*shape, *offsets]
        if set(map(type, numbers)) == {int} and min(numbers) >= 0 and offsets[0] <= offsets[1]:
            return offsets[0], offsets[1]
    raise ValueError(f"the entry of tensor {name!r} is damaged")


def _bytes(file: FileBytes, start: int, n: int) -> bytes:
    buffer = bytearray(n)
    file.read_into([memoryview(buffer)], start)
    return bytes(buffer)
