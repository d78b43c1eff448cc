"""Several adapters at once, with a progress bar that transformers' own switches hide."""

from __future__ import annotations

import pytest
from models import FAMILIES
from oracle import adapters
from transformers.utils import logging

from hf_multilora import MultiLoraError, enable_multilora


def test_reports_and_progress(capfd: pytest.CaptureFixture[str]) -> None:
    model = enable_multilora(FAMILIES["llama"].build(), max_lora_rank=64)
    shown = logging.is_progress_bar_enabled()
    try:
        logging.enable_progress_bar()
        reports = model.multilora.load_many({"a": adapters()["r8"], "b": adapters()["r3"]})
        assert "Loading adapters" in capfd.readouterr().err
        logging.disable_progress_bar()
        model.multilora.load_many({"c": adapters()["r1"]})
        assert "Loading adapters" not in capfd.readouterr().err
    finally:
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    assert {name: report.rank for name, report in reports.items()} == {"a": 8, "b": 3}
    assert set(model.multilora.adapters) == {"a", "b", "c"}


def test_one_that_fails_leaves_those_before_it(tmp_path) -> None:
    model = enable_multilora(FAMILIES["llama"].build(), max_lora_rank=64)
    with pytest.raises(MultiLoraError):
        model.multilora.load_many({"a": adapters()["r8"], "b": tmp_path / "nothing", "c": adapters()["r3"]})
    assert set(model.multilora.adapters) == {"a"}
