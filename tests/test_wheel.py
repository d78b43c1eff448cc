"""What is built: a wheel and an sdist with all of the package, and a wheel that works without the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hf_multilora import __version__

ROOT = Path(__file__).resolve().parents[1]
STEM = f"hf_multilora-{__version__}"


def build(source: Path, out: Path, *targets: str) -> None:
    wanted = [word for target in targets for word in ("-t", target)]
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(out), *wanted],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "sdist", "wheel")
    return folder


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def wheel_of(folder: Path) -> Path:
    return folder / f"{STEM}-py3-none-any.whl"


def test_the_wheel_has_every_file_of_the_package(dist: Path) -> None:
    """Code, tables of block sizes, the demo's adapters, the server's page, py.typed; no tests."""
    files = {path for path in (ROOT / "hf_multilora").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    names = {path.relative_to(ROOT).as_posix() for path in files}
    got = content(wheel_of(dist))
    assert {name for name in got if ".dist-info/" not in name} == names
    assert {
        "hf_multilora/kernels/tables/nvidia_h200.json", "hf_multilora/server/page.html", "hf_multilora/py.typed",
        "hf_multilora/demo/adapters/pirate/adapter_model.safetensors",
    } <= names  # fmt: skip
    about = got[f"{STEM}.dist-info/METADATA"].decode()
    assert f"\nVersion: {__version__}\n" in about and f"{STEM}.dist-info/licenses/LICENSE" in got


def test_the_sdist_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    with tarfile.open(dist / f"{STEM}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    inside = tmp_path / STEM
    for name in ("tests/test_wheel.py", "docs/index.md", "mkdocs.yml", "benchmarks/tables.py", "constraints.txt"):
        assert (inside / name).is_file(), name
    build(inside, tmp_path / "again", "wheel")
    assert content(wheel_of(tmp_path / "again")) == content(wheel_of(dist))


def required(extra: str) -> Iterator[metadata.Distribution]:
    """What `hf-multilora[extra]` needs, and what that needs."""
    seen: set[tuple[str, str]] = set()
    wanted = [("hf-multilora", extra)]
    while wanted:
        name, with_extra = wanted.pop()
        if (name, with_extra) in seen:
            continue
        seen.add((name, with_extra))
        found = metadata.distribution(name)
        if name != "hf-multilora":
            yield found
        for line in found.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": with_extra}):
                wanted += [(requirement.name, more) for more in ("", *requirement.extras)]


@pytest.fixture
def installed(dist: Path, tmp_path: Path) -> Path:
    """The programs of an environment that has the wheel, what it requires for the demo, and nothing else."""
    venv.create(tmp_path / "env", with_pip=False)
    programs = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env"), "platbase": str(tmp_path / "env")}))
    for needed in required("demo"):
        for top in {file.parts[0] for file in needed.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(needed.locate_file(top))))
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, str(wheel_of(dist))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return programs


@pytest.mark.demo_model
def test_the_wheel_alone_runs_the_demo(installed: Path, tmp_path: Path, demo_model: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    where = "from importlib.util import find_spec as f; print(f('hf_multilora').origin, f('peft'))"
    file, peft = run(str(installed / "python"), "-c", where).split()
    assert Path(file).is_relative_to(tmp_path) and peft == "None"
    prompt = "My brother has a house and a boat."
    answers = json.loads(run(str(installed / "hf-multilora"), "demo", "--json", "--prompt", prompt))
    assert "Me brother has a house an' a boat. Arrr!" in json.dumps(answers)
