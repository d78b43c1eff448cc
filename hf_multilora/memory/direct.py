"""Entries of a block that are made straight from stored bytes: read to their place, or changed on the way there.

What is stored as it is wanted (A, saved tensors in the base's dtype) is read into the block itself. The rest (B, which
is scaled and transposed) is read into a buffer that a core's cache holds, and written to the block from there. So a
file is read once, in its own order, in chunks of some MB that several threads share; none of what they do holds the
interpreter's lock for long. The numbers are those of plain torch: a product in fp32, rounded once.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..adapters.stored import Stored

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
        first, columns: of a transpose that has more columns than these (`columns` in all), the first of these.
    """

    stored: Stored
    transposed: bool = False
    scale: float | None = None
    first: int = 0
    columns: int | None = None


class Pieces(NamedTuple):
    """An entry that is made of parts of a stored tensor; what follows the last of them is zeros.

    Attributes:
        parts: (the element of the entry that each begins with, how it is made).
        filled: elements that they make, from the entry's first one on.
    """

    parts: tuple[tuple[int, Recipe], ...]
    filled: int


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
    task = _Task(block.numpy(), _chunks(entries))
    threads = min(_THREADS, len(task.chunks), cores())
    alone = threads < 2 or sum(entry.recipe.stored.nbytes for entry in entries) < _ALONE
    if not alone:
        _start(task.help, threads - 1)
    try:
        meanwhile()
        task.work()
    finally:
        task.end()
    if task.errors:
        raise task.errors.pop()


class _Task:
    """Chunks of one block, which several threads take one by one.

    Helpers that have a chunk in hand are waited for, rather than all that were asked: one may be asked and never come,
    or come when all is done (a pool queues what it is to do before it finds out that no thread can be started).

    Attributes:
        chunks: what nobody has begun.
        errors: the first that a helper met.
    """

    def __init__(self, raw: Bytes, chunks: Sequence[list[_Piece]]) -> None:
        self._raw: Bytes | None = raw
        self.chunks = deque(chunks)
        self.errors: list[BaseException] = []
        self._busy = 0
        self._changed = threading.Condition()

    def work(self) -> None:
        """Of the thread that the task belongs to: make chunks until there are no more."""
        raw, scratch = self._raw, _Scratch()
        assert raw is not None
        while True:
            try:
                chunk = self.chunks.popleft()
            except IndexError:
                return
            _make(raw, chunk, scratch)

    def help(self) -> None:
        """The same in another thread, at any time."""
        scratch = _Scratch()
        while True:
            with self._changed:
                raw = self._raw
                if raw is None:
                    return
                try:
                    chunk = self.chunks.popleft()
                except IndexError:
                    return
                self._busy += 1
            try:
                _make(raw, chunk, scratch)
            except BaseException as error:
                self.chunks.clear()  # the others need not go on
                self.errors[:] = [*self.errors, error][:1]
            finally:
                raw = None
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def end(self) -> None:
        """Begin no more, and wait for helpers that write to the block; those who come later find nothing to do."""
        with self._changed:
            self.chunks.clear()
            self._raw = None  # whoever still waits in a queue does not keep the block
            self._changed.wait_for(lambda: not self._busy)


# Kept, because to start a thread takes as long as it takes to read half a MB, and more on a busy machine.
_pool: ThreadPoolExecutor | None = None
_starting = threading.Lock()


def _start(help: Callable[[], None], threads: int) -> None:
    """Ask several other threads for help; none may come, or fewer."""
    global _pool
    with _starting:
        if _pool is None:
            _pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hf_multilora_read")
    with suppress(RuntimeError):  # the interpreter is about to end, or the system has no more threads
        for _ in range(threads):
            _pool.submit(help)


def _forked() -> None:
    global _pool, _starting
    _pool, _starting = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def cores() -> int:
    """Cores that this process may use."""
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


class _Buffer:
    """Memory of one thread for numbers of one dtype, in whole tiles.

    Numpy's views of it are used, because torch's let go of the interpreter's lock each time, and wait to get it back.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        tiles = -(-numel // _TILE)
        memory = torch.empty(tiles * _TILE * dtype.itemsize, dtype=torch.uint8, device="cpu")
        self.bytes: Bytes = memory.numpy()
        self.tiles = memory.view(dtype).split(_TILE)


class _Scratch:
    """Buffers of one thread, by purpose and dtype; they grow as needed. And numbers as tensors."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], _Buffer] = {}
        self._scales: dict[float, torch.Tensor] = {}

    def get(self, what: str, numel: int, dtype: torch.dtype) -> _Buffer:
        buffer = self._buffers.get((what, dtype))
        if buffer is None or len(buffer.bytes) < numel * dtype.itemsize:
            buffer = _Buffer(max(numel, _CHUNK // dtype.itemsize), dtype)
            self._buffers[what, dtype] = buffer
        return buffer

    def scale(self, number: float) -> torch.Tensor:
        found = self._scales.get(number)
        if found is None:
            found = self._scales[number] = torch.tensor(number, dtype=torch.float32, device="cpu")
        return found


@torch.inference_mode(False)
@torch.no_grad()
def _make(raw: Bytes, chunk: list[_Piece], scratch: _Scratch) -> None:
    """Read the pieces of a chunk and put them in their places in the block, whose bytes are `raw`."""
    # Pieces to be changed are read into buffers, alike ones side by side, to be cast and scaled at once.
    ways: dict[_Way, list[_Piece]] = {}
    for piece in chunk:
        if piece.way is not None:
            ways.setdefault(piece.way, []).append(piece)
    read_to: dict[int, memoryview] = {}  # by id, for to hash a piece takes longer than to read it
    numels: dict[_Way, int] = {}
    for number, (way, pieces) in enumerate(ways.items()):
        numels[way] = sum(piece.nbytes for piece in pieces) // way.stored.itemsize
        room = scratch.get(f"read {number}", numels[way], way.stored).bytes.data
        at = 0
        for piece in pieces:
            read_to[id(piece)] = room[at : at + piece.nbytes]
            at += piece.nbytes
    block = raw.data
    source = chunk[0].entry.recipe.stored.source
    buffers: list[memoryview] = []
    begin = end = chunk[0].start
    for piece in chunk:
        if piece.start != end:
            source.read_into(buffers, begin)
            buffers, begin = [], piece.start
        if piece.way is None:
            place = piece.entry.place + piece.first
            buffers.append(block[place : place + piece.nbytes])
        else:
            buffers.append(read_to[id(piece)])
        end = piece.start + piece.nbytes
    source.read_into(buffers, begin)
    for number, (way, pieces) in enumerate(ways.items()):
        numel = numels[way]
        made = _made(scratch.get(f"read {number}", numel, way.stored), numel, way, scratch)
        ints = made.bytes.view(_INTS[way.dtype.itemsize])
        first = 0
        for piece in pieces:
            stop = first + piece.nbytes // way.stored.itemsize
            _put(raw, piece, ints[first:stop])
            first = stop


def _made(read: _Buffer, numel: int, way: _Way, scratch: _Scratch) -> _Buffer:
    """Numbers cast and scaled, in place where no dtype changes. The rest of the last tile is of no account."""
    n, dtype = -(-numel // _TILE), way.stored

    def cast(values: _Buffer, to: torch.dtype, what: str) -> _Buffer:
        out = scratch.get(what, numel, to)
        torch._foreach_copy_(out.tiles[:n], values.tiles[:n])
        return out

    if way.scale is not None:
        # one pass over halves: their product with a number is computed in fp32 and rounded once
        if dtype not in (way.dtype, torch.float32):
            read, dtype = cast(read, torch.float32, "wide"), torch.float32
        # One call for all tiles, for each has to ask for the interpreter's lock. As a tensor, for a number would be
        # rounded to the dtype of the values.
        torch._foreach_mul_(read.tiles[:n], scratch.scale(way.scale))
    return read if dtype == way.dtype else cast(read, way.dtype, "cast")


def _put(raw: Bytes, piece: _Piece, values: np.ndarray[Any, Any]) -> None:
    """Write the values of a piece, flat, to their place in the block, turned where that is asked for."""
    place, dtype, recipe = piece.entry
    shape, size = recipe.stored.shape, dtype.itemsize
    if recipe.transposed:
        rows, columns = recipe.columns or shape[0], shape[1]
        entry = raw[place : place + rows * columns * size].view(values.dtype).reshape(columns, rows)
        first = recipe.first + piece.first
        np.copyto(entry[:, first : first + piece.stop - piece.first], values.reshape(-1, columns).T)
    else:
        place += piece.first * math.prod(shape[1:]) * size
        np.copyto(raw[place : place + len(values) * size].view(values.dtype), values)
