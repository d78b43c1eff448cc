"""Ray Serve: three replicas answer as one server does, each adapter where it resides; one of them may be killed."""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("ray")

import httpx  # noqa: E402
from serve_bed import ADAPTERS, REPLICAS, RESIDENT, WAIT_S, body, text, until  # noqa: E402

from hf_multilora.errors import ConfigError  # noqa: E402
from hf_multilora.integrations.ray import serve_app  # noqa: E402
from hf_multilora.server import Settings  # noqa: E402


def events(response: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def streamed(app, model: str, prompt: str, new: int) -> list[dict]:
    with app.http.stream("POST", "/v1/completions", json=body(model, prompt, new, stream=True)) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        return events(response)


def test_answers_as_the_server_does(app):
    for model, number in (("tiny", None), ("a0", 1), ("a3", 4)):
        answer = app.ask(model, "Who?")
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == text("Who?", number)
        assert answer.json()["usage"]["completion_tokens"] == 6
    pieces = streamed(app, "a1", "Who?", 12)
    assert len(pieces) > 2 and "".join(piece["choices"][0]["text"] for piece in pieces) == text("Who?", 2, 12)
    chat = {"model": "a2", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 4, "temperature": 0}
    assert app.http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["role"] == "assistant"
    names = {card["id"] for card in app.http.get("/v1/models").json()["data"]}
    assert names == {"tiny", *(f"a{number}" for number in range(ADAPTERS))}


@pytest.mark.parametrize(
    "path, sent, status, code",
    [
        ("/v1/completions", body("a00", "Who?"), 404, "model_not_found"),
        ("/v1/completions", body("../adapters/a0", "Who?"), 404, "model_not_found"),
        ("/v1/completions", body("a0", "Who?", seed=3), 400, "unsupported_field"),
        ("/v1/completions", body("a0", "x" * 300), 400, "context_length_exceeded"),
        ("/v1/completions", [1], 400, None),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "a0"}, 404, None),
        ("/metrics", {}, 404, None),
    ],
)
def test_errors_are_the_servers(app, path, sent, status, code):
    answer = app.http.post(path, json=sent)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and (code is None or error["code"] == code)


def test_requests_land_where_their_adapter_resides(app):
    names = [f"a{number}" for number in range(RESIDENT * 2)]
    at = defaultdict(Counter)
    for name in names:
        app.ask(name, "Who?")
    hits = []
    with ThreadPoolExecutor(8) as pool:
        for answer, name in pool.map(lambda name: (app.ask(name, f"Say {name}"), name), names * 10):
            assert answer.json()["choices"][0]["text"] == text(f"Say {name}", int(name[1:]) + 1)
            at[name][answer.headers["x-multilora-replica"]] += 1
            hits.append(answer.headers["x-multilora-resident"] == "true")
    assert sum(hits) / len(hits) > 0.8, f"{sum(hits)} of {len(hits)}: {dict(at)}"
    assert len({replica for found in at.values() for replica in found}) == REPLICAS, "all of them work"


def test_what_is_evicted_answers_again(app):
    """Adapters that were unloaded for others, also while requests that use them wait for a slot."""
    asked = [(f"a{number}", f"Say {turn}") for turn in range(4) for number in range(ADAPTERS)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda pair: app.ask(*pair, 12), asked))
    for answer, (name, prompt) in zip(answers, asked, strict=True):
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == text(prompt, int(name[1:]) + 1, 12)


def test_a_handle_without_http(app):
    from ray import serve

    handle = serve.get_deployment_handle("MultiLora", "default").options(multiplexed_model_id="a1")
    made = handle.generate.remote(body("a1", "Who?")).result(timeout_s=WAIT_S)
    assert made["choices"][0]["text"] == text("Who?", 2)
    failed = handle.generate.remote(body("a1", "Who?", seed=3)).result(timeout_s=WAIT_S)
    assert failed["error"]["code"] == "unsupported_field"


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_take_their_requests_with_them(app, stream):
    before = app.cancelled()
    with httpx.Client(base_url=app.root, timeout=0.2) as client, contextlib.suppress(httpx.ReadTimeout):
        # A stream's first event comes in time, a whole answer does not.
        asked = client.build_request("POST", "/v1/completions", json=body("a0", "Who?", 240, stream=stream))
        client.send(asked, stream=stream).close()
    until(lambda: app.cancelled() == before + 1, 20)


def test_a_killed_replica_loses_no_request_silently(app):
    """Those that had no part of an answer get one from another replica; a stream that had begun ends with an error."""
    new = 120
    with ThreadPoolExecutor(16) as pool:
        with app.http.stream("POST", "/v1/completions", json=body("a0", "Who?", new, stream=True)) as stream:
            replica, lines = stream.headers["x-multilora-replica"], stream.iter_lines()
            next(lines)
            asked = [(f"a{number % 8}", f"Say {number}") for number in range(16)]
            waiting = [pool.submit(app.ask, name, prompt, new) for name, prompt in asked]
            app.kill(replica)
            last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
        answers = [future.result(timeout=WAIT_S) for future in waiting]
    assert "lost" in last["error"]["message"] and last["error"]["code"] == "unavailable"
    for answer, (name, prompt) in zip(answers, asked, strict=True):
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == text(prompt, int(name[1:]) + 1, new)
        assert answer.headers["x-multilora-replica"] != replica


def test_what_would_change_one_replica_alone_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="one replica alone"):
        serve_app(str(tmp_path), Settings(allow_runtime_updates=True))
