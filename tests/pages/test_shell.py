"""The shell blocks: commands of this package run or are parsed, and what others name exists."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import typer
from blocks import NAMES, ROOT, commands, of_page

from hf_multilora.cli import main

BLOCKS = [block for name in NAMES for block in of_page(name, "bash")]
CASES = [(block.place, command) for block in BLOCKS for command in commands(block.code)]
EXTRAS = set(metadata.metadata("hf-multilora").get_all("Provides-Extra") or [])
TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
RUNS = {"inspect", "check", "generate"}  # others are parsed: they serve until somebody stops them, or need a download


def hf_multilora(words: list[str]) -> None:
    if words[1] in RUNS:
        for left_over in Path.cwd().glob("answers.jsonl*"):
            left_over.unlink()
        with pytest.raises(SystemExit) as left:
            main(words[1:])
        assert not left.value.code, f"exit status {left.value.code}"
        return
    from hf_multilora.cli import app

    group = typer.main.get_command(app)
    if not words[1].startswith("-"):
        group.commands[words[1]].make_context(words[1], words[2:])


def make(words: list[str]) -> None:
    assert words[1] in TARGETS
    assert all(word.startswith(("ARGS=", "PYTHON=")) for word in words[2:])


def pip(words: list[str]) -> None:
    for extras in re.findall(r"\[([\w,-]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= EXTRAS
    for file in (words[i + 1] for i, word in enumerate(words) if word == "-c"):
        assert (ROOT / file).is_file()


def curl(words: list[str]) -> None:
    url = next(word for word in words if word.startswith("localhost"))
    assert url.partition("/")[2] in {"v1/chat/completions", "v1/completions", "v1/models"}
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] and body["messages"]


def script(words: list[str]) -> None:
    if words[1] == "-m":
        __import__(words[2])
    else:
        assert (ROOT / words[1]).is_file()


def nothing(words: list[str]) -> None:
    """rm, cd and the like."""


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "hf-multilora": hf_multilora, "make": make, "pip": pip, "curl": curl, "python": script, "python3.11": script,
    "pre-commit": nothing, "rm": nothing, "cd": nothing,
}  # fmt: skip


@pytest.mark.parametrize(("place", "command"), CASES, ids=[f"{place} {command[:40]}" for place, command in CASES])
def test_command(place: str, command: str, stage: Path) -> None:
    words = shlex.split(command)
    tool = words[0].rpartition("/")[2]
    assert tool in CHECKS, f"{place}: nothing here checks {tool!r}"
    CHECKS[tool](words)


def test_there_are_commands() -> None:
    assert {command.split()[0] for _, command in CASES} >= {"make", "pip", "curl", "hf-multilora"}


@pytest.mark.parametrize(
    "command", ["make dmeo", "pip install '.[no-such-extra]'", "hf-multilora serve X --no-such-flag"]
)
def test_a_command_that_is_wrong_fails(command: str) -> None:
    words = shlex.split(command)
    with pytest.raises(Exception, match="dmeo|no-such"):
        CHECKS[words[0]](words)
