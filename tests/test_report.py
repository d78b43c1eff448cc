"""Reports as people see them: a line, a text, a notebook table; and the dictionary that programs read."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from hf_multilora.report import AdapterStatus, CacheCounters, LoadReport, LoadReports, Status


@pytest.fixture
def report() -> LoadReport:
    modules = {f"model.layers.{i}.self_attn.{p}": r for i in range(30) for p, r in (("q_proj", 8), ("v_proj", 4))}
    return LoadReport(
        name="sql",
        source="org/sql-lora@3f2a",
        generation=7,
        rank=8,
        modules=modules,
        nbytes=937_056,
        load_ms=12.34,
        fingerprint="3f2a" * 10,
        base_model="org/base",
        ignored=[f"field_{i}" for i in range(11)],
        warnings=["trained on 'org/base', loaded onto 'other'", "second"],
    )


@pytest.fixture
def status() -> Status:
    adapters = [
        AdapterStatus("sql", 7, 8, 937_056, slot=0, pinned=True, in_use=2, source="org/sql-lora"),
        AdapterStatus("<script>alert(1)</script>", 8, 4, 476_224, slot=None, pinned=False, in_use=0, source="[red]x"),
    ]
    return Status(
        max_loras=4,
        max_lora_rank=16,
        slot_bytes=2_000_000,
        device="cpu",
        dtype="float32",
        adapters=adapters,
        slots=["sql", None, "sql*0.7+poet*0.3", None],
        resident=CacheCounters(10, 3, 1, 3_000_000, 4.5),
        registered=CacheCounters(12, 2, 0, 1_413_280, 30.0),
    )


def test_report_reads_in_one_line_and_in_full(report):
    assert repr(report) == "LoadReport(sql: rank 8, 60 modules, 937 kB, loaded in 12.3 ms, 2 warnings)"
    text = str(report)
    assert "q_proj 30 x r8, v_proj 30 x r4" in text
    assert "field_7 and 3 more" in text and "field_8" not in text
    assert "trained on 'org/base'" in text and "second" in text
    assert "left out" not in text


def test_status_tables(status):
    assert repr(status).startswith("Status(2 of 4 slots in use, 2 adapters registered, 2 MB a slot (rank 16, float32")
    lines = str(status).splitlines()
    (sql,) = [line for line in lines if line.startswith("sql ")]
    assert sql.split() == ["sql", "8", "937", "kB", "0", "yes", "2", "org/sql-lora"]
    (mix,) = [line for line in lines if line.startswith("sql*0.7")]
    assert mix.split() == ["sql*0.7+poet*0.3", "2", "mix"]
    assert any(line.split() == ["slots", "10", "3", "1", "3", "MB", "4.5", "ms"] for line in lines)


def test_empty_status():
    empty = Status(1, 8, 10, "cpu", "float32", [], [None], CacheCounters(), CacheCounters())
    assert "0 of 1 slot in use, 0 adapters" in str(empty)
    assert "<table" in empty._repr_html_()


class Page(HTMLParser):
    """What a browser would make of some HTML: tables as texts of cells; fails where tags do not close in order."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.styles: list[str] = []
        self.captions: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.outside = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.add(tag)
        assert {name for name, _ in attrs} <= {"style"}
        self.styles += [value for _, value in attrs]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "caption":
            self.captions.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self.open and self.open[-1] == "caption":
            self.captions[-1] += data
        else:
            self.outside += data


NASTY = "<script>alert(1)</script>"


def test_html_of_a_report(report):
    page = Page(report._repr_html_())
    assert page.captions == ["sql: rank 8, 60 modules, 937 kB, loaded in 12.3 ms, 2 warnings"]
    (table,) = page.tables
    assert all(len(row) == 2 for row in table)
    rows = [tuple(row) for row in table]
    assert ("source", "org/sql-lora@3f2a") in rows and ("modules", "q_proj 30 x r8, v_proj 30 x r4") in rows
    assert [text for word, text in rows if word == "warning"] == report.warnings


def test_html_of_a_status(status):
    status.suggestion = f"max_loras=9: {NASTY}"
    page = Page(status._repr_html_())
    assert page.captions == [repr(status).removeprefix("Status(").removesuffix(")")]
    adapters, levels = page.tables
    assert adapters == [
        ["adapter", "rank", "size", "slot", "pinned", "in use", "source"],
        ["sql", "8", "937 kB", "0", "yes", "2", "org/sql-lora"],
        [NASTY, "4", "476 kB", "-", "", "", "[red]x"],
        ["sql*0.7+poet*0.3", "", "", "2", "", "", "mix"],
    ]
    assert levels[1] == ["slots", "10", "3", "1", "3 MB", "4.5 ms"]
    assert page.outside.split() == ["max_loras=9:", *NASTY.split()]
    assert "script" not in page.seen


def test_html_of_several_reports(report):
    reports = LoadReports(sql=report, other=replace(report, name=NASTY, warnings=[]))
    page = Page(reports._repr_html_())
    assert page.captions == ["2 adapters loaded, 1.9 MB, 2 warnings"] == str(reports).splitlines()[:1]
    (table,) = page.tables
    assert table == [
        ["adapter", "rank", "modules", "size", "loaded in", "beside", "warnings"],
        ["sql", "8", "60", "937 kB", "12.3 ms", "", "2"],
        [NASTY, "8", "60", "937 kB", "12.3 ms", "", ""],
    ]
    assert reports["sql"] is report and isinstance(reports, dict)


def test_html_takes_its_colours_from_the_page(report, status):
    """Text and background are the page's; lines are a grey that shows on both; nothing depends on a style sheet."""
    for html in (report._repr_html_(), status._repr_html_()):
        styles = Page(html).styles
        colours = {rule for style in styles for rule in style.split(";") if "color" in rule or "background" in rule}
        assert colours == {"color:inherit", "background:transparent"} | {
            rule for rule in colours if "128,128,128" in rule
        }
        assert "<style" not in html and "class=" not in html


def test_rich_shows_markup_as_it_is(status):
    console = pytest.importorskip("rich.console").Console(width=160, record=True, file=io.StringIO())
    console.print(status)
    text = console.export_text()
    assert "[red]x" in text and "2 of 4 slots in use" in text


def test_dictionaries_go_through_json(report, status):
    assert LoadReport(**json.loads(json.dumps(report.to_dict()))) == report
    assert json.loads(json.dumps(status.to_dict()))["resident"]["hits"] == 10
