"""`generate` after an interruption: what is done is kept, and the output is that of a run that went through."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from bulk_bed import SMALL, answer, read_lines, write_adapter, write_lines
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from hf_multilora.bulk.lines import Line
from hf_multilora.bulk.partial import Partial
from hf_multilora.errors import ConfigError

VERSIONS = {None: None, "a": 1, "b": 2, "c": 3}
ASKED = [{"id": i, "prompt": f"Say {i}", "adapter": [None, "a", "b", "c"][i % 4]} for i in range(12)]


def wanted(versions=VERSIONS, new: int = 24):
    return [{**line, **answer(line["prompt"], versions[line["adapter"]], new)} for line in ASKED]


@pytest.fixture
def source(tmp_path) -> Path:
    return write_lines(tmp_path / "in.jsonl", ASKED)


@pytest.fixture
def partial(tmp_path) -> Path:
    return tmp_path / "out.jsonl.partial"


@contextmanager
def ctrl_c(monkeypatch, after: int):
    """Presses it once so many answers are there, and sees that generation ends then and not with its requests."""
    add, step = Partial.add, ContinuousBatchingManager._generation_step
    steps, late = 0, 0

    def then(self, *args):
        nonlocal late
        add(self, *args)
        if self.count == after:
            late = steps
            signal.raise_signal(signal.SIGINT)

    def counted(self):
        nonlocal steps
        steps += 1
        if late:
            time.sleep(0.1)  # a busy machine takes a while to hear of it
        step(self)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run in the background
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Partial, "add", then)
            patch.setattr(ContinuousBatchingManager, "_generation_step", counted)
            yield
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps - late < 12, "a request takes 24"


@pytest.fixture
def interrupted(generate, source, monkeypatch):
    """What the command says that was interrupted after the fifth answer."""
    others = generation_threads()  # of other folders' tests
    with ctrl_c(monkeypatch, 5):
        said = generate(source)
    assert generation_threads() <= others
    return said


def generation_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "_run_generation_loop" in thread.name}


def answered(partial: Path) -> set[int]:
    """Numbers of the lines whose answers are whole."""
    return {json.loads(raw)["line"] for raw in partial.read_bytes().split(b"\n")[1:-1]}


def test_ctrl_c(interrupted, generate, source, partial, tmp_path):
    code, out, err = interrupted
    assert (code, out) == (130, "") and "5 of 12 lines" in err and "same command" in err
    assert not (tmp_path / "out.jsonl").exists()
    kept = answered(partial)
    assert len(kept) == 5
    code, out, _ = generate(source, "--json")
    found, want = json.loads(out), wanted()
    assert code == 0 and read_lines(tmp_path / "out.jsonl") == want and not partial.exists()
    left = [line["tokens"] for number, line in enumerate(want, 1) if number not in kept]
    assert (found["resumed"], found["new_tokens"]) == (5, sum(left)), "what is there is not made again"
    # Done: neither a second time, nor over what is there.
    before = (tmp_path / "out.jsonl").read_bytes()
    code, _, err = generate(source)
    assert code == 1 and "--overwrite" in err and (tmp_path / "out.jsonl").read_bytes() == before


def test_torn_answers_are_made_again(interrupted, generate, source, partial, tmp_path, monkeypatch):
    whole = partial.read_bytes()
    partial.write_bytes(whole[:-7])  # the fifth answer was being written
    code, out, _ = generate(source, "--json")
    assert code == 0 and json.loads(out)["resumed"] == 4 and read_lines(tmp_path / "out.jsonl") == wanted()
    partial.write_bytes(whole[:-7] + b"\n" + 9 * whole)  # whatever comes after damage is not believed
    with ctrl_c(monkeypatch, 6):
        assert generate(source)[0] == 130
    assert len(answered(partial)) == 6, "nor is it left there"
    code, out, _ = generate(source, "--json", "--overwrite")
    assert code == 0 and json.loads(out)["resumed"] == 6 and read_lines(tmp_path / "out.jsonl") == wanted()


def test_another_run_is_not_mixed_in(interrupted, generate, source, partial, tmp_path, model):
    before = partial.read_bytes()

    def refused(*words: str, **options) -> None:
        code, out, err = generate(source, *options.pop("more", ()), **options)
        said = " ".join(err.split())
        assert (code, out) == (1, "") and partial.read_bytes() == before
        assert all(word in said for word in (*words, "out.jsonl.partial", "--overwrite")), said

    refused("max_new_tokens was 24 and is 8", more=["--max-new-tokens", "8"])
    refused("chat was False and is True", "top_k was 0 and is 3", more=["--chat", "--top-k", "3"])
    refused("dtype was 'auto' and is 'float16'", more=["--dtype", "float16"])
    other = shutil.copytree(model, tmp_path / "other")
    refused(f"model was '{model}' and is '{other}'", base=other)
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    try:
        weights.write_bytes(content[:-4] + b"\0\0\0\0")
        refused("the model's folder has changed")
    finally:
        weights.write_bytes(content)
    write_lines(source, [*ASKED[:-1], {**ASKED[-1], "id": "other"}])
    refused("the input has changed")
    write_lines(source, ASKED)
    # Without an answer in it, it stands in nobody's way, and for nothing.
    out_file = tmp_path / "out.jsonl"
    out_file.write_text("mine")
    partial.write_bytes(before.split(b"\n")[0] + b"\n")
    code, _, err = generate(source, "--max-new-tokens", "8")
    assert code == 1 and f"{out_file} exists" in " ".join(err.split()) and out_file.read_text() == "mine"
    partial.write_bytes(before)
    code, out, _ = generate(source, "--max-new-tokens", "8", "--overwrite", "--json")
    assert code == 0 and json.loads(out)["resumed"] == 0 and read_lines(tmp_path / "out.jsonl") == wanted(new=8)


def test_adapters_that_have_changed_answer_again(interrupted, generate, source, partial, adapters, tmp_path):
    kept = [ASKED[number - 1]["adapter"] for number in answered(partial)]
    others = [name for name in kept if name not in ("a", "b")]
    assert {"a", "b"} & set(kept) and others
    write_adapter(adapters / "a", 2)
    write_adapter(adapters / "b", 1)
    code, out, _ = generate(source, "--json")
    assert code == 0 and json.loads(out)["resumed"] == len(others)
    assert read_lines(tmp_path / "out.jsonl") == wanted({**VERSIONS, "a": 2, "b": 1})


def test_interrupted_before_it_was_sorted(generate, source, partial, tmp_path, monkeypatch):
    def finish(self, lines):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "finish", finish)
        assert generate(source)[0] == 130 and len(answered(partial)) == 12
    monkeypatch.setattr("hf_multilora.bulk.job.load_base", lambda *args: pytest.fail("the model was loaded"))
    code, out, _ = generate(source, "--json")
    assert code == 0 and json.loads(out)["resumed"] == 12 and read_lines(tmp_path / "out.jsonl") == wanted()


def test_generation_that_dies_keeps_what_is_done(generate, source, partial, tmp_path, monkeypatch):
    step, steps = ContinuousBatchingManager._generation_step, 0

    def dying(self):
        nonlocal steps
        steps += 1
        if steps == 60:
            raise RuntimeError("the device is gone")
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(ContinuousBatchingManager, "_generation_step", dying)
        code, _, err = generate(source)
    done = answered(partial)
    assert code == 1 and "the device is gone" in err and 0 < len(done) < 12 and not (tmp_path / "out.jsonl").exists()
    assert not any("error" in json.loads(raw)["answer"] for raw in partial.read_bytes().split(b"\n")[1:-1])
    code, out, _ = generate(source, "--json")
    assert code == 0 and json.loads(out)["resumed"] == len(done) and read_lines(tmp_path / "out.jsonl") == wanted()


def test_an_input_that_changes_meanwhile_is_no_output(generate, source, partial, tmp_path, monkeypatch):
    def finish(self, lines):
        write_lines(source, [{**line, "prompt": line["prompt"] + "!"} for line in ASKED])
        return Partial_finish(self, lines)

    Partial_finish = Partial.finish
    monkeypatch.setattr(Partial, "finish", finish)
    code, _, err = generate(source)
    assert (
        code == 1
        and "has changed" in err
        and sorted(os.listdir(tmp_path))
        == [
            "adapters",
            "in.jsonl",
            "out.jsonl.partial",
        ]
    )


# The server's packages are not there: the command needs none of them.
ALONE = "import sys; sys.modules.update(dict.fromkeys({packages!r})); from hf_multilora.cli import main; main()"


def test_killed(source, partial, adapters, tmp_path, model, generate):
    script = ALONE.format(packages=["fastapi", "uvicorn", "sse_starlette", "prometheus_client"])
    command = [
        sys.executable,
        "-c",
        script,
        "generate",
        str(model),
        str(source),
        "--output",
        str(tmp_path / "out.jsonl"),
    ]
    command += ["--adapters", str(adapters), "--max-new-tokens", "24", *SMALL]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        end = time.monotonic() + 120
        while not partial.exists() or partial.read_bytes().count(b"\n") < 4:
            assert started.poll() is None and time.monotonic() < end, started.communicate()
            time.sleep(0.002)
    finally:
        started.kill()
        started.communicate()
    kept = answered(partial)
    assert 3 <= len(kept) < 12, "killed in the middle"
    code, out, _ = generate(source, "--json")
    found, want = json.loads(out), wanted()
    assert code == 0 and read_lines(tmp_path / "out.jsonl") == want
    left = [line["tokens"] for number, line in enumerate(want, 1) if number not in kept]
    assert (found["resumed"], found["new_tokens"]) == (len(kept), sum(left))


def test_two_runs_at_once(tmp_path):
    """The first to answer goes on, and what it has answered is not lost to one that looked before."""

    def made(overwrite: bool = False) -> Partial:
        return Partial(output, {}, {}, {""}, 3, overwrite)

    def answer_of(line: int) -> dict[str, str]:
        return {"text": f"to {line}"}

    output, lines = tmp_path / "out.jsonl", [Line(number, {"prompt": "?"}) for number in (1, 2, 3)]
    one, other, late = made(), made(), made(True)  # none finds anything
    one.add(1, "", answer_of(1))
    for another in (other, late, made(), made(True)):
        with pytest.raises(ConfigError, match="being written by another run"):
            another.add(1, "", answer_of(1))
    with one:
        one.add(2, "", answer_of(2))
    for another in (other, late):  # it was interrupted
        with pytest.raises(ConfigError, match="has changed since"):
            another.add(1, "", answer_of(1))
    again = made()
    assert again.kept == 2
    again.add(3, "", answer_of(3))
    assert again.finish(lines) == []
    assert [line["text"] for line in read_lines(output)] == ["to 1", "to 2", "to 3"]
    output.unlink()
    torn = made()
    for line in (1, 2, 3):
        torn.add(line, "", answer_of(line))
    content = torn.path.read_bytes()
    torn.path.write_bytes(content.replace(b'"line": 2', b'"line": 3'))
    with pytest.raises(ConfigError, match="has changed while"):
        torn.finish(lines)
    assert not output.exists()
