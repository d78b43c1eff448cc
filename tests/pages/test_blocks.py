"""Every Python block of the README and the docs runs as it is, in the order of its page, or says why not."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from blocks import NAMES, Block, blocks, of_page

LANGUAGES = {"python", "bash", "json", "text", ""}
# Pages some of whose blocks must run: a page that skips everything is a page untested.
RUN = {
    "README.md", "docs/index.md", "docs/guides/quickstart.md", "docs/guides/adapter_ids.md", "docs/guides/loading.md",
    "docs/guides/continuous_batching.md", "docs/guides/server.md", "docs/guides/large_bases.md",
    "docs/guides/troubleshooting.md",
}  # fmt: skip


def run(found: list[Block]) -> dict[str, object]:
    """One namespace for all of them; a traceback shows the page's own lines."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in found:
        padded = "\n" * (block.line - 1) + block.code
        exec(compile(padded, block.page, "exec"), names)
    return names


def param(page: str) -> Any:
    """Pages with real answers need the demo's base model; others have stand-ins."""
    real = any("demo_model_path" in block.code for block in of_page(page, "python"))
    return pytest.param(page, marks=[pytest.mark.demo_model] if real else [])


@pytest.mark.parametrize("page", [param(name) for name in NAMES if of_page(name, "python")])
def test_python(page: str, stage: Path, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("demo_model"):
        request.getfixturevalue("demo_model")
    found = of_page(page, "python")
    for block in found:
        ast.parse(block.code, filename=block.place)
    run([block for block in found if block.not_run is None])


def test_the_pages_that_run() -> None:
    assert {page for page in NAMES if any(block.not_run is None for block in of_page(page, "python"))} >= RUN


@pytest.mark.parametrize("page", NAMES)
def test_languages_are_known(page: str) -> None:
    """A block under another name ("py", "Python") would be run by nobody."""
    path = Path(__file__).resolve().parents[2] / page
    assert {block.language for block in blocks(page, path.read_text(encoding="utf-8"))} <= LANGUAGES


def test_blocks_are_found_where_they_stand() -> None:
    text = "# A\n\n```python\na = 1\n```\n\n<!-- not run: needs a GPU -->\n```python\nb = 2\n```\n"
    text += "\n- item\n\n    ```bash\n    ls\n    ```\n"
    assert blocks("p.md", text) == [
        Block("p.md", 4, "python", "a = 1\n", None),
        Block("p.md", 9, "python", "b = 2\n", "needs a GPU"),
        Block("p.md", 15, "bash", "ls\n", None),
    ]
    with pytest.raises(ValueError, match="p.md:1: this block has no end"):
        blocks("p.md", "```python\nx\n")


def test_a_block_that_fails_names_the_line_of_its_page() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run([Block("p.md", 40, "python", "\n1 / 0\n", None)])
    assert raised.traceback[-1].lineno + 1 == 41 and str(raised.traceback[-1].path).endswith("p.md")


def test_one_namespace_in_order() -> None:
    names = run([Block("p.md", 1, "python", "a = 1\n", None), Block("p.md", 9, "python", "b = a + 1\n", None)])
    assert names["b"] == 2
