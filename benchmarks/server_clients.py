"""Clients of benchmarks/bench_server.py, in a process of their own: what they compute is not the server's.

Reads one JSON object a line: {"url", "stream", "requests": [for each client [(adapter, prompt, new tokens), …]]}. Each
client asks its requests one after another, all clients at once. Writes one line for each: {"seconds", "asked":
[{"adapter", "first_s", "whole_s", "tokens"}, …]}, or {"error"}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httpx

TIMEOUT_S = 300


async def ask(http: httpx.AsyncClient, stream: bool, adapter: str, prompt: str, new: int) -> dict[str, Any]:
    body = {"model": adapter, "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": stream}
    body["ignore_eos"] = True
    start, first, tokens = time.perf_counter(), None, 0
    if not stream:
        response = await http.post("/v1/completions", json=body)
        response.raise_for_status()
        tokens = response.json()["usage"]["completion_tokens"]
    else:
        body["stream_options"] = {"include_usage": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter()
                    if '"usage":{' in line:
                        tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                    elif '"error"' in line:
                        raise RuntimeError(line)
    end = time.perf_counter()
    return {
        "adapter": adapter,
        "first_s": None if first is None else first - start,
        "whole_s": end - start,
        "tokens": tokens,
    }


async def run(http: httpx.AsyncClient, job: dict[str, Any]) -> dict[str, Any]:
    async def client(requests: list[Any]) -> list[dict[str, Any]]:
        return [await ask(http, job["stream"], *request) for request in requests]

    start = time.perf_counter()
    asked = await asyncio.gather(*(client(requests) for requests in job["requests"]))
    return {"seconds": time.perf_counter() - start, "asked": [one for some in asked for one in some]}


async def main() -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as http:
        while line := await asyncio.to_thread(sys.stdin.readline):
            job = json.loads(line)
            http.base_url = job["url"]
            try:
                done = await run(http, job)
            except (httpx.HTTPError, RuntimeError) as error:
                done = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(done), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
