"""Fetching an adapter's files from the hub: only those files, at one commit, from the cache without network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import AdapterFormatError, AdapterNotFoundError, MultiLoraError


def download(
    repo: str,
    config: str,
    weights: list[str],
    *,
    revision: str | None,
    token: str | bool | None,
    local_files_only: bool,
    hint: str,
) -> tuple[Path, Path, str | None]:
    """Fetch the config and the first weight file that exists.

    Args:
        repo: hub id.
        config, weights: file names in the repository; of `weights` the first that exists is taken.
        revision: branch, tag or commit.
        token: as in huggingface_hub.
        local_files_only: look in the cache alone.
        hint: what is known about the same name on this machine; opens the error where the hub does not know it.

    Returns:
        Paths of config and weights, and the commit, where the cache's layout shows it.

    Raises:
        AdapterNotFoundError: no such repository, revision, or no way to reach it.
        AdapterFormatError: a repository without an adapter.
    """

    def fetch(name: str, at: str | None) -> Path:
        return Path(hf_hub_download(repo, name, revision=at, token=token, local_files_only=local_files_only))

    where = f"{repo}@{revision}" if revision else repo
    try:
        try:
            config_path = fetch(config, revision)
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError):
                raise
            raise AdapterFormatError(
                f"{where}: the repository holds no {config}, so no PEFT adapter. If the adapter is in a folder of it, "
                "pass subfolder=; a full model is loaded with from_pretrained."
            ) from error
        commit = _commit(config_path)
        weights_path = _first(weights, lambda name: fetch(name, commit or revision))
        if weights_path is not None and weights_path.suffix == ".json":
            _fetch_shards(weights_path, weights[0], lambda name: fetch(name, commit or revision))
    except MultiLoraError:
        raise
    except Exception as error:  # the hub's client raises its own, the HTTP library's and the socket's errors
        raise AdapterNotFoundError(f"{where}: {_why(error)} And {hint}") from error
    if weights_path is None:
        names = ", ".join(weights)
        raise AdapterFormatError(
            f"{where}: {config} without weights: none of {names}"
            + (" is in the cache. Load it once with network." if local_files_only else " is in the repository.")
        )
    return config_path, weights_path, commit


def _first(names: list[str], fetch: Callable[[str], Path]) -> Path | None:
    missing: Exception | None = None
    for name in names:
        try:
            return fetch(name)
        except EntryNotFoundError as error:  # LocalEntryNotFoundError too: an offline cache may hold a later one
            missing = error
    if isinstance(missing, LocalEntryNotFoundError) and missing.__cause__ is not None:
        raise missing
    return None


def _fetch_shards(index: Path, name: str, fetch: Callable[[str], Path]) -> None:
    folder = name.rpartition("/")[0]
    for shard in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())):
        fetch(f"{folder}/{shard}" if folder else shard)


def _commit(path: Path) -> str | None:
    """The commit in `.../snapshots/<commit>/...`."""
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else None


def _why(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "the repository is gated: accept its terms on the hub and pass token=."
    if isinstance(error, RevisionNotFoundError):
        return "no such revision: check revision=, or leave it out for the main branch."
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such repository, or it is private: check the name, or pass token=."
    if isinstance(error, HFValidationError):
        return "not a valid hub id."
    if isinstance(error, LocalEntryNotFoundError):
        return "not in the hub's cache, and the hub cannot be reached (or is not to be asked). Load it online once."
    return f"the hub cannot be read ({type(error).__name__}: {str(error).partition(chr(10))[0]})."
