"""An application of three replicas, as its clients and its operator see it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import ray
import torch
from ray import serve
from ray_bed import SMALL, write_files
from tiny_files import alone, tokenizer

from hf_multilora.integrations.ray import serve_app
from hf_multilora.integrations.ray.asgi import Call
from hf_multilora.server import Settings

ADAPTERS, RESIDENT, REPLICAS, WAIT_S = 12, 4, 3, 120.0


class App:
    """The running application, with adapters `a0` (version 1), `a1`, …"""

    def __init__(self, root: Path, port: int, adapters: int = ADAPTERS, **options: Any) -> None:
        self.files = write_files(root, adapters)
        settings = Settings(adapters=Path(self.files["adapters"]), offline=True)
        options = {"max_loras": RESIDENT, "max_lora_rank": 8, "resident": RESIDENT, **options}
        built = serve_app(
            self.files["model"],
            settings,
            device="cpu",
            batching=SMALL,
            replica_options={"num_replicas": REPLICAS, "ray_actor_options": {"num_cpus": 0.5}},
            ingress_options={"ray_actor_options": {"num_cpus": 0.1}},
            **options,
        )
        serve.run(built, name="default")
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S)
        self.root = f"http://127.0.0.1:{port}"

    def ask(self, model: str, prompt: str, new: int = 6, **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body(model, prompt, new, **more))

    def cancelled(self) -> int:
        """Requests that were cancelled, in all replicas."""
        handle = serve.get_deployment_handle("MultiLora", "default").options(stream=True)
        found: dict[str, int] = {}
        while len(found) < REPLICAS:
            head, *parts = handle.http.remote(Call("GET", "/metrics"))
            counts = re.findall(r'requests_total{.*outcome="cancelled"} (\d+)', b"".join(parts).decode())
            found[head.headers["x-multilora-replica"]] = sum(map(int, counts))
        return sum(found.values())

    def kill(self, replica: str) -> None:
        """End a replica's process at once."""
        actor = ray.get_actor(f"SERVE_REPLICA::default#MultiLora#{replica}", namespace="serve")
        os.kill(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)


def body(model: str, prompt: str, new: int = 6, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, **more}


@lru_cache(maxsize=4096)
def text(prompt: str, number: int | None, new: int = 6) -> str:
    """What generate() answers, whatever it takes for an end."""
    ids = torch.tensor([tokenizer()(prompt)["input_ids"]])
    options = {"do_sample": False, "max_new_tokens": new, "eos_token_id": -1, "pad_token_id": 257}
    out = alone(number).generate(ids, attention_mask=torch.ones_like(ids), **options)
    return tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def until(happened: Callable[[], bool], wait_s: float) -> None:
    end = time.monotonic() + wait_s
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
