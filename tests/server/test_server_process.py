"""`hf-multilora serve` as its users start and stop it: a process of its own, what it prints, and its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import openai
import pytest
import torch
from server_bed import WAIT_S, answer, build, tokenizer

from hf_multilora.cli import main
from hf_multilora.demo import ADAPTER_NAMES, ADAPTERS

START_S = 180


@contextmanager
def process(*arguments: str, **environment: str):
    """A running server; yields (process, what it said when it was ready)."""
    command = [sys.executable, "-m", "hf_multilora.cli", "serve", *arguments, "--json", "--port", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    errors: list[str] = []
    threading.Thread(target=lambda: errors.extend(started.stderr), daemon=True).start()
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(started.stdout.readline()), daemon=True)
    reader.start()
    try:
        reader.join(START_S)
        assert lines and lines[0], "".join(errors)[-3000:]
        yield started, json.loads(lines[0])
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
        try:
            started.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            started.kill()
            raise


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The tiny model and its tokenizer as files."""
    folder = tmp_path_factory.mktemp("saved") / "tiny-llama"
    build().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(capsys):
    """Run the command line in this process; returns (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["serve", *arguments])
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call


def test_a_signal_lets_a_stream_end(saved, folder):
    small = ["--num-blocks", "64", "--block-tokens", "16", "--max-batch-tokens", "128"]
    more = ["--adapters", str(folder), "--allow-runtime-updates", *small]
    with process(str(saved), *more, HF_MULTILORA_API_KEY="key") as (started, said):
        assert said["base"] == "tiny-llama" and set(said["adapters"]) >= {"a", "b", "c"}
        client = openai.OpenAI(base_url=said["url"], api_key="key", max_retries=0, timeout=WAIT_S)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        made = client.completions.create(model="a", prompt="Who?", max_tokens=12, temperature=0)
        assert made.choices[0].text == answer("Who?", 1)
        stream = client.completions.create(
            model="b", prompt="Tell", max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [next(stream)]
        started.send_signal(signal.SIGTERM)
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert started.wait(WAIT_S) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(said["url"])


def test_mistakes_are_told_before_anything_is_loaded(run, saved, tmp_path):
    for arguments, words in (
        ((str(saved), "--adapters", str(tmp_path / "nowhere")), ("ConfigError", "nowhere")),
        ((str(saved), "--dtype", "int3"), ("--dtype", "bfloat16")),
        ((str(saved), "--log-level", "loud"), ("--log-level", "warning")),
        ((str(saved), "--resolver", "nobody"), ("ConfigError", "nobody")),
        ((str(tmp_path / "no-model"), "--port", "0", "--offline"), ("ModelError", "no-model")),
    ):
        code, out, err = run(*arguments)
        assert code == 1 and out == "" and all(word in err for word in words), err
    code, _, err = run(str(saved), "--port", "99999")
    assert code == 2 and "65535" in err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, out, err = run(str(saved), "--port", port, "--json")
        assert code == 1 and port in json.loads(out)["message"]


@pytest.mark.demo_model
def test_demo_model_and_its_adapters(demo_model):
    """Base and three adapters at once, chat and stream; equal to generate() in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_multilora import enable_multilora

    text, new = "Best pizza in town, friendly staff too.", 6
    slots = ["--max-loras", "4", "--max-lora-rank", "8"]
    small = ["--dtype", "float32", "--num-blocks", "64", "--block-tokens", "32", "--max-batch-tokens", "256"]
    with process(str(demo_model), "--adapters", str(ADAPTERS), "--device", "cpu", *small, *slots) as (_, said):
        assert set(said["adapters"]) == set(ADAPTER_NAMES)
        names = [said["base"], *ADAPTER_NAMES]
        message = {"messages": [{"role": "user", "content": text}], "max_tokens": new, "temperature": 0}

        async def everybody():
            client = openai.AsyncOpenAI(base_url=said["url"], api_key="none", max_retries=0, timeout=WAIT_S)

            async def streamed(name):
                stream = await client.chat.completions.create(model=name, **message, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            whole = [client.chat.completions.create(model=name, **message) for name in names]
            return await asyncio.gather(*whole), await asyncio.gather(*map(streamed, names[:2]))

        whole, streamed = asyncio.run(everybody())
    tokens = AutoTokenizer.from_pretrained(demo_model)
    base = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    model = enable_multilora(base, max_loras=4, max_lora_rank=8)
    for name in ADAPTER_NAMES:
        model.multilora.load(ADAPTERS / name, name)
    chat = tokens.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    inputs = tokens(chat, return_tensors="pt", add_special_tokens=False)
    for name, made in zip(names, whole, strict=True):
        adapter = None if name == said["base"] else name
        out = model.generate(**inputs, adapter_ids=adapter, max_new_tokens=new, do_sample=False)
        want = tokens.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert made.choices[0].message.content == want, name
    assert streamed == [made.choices[0].message.content for made in whole[:2]]
