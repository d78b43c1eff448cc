"""Where an adapter is: a folder or a hub id -> the files to read.

Resolvers are tried in order; each takes a `Request` and returns `AdapterFiles`, or None where the source is not of
its kind. `register_resolver` adds one in front (an object store, a private registry).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import AdapterFormatError, AdapterNotFoundError, closest
from .hub import download

CONFIG = "adapter_config.json"
WEIGHTS = (
    "adapter_model.safetensors",
    "adapter_model.safetensors.index.json",
    "adapter_model.bin",
    "adapter_model.pt",
)  # PEFT's order of preference
# Files of a Trainer checkpoint that hold no weights of the adapter.
_TRAINER = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state.*)\.(bin|pt|pth|safetensors)")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_END = 1 << 16  # bytes at either end of a file that are compared


@dataclass(frozen=True)
class Request:
    """What was asked for, as the user gave it."""

    source: str
    is_path: bool = False  # an os.PathLike, so never a hub id
    revision: str | None = None
    token: str | bool | None = None
    subfolder: str | None = None
    local_files_only: bool = False


@dataclass(frozen=True)
class AdapterFiles:
    """The files of one adapter.

    Args:
        config, weights: paths on this machine.
        label: the source as a reader would write it.
        commit: of the hub, where there is one.
        warnings: what else lies there that a reader may have meant.
    """

    config: Path
    weights: Path
    label: str
    commit: str | None = None
    warnings: list[str] = field(default_factory=list)


Resolver = Callable[[Request], "AdapterFiles | None"]
_resolvers: list[Resolver] = []


def register_resolver(resolver: Resolver) -> Resolver:
    """Put a resolver in front of the ones that exist; usable as a decorator."""
    _resolvers.insert(0, resolver)
    return resolver


def resolve(request: Request) -> AdapterFiles:
    """Find the files of an adapter.

    Raises:
        AdapterNotFoundError: neither an existing folder nor a hub id that can be read.
        AdapterFormatError: a place that exists and holds no PEFT adapter.
    """
    for resolver in _resolvers:
        files = resolver(request)
        if files is not None:
            return files
    raise AdapterNotFoundError(_not_found(request.source))


@register_resolver
def from_hub(request: Request) -> AdapterFiles | None:
    """A hub id such as "org/name"; only the adapter's own files are fetched, or taken from the cache."""
    if request.is_path or not HUB_ID.fullmatch(request.source):
        return None
    prefix = f"{request.subfolder.strip('/')}/" if request.subfolder else ""
    config, weights, commit = download(
        request.source,
        f"{prefix}{CONFIG}",
        [f"{prefix}{name}" for name in WEIGHTS],
        revision=request.revision,
        token=request.token,
        local_files_only=request.local_files_only,
        hint=_not_found(request.source),
    )
    label = request.source + (f"/{request.subfolder}" if request.subfolder else "")
    return AdapterFiles(config, weights, f"{label}@{commit[:12]}" if commit else label, commit)


@register_resolver
def from_folder(request: Request) -> AdapterFiles | None:
    """An existing folder, or the adapter's weight or config file inside it. Wins over a hub id of the same name."""
    if not request.source:
        return None
    path = Path(request.source).expanduser()
    if path.is_file() and path.name in (CONFIG, *WEIGHTS):
        weights = path if path.name in WEIGHTS else None
        return _read_folder(path.parent, weights)
    if path.is_file():
        raise AdapterFormatError(f"{path}: a file, not an adapter. Give the folder that holds {CONFIG}.")
    if not path.is_dir():
        return None
    if request.subfolder:
        inner = path / request.subfolder
        if not inner.is_dir():
            raise AdapterNotFoundError(
                f"{path}: has no subfolder {request.subfolder!r}.{closest(request.subfolder, _subfolders(path))}"
            )
        path = inner
    return _read_folder(path, None)


def _read_folder(folder: Path, weights: Path | None) -> AdapterFiles:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    if CONFIG not in names:
        raise AdapterFormatError(_no_config(folder, names))
    present = [name for name in WEIGHTS if name in names]
    if weights is None and not present:
        raise AdapterFormatError(_no_weights(folder, names))
    chosen = weights or folder / present[0]
    ignored = [name for name in names if _is_weights(name) and name not in (chosen.name, CONFIG)]
    if chosen.suffix == ".json":
        ignored = [name for name in ignored if not name.startswith("adapter_model-")]
    warnings = [f"{folder}: {', '.join(ignored)} beside {chosen.name}: not read."] if ignored else []
    return AdapterFiles(folder / CONFIG, chosen, str(folder), None, warnings)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pt", ".pth", ".npz", ".gguf")) and not _TRAINER.fullmatch(name)


def _subfolders(folder: Path) -> list[str]:
    """Subfolders that hold an adapter, checkpoints in the order of their steps."""

    def step(name: str) -> tuple[str, int, str]:
        head, _, number = name.rpartition("-")
        return (head, int(number), name) if number.isdigit() else (name, -1, name)

    return sorted((entry.parent.name for entry in folder.glob(f"*/{CONFIG}")), key=step)


def _no_config(folder: Path, names: list[str]) -> str:
    inner = _subfolders(folder)
    if inner:
        shown = ", ".join(inner[-8:])
        return (
            f"{folder}: no {CONFIG} here, but in {len(inner)} subfolders: {shown}. Choose one: "
            f"subfolder={inner[-1]!r}, or the path {str(folder / inner[-1])!r}."
        )
    if "adapters.npz" in names or "adapters.safetensors" in names:
        return f"{folder}: an MLX adapter without {CONFIG}. Convert it to PEFT first."
    if any(name in names for name in WEIGHTS):
        return f"{folder}: {CONFIG} is missing beside the weights. Copy it from where the adapter was trained."
    if "config.json" in names:
        what = "a full model" if any(map(_is_weights, names)) else "the config of a full model"
        return f"{folder}: {what}, not an adapter (config.json, and no {CONFIG}). Load it with from_pretrained."
    loose = [name for name in names if _is_weights(name)]
    if loose:
        return f"{folder}: {', '.join(loose[:5])} without {CONFIG}: not a PEFT adapter."
    return f"{folder}: no {CONFIG} here (files: {', '.join(names[:8]) or 'none'})."


def _no_weights(folder: Path, names: list[str]) -> str:
    loose = [name for name in names if _is_weights(name)]
    if any(name.startswith("adapters.") for name in loose):
        return f"{folder}: an MLX adapter ({', '.join(loose)}). Convert it to PEFT first."
    sharded = [entry.name for entry in folder.iterdir() if entry.is_dir() and _is_training_state(entry.name)]
    if sharded:
        return (
            f"{folder}: only the sharded training state ({', '.join(sorted(sharded))}) is here. Gather it with "
            "save_pretrained (DeepSpeed: zero_to_fp32.py; FSDP: FULL_STATE_DICT)."
        )
    found = " Copy them from where it was trained."
    if loose:
        found = f" Found: {', '.join(loose)}; rename it if it is the adapter."
    return f"{folder}: {CONFIG} without weights: none of {', '.join(WEIGHTS)}.{found}"


def _is_training_state(name: str) -> bool:
    return name.startswith(("global_step", "pytorch_model_fsdp"))


def _not_found(source: str) -> str:
    path = Path(source).expanduser()
    here = f"no folder {source!r}" + ("" if path.is_absolute() else f" (looked in {os.getcwd()})")
    parent = path.parent
    near = closest(path.name, (entry.name for entry in parent.iterdir())) if parent.is_dir() else ""
    if HUB_ID.fullmatch(source):
        return f"{here}.{near}"
    return f"{here}.{near} It is no hub id either: those have the form 'org/name'."


def version(name: str, files: Iterable[Path]) -> str:
    """A hash that changes with the files: of their names, their sizes and both of their ends. Folders are left out.

    A file of weights that was trained again differs there; reading all of it would take as long as loading it.
    """
    digest = hashlib.sha256(name.encode())
    for path in sorted(path for path in files if path.is_file()):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"\0{path.name}\0{size}\0".encode())
            digest.update(file.read(_END))
            file.seek(max(size - _END, 0))
            digest.update(file.read(_END))
    return digest.hexdigest()[:16]
