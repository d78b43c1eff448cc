"""What the command line prints: results on stdout, progress and errors on stderr. Needs the `demo` extra."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

notes = Console(stderr=True, highlight=False)  # progress and errors; stdout carries the result alone
_out = Console(highlight=False)


class Show(Protocol):
    """Shows how far a step has come; a total of 0 means that nobody knows how long it takes."""

    def __call__(self, label: str, done: int, total: int, note: str = "") -> None: ...


def show_error(name: str, message: str, as_json: bool = False) -> None:
    """An error: a line on stderr, or a JSON object on stdout."""
    if as_json:
        show_result({"error": name, "message": message})
    else:
        notes.print(f"[bold red]{name}:[/] {escape(message)}", soft_wrap=True)


def show_result(result: Any) -> None:
    """A dict as JSON, anything else as rich prints it."""
    if isinstance(result, dict):
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        _out.print(result, markup=False, soft_wrap=isinstance(result, str))


@contextmanager
def progress() -> Iterator[Show]:
    """A bar that shows one step at a time."""
    from transformers.utils import logging

    shown = notes.is_terminal and logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # one bar is enough
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    more = TextColumn("{task.fields[note]}"), TimeElapsedColumn()
    with Progress(*columns, *more, console=notes, transient=True, disable=not shown) as bar:
        task = bar.add_task("", note="")

        def show(label: str, done: int, total: int, note: str = "") -> None:
            if bar.tasks[task].description != label:
                bar.reset(task, description=label, total=total or None)
            bar.update(task, completed=done, total=total or None, note=note)

        yield show
