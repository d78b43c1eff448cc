"""A server process under many clients for some minutes: whose answers they get, and what stays behind.

    python benchmarks/soak_server.py --clients 200 --seconds 600

A tiny random model on a CPU with more adapters than slots. Clients (OpenAI's own) ask for completions and chats, whole
and as streams, one answer or two; some leave in the middle, and adapters are reloaded meanwhile. Every answer is
compared with generate() of a bare model that has the adapter worked into its weights. The server's memory, open
files and threads are looked at as it goes; at the end nothing may be in work, and the counters must add up.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "server")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx  # noqa: E402
import openai  # noqa: E402
from server_bed import answer, build, tokenizer, write  # noqa: E402
from test_server_process import process  # noqa: E402
from test_server_soak import ADAPTERS, client  # noqa: E402

from hf_multilora.bench.results import Results  # noqa: E402
from hf_multilora.bench.soak import Look, growth  # noqa: E402

SETTLE_S = 30.0
ANSWER_S = 300.0
GOAL_MB = 1.0  # growth of memory per 1000 answers
SLOTS = 3


class Server:
    """The process, as `client` takes it."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid
        self.http = httpx.Client(base_url=url.removesuffix("/v1"), timeout=60)

    def asynchronous(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=ANSWER_S)

    def status(self) -> dict[str, Any]:
        return dict(self.http.get("/v1/status").raise_for_status().json())

    def look(self, served: int, seconds: float) -> dict[str, Any]:
        proc = Path(f"/proc/{self.pid}")
        host = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
        threads = len(list((proc / "task").iterdir()))
        return {
            **vars(Look(served, seconds, host, 0, 0, 0)),
            "files": len(list((proc / "fd").iterdir())),
            "threads": threads,
        }


async def traffic(server: Server, args: argparse.Namespace, seen: list[Any]) -> list[dict[str, Any]]:
    start = time.monotonic()
    end, looks = start + args.seconds, []

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(args.seconds / 20)
            looks.append(server.look(len(seen), time.monotonic() - start))
            print(looks[-1], flush=True)

    async def reload() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_S) as http:
            while time.monotonic() < end:
                await asyncio.sleep(2)
                name = f"n{random.randrange(ADAPTERS)}"
                (await http.post("/reload_lora_adapter", json={"lora_name": name})).raise_for_status()

    clients = [client(server, number, end, seen) for number in range(args.clients)]
    await asyncio.wait_for(asyncio.gather(*clients, watch(), reload()), args.seconds + ANSWER_S)
    return looks


def check(results: Results, server: Server, seen: list[Any]) -> None:
    """Whose answers came, and that nothing is left."""
    whole = [(text, key) for text, key in seen if text != "left"]
    wrong = [(text, key) for text, key in whole if text != answer(*key)]
    if wrong or len({key[1] for _, key in whole}) != ADAPTERS + 1:
        results.fail(f"{len(wrong)} of {len(whole)} answers are wrong: {wrong[:3]}")
    deadline = time.monotonic() + SETTLE_S
    while (queue := server.status()["queue"])["in_work"] and time.monotonic() < deadline:
        time.sleep(0.2)
    if queue["in_work"] or queue["running"] or queue["waiting"]:
        results.fail(f"left in work: {queue}")
    sums = server.status()["sums"]
    if sums["failed"] or sums["requests"] != sums["finished"] + sums["cancelled"]:
        results.fail(f"the counters do not add up: {sums}")
    outcomes = Counter("left" if text == "left" else "whole" for text, _ in seen)
    results.add("answers", outcomes["whole"], "", wrong=len(wrong), left=outcomes["left"], sums=sums)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--clients", type=int, default=200)
    options.add_argument("--seconds", type=float, default=600)
    options.add_argument("--out", default=str(Path(__file__).with_name("results")))
    args = options.parse_args()
    results = Results("server-soak", args.out, "cpu")
    results.settings(**vars(args))
    with tempfile.TemporaryDirectory() as place:
        model, adapters = Path(place, "tiny"), Path(place, "adapters")
        build().save_pretrained(model)
        tokenizer().save_pretrained(model)
        for number in range(ADAPTERS):
            write(adapters / f"n{number}", number)
        small = ["--num-blocks", "512", "--block-tokens", "16", "--max-batch-tokens", "512", "--max-requests", "64"]
        given = [str(model), "--adapters", str(adapters), "--max-loras", str(SLOTS), "--max-lora-rank", "16", *small]
        with process(*given, "--allow-runtime-updates", "--log-level", "error") as (started, said):
            server, seen = Server(said["url"], started.pid), []
            looks = asyncio.run(traffic(server, args, seen))
            check(results, server, seen)
            last = server.look(len(seen), looks[-1]["seconds"])
    steady = [Look(**{name: look[name] for name in Look.__annotations__}) for look in looks[len(looks) // 4 :]]
    results.add("answers a second", len(seen) / args.seconds, "1/s", clients=args.clients)
    results.add("host memory per 1000 answers", growth(steady, "host_mb"), "MB", goal=GOAL_MB, looks=looks)
    results.add("open files at the end", last["files"], "", first=looks[0]["files"])
    results.add("threads at the end", last["threads"], "", first=looks[0]["threads"])
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
