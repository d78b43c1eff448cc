"""The server beside the manager that it stands on: requests a second and time to the first token.

So many clients at once, each with an adapter of its own, each asking again as soon as it has its answer:

    in process   the same requests, as many under way, straight to a manager of continuous batching
    whole        over HTTP from another process, each answer in one piece
    stream       the same, each token as it comes

python benchmarks/bench_server.py
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import socket
import statistics
import string
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_multilora.api import enable_multilora
from hf_multilora.bench.continuous import quiet
from hf_multilora.bench.measure import alternate, median_ratio
from hf_multilora.bench.results import Results, arguments
from hf_multilora.bench.serving import Shape, Side, StuckError, set_attention
from hf_multilora.bench.workload import (
    ALL_LINEAR,
    DTYPES,
    adapter_config,
    build_model,
    linear_shapes,
    random_adapter,
    twin,
)
from hf_multilora.server import Engine, Settings, create_app

GOAL = 0.9  # requests a second, of the manager's
START_S = 120.0
SIZES: dict[str, dict[str, Any]] = {
    "8B": dict(clients=32, each=4, prompt=[64, 192], new_tokens=128, batch_tokens=8192, block=256),
    "tiny": dict(clients=8, each=2, prompt=[8, 24], new_tokens=6, batch_tokens=256, block=16),
}


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """Bytes, and made-up words of one token each up to the model's vocabulary: every token is some text."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"Ġw{number}" for number in range(len(words), vocabulary)]
    inner = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


class Requests:
    """What a repetition asks: for each client, (adapter, prompt, new tokens) one after another.

    A prompt has one token for each of its letters.
    """

    def __init__(self, args: Any) -> None:
        self.args = args

    def __call__(self, seed: int) -> list[list[tuple[str, str, int]]]:
        draw, args = random.Random(seed), self.args
        return [
            [
                (
                    f"a{client}",
                    "".join(draw.choices(string.ascii_letters, k=draw.randint(*args.prompt))),
                    args.new_tokens,
                )
                for _ in range(args.each)
            ]
            for client in range(args.clients)
        ]


class InProcess:
    """A manager of its own, fed by one thread that waits for results."""

    def __init__(self, model: Any, tokenizer: Any, shape: Shape, requests: Requests) -> None:
        self.requests, self._tokenizer, self._side = requests, tokenizer, Side(model, shape)
        self.runs: list[dict[str, Any]] = []

    def __enter__(self) -> InProcess:
        self._side.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._side.__exit__(*error)

    def serve(self) -> float:
        """Seconds of a request."""
        todo = [iter(requests) for requests in self.requests(1 + len(self.runs))]
        begun: dict[str, tuple[int, float]] = {}
        firsts: list[float] = []
        start = time.perf_counter()

        def ask(client: int) -> None:
            for adapter, prompt, new in todo[client]:
                now = time.perf_counter()
                request = self._side.manager.add_request(
                    self._tokenizer(prompt)["input_ids"],
                    max_new_tokens=new,
                    adapter_id=adapter,
                    record_timestamps=True,
                )
                begun[request] = client, now
                return

        for client in range(len(todo)):
            ask(client)
        count = tokens = 0
        while begun:
            result = self._side.manager.get_result(timeout=START_S)
            if result is None or result.error is not None:
                raise StuckError(f"in process: {result and result.error}")
            if result.is_finished():
                client, asked = begun.pop(result.request_id)
                count, tokens = count + 1, tokens + len(result.generated_tokens)
                firsts.append(result.timestamps[0] - asked)
                ask(client)
        seconds = time.perf_counter() - start
        self.runs.append({"seconds": seconds, "requests": count, "tokens": tokens, "first_s": firsts})
        return seconds / count


class OverHTTP:
    """A server in a thread of this process, its clients in another process."""

    def __init__(self, engine: Engine) -> None:
        self._stack, self._engine = ExitStack(), engine
        self.url = ""

    def __enter__(self) -> OverHTTP:
        listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=256))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(self._engine, Settings())
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=10))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        self._stack.callback(thread.join, START_S)
        self._stack.callback(setattr, server, "should_exit", True)
        end = time.monotonic() + START_S
        while not server.started:
            if time.monotonic() > end or not thread.is_alive():
                raise StuckError("the server did not start")
            time.sleep(0.05)
        command = [sys.executable, str(Path(__file__).with_name("server_clients.py"))]
        self._clients = self._stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def ask(self, stream: bool, requests: Any) -> dict[str, Any]:
        assert self._clients.stdin and self._clients.stdout
        print(
            json.dumps({"url": self.url, "stream": stream, "requests": requests}), file=self._clients.stdin, flush=True
        )
        done = json.loads(self._clients.stdout.readline())
        if "error" in done:
            raise StuckError(f"over HTTP: {done['error']}")
        return done


class Clients:
    """One way to ask a server."""

    def __init__(self, server: OverHTTP, stream: bool, requests: Requests) -> None:
        self.server, self.stream, self.requests = server, stream, requests
        self.runs: list[dict[str, Any]] = []

    def serve(self) -> float:
        """Seconds of a request."""
        done = self.server.ask(self.stream, self.requests(1 + len(self.runs)))
        asked = done["asked"]
        firsts = [one["first_s"] for one in asked if one["first_s"] is not None]
        tokens = sum(one["tokens"] for one in asked)
        self.runs.append({"seconds": done["seconds"], "requests": len(asked), "tokens": tokens, "first_s": firsts})
        return float(done["seconds"]) / len(asked)


def report(results: Results, args: Any, label: str, case: Any, times: list[float], inside: list[float]) -> None:
    rates = [1 / one for one in times]
    firsts = sorted(first for run in case.runs for first in run["first_s"])
    expected = args.clients * args.each
    for run in case.runs:
        if run["requests"] != expected or run["tokens"] != expected * args.new_tokens:
            results.fail(f"{label}: {run['requests']} requests, {run['tokens']} tokens")
    results.add(
        f"requests, {label}", statistics.median(rates), "1/s", all=rates, clients=args.clients,
        tokens_per_s=[run["tokens"] / run["seconds"] for run in case.runs],
    )  # fmt: skip
    if firsts:
        tail = firsts[min(len(firsts) - 1, int(0.95 * len(firsts)))]
        results.add(f"first token, {label}, median", 1e3 * statistics.median(firsts), "ms", p95_ms=1e3 * tail)
    if inside is not times:
        full = args.device.startswith("cuda") and args.shape == "8B" and args.layers is None
        ratio = median_ratio(times, inside)
        results.add(
            f"time of a request, {label}", ratio, "x", ratio=ratio, ratio_goal=1 / GOAL if full else None,
            of_in_process=1 / ratio,
        )  # fmt: skip


def main() -> int:
    options = arguments(__doc__ or "")
    options.set_defaults(reps=3, budget_s=300)
    options.add_argument("--clients", type=int)
    options.add_argument("--each", type=int, help="requests of a client, one after another")
    options.add_argument("--prompt", type=int, nargs=2, help="least and most tokens of a prompt")
    options.add_argument("--new-tokens", type=int)
    options.add_argument("--batch-tokens", type=int)
    options.add_argument("--block", type=int)
    options.add_argument("--attention", default="sdpa")
    args = options.parse_args()
    for name, value in SIZES["tiny" if args.shape == "tiny" else "8B"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    quiet()
    deadline = time.monotonic() + args.budget_s
    results = Results("server", args.out, args.device)
    results.settings(**vars(args))
    dtype = DTYPES[args.dtype]
    base = build_model(args.shape, args.device, dtype, args.layers)
    set_attention(base, args.attention)
    shapes, rank = linear_shapes(base), args.rank
    adapters = [
        random_adapter(shapes, rank, number, dtype=dtype, device=args.device) for number in range(args.clients)
    ]

    def enabled(**how: Any) -> Any:
        model = enable_multilora(twin(base), max_loras=args.clients, max_lora_rank=rank, **how)
        for number, tensors in enumerate(adapters):
            model.multilora.load(tensors, f"a{number}", config=adapter_config(rank, 2.0 * rank, ALL_LINEAR))
        return model

    shape = Shape(args.clients, tuple(args.prompt), args.new_tokens, args.clients, args.batch_tokens, args.block)
    requests = Requests(args)
    tokenizer = tokenizer_of(base.config.vocab_size)
    engine = Engine(
        enabled(on_demand=False), tokenizer, page_size=shape.block,
        num_blocks=shape.blocks, max_batch_tokens=shape.batch_tokens, max_requests_per_batch=shape.rows,
    )  # fmt: skip
    results.note(f"{args.clients} adapters, twice")
    try:
        with InProcess(enabled(), tokenizer, shape, requests) as inside, OverHTTP(engine) as server:
            cases = {
                "in process": inside,
                "whole": Clients(server, False, requests),
                "stream": Clients(server, True, requests),
            }
            for label, case in cases.items():
                case.serve()
                results.note(f"{label}: {case.runs.pop()['seconds']:.1f} s to warm up")
            times = alternate(
                {label: functools.partial(case.serve) for label, case in cases.items()}, args.reps, deadline
            )
            for label, case in cases.items():
                report(results, args, label, case, times[label], times["in process"])
    except StuckError as error:
        results.fail(str(error))
    return results.finish()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a generation thread that hangs would keep the process
