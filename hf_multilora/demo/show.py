"""The demo's result for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .run import DemoResult


def render(result: DemoResult) -> RenderableType:
    """The table of answers, the two times, and the status of slots and caches."""
    return Group(_answers(result), _times(result), Text(), result.status)


def _answers(result: DemoResult) -> Table:
    table = Table(
        title=f"{result.rows} rows, one batch: each prompt through the base and {len(result.columns) - 1} adapters",
        title_justify="left",
        title_style="bold",
        box=box.ROUNDED,
        show_lines=True,
        border_style="dim",
    )
    table.add_column("prompt", ratio=5, style="bold")
    for column in result.columns:
        table.add_column(column, ratio=3 if column == "sentiment" else 5, min_width=8)
    for prompt, row in zip(result.prompts, result.answers, strict=True):
        table.add_row(Text(prompt), *(Text(answer.strip()) for answer in row))
    return table


def _times(result: DemoResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "time", "batches"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("all rows in one mixed batch", f"{result.mixed_seconds:.2f} s", "1", style="bold")
    table.add_row("one adapter after another", f"{result.turns_seconds:.2f} s", str(len(result.columns)))
    ratio = result.turns_seconds / result.mixed_seconds
    of = result.conditions
    table.caption = (
        f"{ratio:.1f} x; {result.same_answers} of {result.rows} texts are the same both ways. Up to "
        f"{result.max_new_tokens} new tokens a row, {of['model']}, {of['dtype']}, {of['device']}, "
        f"torch {of['torch']}, transformers {of['transformers']}"
    )
    table.caption_justify = "left"
    return table
