"""Adapters that are loaded, unloaded, reloaded and pinned while others answer; and who may do so."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_bed import BASE, WAIT_S, answer, assert_error, until, write


def load(server, name, path, **more):
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})


@pytest.fixture
def added(folder):
    """Writes adapters into the common folder, and takes them out again."""
    made = []

    def add(name, number):
        made.append(write(folder / name, number))

    yield add
    for path in made:
        shutil.rmtree(path)


def test_load_and_unload(server, folder, added):
    added("late", 7)
    made = load(server, "mine", "late")
    assert made.status_code == 200 and made.json()["id"] == "mine" and "added" in made.json()["message"]
    assert server.ask("mine", "Who?") == answer("Who?", 7)
    assert_error(load(server, "mine", "late"), 400, "adapter_exists")
    assert load(server, "mine", folder / "a", load_inplace=True).status_code == 200
    assert server.ask("mine", "Who?") == answer("Who?", 1)
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "mine"}).status_code == 200
    gone = server.post("/v1/completions", {"model": "mine", "prompt": "x"})
    assert_error(gone, 404, "model_not_found", "'mine'", "/v1/models")
    assert_error(server.post("/v1/unload_lora_adapter", {"lora_name": "mine"}), 404, "model_not_found")


def test_a_new_folder_is_loaded_at_first_use(server, added):
    added("fresh", 8)
    assert server.ask("fresh", "Who?") == answer("Who?", 8)
    assert "fresh" in server.engine.multilora.adapters
    server.post("/v1/unload_lora_adapter", {"lora_name": "fresh"})


def test_the_base_keeps_its_name(server):
    for name in (BASE, "__base__"):
        assert_error(load(server, name, "a"), 400, "invalid_name")


def test_pin(server):
    assert server.post("/v1/pin_lora_adapter", {"lora_name": "a"}).status_code == 200
    assert server.engine.multilora.adapters["a"].pinned
    assert server.post("/v1/pin_lora_adapter", {"lora_name": "a", "pinned": False}).status_code == 200
    assert not server.engine.multilora.adapters["a"].pinned
    assert_error(server.post("/v1/pin_lora_adapter", {"lora_name": "nobody"}), 404, "model_not_found")


def test_reload_during_traffic(serve, tmp_path):
    write(tmp_path / "live", 1)
    write(tmp_path / "other", 2)
    server = serve(adapters=tmp_path, allow_runtime_updates=True)
    olds = {number: answer("Who?", number, 20) for number in (1, 2, 3, 4)}

    async def traffic():
        client, stop, seen = server.asynchronous(), asyncio.Event(), []

        async def ask(model):
            while not stop.is_set():
                made = await client.completions.create(model=model, prompt="Who?", max_tokens=20, temperature=0)
                seen.append((model, made.choices[0].text))

        tasks = [asyncio.create_task(ask(model)) for model in ("live", "live", "other", BASE)]
        for number in (3, 4, 1, 3):
            await asyncio.sleep(0.25)
            write(tmp_path / "live", number)
            made = await asyncio.to_thread(server.post, "/v1/reload_lora_adapter", {"lora_name": "live"})
            assert made.status_code == 200, made.text
            made = await client.completions.create(model="live", prompt="Who?", max_tokens=20, temperature=0)
            assert made.choices[0].text == olds[number]
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)
        return seen

    seen = asyncio.run(traffic())
    assert {text for model, text in seen if model == "other"} == {olds[2]}
    assert {text for model, text in seen if model == BASE} == {answer("Who?", None, 20)}
    assert {text for model, text in seen if model == "live"} <= {olds[1], olds[3], olds[4]}
    assert len({text for model, text in seen if model == "live"}) > 1


def test_updates_are_off_by_default(serve, folder):
    server = serve(adapters=folder)
    for path, body in (
        ("load", {"lora_name": "x", "lora_path": "a"}),
        ("unload", {"lora_name": "a"}),
        ("reload", {"lora_name": "a"}),
        ("pin", {"lora_name": "a"}),
    ):
        refused = server.post(f"/v1/{path}_lora_adapter", body)
        assert_error(refused, 403, "runtime_updates_disabled", "--allow-runtime-updates")
    assert server.ask("a", "Who?") == answer("Who?", 1)


def test_a_broken_adapter_of_the_folder_does_not_keep_the_others(serve, tmp_path, caplog):
    write(tmp_path / "good", 1)
    (write(tmp_path / "bad", 2) / "adapter_model.safetensors").write_bytes(b"no weights")
    server = serve(adapters=tmp_path)
    assert server.ask("good", "Who?") == answer("Who?", 1)
    refused = server.post("/v1/completions", {"model": "bad", "prompt": "x"})
    error = assert_error(refused, 400, "adapter_refused")
    assert str(tmp_path) not in error["message"]
    assert "bad" in caplog.text


def test_those_asked_for_longest_ago_make_room(serve, tmp_path):
    for number in range(5):
        write(tmp_path / f"n{number}", number)
    server = serve(adapters=tmp_path, load_at_start=False, max_on_demand=2)
    assert server.engine.multilora.adapters == {}
    for number in range(5):
        assert server.ask(f"n{number}", "Who?") == answer("Who?", number)
    until(lambda: set(server.engine.multilora.adapters) == {"n3", "n4"})
    assert server.ask("n0", "Who?") == answer("Who?", 0)
    assert len(server.get("/v1/models").json()["data"]) == 6


def test_requests_that_wait_keep_their_adapter(serve, tmp_path):
    """More adapters at once than are kept, and more than there are slots: nobody's is taken away."""
    for number in range(6):
        write(tmp_path / f"n{number}", number)
    server = serve(adapters=tmp_path, load_at_start=False, max_on_demand=1)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: server.ask(f"n{i % 6}", "Who?"), range(24)))
    assert answers == [answer("Who?", i % 6) for i in range(24)]
    until(lambda: len(server.engine.multilora.adapters) == 1)


def test_what_the_operator_has_loaded_or_pinned_stays(serve, tmp_path):
    for number in range(4):
        write(tmp_path / f"n{number}", number)
    server = serve(adapters=tmp_path, load_at_start=False, max_on_demand=1, allow_runtime_updates=True)
    server.ask("n0", "Who?")
    assert server.post("/v1/pin_lora_adapter", {"lora_name": "n0"}).status_code == 200
    server.ask("n1", "Who?")
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "n1"}).status_code == 200
    assert server.post("/v1/load_lora_adapter", {"lora_name": "n1", "lora_path": "n1"}).status_code == 200
    for number in (2, 3):
        server.ask(f"n{number}", "Who?")
    until(lambda: set(server.engine.multilora.adapters) == {"n0", "n1", "n3"})
    assert server.post("/v1/pin_lora_adapter", {"lora_name": "n0", "pinned": False}).status_code == 200
    server.ask("n2", "Who?")
    until(lambda: set(server.engine.multilora.adapters) == {"n1", "n2"})


def test_unloads_that_wait_keep_no_load_waiting(serve, tmp_path, monkeypatch):
    write(tmp_path / "new", 5)
    server = serve(adapters=tmp_path, load_at_start=False)
    resolver, gate = server.app.state.answers.resolver, threading.Event()
    try:
        for _ in range(12):
            server.loop.call_soon_threadsafe(resolver.patiently, gate.wait, 30.0)
        assert server.ask("new", "Who?") == answer("Who?", 5)
    finally:
        gate.set()


def test_on_demand_paths_need_a_pattern(serve, tmp_path):
    inside, outside = write(tmp_path / "shared" / "x", 5), write(tmp_path / "private" / "y", 6)
    closed, opened = serve(), serve(allow_on_demand=[f"{tmp_path}/shared/*"])
    body = {"model": str(inside), "prompt": "Who?", "temperature": 0, "max_tokens": 12}
    assert_error(closed.post("/v1/completions", body), 404, "model_not_found")
    assert opened.ask(str(inside), "Who?") == answer("Who?", 5)
    for name in (str(outside), f"{tmp_path}/shared/../private/y"):
        assert opened.post("/v1/completions", {**body, "model": name}).status_code in (403, 404)
    (tmp_path / "shared" / "link").symlink_to(outside)
    assert_error(opened.post("/v1/completions", {**body, "model": f"{tmp_path}/shared/link"}), 403, "not_allowed")
    assert list(opened.engine.multilora.adapters) == [str(inside)]


def test_hub_ids_need_a_pattern(serve):
    closed, opened = serve(), serve(allow_on_demand=["good/*"], offline=True)
    body = {"model": "good/adapter", "prompt": "x"}
    assert_error(closed.post("/v1/completions", body), 404, "model_not_found", "No model")
    assert_error(opened.post("/v1/completions", body), 404, "model_not_found", "hub")
    assert_error(opened.post("/v1/completions", {**body, "model": "bad/adapter"}), 404, "model_not_found", "No model")


def test_resolvers_of_other_packages(serve, tmp_path, monkeypatch):
    write(tmp_path / "v5", 5)

    class Point:
        name = "mine"

        @staticmethod
        def load():
            return lambda name: tmp_path / "v5" if name == "from-store" else None

    monkeypatch.setattr("hf_multilora.server.resolve.entry_points", lambda group: [Point])
    server = serve(resolvers=["mine"])
    assert server.ask("from-store", "Who?") == answer("Who?", 5)
    assert_error(server.post("/v1/completions", {"model": "other", "prompt": "x"}), 404, "model_not_found")
    from hf_multilora import ConfigError

    with pytest.raises(ConfigError, match="'mine'"):
        serve(resolvers=["nine"])


def test_sizes_are_seen_before_weights(serve, tmp_path):
    small = write(tmp_path / "small", 1)
    huge = write(tmp_path / "huge", 2)
    os.truncate(huge / "adapter_model.safetensors", 1 << 33)  # sparse: no byte of it is on the disk
    wide = write(tmp_path / "wide", 3)
    for field in ({"r": 10**9}, {"rank_pattern": {"q_proj": 4096}}, {"r": float("inf")}):
        config = json.loads((small / "adapter_config.json").read_text())
        (wide / "adapter_config.json").write_text(json.dumps({**config, **field}))
        server = serve(adapters=tmp_path, load_at_start=False)
        refused = server.post("/v1/completions", {"model": "wide", "prompt": "x"})
        assert_error(refused, 400, "too_large", "rank", "--max-lora-rank")
    assert_error(server.post("/v1/completions", {"model": "huge", "prompt": "x"}), 400, "too_large", "bytes")
    lying = write(tmp_path / "lying", 4) / "adapter_model.safetensors"
    raw = lying.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    for start in (b"\xff" * 8, (1 << 40).to_bytes(8, "little")):
        lying.write_bytes(start + raw[8:])
        assert_error(server.post("/v1/completions", {"model": "lying", "prompt": "x"}), 400, "adapter_refused")
    header = json.loads(raw[8 : 8 + size])
    name = next(key for key in header if "lora_A" in key)
    header[name] |= {"shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 42]}
    told = json.dumps(header).encode()
    lying.write_bytes(len(told).to_bytes(8, "little") + told + raw[8 + size :])
    assert_error(server.post("/v1/completions", {"model": "lying", "prompt": "x"}), 400, "adapter_refused")
    (tmp_path / "lying" / "adapter_config.json").write_bytes(b"[" * 200_000)
    assert_error(server.post("/v1/completions", {"model": "lying", "prompt": "x"}), 400, "adapter_refused")
    assert server.ask("small", "Who?") == answer("Who?", 1)
    assert list(server.engine.multilora.adapters) == ["small"]


def test_slow_loads_keep_nobody_waiting(serve, tmp_path, monkeypatch):
    write(tmp_path / "good", 1)
    server = serve(adapters=tmp_path, load_timeout_s=0.3)
    go, load_ = threading.Event(), type(server.app.state.answers.resolver)._load
    asked = []

    def slowly(self, name):
        asked.append(name)
        go.wait(WAIT_S)
        return load_(self, name)

    monkeypatch.setattr(type(server.app.state.answers.resolver), "_load", slowly)
    for number in range(20):
        write(tmp_path / f"slow{number}", number)

    async def everybody():
        client = server.asynchronous()
        body = {"prompt": "Who?", "max_tokens": 12, "temperature": 0}
        slow = [client.completions.create(model=f"slow{number}", **body) for number in [*range(20), 0, 0]]
        waiting = asyncio.gather(*slow, return_exceptions=True)
        await asyncio.sleep(0.1)
        quick = await asyncio.wait_for(client.completions.create(model="good", **body), WAIT_S)
        return quick, await waiting

    quick, late = asyncio.run(everybody())
    assert quick.choices[0].text == answer("Who?", 1)
    assert {error.status_code for error in late} == {504} and late[0].code == "load_timeout"
    go.set()
    until(lambda: len(server.engine.multilora.adapters) == 21)  # they go on, and are there for whoever asks again
    assert asked.count("slow0") == 1, "three have asked for it"
    assert server.ask("slow3", "Who?") == answer("Who?", 3)
