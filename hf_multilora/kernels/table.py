"""Tuned block sizes as data: tables that `bench tune` wrote, looked up by the shape of a call.

The rule in `tuning` gives every call its kernels and their sizes; a table only replaces sizes, for the shapes that
were timed. Which table is in force is fixed when a process first asks: the file that the variable `TABLE_ENV` names,
or else the one that is shipped for the current device, if there is one. Nothing here depends on who is in a batch,
and no size that changes the order of sums on the `widths` of a call: a neighbour may have a layer served alone.

    {"format": 1, "device": ..., "rows": [{"kind": "shrink_rows", "shape": {...}, "tiling": {"warps": 2}}, ...]}

`kind` is the name of a kernel. `shape` has the fields n (rounded up to a power of two), k, max_rank and dtype of the
factors, those of an expand widths, too; it may say with how many rows and adapters it was timed, and for a shrink with
which widths. What else a row or a table says is for people.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, closest

logger = logging.getLogger(__name__)

TABLE_ENV = "HF_MULTILORA_TUNING"
FORMAT = 1
FOLDER = Path(__file__).with_name("tables")
MAX_SPLIT = 32

# What a warp reads with one load of 16 bytes: of so much of a row of Bt, each thread holds all ranks of its columns.
WARP_BYTES = 512
# Up to this rank. Above it threads share columns, and how they do orders the sums: there are no sizes to choose.
LOW_RANK = 16

# The sizes that a table may give, by kernel: others would not be used, leave columns out, or order sums by widths.
FIELDS = {
    "shrink_rows": ("chunk", "block_k", "warps"),
    "shrink_segments": ("chunk", "block_k", "stages", "warps"),
    "shrink_tiles": ("chunk", "block_m", "block_k", "stages", "warps"),
    "expand_rows": ("block_n",),
    "expand_segments": ("block_n", "stages", "warps"),
    "expand_tiles": ("block_n", "steps", "stages", "warps"),
}
# Smallest and largest value, and whether only powers of two will do. tl.dot needs 16 of each.
_LIMITS = {
    "chunk": (16, 1 << 20, False),
    "block_m": (16, 256, True),
    "block_n": (16, 4096, True),
    "block_k": (16, 4096, True),
    "steps": (1, 1024, False),
    "stages": (1, 8, False),
    "warps": (1, 16, True),
}
_SHAPE, _TIMED_WITH = ("n", "k", "max_rank", "dtype"), ("rows", "adapters")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Key = tuple[Any, ...]
Sizes = dict[str, int]
Table = dict[Key, Sizes]


class _Trial:
    """The one row that is in force, in place of all tables, while a search times it."""

    table: Table | None = None


def lookup(kernel: str, n: int, k: int, widths: tuple[int, ...], max_rank: int, dtype: torch.dtype) -> Sizes | None:
    """The sizes that the table in force has for this kernel and shape; None or {}: those of the rule.

    Raises:
        ConfigError: the table's file cannot be read, or has a row that no kernel can run with.
    """
    table = _in_force()
    return table.get(_key(kernel, n, k, widths, max_rank, dtype)) if table else None


@contextmanager
def tried(kernel: str, shape: Mapping[str, Any], candidate: Mapping[str, int]) -> Iterator[None]:
    """Calls of this shape are prepared with these sizes, and all others as without any table. For one thread.

    Launches that were prepared before stay as they were: whoever times them has to have them forgotten.

    Raises:
        ConfigError: sizes that the kernel cannot run with.
    """
    where = f"{kernel} {dict(candidate)}"
    before, _Trial.table = (
        _Trial.table,
        {_key(kernel, **_shape(kernel, shape, where)): _sizes(kernel, shape, candidate, where)},
    )
    try:
        yield
    finally:
        _Trial.table = before


def read(path: str | Path) -> Table:
    """The rows of a table.

    Raises:
        ConfigError: it is not a table of this format, or has a row that no kernel can run with; names file and row.
    """
    return _rows(path, _content(path))


def _content(path: str | Path) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the tuning table cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("rows"), list):
        raise ConfigError(f"{path}: not a tuning table of format {FORMAT}, as `hf-multilora bench tune` writes it.")
    return content


def _rows(path: str | Path, content: dict[str, Any]) -> Table:
    table: Table = {}
    for number, row in enumerate(content["rows"]):
        where = f"{path}, row {number}"
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected an object with kind, shape and tiling, found {row!r}.")
        kernel: Any = row.get("kind")
        shape: Any = row.get("shape")
        if not isinstance(kernel, str) or kernel not in FIELDS:
            raise ConfigError(f"{where}: kind {kernel!r}: expected one of {', '.join(FIELDS)}.")
        key = _key(kernel, **_shape(kernel, shape, where))
        if key in table:
            but = ", widths aside" if _is_shrink(kernel) else ""
            raise ConfigError(
                f"{where}: an earlier row has this kind and shape (n rounded up to a power of two{but})."
            )
        table[key] = _sizes(kernel, shape, row.get("tiling"), where)
    return table


def check() -> None:
    """Read the table in force, so that a bad one is known before the first launch.

    Raises:
        ConfigError: see `lookup`.
    """
    _in_force()


def file_of(device: str) -> Path:
    """Where the table for a device of this name would be shipped."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '_', device.lower())}.json"


def _in_force() -> Table | None:
    if _Trial.table is not None:
        return _Trial.table
    named = _named()
    if named is not None:
        return named
    return _shipped(torch.cuda.current_device()) if _has_cuda() else None


@functools.cache
def _named() -> Table | None:
    path = os.environ.get(TABLE_ENV)
    if not path:
        return None
    content = _content(path)
    table, made_for = _rows(path, content), content.get("device")
    if _has_cuda() and made_for != torch.cuda.get_device_name():
        logger.warning("%s was made for %r, and this is %r.", path, made_for, torch.cuda.get_device_name())
    return table


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


@functools.cache
def _shipped(device: int) -> Table | None:
    name = torch.cuda.get_device_name(device)
    path = file_of(name)
    if not path.is_file():
        return None
    content = _content(path)
    # Two names may differ in no more than signs; the file says whose it is.
    return _rows(path, content) if content.get("device") == name else None


def _key(kernel: str, n: int, k: int, widths: Sequence[int], max_rank: int, dtype: torch.dtype) -> Key:
    return kernel, 1 << (n - 1).bit_length(), k, () if _is_shrink(kernel) else tuple(widths), max_rank, dtype


def _is_shrink(kernel: str) -> bool:
    return kernel.startswith("shrink_")


def _shape(kernel: str, shape: Any, where: str) -> dict[str, Any]:
    """What a key is made of."""
    fields = _SHAPE if _is_shrink(kernel) else (*_SHAPE, "widths")
    if not isinstance(shape, Mapping):
        raise ConfigError(f"{where}: shape {shape!r}: expected an object with {', '.join(fields)}.")
    for name in shape:
        if name not in (*_SHAPE, "widths", *_TIMED_WITH):
            raise ConfigError(f"{where}: a shape has no {name!r}.{closest(str(name), fields)}")
    for name in fields:
        if name not in shape:
            raise ConfigError(f"{where}: the shape has no {name}.")
    widths, dtype = shape.get("widths", (1,)), shape["dtype"]
    if not isinstance(widths, (list, tuple)) or not 1 <= len(widths) <= 4:
        raise ConfigError(f"{where}: widths {widths!r}: expected one to four numbers.")
    for name, value in [(name, shape[name]) for name in ("n", "k", "max_rank")] + [("widths", w) for w in widths]:
        if type(value) is not int or value < 1:
            raise ConfigError(f"{where}: {name} {value!r}: expected a positive whole number.")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ConfigError(f"{where}: dtype {dtype!r}: expected one of {', '.join(_DTYPES)}.")
    return {**{name: shape[name] for name in _SHAPE}, "widths": widths, "dtype": _DTYPES[dtype]}


def _sizes(kernel: str, shape: Mapping[str, Any], tiling: Any, where: str) -> Sizes:
    """The sizes of a row, checked."""
    if not isinstance(tiling, Mapping):
        raise ConfigError(f"{where}: tiling {tiling!r}: expected an object of sizes, which may be empty.")
    for name, value in tiling.items():
        if name not in FIELDS[kernel]:
            raise ConfigError(f"{where}: {kernel} takes no {name!r}, but {', '.join(FIELDS[kernel])}.")
        smallest, largest, power = _LIMITS[name]
        if kernel == "expand_rows" and name == "block_n":
            if shape["max_rank"] > LOW_RANK:
                raise ConfigError(f"{where}: expand_rows takes no block_n above max_rank {LOW_RANK}.")
            smallest = WARP_BYTES // _DTYPES[shape["dtype"]].itemsize
        if kernel == "expand_tiles" and name == "warps":
            smallest = 4  # fewer make another MMA
        if type(value) is not int or not smallest <= value <= largest or (power and value & (value - 1)):
            what = "a power of two" if power else "a whole number"
            raise ConfigError(f"{where}: {name} {value!r}: expected {what} from {smallest} to {largest}.")
    sizes = dict(tiling)
    if "chunk" in sizes and sizes["chunk"] % sizes.get("block_k", 16):
        raise ConfigError(f"{where}: chunk {sizes['chunk']} is no multiple of block_k (16 where it is not given).")
    if "chunk" in sizes and -(-shape["k"] // sizes["chunk"]) > MAX_SPLIT:
        raise ConfigError(f"{where}: chunk {sizes['chunk']} cuts k {shape['k']} into more than {MAX_SPLIT} parts.")
    return sizes
