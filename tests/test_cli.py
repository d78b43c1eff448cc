"""The command line as its users meet it: what it prints, on which stream, and the exit code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from hf_multilora import __version__, enable_multilora
from hf_multilora.checks import check_adapter, inspect_adapter
from hf_multilora.cli import main
from hf_multilora.demo import ADAPTERS
from hf_multilora.errors import AdapterMatchError, ModelError, MultiLoraError, SlotError


@pytest.fixture
def run(capsys):
    """Run the command line in this process; returns (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    llama().save_pretrained(folder)
    return folder


def save_adapter(folder: Path, shapes: dict[str, tuple[int, ...]], **config) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"base_model.model.{k}": torch.ones(shape) for k, shape in shapes.items()},
        folder / "adapter_model.safetensors",
    )
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return str(folder)


def q_proj(rank: int = 4, width: int = 32) -> dict[str, tuple[int, ...]]:
    path = "model.layers.{}.self_attn.q_proj.lora_{}.weight"
    return {path.format(i, ab): (rank, width) if ab == "A" else (width, rank) for i in range(2) for ab in "AB"}


@pytest.fixture
def adapter(tmp_path) -> str:
    return save_adapter(tmp_path / "adapter", q_proj(), base_model_name_or_path="org/base", peft_version="0.21.2")


def test_help_and_version(run):
    code, out, _ = run("--help")
    assert code == 0 and all(word in out for word in ("demo", "inspect", "check", "bench"))
    assert run("--version")[:2] == (0, f"{__version__}\n")
    assert run("no-such-command")[0] == 2


def test_inspect_prints_what_is_there(run):
    code, out, err = run("inspect", str(ADAPTERS / "pirate"))
    assert (code, err) == (0, "")
    assert out.startswith(f"{ADAPTERS / 'pirate'}: rank 8, 60 modules, 922 kB\n")
    assert "q_proj 30 x r8, v_proj 30 x r8" in out and "r=8, alpha=16, PEFT 0.21.2" in out
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in out


def test_inspect_as_json(run, adapter):
    code, out, _ = run("inspect", adapter, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["modules"] == {f"model.layers.{i}.self_attn.q_proj": 4 for i in range(2)}
    assert (found["base_model"], found["alpha"], found["refused"]) == ("org/base", 8, None)
    assert found["nbytes"] == 4 * 32 * 4 * 4 and found["dtypes"] == {"float32": 4}


def test_inspect_shows_what_is_not_served(run, tmp_path):
    path = save_adapter(tmp_path / "arrow", q_proj(), arrow_config={"top_k": 2})
    code, out, _ = run("inspect", path)
    assert code == 0 and "arrow_config" in out.split("refused")[1]
    assert "rank 4, 2 modules" in out


def test_wrong_source_is_an_error_on_stderr(run, tmp_path):
    code, out, err = run("inspect", str(tmp_path / "nowhere"))
    assert (code, out) == (1, "") and "AdapterNotFoundError" in err and "nowhere" in err
    code, out, err = run("inspect", str(tmp_path / "nowhere"), "--json")
    assert (code, err) == (1, "") and json.loads(out)["error"] == "AdapterNotFoundError"


def test_check_says_what_fits(run, base, adapter):
    code, out, _ = run("check", str(base), adapter)
    assert code == 0 and out.startswith(f"{adapter} fits {base}\n")
    assert "q_proj 2 x r4" in out and "trained on 'org/base'" in out
    found = json.loads(run("check", str(base), adapter, "--json")[1])
    (one,) = found["adapters"]
    assert found["fits"] and one["fits"] and one["sites"] == 2 and one["rank"] == 4


def test_check_of_several_says_which_do_not_fit(run, base, adapter, tmp_path):
    wrong = save_adapter(tmp_path / "wrong", q_proj(width=48))
    code, out, err = run("check", str(base), adapter, str(wrong))
    assert code == 1 and out.startswith(f"{adapter} fits {base}\n") and "AdapterMatchError" in err
    code, out, _ = run("check", str(base), adapter, str(wrong), "--json")
    found = json.loads(out)
    assert code == 1 and not found["fits"] and [one["fits"] for one in found["adapters"]] == [True, False]


def test_check_needs_only_the_config(base, adapter, tmp_path):
    shutil.copy(base / "config.json", tmp_path / "config.json")
    assert check_adapter(adapter, str(tmp_path)).modules == check_adapter(adapter, str(base)).modules


def test_check_agrees_with_load(base, tmp_path):
    wrong = save_adapter(tmp_path / "wrong", q_proj(width=48))
    model = enable_multilora(llama(), max_loras=1, max_lora_rank=8)
    with pytest.raises(AdapterMatchError) as loading:
        model.load_adapter(wrong, adapter_name="wrong")
    with pytest.raises(AdapterMatchError) as checking:
        check_adapter(wrong, str(base))
    assert str(checking.value) == str(loading.value)
    right = save_adapter(tmp_path / "right", q_proj())
    check = check_adapter(right, str(base), max_lora_rank=8)
    assert check.modules == model.load_adapter(right, adapter_name="right").modules
    assert check.slot_bytes == model.multilora.status().slot_bytes


HEAD = {"lm_head.weight": (70, 32), "model.embed_tokens.weight": (70, 32)}


@pytest.mark.parametrize(
    ("shapes", "config", "match"),
    [
        ({"lm_head.weight": (64, 32)}, {"modules_to_save": ["lm_head"], "alora_invocation_tokens": [5]}, "no start"),
        (HEAD, {"modules_to_save": ["lm_head", "embed_tokens"]}, "extra_vocab_size=6"),
    ],
    ids=["alora", "vocabulary"],
)
def test_check_refuses_what_load_refuses(base, tmp_path, shapes, config, match):
    path = save_adapter(tmp_path / "refused", {**q_proj(), **shapes}, **config)
    with pytest.raises(MultiLoraError, match=match) as loading:
        enable_multilora(llama()).load_adapter(path, adapter_name="refused")
    with pytest.raises(type(loading.value)) as checking:
        check_adapter(path, str(base))
    assert str(checking.value) == str(loading.value)


def test_check_of_a_larger_vocabulary(run, base, tmp_path):
    path = save_adapter(tmp_path / "larger", {**q_proj(), **HEAD}, modules_to_save=["lm_head", "embed_tokens"])
    assert run("check", str(base), path)[0] == 1
    assert run("check", str(base), path, "--extra-vocab-size", "6")[0] == 0


def test_check_asks_the_hub_for_the_base_as_for_the_adapter(run, base, adapter, monkeypatch):
    asked, read = [], AutoConfig.from_pretrained

    def noted(name, **options):
        asked.append((name, options))
        return read(name)

    monkeypatch.setattr(AutoConfig, "from_pretrained", noted)
    assert run("check", str(base), adapter, "--offline")[0] == 0
    check_adapter(adapter, str(base), token="hf_secret")
    (_, offline), (_, secret) = asked
    assert offline == {"token": None, "local_files_only": True}
    assert secret == {"token": "hf_secret", "local_files_only": False}


def test_check_refuses(run, base, adapter, tmp_path):
    assert run("check", str(base), adapter, "--strict-base")[0] == 1
    with pytest.raises(SlotError, match="max_lora_rank"):
        check_adapter(adapter, str(base), max_lora_rank=2)
    with pytest.raises(ModelError, match="config"):
        check_adapter(adapter, str(tmp_path / "nothing"))
    code, out, _ = run("check", str(base), adapter, "--max-lora-rank", "2", "--json")
    assert code == 1 and json.loads(out)["adapters"][0]["error"] == "SlotError"


def test_weights_that_came_along_are_compared_with_the_base(base, tmp_path):
    path = save_adapter(tmp_path / "saved", {**q_proj(), "lm_head.base_layer.weight": (64, 32)})
    assert check_adapter(path, str(base)).saved == {"lm_head.weight": [64, 32]}
    tensors = load_file(Path(path) / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.base_layer.weight"] = load_file(base / "model.safetensors")["lm_head.weight"]
    save_file(tensors, Path(path) / "adapter_model.safetensors")
    assert any("lm_head" in line for line in check_adapter(path, str(base)).ignored)
    shutil.copy(base / "config.json", tmp_path / "config.json")
    with pytest.raises(ModelError, match="lm_head.weight along"):
        check_adapter(path, str(tmp_path))


def test_tied_head_is_compared_with_the_embedding(tmp_path):
    tied = llama(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "tied")
    path = Path(save_adapter(tmp_path / "adapter", q_proj()))
    tensors = load_file(path / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.base_layer.weight"] = tied.lm_head.weight.detach().clone()
    save_file(tensors, path / "adapter_model.safetensors")
    assert any("lm_head" in line for line in check_adapter(str(path), str(tmp_path / "tied")).ignored)


def test_inspection_of_an_unnamed_base(tmp_path):
    found = inspect_adapter(save_adapter(tmp_path / "x", q_proj()))
    assert "base      not named" in str(found) and "of an unknown version" in str(found)


BENCH = (
    "bench",
    "generate",
    "--shape",
    "tiny",
    "--rows",
    "2,4",
    "--adapters",
    "0,2",
    "--reps",
    "1",
    "--new-tokens",
    "3",
)


def test_bench_prints_a_table_and_writes_rows(run, tmp_path):
    code, out, err = run(*BENCH, "--device", "cpu", "--out", str(tmp_path))
    (file,) = tmp_path.iterdir()
    assert code == 0 and "eager decode, batch 2" in err, "progress goes to stderr"
    assert file.name in out.replace("\n", "") and "over bare" in out and "[" not in out.split("what")[0]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    labels = {f"eager decode, batch {n}, {label}" for n in (2, 4) for label in ("bare model", "2 adapters")}
    assert rows[0]["kind"] == "environment" and labels <= {row.get("what") for row in rows}


def test_bench_of_a_users_model_as_json(run, base, tmp_path):
    code, out, _ = run(*BENCH, str(base), "--device", "cpu", "--parts", "eager,prefill", "--prefill", "32", "--json",
                       "--out", str(tmp_path))  # fmt: skip
    found = json.loads(out)
    whats = [row["what"] for row in found["results"]]
    assert code == 0 and found["failed"] == [] and found["about"]["benchmark"] == "generate"
    assert "prefill 32 tokens, 16 adapters" in whats and found["file"].startswith(str(tmp_path))


def test_bench_names_what_it_does_not_know(run, tmp_path):
    for option, value in (("--rows", "2,x"), ("--rows", "0"), ("--shape", "9B"), ("--parts", "eager,all")):
        code, out, err = run(*BENCH, option, value, "--out", str(tmp_path / "none"))
        assert (code, out) == (1, "") and value.split(",")[-1] in err and not (tmp_path / "none").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
@pytest.mark.parametrize("arguments", [["kernels"], ["tune"], ["--tune"]])
def test_bench_of_kernels_needs_a_gpu(run, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("bench", *arguments)
    assert (code, out) == (1, "") and "CUDA" in err and not list(tmp_path.iterdir())


def test_bench_tune_writes_a_table_and_says_how_to_use_it(run, tmp_path, monkeypatch):
    from hf_multilora.bench import tune

    problems = [tune.Problem("shrink", {"rows": 1}), tune.Problem("expand", {"rows": 1})]
    monkeypatch.setattr(tune, "kernel_timer", lambda: lambda problem, candidate: candidate["us"])
    monkeypatch.setattr(tune, "common_problems", lambda: problems)
    monkeypatch.setattr(tune, "candidates", lambda problem: [{"us": 8.0}, {"us": 4.0}])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "environment", lambda device: dict.fromkeys(("device", "driver", "torch", "triton")))
    table = tmp_path / "table.json"
    code, out, err = run("bench", "--tune", "--seconds", "5", "--table", str(table))
    assert code == 0 and f"HF_MULTILORA_TUNING={table}" in out and "2 shapes, 0.500 x" in out and "shrink" in err
    assert [row["tiling"] for row in json.loads(table.read_text())["rows"]] == [{"us": 4.0}] * 2
    assert json.loads(run("bench", "tune", "--seconds", "5", "--table", str(table), "--json")[1])["format"] == 1


def test_installed_command_runs():
    command = Path(sys.executable).with_name("hf-multilora")
    done = subprocess.run([command, "inspect", str(ADAPTERS / "json"), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rank"] == 4


@pytest.mark.demo_model
def test_check_of_the_demo(run, demo_model):
    code, out, _ = run("check", str(demo_model), str(ADAPTERS / "sentiment"), "--max-lora-rank", "8")
    assert code == 0 and "q_proj 30 x r4, v_proj 30 x r4" in out


@pytest.mark.demo_model
def test_demo_as_json_keeps_stdout_clean(run, demo_model):
    code, out, _ = run("demo", "--json", "--prompt", "What is the capital of Germany?", "--max-new-tokens", "4")
    found = json.loads(out)
    assert code == 0 and found["columns"] == ["base", "sentiment", "pirate", "json"]
    assert len(found["answers"]) == 1 and found["status"]["resident"]["misses"] == 3


@pytest.mark.demo_model
def test_demo_shows_tables(run, demo_model):
    code, out, _ = run("demo", "--prompt", "Stop! The boy found the old map.", "--max-new-tokens", "4")
    assert code == 0
    for text in ("4 rows, one batch", "one mixed batch", "one adapter after another", "4 slots in use"):
        assert text in out
