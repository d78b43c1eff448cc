"""Keys, sizes and shares: what is refused before anything is done, and what metrics say of it all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import httpx
import openai
import pytest
from server_bed import BASE, answer, assert_error, until, write

from hf_multilora import ConfigError
from hf_multilora.server import Settings

TEXT = "/v1/completions"
PROMPT = {"model": "a", "prompt": "Who?", "max_tokens": 12, "temperature": 0}


def test_refusals_in_front_of_the_app_are_counted(serve, folder):
    server = serve(adapters=folder, api_keys=["sesame"], max_body_bytes=1000)
    key = {"Authorization": "Bearer sesame"}
    assert server.post("/v1/completions", {"model": "a", "prompt": "x"}).status_code == 401
    long = {"model": "a", "prompt": "x" * 2000}
    assert server.post("/v1/completions", long, headers=key).status_code == 413
    text = server.get("/metrics").text
    for status in (401, 413):
        assert f'hf_multilora_refused_total{{status="{status}"}} 1.0' in text


def test_keys(serve, folder):
    server = serve(adapters=folder, api_keys=["sesame", "open-up"], allow_runtime_updates=True)
    for key in ("sesame", "open-up"):
        made = server.client(api_key=key).completions.create(**PROMPT)
        assert made.choices[0].text == answer("Who?", 1)
    for key in ("Sesame", "sesam", "sesamee", "x"):
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key=key).models.list()
    for header in ({}, {"Authorization": "sesame"}, {"Authorization": "Basic sesame"}, {"Authorization": "Bearer"}):
        refused = server.post(TEXT, PROMPT, headers=header)
        assert_error(refused, 401, "invalid_api_key", "Bearer")
        assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/v1/status", "/v1/nothing", "/openapi.json", "//v1/models", "/V1/models"):
        assert server.get(path).status_code == 401
    assert_error(server.post("/v1/unload_lora_adapter", {"lora_name": "a"}), 401)
    for path in ("/health", "/ready", "/metrics"):
        assert server.get(path).status_code == 200
    assert "sesame" not in repr(server.app.state.answers.settings)


def test_bodies_beyond_the_limit(serve, folder):
    server = serve(adapters=folder, max_body_bytes=1000)
    assert_error(server.post(TEXT, {**PROMPT, "prompt": "x" * 2000}), 413, "too_large", "1000 bytes")

    def pieces():
        yield b'{"model": "a", "prompt": "'
        for _ in range(100):
            yield b"x" * 100
        yield b'"}'

    sent = httpx.post(
        f"{server.root}{TEXT}", content=pieces(), headers={"Content-Type": "application/json"}, timeout=30
    )
    assert_error(sent, 413, None, "1000 bytes")
    assert server.ask("a", "Who?") == answer("Who?", 1)


def test_adapters_of_one_client(serve, folder):
    server = serve(adapters=folder, api_keys=["one", "two"], max_adapters_per_client=2, client_window_s=1.0)
    first, second = server.client(api_key="one"), server.client(api_key="two")
    for name in ("a", "b", "a", BASE):
        first.completions.create(**{**PROMPT, "model": name})
    with pytest.raises(openai.RateLimitError, match="More than 2 adapters") as caught:
        first.completions.create(**{**PROMPT, "model": "c"})
    assert caught.value.code == "too_many_adapters" and caught.value.response.headers["retry-after"]
    second.completions.create(**{**PROMPT, "model": "c"})

    def again() -> bool:
        try:
            return bool(first.completions.create(**{**PROMPT, "model": "c"}))
        except openai.RateLimitError:
            return False

    until(again)


def test_settings_are_checked(tmp_path):
    for wrong in (
        {"max_queue": 0},
        {"request_timeout_s": float("inf")},
        {"load_timeout_s": float("nan")},
        {"api_keys": "secret"},
        {"api_keys": ["has space"]},
        {"allow_on_demand": [""]},
        {"adapters": tmp_path / "nowhere"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong)).replace("api_keys", "API key|api_keys")):
            Settings(**wrong)
    assert dataclasses.replace(Settings(), adapters=Path(tmp_path)).adapters == tmp_path


def test_metrics(serve, tmp_path):
    for number in range(1, 6):
        write(tmp_path / f"n{number}", number)
    server = serve(adapters=tmp_path, max_metric_adapters=2)
    for number in range(1, 6):
        server.ask(f"n{number}", "Who?", 4, extra_body={"ignore_eos": True})
    server.ask(BASE, "Who?", 4, extra_body={"ignore_eos": True})
    server.client().completions.create(model="n1", prompt="x", max_tokens=3, n=2)
    server.post(TEXT, {**PROMPT, "model": "nobody"})
    lines = {}
    for line in server.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            lines[name.removeprefix("hf_multilora_")] = float(value)
    assert lines['requests_total{adapter="n1",outcome="ok"}'] == 2
    assert lines['requests_total{adapter="other",outcome="ok"}'] == 3
    assert lines[f'requests_total{{adapter="{BASE}",outcome="ok"}}'] == 1
    assert lines['new_tokens_total{adapter="n2"}'] == 4
    assert lines['prompt_tokens_total{adapter="n2"}'] == 4
    assert lines['time_to_first_token_seconds_count{adapter="other"}'] == 3
    assert lines['inter_token_seconds_count{adapter="n2"}'] == 1
    assert 0 < lines['time_to_first_token_seconds_sum{adapter="n2"}'] < 30
    assert lines['refused_total{status="404"}'] == 1
    assert lines["ready"] == 1 and lines["slots"] == 3 and lines["slots_used"] == 3
    assert lines["adapters_registered"] == 5
    assert lines["slots_evictions_total"] >= 2 and lines["slots_misses_total"] >= 5
    assert lines["slots_copied_bytes_total"] > 0
    assert lines["requests_in_work"] == lines["requests_running"] == lines["requests_waiting"] == 0
    assert not any("nobody" in name for name in lines)


def test_status(server):
    status = server.get("/v1/status").json()
    assert status["max_loras"] == 3 and status["base"] == BASE
    assert {adapter["name"] for adapter in status["adapters"]} >= {"a", "b", "c"}
    assert status["queue"]["in_work"] == 0 and status["queue"]["max_queue"] == 1024
