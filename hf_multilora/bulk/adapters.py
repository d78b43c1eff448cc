"""What the names in a file of prompts mean: a sub-folder of the adapters' folder, a path, or a hub id."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..adapters.source import CONFIG, HUB_ID, Request, resolve, version
from ..errors import AdapterNotFoundError, ConfigError, MultiLoraError, closest

_KINDS = (".json", ".safetensors", ".bin", ".pt", ".model", ".jinja")


@dataclass(frozen=True)
class Place:
    """Where an adapter is.

    Args:
        source: absolute path or hub id, as it is to be loaded.
        version: changes with its files; empty where these are not on this machine.
    """

    source: str
    version: str


BASE = Place("", "")


class Adapters:
    """Finds adapters by name; of their files, only the ends are read.

    Args:
        folder: whose sub-folders are adapters.
        offline: take hub ids from the cache alone.

    Raises:
        ConfigError: no such folder.
    """

    def __init__(self, folder: Path | None, offline: bool) -> None:
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"--adapters {folder}: no such folder.")
        self._folder, self._offline = folder, offline
        self._found: dict[str, Place | MultiLoraError] = {}

    def find(self, name: str | None) -> Place:
        """Where an adapter is; None: BASE.

        Raises:
            AdapterNotFoundError: neither in the folder, nor a path, nor shaped like a hub id.
            AdapterFormatError: a folder that holds no adapter.
        """
        if name is None:
            return BASE
        if name not in self._found:
            try:
                self._found[name] = self._find(name)
            except MultiLoraError as error:
                self._found[name] = error
        found = self._found[name]
        if isinstance(found, MultiLoraError):
            raise found
        return found

    def versions(self) -> set[str]:
        """Of all adapters that were found, and of BASE."""
        return {BASE.version, *(place.version for place in self._found.values() if isinstance(place, Place))}

    def _find(self, name: str) -> Place:
        for path in ([self._folder / name] if self._folder else []) + [Path(os.path.expanduser(name))]:
            if os.path.exists(path):
                files = resolve(Request(str(path), is_path=True))
                return Place(str(path.resolve()), version(name, files.config.parent.glob("adapter_*")))
        if HUB_ID.fullmatch(name):
            if not self._offline:
                return Place(name, "")
            files = resolve(Request(name, local_files_only=True))
            return Place(str(files.config.parent), files.commit or "")
        raise AdapterNotFoundError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        if self._folder is None:
            return f"no adapter {name!r}: no such path, and no hub id. --adapters FOLDER says where names are."
        names = sorted(path.parent.name for path in self._folder.glob(f"*/{CONFIG}"))
        return f"no adapter {name!r} in {self._folder}, no such path, and no hub id.{closest(name, names)}"


def model_version(name: str) -> str:
    """A hash that changes with the files of a model's folder; empty for a hub id."""
    folder = Path(name)
    if not folder.is_dir():
        return ""
    return version("", (path for path in folder.iterdir() if path.is_file() and path.suffix in _KINDS))
