"""A tiny model and its adapters (`tiny_files`) behind a real server in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from functools import lru_cache
from typing import Any

import httpx
import openai
import torch
import uvicorn
from tiny_files import LENGTH, VOCAB, alone, build, chat_prompt, tokenizer, version
from tiny_files import write_adapter as write
from transformers import LlamaForCausalLM
from waits import until

from hf_multilora import enable_multilora
from hf_multilora.server import Engine, Settings, create_app

__all__ = ["LENGTH", "VOCAB", "alone", "build", "chat_prompt", "tokenizer", "until", "version", "write"]

WAIT_S = 60.0
BASE = "tiny"


def named() -> LlamaForCausalLM:
    """The model, under the name that it is served by."""
    model = build()
    model.config._name_or_path = f"somewhere/{BASE}"
    return model


@lru_cache(maxsize=4096)
def _tokens(prompt: tuple[int, ...], number: int | None, new: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    out = alone(number).generate(ids, do_sample=False, max_new_tokens=new, attention_mask=torch.ones_like(ids))
    return tuple(out[0, len(prompt) :].tolist())


def tokens(prompt: tuple[int, ...], number: int | None, new: int) -> tuple[int, ...]:
    """What generate() answers, greedily, end token included."""
    return _tokens(prompt, number, next(length for length in (24, 64, 256) if new <= length))[:new]


def encode(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


def answer(prompt: str, number: int | None, new: int = 12) -> str:
    """The text of generate()'s answer to a plain prompt."""
    return tokenizer().decode(tokens(tuple(encode(prompt)), number, new), skip_special_tokens=True)


def engine(**options: Any) -> Engine:
    model = enable_multilora(named(), max_loras=3, max_lora_rank=16, on_demand=False)
    small = {"page_size": 16, "num_blocks": 128, "max_batch_tokens": 128, "max_requests_per_batch": 16}
    return Engine(model, tokenizer(), **{**small, **options})


class Running:
    """A real uvicorn server in a thread of its own, on any port that is free unless one is named."""

    def __init__(self, made: Engine, settings: Settings, port: int = 0) -> None:
        self.engine, self.app = made, create_app(made, settings)
        self.loop: asyncio.AbstractEventLoop | None = None
        listener = socket.create_server(("127.0.0.1", port), backlog=256)
        self.root = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = uvicorn.Server(
            uvicorn.Config(self.app, log_level="warning", lifespan="on", timeout_graceful_shutdown=10)
        )
        self._thread = threading.Thread(target=self._run, args=(listener,), daemon=True)
        self._thread.start()
        self._http = httpx.Client(base_url=self.root, timeout=WAIT_S)  # making one takes longer than most requests
        self._openai = openai.OpenAI(
            base_url=f"{self.root}/v1", api_key="none", max_retries=0, timeout=WAIT_S, http_client=self._http
        )
        until(lambda: self.server.started or not self._thread.is_alive())
        assert self.server.started, "the server did not start"

    def _run(self, listener: socket.socket) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            await self.server.serve(sockets=[listener])

        asyncio.run(main())

    def client(self, **options: Any) -> openai.OpenAI:
        return self._openai.with_options(**options) if options else self._openai

    def asynchronous(self, **options: Any) -> openai.AsyncOpenAI:
        common = {"base_url": f"{self.root}/v1", "api_key": "none", "max_retries": 0, "timeout": WAIT_S}
        return openai.AsyncOpenAI(**{**common, **options})

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self._http.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._http.get(path, **options)

    def ask(self, model: str, prompt: str, new: int = 12, **options: Any) -> str:
        """A greedy completion's text."""
        made = self.client().completions.create(model=model, prompt=prompt, max_tokens=new, temperature=0, **options)
        return made.choices[0].text

    def traffic(self) -> dict[str, Any]:
        """The manager's counters by adapter."""
        return self.engine.multilora.status().batching.adapters

    def idle(self) -> bool:
        """Whether nothing is in work, in the server as in the manager."""
        return self.engine.in_work == 0 and all(t.running + t.waiting == 0 for t in self.traffic().values())

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the server did not stop"


def assert_error(response: httpx.Response, status: int, code: str | None = None, *words: str) -> dict[str, Any]:
    """An error in OpenAI's shape, which says these words."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert code is None or error["code"] == code, error
    for word in words:
        assert word in error["message"], error
    return error
