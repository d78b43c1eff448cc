"""A tiny Llama with a tokenizer of bytes, adapters that answer differently, and a real server of both in a thread.

An adapter's *version* is a number from which its factors follow. What it is to answer is generate() of a bare model
with the version worked into its weights; nothing of this package takes part in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
import uvicorn
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_multilora import enable_multilora
from hf_multilora.server import Engine, Settings, create_app

SPECIAL = ["<s>", "</s>", "<|user|>", "<|bot|>"]
VOCAB = 256 + len(SPECIAL)
HIDDEN, INNER, LENGTH = 48, 80, 256
WAIT_S = 60.0
BASE = "tiny"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "<|user|>{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)
_WIDTHS = {"q_proj": (HIDDEN, HIDDEN), "v_proj": (HIDDEN, HIDDEN // 2), "o_proj": (HIDDEN, HIDDEN)}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE, model_max_length=LENGTH
    )


def build() -> LlamaForCausalLM:
    """The bare base model, fp32; weights large enough that adapters and prompts show."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=256, eos_token_id=257, pad_token_id=257,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else noise * (1.0 if "embed" in name else 0.15))
        # Letters are likelier than what is no text; the end token comes now and then.
        model.lm_head.weight[257].mul_(1.2)
    model.config._name_or_path = f"somewhere/{BASE}"
    return model.eval()


def version(number: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors under PEFT's names and the adapter_config.json of this version."""
    rank, generator = 2 + number % 5, torch.Generator().manual_seed(1000 + number)
    tensors = {}
    for layer in range(2):
        for name, (inside, out) in _WIDTHS.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            tensors[f"{stem}A.weight"] = torch.randn(rank, inside, generator=generator) * inside**-0.5
            tensors[f"{stem}B.weight"] = torch.randn(out, rank, generator=generator) * rank**-0.5
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": 2 * rank}
    return tensors, {**config, "target_modules": list(_WIDTHS)}


def write(folder: Path, number: int) -> Path:
    """This version as files in `folder`, in place of what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, config = version(number)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "new", metadata={"format": "pt"})
    os.replace(folder / "new", folder / "adapter_model.safetensors")
    return folder


@lru_cache(maxsize=32)
def alone(number: int | None) -> LlamaForCausalLM:
    """The bare model with this version worked into its weights."""
    model = build()
    if number is not None:
        tensors, _ = version(number)
        with torch.no_grad():
            for name, a in tensors.items():
                if "lora_A" in name:
                    path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    model.get_submodule(path).weight.add_(2.0 * tensors[name.replace("lora_A", "lora_B")] @ a)
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


def chat_prompt(content: str) -> str:
    return f"<|user|>user: {content}<|bot|>"


def engine(**options: Any) -> Engine:
    model = enable_multilora(build(), max_loras=3, max_lora_rank=16, on_demand=False)
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


def until(happened: Callable[[], Any], wait_s: float = WAIT_S) -> None:
    """Wait for something, and fail where it does not come."""
    end = time.monotonic() + wait_s
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def assert_error(response: httpx.Response, status: int, code: str | None = None, *words: str) -> dict[str, Any]:
    """An error in OpenAI's shape, which says these words."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert code is None or error["code"] == code, error
    for word in words:
        assert word in error["message"], error
    return error
