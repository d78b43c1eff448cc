"""Notebooks as they are stored: in step with their scripts, run from top to bottom, small, and from no machine.

That they run is tested by running them: pytest --nbmake notebooks.
"""

from __future__ import annotations

import base64
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.name != "conftest.py")
COLAB = "https://colab.research.google.com/github/"


def stored(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def cells(notebook: Any) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def test_each_script_has_its_notebook():
    assert len(NAMES) >= 4
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_in_step_with_the_script(name):
    """After a change of the .py: jupytext --to ipynb --execute notebooks/NAME.py"""
    assert cells(jupytext.read(FOLDER / f"{name}.py")) == cells(stored(name))


@pytest.mark.parametrize("name", NAMES)
def test_was_run_from_top_to_bottom_without_errors(name):
    code = [cell for cell in stored(name)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    kinds = [kind for output in outputs for kind in output.get("data", {})]
    assert "text/html" in kinds and kinds.count("text/html") + kinds.count("image/png") >= 2, (
        "tables and plots are stored"
    )


def texts(value: Any) -> list[str]:
    """Every text of a notebook; pictures decoded, since they carry what drew them."""
    if isinstance(value, dict):
        return [text for key, part in value.items() for text in (_picture(key, part) or texts(part))]
    if isinstance(value, list):
        return (
            ["".join(value)] if all(isinstance(part, str) for part in value) else [t for v in value for t in texts(v)]
        )
    return [value] if isinstance(value, str) else []


def _picture(key: str, part: Any) -> list[str]:
    return [base64.b64decode(part).decode("latin-1")] if key == "image/png" else []


@pytest.mark.parametrize("name", NAMES)
def test_tells_nothing_of_the_machine_that_ran_it(name):
    found = texts(stored(name))
    here = {str(Path.home()), tempfile.gettempdir(), str(FOLDER.parent)}
    for text in found:
        assert not re.search(r"/(home|root|tmp|Users|work|usr|opt|mnt|var)/\w", text), text[:300]
        assert not any(folder in text for folder in here if len(folder) > 1)


@pytest.mark.parametrize("name", NAMES)
def test_is_small_and_opens_in_colab(name):
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 200_000
    first = cells(stored(name))[0][1]
    assert COLAB in first and first.count(f"notebooks/{name}.ipynb") == 1
