"""What the notebooks share: chats as one padded batch, and answers side by side as a coloured table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_CELL = "padding:.4em .7em;border:1px solid rgba(128,128,128,.35);vertical-align:top;text-align:left"
_HUES = (None, 205, 35, 145, 320, 60, 265, 10)  # of the columns: grey for the first, and over again after the last


def chat(tokenizer: Any, prompts: Sequence[str]) -> Any:
    """`input_ids` and `attention_mask` [prompts, tokens], each prompt as the first message of a chat, padded left."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)


def answers(tokenizer: Any, inputs: Any, out: Any) -> list[str]:
    """The new text of each row of generate()'s output."""
    new = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in new]


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
