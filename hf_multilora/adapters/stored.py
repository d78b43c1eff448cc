"""Stored tensors as bytes: where they lie, and how they get from there into memory that somebody else owns.

Reading goes by position into given buffers, so that a tensor's bytes are copied once, to where they are wanted, by as
many threads as like to; and a file that is cut off meanwhile is an error, where a mapping of it would be a crash.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..errors import AdapterFormatError


class FileBytes:
    """A file, opened. Threads may read at once.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of the file as it is now."""
        return os.fstat(self._file.fileno()).st_size

    def read_into(self, buffers: Sequence[memoryview], start: int) -> None:
        """Fill `buffers` (bytes, at most 1024 of them), one after the other, with what follows `start`.

        Raises:
            AdapterFormatError: it cannot be read, or ends before the last buffer is full.
            ValueError: it was closed.
        """
        left = [buffer for buffer in buffers if len(buffer)]
        while left:
            try:
                n = self._read(left, start)
            except OSError as error:
                raise AdapterFormatError(f"{self._path}: cannot be read ({error.strerror or error}).") from error
            if not n:
                raise AdapterFormatError(f"{self._path}: was cut off at byte {start} while it was read.")
            start += n
            while left and n >= len(left[0]):
                n -= len(left.pop(0))
            if n:
                left[0] = left[0][n:]

    def _read(self, buffers: list[memoryview], start: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), buffers, start)
        with self._lock:  # Windows
            self._file.seek(start)
            return self._file.readinto(buffers[0]) or 0

    def close(self) -> None:
        self._file.close()


class TensorBytes:
    """A contiguous tensor in host memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = tensor.detach().view(-1).view(torch.uint8).numpy()

    def read_into(self, buffers: Sequence[memoryview], start: int) -> None:
        for buffer in buffers:
            # unlike an assignment of memoryviews, this lets other threads run
            np.copyto(np.frombuffer(buffer, np.uint8), self._bytes[start : start + len(buffer)])
            start += len(buffer)

    def view(self, start: int, nbytes: int) -> torch.Tensor:
        """Some of the bytes, uint8 [nbytes]."""
        return torch.from_numpy(self._bytes[start : start + nbytes])


@dataclass(frozen=True)
class Stored:
    """A tensor's bytes, row-major.

    Args:
        source: what holds them.
        start: the first byte.
        shape, dtype: of the tensor.
    """

    source: FileBytes | TensorBytes
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry along the first dimension; of the whole tensor where it has none."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> Stored:
        """A range along the first dimension."""
        return Stored(self.source, self.start + start * self.row_bytes, (stop - start, *self.shape[1:]), self.dtype)

    def stretch(self, row: int, start: int, stop: int) -> Stored:
        """Of a matrix, a range of one row."""
        first = self.start + row * self.row_bytes + start * self.dtype.itemsize
        return Stored(self.source, first, (stop - start,), self.dtype)

    def read(self) -> torch.Tensor:
        """The tensor; it may be a view, do not write to it. Raises: AdapterFormatError, ValueError (see FileBytes)."""
        if isinstance(self.source, TensorBytes):
            return self.source.view(self.start, self.nbytes).view(self.dtype).view(self.shape)
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        if tensor.numel():
            self.source.read_into([tensor.view(-1).view(torch.uint8).numpy().data], self.start)
        return tensor


def in_memory(tensor: torch.Tensor) -> Stored | None:
    """A tensor's own bytes; None where they do not lie in host memory one after the other, as its elements do."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    if not tensor.numel() or not tensor.dim():
        return None
    return Stored(TensorBytes(tensor), 0, tuple(tensor.shape), tensor.dtype)
