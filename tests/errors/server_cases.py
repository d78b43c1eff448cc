"""Requests that the server refuses, and what its answers must hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient
from tiny_files import build, tokenizer, write_adapter

from hf_multilora import enable_multilora
from hf_multilora.server import Engine, Settings, create_app

_CHAT = {"model": "sql", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@dataclass(frozen=True)
class ServerCase:
    status: int
    where: str
    step: str = ""
    body: dict[str, Any] = field(default_factory=dict)  # on top of a chat that would be answered
    path: str = "/v1/chat/completions"


SERVER_CASES = {
    "unknown model": ServerCase(404, "'sqll'", "'sql'", {"model": "sqll"}),
    "a hub id that is not allowed": ServerCase(404, "'org/adapter'", "", {"model": "org/adapter"}),
    "a seed": ServerCase(400, "seed", "stream of random numbers", {"seed": 3}),
    "tools": ServerCase(400, "tools", "tool calls", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    "an unknown field": ServerCase(400, "max_tokenz", "", {"max_tokenz": 3}),
    "too many answers": ServerCase(400, "65 answers", "at most 64", {"n": 65}),
    "a prompt that is too long": ServerCase(400, "tokens", "Shorten the prompt", {"max_tokens": 10_000}),
    "a temperature out of range": ServerCase(400, "temperature", "", {"temperature": -1}),
    "loading at run time, which is off": ServerCase(
        403, "--allow-runtime-updates", "", {"lora_name": "x", "lora_path": "org/x"}, "/v1/load_lora_adapter"
    ),
}


def answers(folder: Path) -> dict[str, dict[str, Any]]:
    """Title -> status, code and message of each case's answer."""
    write_adapter(folder / "sql", 1)
    model = build()
    model.config._name_or_path = "somewhere/tiny"
    model = enable_multilora(model, max_loras=2, max_lora_rank=16, on_demand=False)
    engine = Engine(model, tokenizer(), page_size=16, num_blocks=16, max_batch_tokens=64, max_requests_per_batch=4)
    found = {}
    with TestClient(create_app(engine, Settings(adapters=folder))) as client:
        for title, case in SERVER_CASES.items():
            body = case.body if case.path.endswith("adapter") else {**_CHAT, **case.body}
            answer = client.post(case.path, json=body)
            found[title] = {"status": answer.status_code, **answer.json()["error"]}
    return found
