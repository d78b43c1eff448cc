"""Weight files, opened lazily: the only place that opens them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor, known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """Tensors by name, in one or several files or in memory. Two checkpoints are equal only if they are the same object.

    Args:
        where: the file, or "memory"; named in every error.
        infos: tensor name -> shape and dtype.
        read: tensor name -> the tensor, which may be a view of a mapped file.
        close: releases the files.
    """

    def __init__(
        self,
        where: str | Path,
        infos: dict[str, TensorInfo],
        read: Callable[[str], torch.Tensor],
        close: Callable[[], None] | None = None,
    ) -> None:
        self.where = str(where)
        self.infos = infos
        self._read = read
        self._close = close

    def read(self, key: str) -> torch.Tensor:
        return self._read(key)

    def close(self) -> None:
        """Release the files; references to tensors cannot be read afterwards. May be called twice."""
        if self._close is not None:
            self._close()
            self._close = None


@dataclass(frozen=True)
class TensorRef:
    """A stored tensor, or a range of its rows, that is read when asked for.

    References are equal, and hash alike, exactly when they mean the same stored numbers, so a factor that several
    layers share can be stored once.
    """

    checkpoint: Checkpoint
    key: str
    rows: tuple[int, int] | None = None

    def read(self) -> torch.Tensor:
        """The tensor as stored (shape and dtype of the file), cut to `rows`; it may be a view: do not write to it."""
        tensor = self.checkpoint.read(self.key)
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]

    @property
    def dtype(self) -> torch.dtype:
        return self.checkpoint.infos[self.key].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.checkpoint.infos[self.key].shape
        return shape if self.rows is None else (self.rows[1] - self.rows[0], *shape[1:])
