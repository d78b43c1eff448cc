"""The demo's result for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .run import DemoResult


def render(result: DemoResult) -> RenderableType:
    """The table of answers, the two times, and the status of slots and caches."""
    return Group(_answers(result), _times(result), _conditions(result), Text(), result.status)


def _answers(result: DemoResult) -> Table:
    table = Table(
        title=f"{result.rows} rows, one batch: each prompt through the base and {len(result.columns) - 1} adapters",
        title_justify="left",
        title_style="bold",
        box=box.ROUNDED,
        show_lines=True,
        border_style="dim",
    )
    table.add_column("prompt", ratio=5, style="bold", overflow="fold")
    for column in result.columns:
        table.add_column(column, ratio=3 if column == "sentiment" else 5, min_width=8, overflow="fold")
    for prompt, row in zip(result.prompts, result.answers, strict=True):
        table.add_row(Text(prompt), *(Text(answer.strip()) for answer in row))
    return table


def _times(result: DemoResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "time", "batches"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("all rows in one mixed batch", f"{result.mixed_seconds:.2f} s", "1", style="bold")
    table.add_row("one adapter after another", f"{result.turns_seconds:.2f} s", str(len(result.columns)))
    return table


def _conditions(result: DemoResult) -> Text:
    of = result.conditions
    return Text(
        f"{result.turns_seconds / result.mixed_seconds:.1f} x as fast in one batch, and {result.same_answers} of "
        f"{result.rows} texts are the same both ways. Up to {result.max_new_tokens} new tokens a row; {of['model']}, "
        f"{of['dtype']}, {of['device']}, torch {of['torch']}, transformers {of['transformers']}.",
        style="dim",
    )
