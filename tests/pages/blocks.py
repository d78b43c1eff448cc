"""The code blocks of the pages that people read.

A block that is not run has a comment on the line above it that says why: `<!-- not run: needs a GPU -->`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>\S*).*$")
_NOT_RUN = re.compile(r"^ *<!-- not run: (?P<why>.+) -->$")


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of its first line of code, from 1
    language: str
    code: str
    not_run: str | None  # why

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> list[Block]:
    """All fenced blocks of a page, in order.

    Raises:
        ValueError: a fence that is not closed.
    """
    found: list[Block] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opened = _FENCE.match(lines[at])
        if opened is None:
            at += 1
            continue
        why = _NOT_RUN.match(lines[at - 1]) if at else None
        indent, ticks = len(opened["indent"]), opened["ticks"]
        end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == ticks), None)
        if end is None:
            raise ValueError(f"{page}:{at + 1}: this block has no end")
        code = "\n".join(line[min(indent, len(line) - len(line.lstrip())) :] for line in lines[at + 1 : end])
        found.append(Block(page, at + 2, opened["language"], f"{code}\n", why["why"] if why else None))
        at = end + 1
    return found


def of_page(name: str, language: str) -> list[Block]:
    found = blocks(name, (ROOT / name).read_text(encoding="utf-8"))
    return [block for block in found if block.language == language]


def commands(code: str) -> list[str]:
    """The commands of a shell block, without comments; lines that go on are joined.

    Example:
        >>> commands("make demo   # sets up\\ncurl a \\\\\\n  -d b && ls")
        ['make demo', 'curl a -d b', 'ls']
    """
    joined = re.sub(r"\\\n\s*", "", code)
    lines = [re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines()]
    return [command.strip() for line in lines for command in line.split(" && ") if command.strip()]
