"""What cannot be served is refused by name, at once or for its own request alone; the others never notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from continuous.cb_bed import (
    assert_answer,
    assert_told_apart,
    batch,
    batching,
    enabled,
    folder,
    load,
    prompt,
)
from continuous.cb_run import Results, assert_serves, running
from transformers import CompileConfig
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_multilora import (
    AdapterNotFoundError,
    ConfigError,
    ModelError,
    MultiLoraError,
    RoutingError,
)

pytestmark = pytest.mark.timeout(120)

VERSIONS = {"sql": 0, "poet": 1, "law": 2}
INPUTS = [prompt(5 + 3 * i, seed=i) for i in range(6)]


@pytest.fixture
def model() -> Any:
    return enabled(VERSIONS)


def test_the_sources_here_are_told_apart() -> None:
    assert_told_apart(INPUTS, [None, 0, 1, 2, 5], 8)


def test_unknown_names_raise_at_once(model: Any) -> None:
    with pytest.raises(AdapterNotFoundError, match="sqk.*'sql'"):
        model.generate_batch(INPUTS[:2], continuous_batching_config=batching(), adapter_ids=["sql", "sqk"])
    with running(model) as manager:
        for call in (
            lambda: manager.add_request(INPUTS[0], adapter_id="sqk"),
            lambda: manager.add_request(INPUTS[0], adapter_id={"sql": 0.5, "sqk": 0.5}),
            lambda: manager.add_requests(INPUTS[:2], adapter_ids=["sql", "sqk"]),
        ):
            with pytest.raises(AdapterNotFoundError, match="sqk.*'sql'"):
                call()
        assert_serves(manager, VERSIONS)
        assert sum(one.requests for one in manager.status().adapters.values()) == 4, "part of a refused list was added"


def test_folders_without_on_demand_raise_at_once() -> None:
    model = enabled(VERSIONS, on_demand=False)
    with running(model) as manager:
        with pytest.raises(AdapterNotFoundError, match="on_demand"):
            manager.add_request(INPUTS[0], adapter_id=str(folder(4)))
        assert_serves(manager, VERSIONS)


@pytest.mark.parametrize("ids", [["sql"], ["sql", None, "poet"], [], ["sql", 7], ["sql", ""], ["sql", {}], 7], ids=str)
def test_ids_that_do_not_fit(model: Any, ids: Any) -> None:
    with pytest.raises(RoutingError, match="adapter_ids|adapter_id"):
        model.generate_batch(INPUTS[:2], continuous_batching_config=batching(), adapter_ids=ids)
    with running(model) as manager:
        with pytest.raises(RoutingError):
            manager.add_requests(INPUTS[:2], adapter_ids=ids)
        assert_serves(manager, VERSIONS)


def test_both_spellings_at_once(model: Any) -> None:
    with pytest.raises(RoutingError, match="adapter_names"):
        batch(model, INPUTS[:1], adapter_ids="sql", adapter_names="sql")


def _empty(path: Path) -> None:
    path.mkdir()


def _truncated(path: Path) -> None:
    weights = folder(4, path) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _foreign(path: Path) -> None:
    config = json.loads((folder(4, path) / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))


def _too_large(path: Path) -> None:
    config = json.loads((folder(4, path) / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, "r": 4096}))


@pytest.mark.parametrize("damage", [_empty, _truncated, _foreign, _too_large], ids=lambda one: one.__name__)
def test_a_folder_that_cannot_be_loaded_fails_its_requests_alone(model: Any, damage: Any, tmp_path: Path) -> None:
    damage(path := tmp_path / "bad")
    ids = ["sql", str(path), None, str(path), "poet", {"law": 0.5, str(path): 0.5}]
    outputs = batch(model, INPUTS, adapter_ids=ids)
    assert len(outputs) == len(INPUTS)
    for output, source in zip(outputs, [0, "bad", None, "bad", 1, "bad"], strict=True):
        if source == "bad":
            assert output.status == RequestStatus.FAILED and output.error and not output.generated_tokens
            assert str(path) in output.error
        else:
            assert_answer(output, source, 8)
    assert all(adapter.in_use == 0 for adapter in model.multilora.status().adapters)


def test_a_hub_id_that_nobody_has_fails_its_request_alone(model: Any) -> None:
    with running(model) as manager:
        results = Results(manager)
        bad = manager.add_request(INPUTS[0], adapter_id="nobody/has-this")
        assert_serves(manager, VERSIONS, results)
        assert "nobody/has-this" in results.wait(bad)[0].error and results[bad].status == RequestStatus.FAILED
        assert manager.status().adapters["nobody/has-this"].failed == 1


def test_a_folder_that_is_mended(model: Any, tmp_path: Path) -> None:
    """A failure is not remembered: the next request reads the files again."""
    path = tmp_path / "bad"
    _truncated(path)
    with running(model) as manager:
        results = Results(manager)
        assert results.wait(manager.add_request(INPUTS[0], adapter_id=str(path)))[0].error
        folder(4, path)
        assert_answer(results.wait(manager.add_request(INPUTS[0], adapter_id=str(path)))[0], 4, 8)


def test_pins_on_every_slot(model: Any) -> None:
    """A request that no slot can ever be emptied for fails, naming the pins, or waits for an unpin; others go on."""
    model = enabled(VERSIONS, max_loras=1)
    model.multilora.pin("sql")
    with running(model) as manager:
        results = Results(manager)
        stuck = manager.add_request(INPUTS[0], adapter_id="poet")
        for _ in range(3):
            assert_answer(results.wait(manager.add_request(INPUTS[1], adapter_id="sql"))[0], 0, 8)
        model.multilora.unpin("sql")
        output = results.wait(stuck)[0]
        assert output.error is None or "pin" in output.error
        if output.error is None:
            assert_answer(output, 1, 8)


def test_a_mix_with_too_many_ranks(model: Any) -> None:
    for number in (7, 15, 23):
        load(model, f"wide{number}", number)
    mix = {f"wide{number}": 0.5 for number in (7, 15, 23)}
    with running(model) as manager:
        try:
            request = manager.add_request(INPUTS[0], adapter_id=mix)
        except MultiLoraError as error:
            assert "rank" in str(error)
        else:
            output = Results(manager).wait(request)[0]
            assert output.status == RequestStatus.FAILED and "rank" in output.error
        assert_serves(manager, VERSIONS)


@pytest.mark.parametrize(
    "name, value",
    [
        ("varlen_compile_config", CompileConfig()),
        ("decode_compile_config", CompileConfig()),
        ("default_compile_level", 1),
    ],
)
def test_compiled_forwards_are_refused_by_name(model: Any, name: str, value: Any) -> None:
    with pytest.raises((ConfigError, ModelError), match=name):
        model.init_continuous_batching(continuous_batching_config=batching(**{name: value}))
    with pytest.raises((ConfigError, ModelError), match=name):
        batch(model, INPUTS, config=batching(**{name: value}), adapter_ids="sql")
    assert_answer(batch(model, INPUTS[:1], adapter_ids="sql")[0], 0, 8)


def test_no_manager_inside_of_a_use_block(model: Any) -> None:
    with model.multilora.use("sql"):
        with pytest.raises(RoutingError, match="use"):
            model.init_continuous_batching(continuous_batching_config=batching())
        with pytest.raises(RoutingError, match="use"):
            batch(model, INPUTS)
    assert_answer(batch(model, INPUTS[:1], adapter_ids="sql")[0], 0, 8)
