"""Entries of a block that are made straight from stored bytes: read to their place, or changed on the way there.

What is stored as it is wanted (A, saved tensors in the base's dtype) is read into the block itself. The rest (B, which
is scaled and transposed) is read into a buffer that a core's cache holds, and written to the block from there. So a
file is read once, in its own order, in chunks of some MB that several threads share; none of what they do holds the
interpreter's lock for long. The numbers are those of plain torch: a product in fp32, rounded once.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..adapters.stored import Stored
from .layout import FACTOR_ALIGN, align

_CHUNK = 2 << 20  # bytes that a thread reads at once
_PIECES = 512  # and buffers that it reads them into, of which the system takes 1024
_ALONE = 4 << 20  # less than this is not worth a second thread
_THREADS = 8
# torch spreads larger tensors over threads of its own, of which these threads would get as many each.
_TILE = 32_000
Bytes = np.ndarray[Any, Any]  # uint8, flat
_INTS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Recipe:
    """How an entry is made from a stored tensor.

    Args:
        stored: where its bytes are.
        transposed: the entry is its transpose; of matrices only.
        scale: number that it is multiplied by in fp32, before it is rounded to the entry's dtype; None: it is cast.
    """

    stored: Stored
    transposed: bool = False
    scale: float | None = None


def stored_of(ref: Any) -> Stored | None:
    """The bytes of what a plan refers to; None where it is computed, or lies elsewhere."""
    find = getattr(ref, "stored", None)
    found: Stored | None = find() if find is not None else None
    return found


class Entry(NamedTuple):
    """An entry of a block: its first byte, dtype and recipe."""

    place: int
    dtype: torch.dtype
    recipe: Recipe


class _Way(NamedTuple):
    """What is done to stored numbers before they are put in their place, alike for many entries."""

    stored: torch.dtype
    dtype: torch.dtype
    scale: float | None


class _Piece(NamedTuple):
    """Some of an entry: rows [first, stop) of what is stored, or bytes where it is stored as it is wanted."""

    entry: Entry
    way: _Way | None  # None: the stored bytes are the entry's own
    first: int
    stop: int
    start: int  # the first byte in the source
    nbytes: int


def fill(block: torch.Tensor, entries: Sequence[Entry], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Make entries of `block` (uint8, flat, on the CPU). `meanwhile` runs at the same time, in this thread.

    Raises:
        AdapterFormatError: a file cannot be read, or ends too early.
        Whatever `meanwhile` raises.
    """
    chunks = deque(_chunks(entries))
    threads = min(_THREADS, len(chunks), _cores())
    raw = block.numpy()

    def work() -> None:
        scratch = _Scratch()
        while True:
            try:
                chunk = chunks.popleft()
            except IndexError:
                return
            try:
                _make(raw, chunk, scratch)
            except BaseException:
                chunks.clear()  # the others need not go on
                raise

    if threads < 2 or sum(entry.recipe.stored.nbytes for entry in entries) < _ALONE:
        work()
        meanwhile()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="hf_multilora_read") as pool:
        workers = [pool.submit(work) for _ in range(threads)]
        try:
            meanwhile()
        except BaseException:
            chunks.clear()
            raise
    for worker in workers:
        worker.result()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chunks(entries: Sequence[Entry]) -> list[list[_Piece]]:
    """Pieces in the order of their bytes; those of one chunk are of one source."""
    chunks: list[list[_Piece]] = []
    room = 0
    last: Any = None
    for entry in sorted(entries, key=lambda entry: (id(entry.recipe.stored.source), entry.recipe.stored.start)):
        recipe = entry.recipe
        stored = recipe.stored
        way = _Way(stored.dtype, entry.dtype, recipe.scale)
        plain = not recipe.transposed and recipe.scale is None and stored.dtype == entry.dtype
        start, nbytes = stored.start, stored.nbytes
        unit = 1 if plain else max(1, stored.row_bytes)
        first = 0
        while nbytes:
            if stored.source is not last or room < min(unit, nbytes) or len(chunks[-1]) >= _PIECES:
                chunks.append([])
                room, last = max(_CHUNK, unit), stored.source
            rows = min(nbytes, room) // unit
            size = rows * unit
            chunks[-1].append(_Piece(entry, None if plain else way, first, first + rows, start, size))
            first, start, nbytes, room = first + rows, start + size, nbytes - size, room - size
    return chunks


class _Scratch:
    """Buffers of one thread, by purpose; they grow as needed."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def get(self, what: str, nbytes: int) -> torch.Tensor:
        buffer = self._buffers.get(what)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[what] = torch.empty(max(nbytes, _CHUNK), dtype=torch.uint8, device="cpu")
        return buffer[:nbytes]


@torch.inference_mode(False)
@torch.no_grad()
def _make(raw: Bytes, chunk: list[_Piece], scratch: _Scratch) -> None:
    """Read the pieces of a chunk and put them in their places in the block, whose bytes are `raw`."""
    # Pieces to be changed are read into the buffer, alike ones side by side, to be cast and scaled at once.
    ways: dict[_Way, list[_Piece]] = {}
    for piece in chunk:
        if piece.way is not None:
            ways.setdefault(piece.way, []).append(piece)
    at = 0
    parts: dict[_Way, slice] = {}
    read_to: dict[int, int] = {}  # by id, for to hash a piece takes longer than to read it
    for way, pieces in ways.items():
        begin = at
        for piece in pieces:
            read_to[id(piece)] = at
            at += piece.nbytes
        parts[way] = slice(begin, at)
        at = align(at, FACTOR_ALIGN)
    read = scratch.get("read", at)
    room, block = read.numpy().data, raw.data
    source = chunk[0].entry.recipe.stored.source
    buffers: list[memoryview] = []
    begin = end = chunk[0].start
    for piece in chunk:
        if piece.start != end:
            source.read_into(buffers, begin)
            buffers, begin = [], piece.start
        target, place = (block, piece.entry.place + piece.first) if piece.way is None else (room, read_to[id(piece)])
        buffers.append(target[place : place + piece.nbytes])
        end = piece.start + piece.nbytes
    source.read_into(buffers, begin)
    for way, pieces in ways.items():
        made = _numbers(read[parts[way]].view(way.stored), way, scratch)
        ints = made.view(torch.uint8).numpy().view(_INTS[way.dtype.itemsize])
        first = 0
        for piece in pieces:
            stop = first + piece.nbytes // way.stored.itemsize
            _put(raw, piece, ints[first:stop])
            first = stop


def _numbers(values: torch.Tensor, way: _Way, scratch: _Scratch) -> torch.Tensor:
    """Values cast and scaled; in place where no dtype changes."""
    if way.scale is not None:
        # one pass over halves: their product with a number is computed in fp32 and rounded once
        values = _cast(values, way.dtype if way.dtype == way.stored else torch.float32, scratch, "wide")
        for tile in values.split(_TILE):
            tile.mul_(way.scale)
    return _cast(values, way.dtype, scratch, "cast")


def _cast(values: torch.Tensor, dtype: torch.dtype, scratch: _Scratch, what: str) -> torch.Tensor:
    if values.dtype == dtype:
        return values
    out = scratch.get(what, values.numel() * dtype.itemsize).view(dtype)
    for tile, source in zip(out.split(_TILE), values.split(_TILE), strict=True):
        tile.copy_(source)
    return out


def _put(raw: Bytes, piece: _Piece, values: np.ndarray[Any, Any]) -> None:
    """Write the values of a piece, flat, to their place in the block, turned where that is asked for."""
    place, dtype, recipe = piece.entry
    shape, size = recipe.stored.shape, dtype.itemsize
    if recipe.transposed:
        rows, columns = shape
        entry = raw[place : place + rows * columns * size].view(values.dtype).reshape(columns, rows)
        np.copyto(entry[:, piece.first : piece.stop], values.reshape(-1, columns).T)
    else:
        place += piece.first * math.prod(shape[1:]) * size
        np.copyto(raw[place : place + len(values) * size].view(values.dtype), values)
