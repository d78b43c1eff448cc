"""Small tables as people read them: in a text, in a terminal, in a notebook."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

# No colour of their own but a translucent grey: text and background stay the page's, light or dark. All of it stands
# in style attributes, since notebooks and code hosts drop style sheets.
_LINE = "rgba(128,128,128,.35)"
_TABLE = (
    "border-collapse:collapse;border:0;margin:.25em 0 .75em;font-size:inherit;background:transparent;color:inherit;"
    "font-variant-numeric:tabular-nums"
)
_CAPTION = "caption-side:top;text-align:left;padding:0 0 .35em;color:inherit;font-weight:600;white-space:nowrap"
_CELL = f"padding:.2em 1.2em .2em 0;border:0;border-bottom:1px solid {_LINE};vertical-align:top;max-width:48em"
_HEAD = "font-weight:400;opacity:.7;white-space:nowrap"
_NUMBER = "text-align:right;white-space:nowrap"
_WORDS = "text-align:left;overflow-wrap:anywhere"


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Args:
        title: a line above it, or None.
        head: names of the columns; None: the first column holds the names, one for each row.
        rows: as many cells in each as there are columns.
        numbers: the names of columns that hold numbers, which are set flush right.
    """

    title: str | None
    head: Sequence[str] | None
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()

    def text(self) -> str:
        """Lines of equal columns, without the title."""
        lines = [self.head, *self.rows] if self.head else list(self.rows)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if self._number(i) else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def rich(self) -> Any:
        """A rich.table.Table; markup in cells is shown as it is."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=self.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for i, name in enumerate(self.head or ()):
            table.add_column(name, justify="right" if self._number(i) else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def html(self) -> str:
        """A <table>; every text is escaped."""
        lines = [f"<div style='overflow-x:auto'><table style='{_TABLE}'>"]
        if self.title:
            lines.append(f"<caption style='{_CAPTION}'>{escape(self.title)}</caption>")
        if self.head:
            lines.append(f"<thead>{self._line(self.head, 'th', _HEAD)}</thead>")
        lines += ["<tbody>", *(self._line(row, "td") for row in self.rows), "</tbody></table></div>"]
        return "\n".join(lines)

    def _line(self, cells: Sequence[str], tag: str, style: str = "") -> str:
        parts = []
        for i, cell in enumerate(cells):
            named = self.head is None and i == 0
            kind, own = ("th", f"{_HEAD};") if named else (tag, f"{style};" if style else "")
            side = _NUMBER if self._number(i) else _WORDS
            parts.append(f"<{kind} style='{_CELL};{own}{side}'>{escape(cell)}</{kind}>")
        return f"<tr style='background:transparent'>{''.join(parts)}</tr>"

    def _number(self, column: int) -> bool:
        return self.head is not None and self.head[column] in self.numbers


class Shown:
    """What is shown as tables: a line for a prompt (`repr`), a text (`print`), HTML for a notebook, and rich for a
    terminal. A dataclass of this kind needs `repr=False`, or it gets a line of its own."""

    def _title(self) -> str:
        raise NotImplementedError

    def _tables(self) -> Sequence[Table]:
        """The first one has the title."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._title()})"

    def __str__(self) -> str:
        return "\n\n".join([self._title(), *(table.text() for table in self._tables())])

    def _repr_html_(self) -> str:
        return "\n".join(table.html() for table in self._tables())

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*(table.rich() for table in self._tables()))
