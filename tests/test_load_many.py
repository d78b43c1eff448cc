"""Several adapters at once, with a progress bar that transformers' own switches hide."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from models import FAMILIES
from oracle import adapters
from safetensors.torch import load_file
from transformers.utils import logging

from hf_multilora import MultiLoraError, enable_multilora
from hf_multilora.errors import AdapterExistsError, AdapterFormatError, ConfigError


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


def test_one_that_fails_leaves_those_before_it(tmp_path: Path) -> None:
    model = enable_multilora(FAMILIES["llama"].build(), max_lora_rank=64)
    with pytest.raises(MultiLoraError):
        model.multilora.load_many({"a": adapters()["r8"], "b": tmp_path / "nothing", "c": adapters()["r3"]})
    assert set(model.multilora.adapters) == {"a"}


@pytest.fixture
def model() -> Any:
    return enable_multilora(FAMILIES["llama"].build(), max_lora_rank=64)


def test_several_are_read_at_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_multilora.memory.ahead.cores", lambda: 16)
    handle = model.multilora
    read, barrier = type(handle._reader).read, threading.Barrier(2)

    def meeting(self: Any, source: Any, options: Any) -> Any:
        barrier.wait(30)
        return read(self, source, options)

    monkeypatch.setattr(type(handle._reader), "read", meeting)
    names = ["r8", "r3", "r1", "r16"]
    reports = handle.load_many({name: adapters()[name] for name in names})
    assert list(reports) == names == list(handle.adapters)
    generations = [report.generation for report in reports.values()]
    assert generations == sorted(generations)
    assert all(report.load_ms > 0 for report in reports.values())
    monkeypatch.undo()
    alone = enable_multilora(FAMILIES["llama"].build(), max_lora_rank=64).multilora
    for name in names:
        assert alone.load(adapters()[name], name).nbytes == reports[name].nbytes
        assert alone.store.entry(name).packed.digest() == handle.store.entry(name).packed.digest()


def test_a_broken_file_is_named_and_those_before_it_stay(model: Any, tmp_path: Path) -> None:
    broken = shutil.copytree(adapters()["r3"], tmp_path / "broken")
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    sources = {
        "a": adapters()["r8"],
        "b": adapters()["r1"],
        "c": broken,
        "d": adapters()["r16"],
        "e": adapters()["r3"],
    }
    with pytest.raises(AdapterFormatError, match="broken.*cut off"):
        model.multilora.load_many(sources)
    assert list(model.multilora.adapters) == ["a", "b"]


def test_names_that_exist(model: Any) -> None:
    model.multilora.load(adapters()["r1"], "b")
    sources = {"a": adapters()["r8"], "b": adapters()["r3"], "c": adapters()["r1"]}
    with pytest.raises(AdapterExistsError, match="'b'"):
        model.multilora.load_many(sources)
    assert list(model.multilora.adapters) == ["b", "a"] and model.multilora.adapters["b"].rank == 1
    reports = model.multilora.load_many(sources, reload=True)
    assert {name: report.rank for name, report in reports.items()} == {"a": 8, "b": 3, "c": 1}


def test_wrong_names_and_options(model: Any) -> None:
    with pytest.raises(ConfigError, match="cannot name an adapter"):
        model.multilora.load_many({"a": adapters()["r8"], "": adapters()["r3"]})
    assert list(model.multilora.adapters) == ["a"]
    with pytest.raises(TypeError, match="nosuch"):
        model.multilora.load_many({"b": adapters()["r3"]}, nosuch=1)


def test_reload_with_options_that_nobody_would_read(model: Any) -> None:
    before = model.multilora.load(adapters()["r8"], "a").generation
    for options in ({"revision": "main"}, {"strict_bass": True}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} and no source"):
            model.multilora.reload("a", **options)
    assert model.multilora.adapters["a"].generation == before
    assert model.multilora.reload("a", adapters()["r3"], strict_base=False).rank == 3
    with pytest.raises(TypeError, match="strict_bass"):
        model.multilora.reload("a", adapters()["r3"], strict_bass=True)


def test_tensors_and_dropped_ones_are_read_again() -> None:
    model = enable_multilora(FAMILIES["llama"].build(), max_lora_rank=64, max_loras=1, max_cpu_loras=2)
    tensors = load_file(adapters()["r8"] / "adapter_model.safetensors")
    config = json.loads((adapters()["r8"] / "adapter_config.json").read_text())
    model.multilora.load_many({"t": tensors}, config=config)
    model.multilora.load_many({"a": adapters()["r8"], "b": adapters()["r3"]})
    handle = model.multilora
    assert handle.status().registered.evictions == 1, (
        "tensors cannot be read again and stay, and there is room for two"
    )
    assert handle.store.entry("a").packed is None
    generation = handle.adapters["a"].generation
    with handle.store.acquire(["a"]):
        again, given = handle.store.entry("a").packed, handle.store.entry("t").packed
        assert again.digest() == given.digest(), "the same numbers, from the file and from tensors"
    assert handle.adapters["a"].generation == generation


def test_a_copy_of_the_model_reads_them_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable_multilora(FAMILIES["llama"].build(), max_lora_rank=64, max_loras=1, max_cpu_loras=1)
    model.multilora.load_many({"a": adapters()["r8"], "b": adapters()["r3"]})
    twin = copy.deepcopy(model)
    assert twin.multilora.store.entry("a").packed is None, "there is room for one"
    readers, read = [], type(model.multilora._reader).read

    def noted(self: Any, source: Any, options: Any) -> Any:
        readers.append(self)
        return read(self, source, options)

    monkeypatch.setattr(type(model.multilora._reader), "read", noted)
    with twin.multilora.store.acquire(["a"]):
        assert readers == [twin.multilora._reader]
