"""Folders and weight files: every format, every kind of damage, and places that hold something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapter_bed import adapter, config, deltas, llama, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as safetensors_bytes
from safetensors.torch import save_file

from hf_multilora.adapters.checkpoint import TensorRef, from_tensors, open_checkpoint
from hf_multilora.adapters.load import load_plan, short_name
from hf_multilora.adapters.source import AdapterFiles, Request, _resolvers, register_resolver
from hf_multilora.errors import AdapterFormatError, AdapterNotFoundError

TARGETS = llama()
TENSORS = adapter(TARGETS, ["q_proj", "v_proj"])
CONFIG = config(target_modules=["q_proj", "v_proj"])


def read(source, **options):
    return load_plan(source, TARGETS, **{"max_lora_rank": 64, **options})


EXPECTED = deltas(load_plan(TENSORS, TARGETS, max_lora_rank=64, config=CONFIG))


def write_torch(folder: Path, name: str, **options) -> Path:
    save(folder, {}, CONFIG)
    torch.save(TENSORS, folder / name, **options)
    return folder


@pytest.mark.parametrize("form", ["safetensors", "bin", "pt", "legacy bin", "shards"])
def test_formats(form: str, tmp_path: Path) -> None:
    if form == "safetensors":
        save(tmp_path, TENSORS, CONFIG)
    elif form == "shards":
        save(tmp_path, {}, CONFIG)
        names = sorted(TENSORS)
        index = {}
        for i in (0, 1):
            file = f"adapter_model-0000{i + 1}-of-00002.safetensors"
            save_file({name: TENSORS[name] for name in names[i::2]}, tmp_path / file)
            index |= dict.fromkeys(names[i::2], file)
        (tmp_path / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        legacy = {"_use_new_zipfile_serialization": False} if form.startswith("legacy") else {}
        write_torch(tmp_path, f"adapter_model.{form.split()[-1]}", **legacy)
    with read(tmp_path) as plan:
        found = deltas(plan)
        assert plan.source == str(tmp_path) and plan.warnings == []
    assert found.keys() == EXPECTED.keys()
    assert all(found[site].equal(EXPECTED[site]) for site in found)


def test_closing_releases_and_says_so(tmp_path: Path) -> None:
    plan = read(save(tmp_path, TENSORS, CONFIG))
    plan.close()
    plan.close()
    with pytest.raises(ValueError, match="closed"):
        plan.factors[0].a.read()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_file_of_the_folder_will_do(name: str, tmp_path: Path) -> None:
    save(tmp_path, TENSORS, CONFIG)
    assert len(read(tmp_path / name).factors) == 4
    with pytest.raises(AdapterFormatError, match="Give the folder"):
        read(_touch(tmp_path / "notes.txt"))


def _touch(path: Path, content: bytes = b"x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_safetensors_come_first_and_other_weights_are_named(tmp_path: Path) -> None:
    write_torch(tmp_path, "adapter_model.bin")
    save(tmp_path, TENSORS, CONFIG)
    for name in ("trainable_params.bin", "optimizer.pt", "training_args.bin", "rng_state_0.pth", "scheduler.pt"):
        _touch(tmp_path / name)
    (warning,) = read(tmp_path).warnings
    assert "adapter_model.bin, trainable_params.bin beside adapter_model.safetensors: not read" in warning


def test_trainer_checkpoints(tmp_path: Path) -> None:
    """A checkpoint-* folder loads as it is; their parent names them, the last one as the next step."""
    for step in (9, 10, 100):
        save(tmp_path / f"checkpoint-{step}", TENSORS, CONFIG)
        _touch(tmp_path / f"checkpoint-{step}" / "optimizer.pt")
    assert read(tmp_path / "checkpoint-9").warnings == []
    assert read(tmp_path, subfolder="checkpoint-100").source.endswith("checkpoint-100")
    with pytest.raises(
        AdapterFormatError, match="checkpoint-9, checkpoint-10, checkpoint-100.*subfolder='checkpoint-100'"
    ):
        read(tmp_path)
    with pytest.raises(AdapterNotFoundError, match="no subfolder 'checkpoint-11'.*Closest: 'checkpoint-10"):
        read(tmp_path, subfolder="checkpoint-11")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": b"{}", "model.safetensors": b"x"}, "a full model, not an adapter.*from_pretrained"),
        ({"config.json": b"{}"}, "config of a full model"),
        ({"adapters.npz": b"x"}, "MLX adapter"),
        ({"adapters.safetensors": b"x"}, "MLX adapter"),
        ({"adapter_model.safetensors": b"x"}, "adapter_config.json is missing beside the weights"),
        ({"kohya.safetensors": b"x"}, "not a PEFT adapter"),
        ({"notes.txt": b"x"}, "no adapter_config.json here .files: notes.txt"),
        ({}, "files: none"),
        ({"adapter_config.json": b"{}"}, "without weights"),
        ({"adapter_config.json": b"{}", "lora.safetensors": b"x"}, "Found: lora.safetensors; rename it"),
        ({"adapter_config.json": b"{}", "adapters.safetensors": b"x"}, "MLX adapter"),
        ({"adapter_config.json": b"{}", "global_step7/x": b"x"}, "sharded training state .global_step7"),
    ],
)
def test_folders_of_something_else(files: dict[str, bytes], words: str, tmp_path: Path) -> None:
    for name, content in files.items():
        _touch(tmp_path / name, content)
    with pytest.raises(AdapterFormatError, match=words) as raised:
        read(tmp_path)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("source", ["./nosuch", "/nosuch/at/all", "~/nosuch", "a/b/c", "nosuch", "C:\\x\\y", ""])
def test_no_such_folder(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterNotFoundError, match="org/name"):
        read(source)


def test_a_path_is_never_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "runs" / "sql-final", TENSORS, CONFIG)
    with pytest.raises(AdapterNotFoundError, match="no folder 'runs/sql-fimal'.*Closest: 'sql-final'"):
        read(Path("runs/sql-fimal"))
    assert read("runs/sql-final").source == "runs/sql-final"


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"\0" * 2000, "zeros"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 84", "git lfs pull"),
        (b"\n<!doctype html><title>Sign in</title>", "HTML page"),
        (b"PK\x03\x04 rubbish", "not a whole"),
        (b"rubbish" * 500, "not a whole"),
    ],
)
def test_damaged_weights(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    save(tmp_path, {}, CONFIG)
    _touch(tmp_path / name, content)
    with pytest.raises(AdapterFormatError, match=words) as raised:
        read(tmp_path)
    assert name in str(raised.value)


SMALL = {"a.lora_A.weight": torch.ones(2, 3), "a.lora_B.weight": torch.ones(3, 2)}


def torch_bytes(folder: Path, legacy: bool) -> bytes:
    torch.save(SMALL, folder / "x.bin", _use_new_zipfile_serialization=not legacy)
    return (folder / "x.bin").read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_truncation_loads(data: st.DataObject, tmp_path: Path) -> None:
    """Cut at any byte, a file is an error and not a smaller adapter."""
    form = data.draw(st.sampled_from(["safetensors", "zip", "legacy"]))
    whole = safetensors_bytes(SMALL) if form == "safetensors" else torch_bytes(tmp_path, form == "legacy")
    n = data.draw(st.integers(0, len(whole) - 1))
    path = _touch(tmp_path / ("cut.safetensors" if form == "safetensors" else "cut.bin"), whole[:n])
    with pytest.raises(AdapterFormatError, match="cut"):
        open_checkpoint(path)


class Payload:
    """Would run when unpickled by a careless loader."""

    def __reduce__(self):
        return (open, ("/tmp/never-written-by-hf-multilora", "w"))


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    save(tmp_path, {}, CONFIG)
    torch.save({"a": Payload()}, tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterFormatError, match="code in a pickle is never run"):
        read(tmp_path)
    assert not Path("/tmp/never-written-by-hf-multilora").exists()


def test_not_a_dict_of_tensors(tmp_path: Path) -> None:
    save(tmp_path, {}, CONFIG)
    torch.save([torch.ones(2)], tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterFormatError, match="expected a dict of tensors, got a list"):
        read(tmp_path)
    torch.save({"state": {"a": torch.ones(2)}}, tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterFormatError, match="'state' is a dict, not a tensor"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "../x.safetensors"}}, "outside its own folder"),
        ({"weights": {}}, "not an index"),
        ([], "not an index"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors"),
        ({"weight_map": {"nosuch": "s.safetensors"}}, "in no shard, such as 'nosuch'"),
    ],
)
def test_bad_index(index: object, words: str, tmp_path: Path) -> None:
    save_file(SMALL, tmp_path / "s.safetensors")
    path = _touch(tmp_path / "adapter_model.safetensors.index.json", json.dumps(index).encode())
    with pytest.raises(AdapterFormatError, match=words):
        open_checkpoint(path)


def test_references_mean_stored_numbers() -> None:
    first, second = from_tensors(SMALL), from_tensors(SMALL)
    key = "a.lora_B.weight"
    assert TensorRef(first, key) == TensorRef(first, key) != TensorRef(second, key)
    assert TensorRef(first, key, (0, 2)) != TensorRef(first, key)
    assert TensorRef(first, key, (1, 3)).shape == (2, 2) == tuple(TensorRef(first, key, (1, 3)).read().shape)
    assert len({TensorRef(first, key), TensorRef(first, key), TensorRef(first, key, (0, 1))}) == 2


def test_resolvers_can_be_added(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, CONFIG)

    @register_resolver
    def from_store(request: Request) -> AdapterFiles | None:
        if not request.source.startswith("store://"):
            return None
        return AdapterFiles(
            tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors", request.source, "v7"
        )

    try:
        plan = read("store://sql")
        assert (plan.source, plan.fingerprint_of_source) == ("store://sql", "v7")
        assert read(tmp_path).source == str(tmp_path)
    finally:
        _resolvers.remove(from_store)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("meta-llama/Llama-3-8B", "/models/Llama-3-8B/", True),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Meta-Llama-3.1-8B-Instruct", True),
        ("unsloth/gemma-3-4b-it-unsloth-bnb-4bit", "google/gemma-3-4b-it", True),
        ("TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ", "mistralai/Mixtral-8x7B-Instruct-v0.1", True),
        ("/c/hub/models--Qwen--Qwen3-8B/snapshots/0123abc", "Qwen/Qwen3-8B", True),
        ("C:\\models\\Qwen3-8B", "Qwen/Qwen3-8B", True),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", False),
        ("meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-7b-hf", False),
    ],
)
def test_base_names(a: str, b: str, same: bool) -> None:
    assert (short_name(a) == short_name(b)) is same


def test_base_mismatch() -> None:
    for name, warned in (("org/other", True), ("else/tiny", False), ("", False), (None, False)):
        fields = CONFIG | {"base_model_name_or_path": name}
        plan = read(TENSORS, config=fields)
        assert bool(plan.warnings) is warned
        assert plan.base_model == (name or None)
    assert read(TENSORS, config=CONFIG | {"base_model_name_or_path": "x/tiny"}, strict_base=True)
    with pytest.raises(AdapterFormatError, match="trained on 'org/other', loaded on 'org/tiny'"):
        read(TENSORS, config=CONFIG | {"base_model_name_or_path": "org/other"}, strict_base=True)
