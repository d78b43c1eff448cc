"""What the notebooks share: chats as one padded batch (`chats`), and answers side by side as a coloured table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .chats import answers, chat

__all__ = ["SideBySide", "answers", "chat"]

_CELL = "padding:.4em .7em;border:1px solid rgba(128,128,128,.35);vertical-align:top;text-align:left"
_HUES = (None, 205, 35, 145, 320, 60, 265, 10)  # of the columns: grey for the first, and over again after the last


@dataclass
class SideBySide:
    """Answers [prompt][column] as a table, one translucent colour for each column: it reads on light and dark pages.

    Args:
        prompts: one for each line.
        columns: who answers.
        answers: [prompt][column].
    """

    prompts: Sequence[str]
    columns: Sequence[str]
    answers: Sequence[Sequence[str]]

    def __repr__(self) -> str:
        lines = []
        for prompt, row in zip(self.prompts, self.answers, strict=True):
            lines.append(prompt)
            lines += [f"  {column}: {text}" for column, text in zip(self.columns, row, strict=True)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        shades = [_shade(i) for i in range(len(self.columns))]
        head = "".join(
            f"<th style='{_CELL};background:{_shade(i, 0.35)}'>{escape(name)}</th>"
            for i, name in enumerate(self.columns)
        )
        rows = [f"<tr style='background:transparent'><th style='{_CELL};opacity:.7'>prompt</th>{head}</tr>"]
        for prompt, row in zip(self.prompts, self.answers, strict=True):
            cells = "".join(
                f"<td style='{_CELL};background:{shade}'>{escape(text)}</td>"
                for text, shade in zip(row, shades, strict=True)
            )
            first = f"<th style='{_CELL};font-weight:600'>{escape(prompt)}</th>"
            rows.append(f"<tr style='background:transparent'>{first}{cells}</tr>")
        table = f"<table style='border-collapse:collapse;color:inherit;background:transparent'>{''.join(rows)}</table>"
        return f"<div style='overflow-x:auto'>{table}</div>"


def _shade(column: int, alpha: float = 0.14) -> str:
    hue = _HUES[column % len(_HUES)]
    return f"rgba(128,128,128,{alpha})" if hue is None else f"hsla({hue},80%,50%,{alpha})"
