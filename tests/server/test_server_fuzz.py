"""Whatever its OpenAPI description allows, and whatever it does not: the server answers as it says it does."""

from __future__ import annotations

import time

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from server_bed import Running, answer, assert_error, engine, until, write

from hf_multilora.server import Settings

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.generation.modes import GenerationMode  # noqa: E402

BUDGET_S = 25.0


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzzed")
    for number, name in enumerate("abc", 1):
        write(root / name, number)
    running = Running(engine(), Settings(adapters=root, allow_runtime_updates=True, request_timeout_s=20))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def api(fuzzed):
    return schemathesis.openapi.from_url(f"{fuzzed.root}/openapi.json")


def _small(case) -> None:
    """Name what is there, and ask for little: else every case is a 404 or a long answer."""
    body = case.body
    if isinstance(body, dict) and "model" in body and len(str(body)) % 2:
        body["model"] = "abc"[len(str(body)) % 3]
        if body.get("max_tokens") is not None or "prompt" in body:
            body["max_tokens"] = 3


def _try(operation, mode, statuses: set[int], seconds: float) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    end = time.monotonic() + seconds

    def check(case):
        if time.monotonic() > end:
            return
        _small(case)
        response = case.call(timeout=30)
        statuses.add(response.status_code)
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
        streamed = "text/event-stream" in str(response.headers.get("content-type"))
        case.validate_response(response, checks=checks[:1] if streamed else checks)

    run = settings(
        max_examples=60, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run(given(case=operation.as_strategy(generation_mode=mode))(check))()


def test_every_operation_answers_as_described(fuzzed, api):
    operations = [found.ok() for found in api.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/completions", "/v1/load_lora_adapter", "/metrics"}
    statuses: dict[str, set[int]] = {}
    turns = [(o, m) for o in operations for m in GenerationMode if o.body or m is GenerationMode.POSITIVE]
    for operation, mode in turns:
        _try(operation, mode, statuses.setdefault(operation.path, set()), BUDGET_S / len(turns))
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert statuses[path] >= {200, 400}, statuses
    assert statuses["/v1/load_lora_adapter"] >= {400, 403}, statuses
    until(fuzzed.idle)
    assert fuzzed.ask("a", "Who?") == answer("Who?", 1)


def test_headers_of_every_kind(fuzzed):
    body = b'{"model": "a", "prompt": "Who?", "max_tokens": 1}'
    for headers in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Encoding": "gzip", "Content-Type": "application/json"},
        {"Accept": "text/html", "Content-Type": "application/json"},
        {"Authorization": "Bearer " + "x" * 4000, "Content-Type": "application/json"},
    ):
        made = httpx.post(f"{fuzzed.root}/v1/completions", content=body, headers=headers, timeout=30)
        if made.status_code != 200:
            assert_error(made, 400)
