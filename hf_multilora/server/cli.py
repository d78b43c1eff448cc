"""`hf-multilora serve`: a folder of adapters, and an endpoint that any OpenAI client can call."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import options
from ..base_model import check_dtype, load_base, load_tokenizer
from ..errors import ConfigError
from ..report import count

if TYPE_CHECKING:
    from .engine import Engine
    from .settings import Settings

_LEVELS = ("critical", "error", "warning", "info", "debug")
KEY_ENV = "HF_MULTILORA_API_KEY"
# Clients let go of idle connections after 5 to 60 seconds. Were the server first, a request might be on its way.
_KEEP_ALIVE_S = 75


def serve(
    model: options.Model,
    adapters: options.Adapters = None,
    max_loras: options.MaxLoras = 8,
    max_lora_rank: options.MaxLoraRank = 64,
    max_cpu_loras: options.MaxCpuLoras = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="The base model's id in requests.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help=f"Key that requests must bear; several are possible. Or ${KEY_ENV}.")
    ] = None,
    lazy: Annotated[bool, typer.Option("--lazy", help="Load adapters at first use, not at the start.")] = False,
    allow_on_demand: Annotated[
        list[str] | None,
        typer.Option(
            help="Pattern of hub ids ('org/*') or absolute paths that requests may name; several are possible."
        ),
    ] = None,
    resolver: Annotated[
        list[str] | None, typer.Option(help="Entry point of the group hf_multilora.resolvers to ask for names.")
    ] = None,
    allow_runtime_updates: Annotated[
        bool, typer.Option("--allow-runtime-updates", help="Let requests load, unload, reload and pin adapters.")
    ] = False,
    offline: options.Offline = False,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt and its answer.")] = None,
    max_batch_tokens: options.MaxBatchTokens = None,
    max_requests: options.MaxRequests = None,
    num_blocks: options.NumBlocks = None,
    block_tokens: options.BlockTokens = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Answers in work or waiting.")] = 1024,
    max_adapters_per_client: Annotated[
        int | None, typer.Option(min=1, help="Distinct adapters that one API key may name within a minute.")
    ] = None,
    max_adapter_bytes: Annotated[int, typer.Option(min=1, help="Of an adapter's weight files.")] = 4 << 30,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of a request.")] = 4 << 20,
    request_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for an answer.")] = 600.0,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds for running requests at the end.")
    ] = 20.0,
    log_level: Annotated[str, typer.Option(help=f"One of {', '.join(_LEVELS)}.")] = "info",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line once the server is ready.")] = False,
) -> None:
    """Serve a base model and its adapters to OpenAI clients: `model` names the adapter.

    Example: hf-multilora serve HuggingFaceTB/SmolLM2-135M-Instruct --adapters ./adapters --max-loras 8
    """
    try:
        from .settings import Settings

        for name in ("fastapi", "prometheus_client", "sse_starlette", "uvicorn"):
            __import__(name)
    except ImportError as error:
        raise SystemExit(f"The server needs {error.name}: pip install 'hf-multilora[serve]'") from error
    check_dtype(dtype)
    if log_level not in _LEVELS:
        raise ConfigError(f"--log-level {log_level!r}: expected one of {', '.join(_LEVELS)}.")
    keys = api_key or [key for key in (os.environ.get(KEY_ENV),) if key]
    settings = Settings(
        served_name=served_model_name,
        adapters=adapters,
        load_at_start=not lazy,
        allow_on_demand=allow_on_demand or (),
        resolvers=resolver or (),
        allow_runtime_updates=allow_runtime_updates,
        offline=offline,
        api_keys=keys,
        max_body_bytes=max_body_bytes,
        max_model_len=max_model_len,
        max_queue=max_queue,
        max_adapters_per_client=max_adapters_per_client,
        max_adapter_bytes=max_adapter_bytes,
        request_timeout_s=request_timeout,
        shutdown_timeout_s=shutdown_timeout,
    )
    listener = _listen(host, port)  # before minutes of loading
    with listener:
        slots = {"max_loras": max_loras, "max_lora_rank": max_lora_rank, "max_cpu_loras": max_cpu_loras}
        batching = {"max_batch_tokens": max_batch_tokens, "max_requests_per_batch": max_requests}
        batching |= {"num_blocks": num_blocks, "page_size": block_tokens}
        engine = _engine(model, dtype, device, offline, slots, batching)
        if not run(engine, settings, listener, log_level, as_json):
            raise typer.Exit(1)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port."
        ) from error


def _engine(model: str, dtype: str, device: str | None, offline: bool, slots: Any, batching: Any) -> Engine:
    from ..api import enable_multilora
    from .engine import Engine

    tokenizer = load_tokenizer(model, offline)
    base = load_base(model, dtype, device, offline)
    return Engine(enable_multilora(base, on_demand=False, **slots), tokenizer, **batching)


def run(engine: Engine, settings: Settings, listener: socket.socket, log_level: str, as_json: bool = False) -> bool:
    """Serve until a signal; returns whether the server came up.

    A signal stops new requests; running ones have `shutdown_timeout_s` to end, then they fail with 503.
    """
    import uvicorn
    from uvicorn.config import LOGGING_CONFIG

    from .app import create_app

    app = create_app(engine, settings)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                names = app.state.answers.resolver.names()
                if as_json:
                    print(
                        json.dumps({"url": url, "base": app.state.answers.resolver.base, "adapters": names}),
                        flush=True,
                    )
                else:
                    what = f"{app.state.answers.resolver.base} and {count(len(names), 'adapter')}"
                    page = url.removesuffix("v1")
                    typer.echo(f"Serving {what} at {url}; a browser shows at {page} what goes on", err=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            engine.draining = True
            timer = asyncio.get_running_loop().call_later(
                settings.shutdown_timeout_s, engine.fail_all, "The server is shutting down."
            )
            await super().shutdown(sockets)
            timer.cancel()

    logs: dict[str, Any] = copy.deepcopy(LOGGING_CONFIG)
    logs["handlers"]["access"]["stream"] = "ext://sys.stderr"  # stdout carries the result alone
    grace = int(settings.shutdown_timeout_s) + 5
    config = uvicorn.Config(
        app,
        log_level=log_level,
        log_config=logs,
        lifespan="on",
        timeout_graceful_shutdown=grace,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    server = Server(config)
    # uvicorn raises a signal again after it has stopped for it, which is no failure here.
    before = {number: signal.signal(number, _stopped) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return server.started


def _stopped(number: int, frame: Any) -> None:
    """After a signal has been served."""
