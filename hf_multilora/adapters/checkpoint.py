"""Weight files, opened lazily: here, and by `stored` for safetensors. Code in a pickle is never run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import AdapterFormatError
from .damage import weights_damage
from .header import read_header
from .stored import FileBytes, Stored, in_memory


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor, known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """Tensors by name, in one or several files or in memory. Two are equal only if they are the same object.

    Args:
        where: the file, or "memory"; named in every error.
        infos: tensor name -> shape and dtype.
        find: tensor name -> its bytes, or the tensor itself where it has no bytes of its own in host memory.
        close: releases the files.
    """

    def __init__(
        self,
        where: str | Path,
        infos: dict[str, TensorInfo],
        find: Callable[[str], Stored | torch.Tensor],
        close: Callable[[], None] | None = None,
    ) -> None:
        self.where = str(where)
        self.infos = infos
        self._find: Callable[[str], Stored | torch.Tensor] | None = find
        self._close = close

    def find(self, key: str) -> Stored | torch.Tensor:
        """The tensor's bytes, or the tensor (see the class). Raises: ValueError: the checkpoint was closed."""
        if self._find is None:
            raise ValueError(f"{self.where}: closed. Read the tensors before closing the plan.")
        return self._find(key)

    def read(self, key: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor as stored, or a range of its rows.

        Raises:
            AdapterFormatError: the file cannot be read any more.
            ValueError: the checkpoint was closed.
        """
        found = self.find(key)
        if isinstance(found, torch.Tensor):
            return found if rows is None else found[rows[0] : rows[1]]
        return (found if rows is None else found.rows(*rows)).read()

    def close(self) -> None:
        """Release the files; references to tensors cannot be read afterwards. May be called twice."""
        self._find = None
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
        return self.checkpoint.read(self.key, self.rows)

    def stored(self) -> Stored | None:
        """The same as bytes, for those who copy them to their place by themselves; None where there are none."""
        found = self.checkpoint.find(self.key)
        if isinstance(found, torch.Tensor):
            return None
        return found if self.rows is None else found.rows(*self.rows)

    @property
    def dtype(self) -> torch.dtype:
        return self.checkpoint.infos[self.key].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.checkpoint.infos[self.key].shape
        return shape if self.rows is None else (self.rows[1] - self.rows[0], *shape[1:])


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a weight file: .safetensors, an index of safetensors shards (.json), or a torch file (.bin, .pt).

    Raises:
        AdapterFormatError: damaged, foreign, holding more than tensors, or missing.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(1024)
    except OSError as error:
        raise AdapterFormatError(f"{path}: cannot be read ({error.strerror or error}).") from error
    damage = weights_damage(head)
    if damage:
        raise AdapterFormatError(f"{path}: {damage}")
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix == ".json":
        return _open_shards(path)
    return _open_torch(path)


def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    """Tensors in memory as a checkpoint.

    Raises:
        AdapterFormatError: something that is not a tensor.
    """
    return _from_dict("memory", tensors)


def _open_safetensors(path: Path) -> Checkpoint:
    try:
        file = FileBytes(path)
    except OSError as error:
        raise AdapterFormatError(f"{path}: cannot be read ({error.strerror or error}).") from error
    try:
        found = read_header(file, str(path))
    except BaseException as error:
        file.close()
        if isinstance(error, AdapterFormatError) or not isinstance(error, (ValueError, RecursionError)):
            raise
        raise AdapterFormatError(
            f"{path}: not a whole safetensors file ({error}). It is cut off or damaged: copy or download it again."
        ) from error
    infos = {key: TensorInfo(stored.shape, stored.dtype) for key, stored in found.items()}
    return Checkpoint(path, infos, found.__getitem__, file.close)


def _open_shards(path: Path) -> Checkpoint:
    """An index as transformers writes it: {"weight_map": {tensor name: file name}}."""
    try:
        names: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(names.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterFormatError(f"{path}: not an index of safetensors shards ({error!r}).") from error
    if any(Path(name).name != name for name in files):
        raise AdapterFormatError(f"{path}: names files outside its own folder: {files}.")
    shards: list[Checkpoint] = []
    home: dict[str, Checkpoint] = {}
    for name in files:
        shard = open_checkpoint(path.parent / name)
        shards.append(shard)
        for key in shard.infos:
            if key in home:
                raise AdapterFormatError(f"{path}: tensor {key!r} is in two shards.")
            home[key] = shard
    lost = [key for key in names if key not in home]
    if lost:
        raise AdapterFormatError(
            f"{path}: {len(lost)} tensors of the index are in no shard, such as {lost[0]!r}. Copy the folder again."
        )

    def close() -> None:
        for shard in shards:
            shard.close()

    infos = {key: shard.infos[key] for key, shard in home.items()}
    return Checkpoint(path, infos, lambda key: home[key].find(key), close)


def _open_torch(path: Path) -> Checkpoint:
    try:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            tensors = torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error).lower() or "Unsupported" in str(error):
            raise AdapterFormatError(
                f"{path}: holds more than tensors, and code in a pickle is never run here. If you trust it, load it "
                "yourself and save the tensors with safetensors."
            ) from error
        raise _damaged(path, error) from error
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to spell
        raise _damaged(path, error) from error
    if not isinstance(tensors, Mapping):
        raise AdapterFormatError(f"{path}: expected a dict of tensors, got a {type(tensors).__name__}.")
    return _from_dict(path, tensors)


def _damaged(path: Path, error: Exception) -> AdapterFormatError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return AdapterFormatError(
        f"{path}: not a whole torch file ({reason}). It is cut off or damaged: copy or download it again."
    )


def _from_dict(where: str | Path, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    for key, value in tensors.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise AdapterFormatError(
                f"{where}: {key!r} is a {type(value).__name__}, not a tensor. Expected a flat dict of tensors by name."
            )
    held = dict(tensors)
    infos = {key: TensorInfo(tuple(value.shape), value.dtype) for key, value in held.items()}

    def find(key: str) -> Stored | torch.Tensor:
        return in_memory(held[key]) or held[key].detach()

    return Checkpoint(where, infos, find, held.clear)
