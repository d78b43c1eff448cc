"""Clients that go away, servers that end, threads that die, and limits of time and number: nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import openai
import pytest
from server_bed import BASE, WAIT_S, answer, assert_error, until, write

TEXT = "/v1/completions"
LONG = {"model": "a", "prompt": "Tell", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def cancelled(server) -> int:
    return sum(traffic.cancelled for traffic in server.traffic().values())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels(server, stream):
    before = cancelled(server)

    async def leave():
        async with httpx.AsyncClient(timeout=WAIT_S) as client:
            sent = client.stream("POST", f"{server.root}{TEXT}", json={**LONG, "n": 3, "stream": stream})
            if stream:
                async with sent as response:
                    async for _ in response.aiter_lines():
                        return
            else:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(sent.__aenter__(), 0.15)

    asyncio.run(leave())
    until(lambda: cancelled(server) == before + 3)
    until(server.idle)
    assert not server.engine._manager.output_router.result_handlers
    until(lambda: server.engine._manager.output_router.output_queue.empty())
    assert server.ask("a", "Who?") == answer("Who?", 1)


def test_a_client_that_goes_away_before_anything_runs(server):
    before = {name: traffic.requests for name, traffic in server.traffic().items()}
    host, port = server.root.removeprefix("http://").split(":")
    import json
    import socket

    body = json.dumps({**LONG, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(10):
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as line:
            line.sendall(head.encode() + body)
    time.sleep(0.3)
    until(server.idle)
    after = server.traffic()["a"]
    assert after.requests <= before["a"] + 10
    assert server.ask("b", "Who?") == answer("Who?", 2)


def test_answers_that_take_too_long(serve, folder):
    server = serve(adapters=folder, request_timeout_s=0.2)
    assert_error(server.post(TEXT, LONG), 504, "timeout", "0.2 s")
    with httpx.stream("POST", f"{server.root}{TEXT}", json={**LONG, "stream": True}, timeout=WAIT_S) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    assert response.status_code == 200 and '"code":"timeout"' in lines[-1]
    until(server.idle)
    assert cancelled(server) == 2
    assert server.ask("a", "Who?", 2) == answer("Who?", 1, 2)


def test_a_full_queue_refuses(serve, folder):
    server = serve(adapters=folder, max_queue=4)
    many = server.post(TEXT, {**LONG, "n": 5})
    assert_error(many, 503, "unavailable", "limit is 4")
    assert many.headers["retry-after"] == "1"
    assert server.post(TEXT, {**LONG, "max_tokens": 2, "n": 4}).status_code == 200


def test_more_answers_than_the_cache_has_room_for(serve, folder):
    small = {"num_blocks": 12, "max_requests_per_batch": 4}  # 192 tokens: fewer than the model could take
    server = serve(adapters=folder, options=small)
    assert_error(server.post(TEXT, {**LONG, "max_tokens": 230}), 400, "context_length_exceeded", "192")

    async def crowd():
        client = server.asynchronous()
        asked = [
            client.completions.create(model=model, prompt=f"Tell {i}", max_tokens=60, temperature=0)
            for i in range(4)
            for model in ("a", "b", BASE)
        ]
        return await asyncio.wait_for(asyncio.gather(*asked), WAIT_S)

    made = asyncio.run(crowd())
    for i in range(4):
        for model, number in (("a", 1), ("b", 2), (BASE, None)):
            assert made.pop(0).choices[0].text == answer(f"Tell {i}", number, 60), (i, model)


def test_the_whole_room_can_be_used_alone(serve, folder):
    server = serve(adapters=folder, options={"num_blocks": 12})
    made = server.post(TEXT, {**LONG, "max_tokens": 192 - len("Tell")})
    assert made.status_code == 200 and made.json()["usage"]["total_tokens"] == 192
    assert server.get("/ready").status_code == 200


def test_a_dead_generation_thread_is_told(serve, folder):
    server = serve(adapters=folder)
    assert server.get("/ready").json() == {"status": "ready"}
    failed: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: failed.append(server.post(TEXT, LONG)))
    waiting.start()
    until(lambda: server.engine.in_work)

    def broken(*args, **kwargs):
        raise RuntimeError("the device is gone")

    server.engine._manager.batch_processor._generation_step = broken
    waiting.join(WAIT_S)
    assert_error(failed[0], 503, "unavailable", "generation thread")
    until(lambda: server.get("/ready").status_code == 503)
    assert_error(server.get("/ready"), 503, "unavailable", "died")
    assert_error(server.post(TEXT, LONG), 503, "unavailable", "died")
    assert server.get("/health").status_code == 200
    assert "hf_multilora_ready 0.0" in server.get("/metrics").text


def test_a_stop_lets_answers_end(serve, folder):
    server = serve(adapters=folder)
    body = {**LONG, "stream": True, "max_tokens": 120}
    got: list[str] = []

    def follow():
        with httpx.stream("POST", f"{server.root}{TEXT}", json=body, timeout=WAIT_S) as response:
            got.extend(response.iter_lines())

    waiting = threading.Thread(target=follow)
    waiting.start()
    until(lambda: len(got) > 4)
    generation = server.engine._manager._generation_thread
    server.stop()
    waiting.join(WAIT_S)
    assert "data: [DONE]" in got
    with pytest.raises(httpx.ConnectError):
        server.get("/health")
    assert not generation.is_alive()


def test_what_has_not_ended_in_time_fails_cleanly(serve, folder):
    server = serve(adapters=folder)
    slow, step = threading.Event(), server.engine._manager.batch_processor._generation_step

    def slowly(*args):
        slow.wait(0.2)
        return step(*args)

    server.engine._manager.batch_processor._generation_step = slowly
    with httpx.stream("POST", f"{server.root}{TEXT}", json={**LONG, "stream": True}, timeout=WAIT_S) as response:
        lines = response.iter_lines()
        next(line for line in lines if line)
        server.loop.call_soon_threadsafe(server.engine.fail_all, "The server is shutting down.")
        last = [line for line in lines if line.startswith("data:")][-1]
    slow.set()
    assert '"type":"server_error"' in last and "shutting down" in last
    until(server.idle)


def test_clients_see_errors_inside_of_a_stream(serve, folder):
    server = serve(adapters=folder, request_timeout_s=0.2)
    with pytest.raises(openai.APIError, match=r"within 0\.2 s"):
        for _ in server.client().completions.create(
            model="a", prompt="Tell", max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
        ):
            pass


def test_an_unload_waits_for_its_requests(serve, folder):
    server = serve(adapters=folder, allow_runtime_updates=True)
    got: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: got.append(server.post(TEXT, {**LONG, "model": "b"})))
    asking.start()
    until(lambda: server.traffic().get("b") and server.traffic()["b"].running)
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "b"}).status_code == 200
    asking.join(WAIT_S)
    assert got[0].json()["choices"][0]["finish_reason"] == "length"
    assert "b" not in server.engine.multilora.adapters


def test_engines_refuse_what_they_cannot_serve():
    from server_bed import build, tokenizer

    from hf_multilora import ConfigError, ModelError, enable_multilora
    from hf_multilora.server import Engine

    with pytest.raises(ModelError, match="not enabled"):
        Engine(build(), tokenizer())
    with pytest.raises(ConfigError, match="on_demand=False"):
        Engine(enable_multilora(build()), tokenizer())
    with pytest.raises(ConfigError, match="num_blox"):
        Engine(enable_multilora(build(), on_demand=False), tokenizer(), num_blox=3)
    shared = enable_multilora(build(), on_demand=False)
    shared.multilora.calls.agreement = object()  # as a tensor-parallel model has one
    with pytest.raises(ModelError, match="one process"):
        Engine(shared, tokenizer())


def test_poison_reaches_nobody_else(serve, folder, tmp_path):
    from safetensors.torch import load_file, save_file

    bad = write(tmp_path / "bad", 5) / "adapter_model.safetensors"
    tensors = load_file(bad)
    next(tensor for name, tensor in tensors.items() if "lora_B" in name)[0, 0] = float("nan")
    save_file(tensors, bad, metadata={"format": "pt"})
    write(tmp_path / "good", 1)
    server = serve(adapters=tmp_path)

    async def both():
        client = server.asynchronous()
        asked = [
            client.completions.create(model=m, prompt="Who?", max_tokens=12, temperature=0) for m in ("bad", "good")
        ]
        return await asyncio.gather(*asked, return_exceptions=True)

    poisoned, good = asyncio.run(both())
    assert isinstance(poisoned, openai.InternalServerError) and poisoned.code == "adapter_error"
    assert good.choices[0].text == answer("Who?", 1)
