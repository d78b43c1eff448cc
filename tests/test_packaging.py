"""What a user installs: one version, the extras, the tested set. What is built is in test_wheel.py."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hf_multilora._version import __version__

ROOT = Path(__file__).resolve().parents[1]


def requirements() -> list[Requirement]:
    return [Requirement(line) for line in metadata.requires("hf-multilora") or []]


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {normal(r.name): r for r in found}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_version_comes_from_one_place():
    assert metadata.version("hf-multilora") == __version__
    files = [*(ROOT / "hf_multilora").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.*")]
    naming = [path.name for path in files if path.is_file() and __version__ in path.read_text(encoding="utf-8")]
    assert naming == ["_version.py"]


def test_core_needs_no_peft_and_triton_only_on_linux():
    core = {normal(r.name): r for r in requirements() if "extra" not in str(r.marker)}
    assert set(core) == {"torch", "transformers", "accelerate", "safetensors", "huggingface-hub", "triton"}
    assert not core["triton"].marker.evaluate({"platform_system": "Darwin"})


@pytest.mark.parametrize("extra", ["demo", "test", "docs", "serve", "ray", "bench", "notebooks", "lm-eval"])
def test_extra_exists(extra: str):
    assert any(r.marker and r.marker.evaluate({"extra": extra}) and "extra" in str(r.marker) for r in requirements())


def test_everything_that_tests_docs_and_demo_install_is_pinned():
    known = pins()
    for extra in ("demo", "docs", "test"):
        for r in requirements():
            if r.marker is None or r.marker.evaluate({"extra": extra}):
                name = normal(r.name)
                assert name == "hf-multilora" or name in known, f"{name} is not in constraints.txt"


def test_the_design_lists_modules_in_the_order_of_their_imports():
    """docs/design.md says that each imports what stands above it, the contract that each imports what is below."""
    contract = re.search(r"^layers = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    layers = [set(re.findall(r"\w+", layer)) for layer in re.findall(r'"(.+)"', contract[1])][::-1]
    block = (ROOT / "docs" / "design.md").read_text().partition("```\nhf_multilora/\n")[2].partition("```")[0]
    starts = [re.match(r"  ((?:\w+(?:\.py|/) ?)+)", line) for line in block.splitlines()]
    listed = [name for start in starts if start for name in re.findall(r"\w+(?=\.py|/)", start[1])]
    places = [next(i for i, layer in enumerate(layers) if name in layer) for name in listed]
    assert places == sorted(places)
    assert set(listed) == set().union(*layers) - {"_version"} and len(listed) == len(set(listed))


def test_pins_are_exact_and_plain():
    for r in pins().values():
        assert re.fullmatch(r"==[\w.]+", str(r.specifier)), f"{r}: a pin without local version is expected"


def test_pins_satisfy_the_package():
    known = pins()
    for r in requirements():
        pin = known.get(normal(r.name))
        if pin is not None:
            assert r.specifier.contains(str(pin.specifier).removeprefix("==")), f"{r} excludes the tested {pin}"
