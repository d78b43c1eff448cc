"""Answers side by side: what the notebooks show as a coloured table."""

from __future__ import annotations

import torch
from test_report import NASTY, Page
from tiny_files import tokenizer

from hf_multilora.demo.notebook import SideBySide, answers, chat


def test_a_table_of_answers():
    columns = [f"c{i}" for i in range(10)]
    table = SideBySide(["one", NASTY], columns, [[f"{i}" for i in range(10)], [NASTY] * 10])
    page = Page(table._repr_html_())
    assert page.tables == [[["prompt", *columns], ["one", *map(str, range(10))], [NASTY] * 11]]
    assert "script" not in page.seen
    assert repr(table).splitlines()[:2] == ["one", "  c0: 0"]


def test_colours_are_translucent_and_differ_between_neighbours():
    html = SideBySide(["p"], ["base", "a", "b"], [["x", "y", "z"]])._repr_html_()
    shades = [rule for style in Page(html).styles for rule in style.split(";") if rule.startswith("background:")]
    cells = [shade for shade in shades if "0.14" in shade]
    assert len(set(cells)) == len(cells) == 3
    assert all(shade == "background:transparent" or ",0." in shade for shade in shades)
    assert {rule for style in Page(html).styles for rule in style.split(";") if rule.startswith("color:")} == {
        "color:inherit"
    }


def test_chats_are_padded_on_the_left_and_answers_come_without_them():
    tok = tokenizer()
    tok.pad_token = tok.eos_token
    inputs = chat(tok, ["hi", "hello there"])
    assert inputs["attention_mask"][0, 0] == 0 and inputs["attention_mask"][:, -1].tolist() == [1, 1]
    ids = inputs["input_ids"]
    new = ids.new_tensor([tok(" ok ")["input_ids"]]).repeat(2, 1)
    assert answers(tok, inputs, torch.cat([ids, new], 1)) == ["ok", "ok"]
