"""What cannot be honoured is a 4xx in OpenAI's shape that says so; afterwards the server answers as before."""

from __future__ import annotations

import json
import socket

import httpx
import openai
import pytest
from server_bed import BASE, LENGTH, VOCAB, answer, assert_error, encode, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": "a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
PROMPT = {"model": "a", "prompt": "Hi", "max_tokens": 4}


@pytest.fixture(autouse=True)
def still_answers(server):
    yield
    assert server.ask("a", "Who?", 3) == answer("Who?", 1, 3)
    assert set(server.engine.multilora.adapters) >= {"a", "b", "c"}
    until(server.idle)


UNSUPPORTED = [
    (CHAT, {"seed": 1}),
    (CHAT, {"logprobs": True}),
    (CHAT, {"top_logprobs": 3}),
    (CHAT, {"logit_bias": {"5": 1}}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    (CHAT, {"tool_choice": "auto"}),
    (CHAT, {"functions": [{"name": "f"}]}),
    (CHAT, {"function_call": "auto"}),
    (CHAT, {"response_format": {"type": "json_object"}}),
    (CHAT, {"presence_penalty": 0.5}),
    (CHAT, {"frequency_penalty": -0.5}),
    (CHAT, {"modalities": ["text", "audio"]}),
    (CHAT, {"audio": {"voice": "x", "format": "wav"}}),
    (CHAT, {"store": True}),
    (CHAT, {"metadata": {"a": "b"}}),
    (CHAT, {"reasoning_effort": "low"}),
    (CHAT, {"service_tier": "priority"}),
    (CHAT, {"prediction": {"type": "content", "content": "x"}}),
    (CHAT, {"web_search_options": {}}),
    (TEXT, {"seed": 0}),
    (TEXT, {"best_of": 2}),
    (TEXT, {"echo": True}),
    (TEXT, {"suffix": "end"}),
    (TEXT, {"logprobs": 0}),
    (TEXT, {"min_p": 0.1}),
    (TEXT, {"repetition_penalty": 1.2}),
]


@pytest.mark.parametrize(
    ("path", "more"), UNSUPPORTED, ids=lambda value: "".join(value) if type(value) is dict else ""
)
def test_what_the_engine_cannot_do_is_said(server, path, more):
    (name,) = more
    error = assert_error(server.post(path, {**(HELLO if path == CHAT else PROMPT), **more}), 400, "unsupported_field")
    assert error["param"] == name and name in error["message"] and error["type"] == "invalid_request_error"


def test_neutral_values_pass(server):
    chat = {"seed": None, "logprobs": False, "logit_bias": {}, "tools": [], "tool_choice": "none", "functions": None}
    chat |= {"response_format": {"type": "text"}, "presence_penalty": 0, "frequency_penalty": 0.0, "store": False}
    chat |= {"modalities": ["text"], "service_tier": "auto", "metadata": None, "n": 1, "user": "me", "stop": []}
    assert server.post(CHAT, {**HELLO, **chat}).status_code == 200
    text = {"best_of": 1, "echo": False, "suffix": None, "logprobs": None, "stop": None, "min_p": 0.0}
    assert server.post(TEXT, {**PROMPT, **text}).status_code == 200


WRONG = [
    {"temperature": -1},
    {"temperature": 3},
    {"temperature": "hot"},
    {"temperature": True},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": 1.5},
    {"max_tokens": 0},
    {"max_tokens": "5"},
    {"max_tokens": 1.5},
    {"max_tokens": 10**30},
    {"n": 0},
    {"n": 100_000},
    {"n": 100},
    {"stop": ["a", "b", "c", "d", "e"]},
    {"stop": ""},
    {"stop": [1]},
    {"stream": "yes"},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"what": 1}},
    {"model": ""},
    {"model": 5},
    {"model": None},
    {"user": 3},
]


@pytest.mark.parametrize("more", WRONG, ids=str)
@pytest.mark.parametrize("path", [CHAT, TEXT], ids=["chat", "text"])
def test_values_out_of_range(server, path, more):
    error = assert_error(server.post(path, {**(HELLO if path == CHAT else PROMPT), **more}), 400)
    name = list(more)[-1]
    assert name in error["message"], error


def test_unknown_fields_are_named_with_the_closest(server):
    error = assert_error(server.post(CHAT, {**HELLO, "temprature": 1}), 400, "unknown_field", "'temperature'")
    assert error["param"] == "temprature"
    inner = {**HELLO, "messages": [{"role": "user", "content": "x", "colour": "red"}]}
    assert_error(server.post(CHAT, inner), 400, "unknown_field", "colour")
    assert_error(
        server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "a", "y": 1}), 400, "unknown_field"
    )


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"role": "tool", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "assistant", "content": "x", "tool_calls": []}],
        [{"role": "user", "content": "x"}, {"role": "system", "content": "late"}],
    ],
    ids=str,
)
def test_messages_that_cannot_be_taken(server, messages):
    assert_error(server.post(CHAT, {**HELLO, "messages": messages}), 400)


PROMPTS = ["", [], [[]], [""], [1, "a"], [-1], [1.5], [True], [VOCAB], [[1], [VOCAB + 7]], [2**40], None, {"a": 1}]


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_prompts_that_cannot_be_taken(server, prompt):
    assert_error(server.post(TEXT, {**PROMPT, "prompt": prompt}), 400)


BODIES = [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"\\udfff": 1}']
BODIES += [b'{"model": "a", "prompt": "x", "temperature": NaN}', b'{"model": "a", "prompt": "\\ud800"}']
BODIES += [
    b'{"model": "a", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"model": "\\ud800", "prompt": "x"}',
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(body[:40]))
def test_bodies_that_are_no_request(server, body):
    made = httpx.post(f"{server.root}{TEXT}", content=body, headers={"Content-Type": "application/json"}, timeout=30)
    assert_error(made, 400)


def test_other_paths_and_methods(server):
    assert_error(server.get("/v1/nothing"), 404)
    assert_error(server.get(CHAT), 405)
    assert_error(server.post("/v1/models", {}), 405)


NAMES = [
    "../a",
    "../../etc/passwd",
    "/etc",
    "a/../b",
    "./a",
    "~",
    "~root",
    ".",
    "..",
    "a/",
    "a\\..\\b",
    "C:\\a",
    "%2e%2e/a",
]
CONTROL = ["a\0", "a\nb", "a\x1b[31m", "\u202ea", "  ", "x" * 513]


@pytest.mark.parametrize("name", NAMES + CONTROL, ids=ascii)
def test_names_that_lead_elsewhere(server, name):
    made = server.post(TEXT, {**PROMPT, "model": name})
    assert_error(made, 400 if name in CONTROL else 404)
    assert set(server.engine.multilora.adapters) == {"a", "b", "c"}


PATHS = [*(n for n in NAMES if n not in ("./a", "a/", "a/../b")), "/", "/tmp", "org/adapter", "a\0"]


@pytest.mark.parametrize("path", PATHS, ids=ascii)
def test_paths_that_lead_elsewhere(server, path):
    made = server.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": path})
    assert_error(made, 400 if path == "a\0" else 403)
    assert set(server.engine.multilora.adapters) == {"a", "b", "c"}


def test_links_to_outside_are_not_followed(server, folder, tmp_path):
    from server_bed import write

    secret = write(tmp_path / "secret", 9)
    (folder / "link").symlink_to(secret)
    inner = write(folder / "files", 9)
    (inner / "adapter_model.safetensors").unlink()
    (inner / "adapter_model.safetensors").symlink_to(secret / "adapter_model.safetensors")
    try:
        assert_error(server.post(TEXT, {**PROMPT, "model": "link"}), 404, "model_not_found")
        assert_error(server.post(TEXT, {**PROMPT, "model": "files"}), 403, "not_allowed")
        for name in ("link", "files"):
            made = server.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": name})
            assert_error(made, 403, "not_allowed")
        assert set(server.engine.multilora.adapters) == {"a", "b", "c"}
    finally:
        (folder / "link").unlink()
        (inner / "adapter_model.safetensors").unlink()
        (inner / "adapter_config.json").unlink()
        inner.rmdir()


def test_an_unknown_model_is_told_with_the_closest(serve, tmp_path):
    from server_bed import write

    write(tmp_path / "sql-v1", 1)
    server = serve(adapters=tmp_path)
    with pytest.raises(openai.NotFoundError, match="sql-v1") as caught:
        server.client().completions.create(model="sql-v2", prompt="x")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_beyond_the_context(server):
    long = "x" * LENGTH
    for path, body in ((TEXT, {**PROMPT, "prompt": long}), (TEXT, {**PROMPT, "max_tokens": LENGTH})):
        assert_error(server.post(path, body), 400, "context_length_exceeded", str(LENGTH))
    chat = {**HELLO, "messages": [{"role": "user", "content": long}]}
    assert_error(server.post(CHAT, chat), 400, "context_length_exceeded")
    assert_error(server.post(TEXT, {**PROMPT, "prompt": "x" * 200_000}), 400, "context_length_exceeded")
    full = server.post(TEXT, {**PROMPT, "prompt": "x" * (LENGTH - 4), "temperature": 0})
    assert full.status_code == 200
    rest = server.post(CHAT, {"model": BASE, "messages": HELLO["messages"], "ignore_eos": True}).json()
    assert rest["usage"]["total_tokens"] == LENGTH and rest["choices"][0]["finish_reason"] == "length"
    assert rest["usage"]["prompt_tokens"] == len(encode("<|user|>user: Hi<|bot|>"))


def test_bytes_that_are_no_http(server):
    host, port = server.root.removeprefix("http://").split(":")
    for raw in (b"\x00\x01\x02\r\n\r\n", b"GET /x HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as line:
            line.sendall(raw)
            if raw.endswith(b"\r\n\r\n"):
                assert b" 40" in line.recv(100)


def test_errors_are_json_in_the_description(server):
    described = server.get("/openapi.json").json()
    assert "422" not in json.dumps(described)
    assert "/v1/chat/completions" in described["paths"]
