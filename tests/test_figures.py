"""The README's figures are those of the result files, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_readme_shows_the_result_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "tables", raising=False)
    import tables

    block = f"{tables.START}\n{tables.table()}\n{tables.END}"
    assert " ms |" in block
    assert block in (ROOT / "README.md").read_text(), "run: python benchmarks/tables.py --write"
