"""Reports as people see them: a line, a text, a notebook table; and the dictionary that programs read."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser

import pytest

from hf_multilora.report import AdapterStatus, CacheCounters, LoadReport, Status


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


class Balanced(HTMLParser):
    """Checks that tags close in order and collects their names."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_well_formed_and_escaped(report, status):
    for html in (report._repr_html_(), status._repr_html_()):
        assert "script" not in Balanced(html).seen
        assert "<script>" not in html


def test_html_takes_its_colours_from_the_page(report, status):
    html = report._repr_html_() + status._repr_html_()
    for rule in ("#", "white", "black"):
        assert rule not in html.replace("&#x27;", "")
    assert "color:inherit" in html


def test_rich_shows_markup_as_it_is(status):
    console = pytest.importorskip("rich.console").Console(width=160, record=True, file=io.StringIO())
    console.print(status)
    text = console.export_text()
    assert "[red]x" in text and "2 of 4 slots in use" in text


def test_dictionaries_go_through_json(report, status):
    assert LoadReport(**json.loads(json.dumps(report.to_dict()))) == report
    assert json.loads(json.dumps(status.to_dict()))["resident"]["hits"] == 10
