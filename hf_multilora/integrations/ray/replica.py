"""One replica: a model, its manager of continuous batching, and the server's app around it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from ...api import enable_multilora
from ...base_model import load_base, load_tokenizer
from ...errors import ModelError, MultiLoraError
from ...server import Engine, Settings, create_app
from ...server.problems import ApiError
from .asgi import Call, Head, respond
from .residents import Resident, Residents

REPLICA, RESIDENT = "x-multilora-replica", "x-multilora-resident"


@dataclass(frozen=True)
class Base:
    """What a replica loads: see `load_base`, enable_multilora (slots) and `Engine` (batching)."""

    model: str
    dtype: str = "auto"
    device: str | None = None
    offline: bool = False
    slots: dict[str, Any] = field(default_factory=dict)
    batching: dict[str, Any] = field(default_factory=dict)


class Replica:
    """Answers what `hf-multilora serve` answers. Serve makes one in each of its processes.

    Raises:
        ModelError, ConfigError: nothing that can be served.
    """

    async def __init__(self, base: Base, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        from ray import serve

        self._replica = serve.get_replica_context().replica_id.unique_id
        tokenizer = load_tokenizer(base.model, base.offline)
        model = load_base(base.model, base.dtype, base.device, base.offline)
        engine = Engine(enable_multilora(model, on_demand=False, **base.slots), tokenizer, **base.batching)
        self._engine, self._app = engine, create_app(engine, settings)
        self._resolver = self._app.state.answers.resolver
        self._residents = Residents(self._unload)
        self._life = AsyncExitStack()
        await self._life.enter_async_context(self._app.router.lifespan_context(self._app))

    async def http(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """The answer to a request: its head, then its body in pieces."""
        async with AsyncExitStack() as stack:
            app: Any = self._app
            resident = None
            if call.adapter is not None:
                await stack.enter_async_context(self._residents.use(call.adapter))
                resident = call.adapter in self._residents
                try:
                    # What cannot be loaded evicts nothing: Serve makes room before it asks for a model.
                    await stack.enter_async_context(self._resolver.use(call.adapter))
                    await self.resident(call.adapter)
                except ApiError as error:
                    app = error.response()
            parts = await stack.enter_async_context(aclosing(respond(app, call)))
            async for part in parts:
                yield self._signed(part, resident) if isinstance(part, Head) else part

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to the body of a chat (with "messages") or a completion; or {"error": ...}, as OpenAI has it.

        For handles: `handle.options(multiplexed_model_id="sql").generate.remote({"model": "sql", ...})`.
        """
        if body.get("stream"):
            return ApiError(
                400, "generate() gives whole answers; stream over HTTP.", "unsupported_field", "stream"
            ).body()
        name = body.get("model")
        known = isinstance(name, str) and name != self._resolver.base
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        headers = ((b"content-type", b"application/json"),)
        call = Call("POST", path, headers, json.dumps(body).encode(), name if known else None)
        return json.loads(b"".join([part async for part in self.http(call) if isinstance(part, bytes)]))

    async def resident(self, name: str) -> Resident:
        """The object that stands for an adapter; `serve_app` lays Serve's cache of multiplexed models around it."""
        return self._residents.enter(name)

    async def check_health(self) -> None:
        """Raises: ModelError once nothing can be answered any more; Serve then starts another replica."""
        if (why := self._engine.why_dead()) is not None:
            raise ModelError(why)

    async def _unload(self, name: str) -> None:
        with suppress(MultiLoraError):
            await self._resolver.unload(name)

    def _signed(self, head: Head, resident: bool | None) -> Head:
        found = {} if resident is None else {RESIDENT: str(resident).lower()}
        return Head(head.status, {**head.headers, REPLICA: self._replica, **found})
