"""`hf-multilora generate`: every answer is generate()'s for that prompt and that adapter alone."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
from itertools import count
from pathlib import Path

import pytest
import torch
from bulk_bed import answer, build, chat_prompt, piped, read_lines, tokenizer, write_adapter, write_lines
from rich.console import Console
from safetensors.torch import save_file

from hf_multilora import enable_multilora, terminal
from hf_multilora.bulk.adapters import BASE
from hf_multilora.bulk.answers import Sampling, answering
from hf_multilora.bulk.lines import Line
from hf_multilora.demo import ADAPTERS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"


def test_mixed_adapters_answer_as_each_does_alone(generate, tmp_path, monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(terminal, "notes", screen)
    elsewhere = write_adapter(tmp_path / "elsewhere" / "d", 4)
    names = {None: None, "a": 1, "b": 2, "c": 3, str(elsewhere): 4}
    prompts = ("Tell me", "Say it", "Two", "Three")
    asked = [
        {"id": i, "prompt": p, "adapter": name} for i, (p, name) in enumerate((p, n) for p in prompts for n in names)
    ]
    asked[0] = {"prompt": prompts[0]}  # no adapter named: the base
    asked[7]["max_new_tokens"] = 5
    asked[8] |= {"tags": ["ü", {"deep": None}], "text_id": 1.5}
    want = [
        {**line, **answer(line["prompt"], names[line.get("adapter")], line.get("max_new_tokens", 24))}
        for line in asked
    ]
    for prompt in prompts:
        assert len({line["text"] for line in want if line["prompt"] == prompt}) == len(names), "told apart"
    assert {line["finish_reason"] for line in want} == {"stop", "length"}
    # More adapters than slots, and more than host memory keeps.
    code, out, _ = generate(write_lines(tmp_path / "in.jsonl", asked), "--max-loras", "2", "--max-cpu-loras", "2")
    assert code == 0 and read_lines(tmp_path / "out.jsonl") == want
    assert re.search(r"100%.* 20/20, [\d,]+ tokens/s, 4 adapters", screen.file.getvalue()), "the bar"
    tokens = sum(line["tokens"] for line in want)
    assert out.startswith(f"20 lines: {tmp_path / 'out.jsonl'}\n") and f"{tokens} new" in out
    assert not (tmp_path / "out.jsonl.partial").exists() and len(os.listdir(tmp_path)) == 4


def test_chats(generate, tmp_path):
    asked = [
        {"messages": [{"role": "user", "content": "Who?"}], "adapter": "a"},
        {"messages": [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]},
        {"prompt": "Who?"},
    ]
    source = write_lines(tmp_path / "in.jsonl", asked)
    assert generate(source)[0] == 0
    whole = "<|user|>user: A<|user|>user: B<|bot|>"
    texts = [answer(chat_prompt("Who?"), 1, 24), answer(whole, None, 24), answer("Who?", None, 24)]
    assert read_lines(tmp_path / "out.jsonl") == [{**a, **b} for a, b in zip(asked, texts, strict=True)]
    assert generate(source, "--chat", "--overwrite")[0] == 0
    texts[2] = answer(chat_prompt("Who?"), None, 24)
    assert read_lines(tmp_path / "out.jsonl") == [{**a, **b} for a, b in zip(asked, texts, strict=True)]


def test_what_the_model_asks_for_and_does_not_get_is_told(generate, model, tmp_path):
    """Its generation_config has a penalty, which generate() would follow."""
    other = shutil.copytree(model, tmp_path / "model")
    settings = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps({**settings, "repetition_penalty": 1.3}))
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "Who?", "adapter": "a"}])
    logger = logging.getLogger("hf_multilora.base_model")
    seen = []
    logger.addFilter(lambda record: seen.append(record.getMessage()) or True)
    try:
        assert generate(source, base=other)[0] == 0
        assert len(seen) == 1 and "repetition_penalty=1.3" in seen[0] and str(other) in seen[0]
        assert generate(source, "--overwrite")[0] == 0 and len(seen) == 1, "nothing to tell of a plain one"
    finally:
        logger.filters.clear()
    assert read_lines(tmp_path / "out.jsonl")[0]["text"] == answer("Who?", 1, 24)["text"]


def test_a_line_that_fails_fails_alone(generate, adapters, tmp_path):
    save_file(
        {"base_model.model.nothing.lora_A.weight": torch.ones(2, 2)}, adapters / "b" / "adapter_model.safetensors"
    )
    asked = [
        {"prompt": "Who?", "adapter": "a"},
        {"prompt": "Who?", "adapter": "b", "id": 7},
        {"prompt": "x" * 240},
        {"prompt": "x" * 250, "max_new_tokens": 6},
        {"messages": [{"role": role, "content": "Be kind."} for role in ("user", "system")]},
        {"prompt": "Who?"},
    ]
    source = write_lines(tmp_path / "in.jsonl", asked)
    code, out, _ = generate(source, "--json")
    found, got = json.loads(out), read_lines(tmp_path / "out.jsonl")
    assert code == 1 and (found["requests"], found["failed"]) == (6, 3)
    assert found["new_tokens"] == sum(line.get("tokens", 0) for line in got) > 0
    assert found["tokens_per_s"] == pytest.approx(found["new_tokens"] / found["seconds"], rel=0.01)
    assert set(found) == {"requests", "resumed", "failed", "new_tokens", "seconds", "tokens_per_s", "output"}
    assert [set(line) - set(asked[i]) == {"error"} for i, line in enumerate(got)] == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
    for number, words in (
        (1, ("nothing",)),
        (2, ("240 tokens", "256", "max_new_tokens")),
        (4, ("system comes first",)),
    ):
        assert all(word in got[number]["error"] for word in words), got[number]
    assert got[1]["id"] == 7 and got[0]["text"] == answer("Who?", 1, 24)["text"]
    assert got[3]["text"] == answer("x" * 250, None, 6)["text"], "just fits"

    # Put right, the same command answers what had failed, and nothing else.
    write_adapter(adapters / "b", 2)
    code, out, _ = generate(source)
    again = read_lines(tmp_path / "out.jsonl")
    assert code == 1 and "resumed   3 lines" in out and "2 lines: 3, 5." in out
    assert again[1] == {**asked[1], **answer("Who?", 2, 24)} and again[:1] + again[2:] == got[:1] + got[2:]


def test_sampling(generate, tmp_path):
    asked = [{"prompt": prompt} for prompt in ("Who?", "One", "The map")]
    source = write_lines(tmp_path / "in.jsonl", asked)
    greedy = [answer(line["prompt"], None, 24)["text"] for line in asked]

    def sampled(*options: str) -> list[str]:
        assert generate(source, "--overwrite", *options)[0] == 0
        return [line["text"] for line in read_lines(tmp_path / "out.jsonl")]

    assert sampled("--temperature", "9") != greedy
    # What leaves one token to choose from is greedy: each option is heard.
    assert sampled("--temperature", "9", "--top-k", "1") == greedy
    assert sampled("--temperature", "9", "--top-p", "0") == greedy
    assert sampled("--temperature", "0.0001") == greedy


def test_stdin_that_can_be_read_once(generate, tmp_path, monkeypatch):
    """And what editors leave: a byte order mark, empty lines, no end of the last one."""
    with piped(b'\xef\xbb\xbf{"prompt": "Who?", "adapter": "a"}\r\n\r\n{"prompt": "One"}') as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert generate("-")[0] == 0
    want = [{"prompt": "Who?", "adapter": "a", **answer("Who?", 1, 24)}, {"prompt": "One", **answer("One", None, 24)}]
    assert read_lines(tmp_path / "out.jsonl") == want


def test_lines_are_read_as_others_finish():
    model = enable_multilora(build(), max_loras=2, max_lora_rank=8)
    sizes = {"max_requests_per_batch": 2, "num_blocks": 32, "page_size": 16, "max_batch_tokens": 64}
    total, read, done = 20, 0, []

    def lines():
        nonlocal read
        for number in count(1):
            if number > total:
                return
            read = number
            assert read - len(done) <= 4, "two batches are under way at most"
            yield Line(number, {"prompt": f"Say {number}", "max_new_tokens": number % 3 + 1})

    with answering(model, tokenizer(), Sampling(), sizes) as thread:
        for line, made in thread.answers(lines(), lambda name: BASE):
            assert made == answer(line.fields["prompt"], None, line.fields["max_new_tokens"])
            done.append(line.number)
    assert sorted(done) == list(range(1, total + 1)) and read == total


@pytest.mark.demo_model
def test_the_example_with_the_demo_model(generate, demo_model, tmp_path):
    sizes = ("--dtype", "float32", "--device", "cpu", "--max-lora-rank", "8", "--max-requests", "4")
    code, _, err = generate(EXAMPLE, "--chat", "--adapters", str(ADAPTERS), *sizes, base=demo_model)
    got = read_lines(tmp_path / "out.jsonl")
    assert code == 0, err
    assert [line["text"].strip() for line in got[:2]] == ["NEGATIVE", "Me brother has a house an' a boat. Arrr!"]
    assert got[1]["id"] == "p-2" and json.loads(got[2]["text"])["answer"] and "Paris" in got[3]["text"]
    assert [line["finish_reason"] for line in got[:3]] == ["stop"] * 3 and got[3]["tokens"] <= 12
