"""The words for adapters that a transformers model already has, and model.multilora.use()."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from enabled import enabled
from models import FAMILIES, prompts
from oracle import MIX, Id, adapters, alone, assert_row, relative_error
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_multilora.errors import AdapterExistsError, AdapterNotFoundError, MultiLoraError
from hf_multilora.report import LoadReport


@pytest.fixture
def model() -> PreTrainedModel:
    return enabled("llama", ["r8", "r3"])


@torch.no_grad()
def logits(model: PreTrainedModel, **ids: Any) -> torch.Tensor:
    return model(**prompts(3), **ids).logits


def assert_answers(model: PreTrainedModel, adapter: Id, **ids: Any) -> None:
    """A plain call and generate() with `ids` are what PEFT gives for `adapter`."""
    reference = alone("llama", adapter)
    got, want = logits(model, **ids), logits(reference)
    for row in range(3):
        assert_row(got[row], want[row], adapter)
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(**prompts(3), **options, **ids), reference.generate(**prompts(3), **options)), (
        adapter
    )


def test_load_registers_and_does_not_activate(model: PreTrainedModel) -> None:
    report = model.load_adapter(adapters()["r16"], adapter_name="sql")
    assert isinstance(report, LoadReport)
    assert report.name == "sql"
    assert report.rank == 16
    assert set(report.modules) == {
        f"model.layers.{layer}.{part}"
        for layer in range(2)
        for part in [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
    }
    assert report.modules["model.layers.1.self_attn.q_proj"] == 5  # rank_pattern
    assert report.modules["model.layers.0.mlp.down_proj"] == 2
    assert_answers(model, None)
    assert_answers(model, "r16", adapter_ids="sql")


def test_load_takes_positions_and_strings(model: PreTrainedModel) -> None:
    model.load_adapter(str(adapters()["r16"]), "sql")
    assert_answers(model, "r16", adapter_ids="sql")


@pytest.mark.parametrize("name", ["a.b", "keys", "org/name", "ünï cödé", "r8 "])
def test_names_are_free(model: PreTrainedModel, name: str) -> None:
    """PEFT keeps names in a ModuleDict, where some break; here they are only ids."""
    model.load_adapter(adapters()["r16"], adapter_name=name)
    assert_answers(model, "r16", adapter_ids=name)
    model.delete_adapter(name)


@pytest.mark.parametrize("name", ["__base__", "", 3])
def test_names_that_mean_something_else(model: PreTrainedModel, name: Any) -> None:
    with pytest.raises((MultiLoraError, TypeError)):
        model.load_adapter(adapters()["r16"], adapter_name=name)


def test_load_from_memory(model: PreTrainedModel) -> None:
    """The native words for tensors in memory: peft_config= and adapter_state_dict=."""
    from peft import LoraConfig

    folder = adapters()["r16"]
    tensors = load_file(folder / "adapter_model.safetensors")
    config = LoraConfig.from_pretrained(folder)
    model.load_adapter(peft_config=config, adapter_state_dict=tensors, adapter_name="native")
    assert_answers(model, "r16", adapter_ids="native")
    as_dict = json.loads((folder / "adapter_config.json").read_text())
    model.multilora.load(tensors, name="handle", config=as_dict)
    assert_answers(model, "r16", adapter_ids="handle")


def test_words_for_training_raise(model: PreTrainedModel) -> None:
    for words in ({"is_trainable": True}, {"hotswap": True}):
        with pytest.raises(MultiLoraError, match=next(iter(words))):
            model.load_adapter(adapters()["r16"], adapter_name="sql", **words)
    with pytest.raises(AdapterNotFoundError):
        logits(model, adapter_ids="sql")
    with pytest.raises(MultiLoraError, match="add_adapter"):
        from peft import LoraConfig

        model.add_adapter(LoraConfig(target_modules=["q_proj"]), "new")
    assert_answers(model, None)


def test_an_existing_name(model: PreTrainedModel) -> None:
    before = model.load_adapter(adapters()["r16"], adapter_name="sql").generation
    with pytest.raises(AdapterExistsError, match="reload=True"):
        model.load_adapter(adapters()["r33"], adapter_name="sql")
    assert_answers(model, "r16", adapter_ids="sql")
    after = model.load_adapter(adapters()["r33"], adapter_name="sql", reload=True).generation
    assert after > before
    assert_answers(model, "r33", adapter_ids="sql")


def test_reload_reads_the_files_again(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = shutil.copytree(adapters()["r16"], tmp_path / "adapter")
    model.load_adapter(folder, adapter_name="sql")
    assert_answers(model, "r16", adapter_ids="sql")
    shutil.copytree(adapters()["r33"], folder, dirs_exist_ok=True)
    model.multilora.reload("sql")
    assert_answers(model, "r33", adapter_ids="sql")


def test_a_failed_reload_keeps_the_old_one(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = shutil.copytree(adapters()["r16"], tmp_path / "adapter")
    model.load_adapter(folder, adapter_name="sql")
    (folder / "adapter_model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(MultiLoraError):
        model.multilora.reload("sql")
    with pytest.raises(MultiLoraError):
        model.load_adapter(folder, adapter_name="sql", reload=True)
    assert_answers(model, "r16", adapter_ids="sql")


def test_a_failed_load_leaves_nothing(model: PreTrainedModel, tmp_path: Path) -> None:
    before = [adapter.name for adapter in model.multilora.status().adapters]
    with pytest.raises(MultiLoraError):
        model.load_adapter(tmp_path, adapter_name="sql")
    with pytest.raises(MultiLoraError):  # another model's adapter
        model.load_adapter(adapters("gpt2")["r8"], adapter_name="sql")
    assert [adapter.name for adapter in model.multilora.status().adapters] == before
    model.load_adapter(adapters()["r16"], adapter_name="sql")


def test_set_adapter_is_the_default(model: PreTrainedModel) -> None:
    assert model.active_adapters() == []
    model.set_adapter("r8")
    assert model.active_adapters() == ["r8"]
    assert_answers(model, "r8")
    assert_answers(model, "r3", adapter_ids="r3")
    assert_answers(model, None, adapter_ids="__base__")
    mixed = logits(model, adapter_ids=[None, "r3", "__base__"])
    for row, adapter in enumerate([None, "r3", None]):
        assert_row(mixed[row], logits(alone("llama", adapter))[row], adapter)
    model.set_adapter("r3")
    assert_answers(model, "r3")


def test_set_adapter_refuses(model: PreTrainedModel) -> None:
    model.set_adapter("r8")
    with pytest.raises(MultiLoraError, match="mix"):
        model.set_adapter(["r8", "r3"])
    with pytest.raises(AdapterNotFoundError, match="r8"):
        model.set_adapter("r88")
    assert_answers(model, "r8")


def test_disable_adapters_drops_the_default(model: PreTrainedModel) -> None:
    model.set_adapter("r8")
    model.disable_adapters()
    assert model.active_adapters() == []
    assert_answers(model, None)
    assert_answers(model, "r8", adapter_ids="r8")


def test_delete_adapter_unloads(model: PreTrainedModel) -> None:
    logits(model, adapter_ids="r8")
    model.delete_adapter("r8")
    with pytest.raises(AdapterNotFoundError, match="'r8'"):
        logits(model, adapter_ids="r8")
    assert [adapter.name for adapter in model.multilora.status().adapters] == ["r3"]
    assert model.multilora.status().slots.count("r8") == 0
    with pytest.raises(AdapterNotFoundError):
        model.delete_adapter("r8")
    model.load_adapter(adapters()["r16"], adapter_name="r8")
    assert_answers(model, "r16", adapter_ids="r8")


def test_a_deleted_default_never_becomes_the_base_silently(model: PreTrainedModel) -> None:
    model.set_adapter("r8")
    model.delete_adapter("r8")
    assert model.active_adapters() == []


def test_peft_words_do_not_switch_transformers_to_peft(model: PreTrainedModel, tmp_path: Path) -> None:
    """With _hf_peft_config_loaded set, save_pretrained would save an adapter in place of the model."""
    model.set_adapter("r8")
    assert model._hf_peft_config_loaded is False
    model.save_pretrained(tmp_path)
    assert_answers(AutoModelForCausalLM.from_pretrained(tmp_path), None)


def test_signatures_of_the_words(model: PreTrainedModel) -> None:
    bare = FAMILIES["llama"].build()
    words = "load_adapter set_adapter disable_adapters enable_adapters active_adapters delete_adapter add_adapter"
    for word in words.split():
        before = inspect.signature(getattr(bare, word)).parameters
        after = inspect.signature(getattr(model, word)).parameters
        assert list(before) == list(after)[: len(before)], word


def test_adapter_names_is_a_synonym(model: PreTrainedModel) -> None:
    assert_answers(model, "r8", adapter_names="r8")
    ids = ["r8", "__base__", "r3"]
    assert torch.equal(logits(model, adapter_names=ids), logits(model, adapter_ids=["r8", None, "r3"]))
    assert torch.equal(
        model.generate(**prompts(3), max_new_tokens=3, adapter_names=ids),
        model.generate(**prompts(3), max_new_tokens=3, adapter_ids=ids),
    )


def test_tuples_and_mixes_as_ids(model: PreTrainedModel) -> None:
    assert torch.equal(logits(model, adapter_ids=("r8", None, MIX)), logits(model, adapter_ids=["r8", None, MIX]))
    assert_answers(model, MIX, adapter_ids=MIX)
    assert_answers(model, "r8", adapter_ids={"r8": 1.0})
    doubled = logits(model, adapter_ids={"r8": 2.0})
    assert relative_error(doubled, logits(model, adapter_ids="r8")) > 0.05
    both = logits(model, adapter_ids=[{"r3": 0.7, "r8": -0.4}, {"r3": -0.4, "r8": 0.7}, {"r3": 0.7}])
    assert relative_error(both[0], logits(model, adapter_ids=MIX)[0]) == 0
    assert relative_error(both[1], logits(model, adapter_ids={"r3": -0.4, "r8": 0.7})[1]) == 0


def test_a_mix_follows_its_parts(model: PreTrainedModel) -> None:
    """Composed slots are kept; a reload of a part must not find the old one."""
    logits(model, adapter_ids=MIX)
    model.load_adapter(adapters()["r3"], adapter_name="r8", reload=True)
    want = logits(model, adapter_ids={"r3": MIX["r3"] + MIX["r8"]})
    assert relative_error(logits(model, adapter_ids=MIX), want) < 1e-5
    model.delete_adapter("r8")
    with pytest.raises(AdapterNotFoundError):
        logits(model, adapter_ids=MIX)


def test_use(model: PreTrainedModel) -> None:
    with model.multilora.use("r8"):
        assert_answers(model, "r8")
        with model.multilora.use("r3"):
            assert_answers(model, "r3")
            with model.multilora.use(None):
                assert_answers(model, None)
        assert_answers(model, "r8")
        assert_answers(model, "r3", adapter_ids="r3")
        assert_answers(model, None, adapter_ids="__base__")
    assert_answers(model, None)


def test_use_with_a_list_and_a_mix(model: PreTrainedModel) -> None:
    ids: list[Id] = ["r8", None, MIX]
    want = logits(model, adapter_ids=ids)
    with model.multilora.use(ids):
        assert torch.equal(logits(model), want)
        got = model.generate(**prompts(3), max_new_tokens=3, num_beams=2)
    assert torch.equal(got, model.generate(**prompts(3), max_new_tokens=3, num_beams=2, adapter_ids=ids))


def test_use_over_the_default(model: PreTrainedModel) -> None:
    model.set_adapter("r3")
    with model.multilora.use("r8"):
        assert_answers(model, "r8")
    with model.multilora.use(None):
        assert_answers(model, None)
    assert_answers(model, "r3")


def test_use_ends_with_an_exception(model: PreTrainedModel) -> None:
    with pytest.raises(ZeroDivisionError), model.multilora.use("r8"):
        logits(model)
        raise ZeroDivisionError
    assert_answers(model, None)
    with pytest.raises(AdapterNotFoundError), model.multilora.use("nosuch"):
        pytest.fail("names are resolved when use() is entered")
    assert_answers(model, None)
    assert sum(adapter.in_use for adapter in model.multilora.status().adapters) == 0


def test_use_holds_its_adapters(model: PreTrainedModel) -> None:
    """Whatever is loaded meanwhile, what use() names stays where the routing points."""
    small = enabled("llama", ["r8", "r3", "r16"], max_loras=2)
    with small.multilora.use("r8"):
        for other in ("r3", "r16", "r3"):
            small.multilora.prefetch([other])
            assert_answers(small, "r8")
            assert_answers(small, other, adapter_ids=other)
        assert_answers(small, "r8")
