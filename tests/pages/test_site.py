"""The docs site is built without a warning, and a reader's browser fetches nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import ROOT

import hf_multilora


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; the test fails with what mkdocs says."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "true"},
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return folder


def page(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text(encoding="utf-8")


def test_every_public_name_is_documented(site: Path) -> None:
    ids = set()
    for name in ("api", "api/errors", "api/reports"):
        ids |= set(re.findall(r'id="hf_multilora\.([\w.]+)"', page(site, name)))
    known = {name.rpartition(".")[2] for name in ids}
    assert set(hf_multilora.__all__) - {"__version__"} <= known


def test_docstrings_are_rendered(site: Path) -> None:
    text = page(site, "api")
    assert "slots, i.e. distinct adapters that one forward can mix" in text and "doc-section-title" in text
    assert "planes[s, t, i, j]" in page(site, "kernels")


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """Links may lead away; scripts, styles, fonts and pictures may not."""
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe)[^>]+src="(https?:[^"]+)"', text)
        fetched += re.findall(r'<link[^>]+rel="(?:stylesheet|preconnect|preload)"[^>]+href="(https?:[^"]+)"', text)
        fetched += re.findall(r'<link[^>]+href="(https?:[^"]+)"[^>]+rel="(?:stylesheet|preconnect|preload)"', text)
        assert not fetched, path


def test_pages_are_found_by_searching(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"] for entry in index["docs"]}
    assert {"concepts/", "figures/", "fidelity/", "guides/troubleshooting/"} <= places


def test_pictures_are_there(site: Path) -> None:
    for path in site.rglob("*.html"):
        for source in re.findall(r'<img[^>]+src="([^":]+)"', path.read_text(encoding="utf-8")):
            source = source.partition("#")[0]  # which says for which palette a picture is
            assert (path.parent / source).resolve().is_file(), f"{path}: {source}"
