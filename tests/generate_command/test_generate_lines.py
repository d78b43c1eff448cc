"""What `generate` refuses before it loads or writes anything, and how it says so."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from bulk_bed import piped, write_lines

from hf_multilora.bulk import job

GOOD = {"prompt": "Who?", "adapter": "a"}


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    def load_base(*args):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(job, "load_base", load_base)


def refused(generate, tmp_path, source, *more, **options) -> str:
    """What the command says to this input; nothing is written."""
    before = sorted(os.listdir(tmp_path))
    code, out, err = generate(source, *more, **options)
    assert (code, out) == (1, "") and sorted(os.listdir(tmp_path)) == before
    return " ".join(err.split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{'prompt': 1}", ["no JSON", "column 2"]),
        ('{"prompt": "a", "score": NaN}', ["NaN"]),
        ("[" * 100_000, ["nested"]),
        (["prompt"], ["object", "a list"]),
        ({"Prompt": "a"}, ['"prompt" or "messages"', "neither", "'Prompt'"]),
        ({"prompt": "a", "messages": []}, ["both"]),
        ({"prompt": 5}, ['"prompt"', "a number"]),
        ({"prompt": ""}, ["empty"]),
        ({"messages": []}, ['"messages"', "list"]),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}, ['"messages", 1', '"content"']),
        ({**GOOD, "adapter": ["a"]}, ['"adapter"', "a list"]),
        ({**GOOD, "adapter": ""}, ['"adapter"', "null"]),
        ({**GOOD, "adapter": "aa"}, ["'aa'", "Closest: 'a'"]),
        ({**GOOD, "adapter": "not/a/hub/id"}, ["not/a/hub/id"]),
        ({**GOOD, "adapter": ".."}, ["adapter_config.json"]),
        ({"prompt": "a", "adaptor": "a"}, ['"adaptor"', '"adapter"']),
        ({**GOOD, "max_new_tokens": 0}, ['"max_new_tokens"', "at least 1"]),
        ({**GOOD, "max_new_tokens": True}, ['"max_new_tokens"']),
        ({**GOOD, "max_new_tokens": None}, ['"max_new_tokens"']),
        ({**GOOD, "text": "", "error": 1}, ['"text", "error"', "Rename"]),
        ('{"prompt": "a", "id": "\\ud800"}', ["half of a character"]),
        ('{"prompt": "a", "adapter": "a", "adapter": null}', ['"adapter" comes twice']),
        ('{"prompt": "a", "score": 1e999}', ["number", "too large"]),
        (f'{{"prompt": "a", "id": {"9" * 5000}}}', ["digits"]),
    ],
)
def test_wrong_line(generate, tmp_path, line, words):
    source = write_lines(tmp_path / "in.jsonl", [GOOD, "", line])
    said = refused(generate, tmp_path, source)
    assert f"{source}:3: " in said and all(word in said for word in words), said


def test_all_wrong_lines_are_named_up_to_ten(generate, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [GOOD, {"prompt": 1}, GOOD, {"prompt": 2}])
    said = refused(generate, tmp_path, source)
    assert f"{source}:2: " in said and f"{source}:4: " in said and f"{source}:1: " not in said
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": i} for i in range(50)])
    said = refused(generate, tmp_path, source)
    assert said.count(f"{source}:") == 10 and "others" in said


def test_wrong_bytes(generate, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "\xff"}\n')
    assert f"{source}:1: no UTF-8 from byte 13 on" in refused(generate, tmp_path, source)
    source.write_bytes(b"\n  \n")
    assert "holds no line" in refused(generate, tmp_path, source)


def test_wrong_places(generate, adapters, tmp_path, model):
    source, out = write_lines(tmp_path / "in.jsonl", [GOOD]), tmp_path / "out.jsonl"
    assert "nowhere" in refused(generate, tmp_path, tmp_path / "nowhere.jsonl")
    assert "folder" in refused(generate, tmp_path, source, "--output", str(tmp_path / "none" / "out"))
    assert "no file" in refused(generate, tmp_path, source, "--output", str(adapters))
    assert "is the input" in refused(generate, tmp_path, source, "--output", str(source), "--overwrite")
    assert "no such folder" in refused(generate, tmp_path, source, "--adapters", str(tmp_path / "none"))
    assert "--dtype" in refused(generate, tmp_path, source, "--dtype", "int3")
    assert "max_cpu_loras" in refused(generate, tmp_path, source, "--max-cpu-loras", "2")
    assert "no-model" in refused(generate, tmp_path, source, base=tmp_path / "no-model")
    out.write_text("mine")
    assert "--overwrite" in refused(generate, tmp_path, source) and out.read_text() == "mine"
    out.unlink()
    partial = tmp_path / "out.jsonl.partial"
    partial.write_text('{"mine": 1}\n')
    assert "not written by this command" in refused(generate, tmp_path, source)
    assert partial.read_text() == '{"mine": 1}\n'
    assert generate(source, "--seed", "1")[0] == 2 and generate(source, "--temperature", "-1")[0] == 2


def test_errors_as_json(generate, tmp_path):
    code, out, err = generate(write_lines(tmp_path / "in.jsonl", [{"prompt": 1}]), "--json")
    assert (
        (code, err) == (1, "") and json.loads(out)["error"] == "ConfigError" and ":1: " in json.loads(out)["message"]
    )


def test_a_hub_id_must_be_in_the_cache_where_no_hub_is_asked(generate, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{**GOOD, "adapter": "org/nowhere"}])
    said = refused(generate, tmp_path, source, "--offline")
    assert f"{source}:1: org/nowhere" in said and "cache" in said


def test_no_chat_template(generate, tmp_path, model):
    other = shutil.copytree(model, tmp_path / "no-template")
    (other / "chat_template.jinja").unlink()
    chat = write_lines(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "Who?"}]}])
    assert "no chat template" in refused(generate, tmp_path, chat, base=other)
    plain = write_lines(tmp_path / "plain.jsonl", [GOOD])
    assert "no chat template" in refused(generate, tmp_path, plain, "--chat", base=other)


def test_lines_of_stdin(generate, tmp_path, monkeypatch):
    with piped(b'{"prompt": 1}\n') as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert "<stdin>:1: " in refused(generate, tmp_path, "-")
