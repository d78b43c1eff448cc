"""A model and adapters as files, and the command as its users call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bulk_bed import SMALL, build, tokenizer, write_adapter

from hf_multilora.cli import main


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny-llama"
    build().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def adapters(tmp_path) -> Path:
    """Adapters `a`, `b` and `c`, of the versions 1, 2 and 3."""
    for number, name in enumerate("abc", 1):
        write_adapter(tmp_path / "adapters" / name, number)
    return tmp_path / "adapters"


@pytest.fixture
def generate(capsys, model, adapters, tmp_path):
    """Run `generate INPUT` in this process, with 24 new tokens; returns (exit code, stdout, stderr).

    The answers go to `tmp_path / "out.jsonl"`.
    """

    def call(source: Any, *more: str, base: Path = model) -> tuple[int, str, str]:
        arguments = ["generate", str(base), str(source), "--output", str(tmp_path / "out.jsonl")]
        arguments += ["--adapters", str(adapters), "--max-new-tokens", "24", *SMALL, *more]
        with pytest.raises(SystemExit) as left:
            main(arguments)
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call
