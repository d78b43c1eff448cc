"""What clients talk to: OpenAI's endpoints, each request sent to a replica where its adapter resides."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ...server import Settings
from ...server.clients import Keys
from ...server.places import Places
from ...server.problems import ApiError, unavailable
from .asgi import Call, Head

logger = logging.getLogger(__name__)

_POSTS = ("/v1/chat/completions", "/v1/completions")
_AGAIN_S = 0.1
_GRACE_S = 10.0  # after which a replica that should have said 504 by itself is given up


class Ingress:
    """Sends requests on, and again where the replica was lost before the client had any of the answer.

    Args:
        replicas: handle of the deployment of `Replica`.
        base: the base model's name.
        by_residency: tell Serve which adapter a request is for; else any replica gets it.
        tries: replicas that may be lost over one request.
    """

    def __init__(
        self, replicas: Any, settings: Settings, base: str, by_residency: bool = True, tries: int = 3
    ) -> None:
        self._replicas = replicas.options(stream=True)
        self._settings, self._base, self._by_residency, self._tries = settings, base, by_residency, tries
        self._places, self._keys = Places(settings.adapters, settings.allow_on_demand), Keys(settings.api_keys)
        self._limit_s = settings.load_timeout_s + settings.request_timeout_s + _GRACE_S

    async def __call__(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except ApiError as error:
            return error.response()

    async def _answer(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "").rstrip("/"))
        if path == "/health":
            return JSONResponse({"status": "ok"})
        if self._keys.client(request.headers.get("authorization", "").encode("latin-1") or None) is None:
            raise ApiError(401, "No valid API key. Send it as 'Authorization: Bearer <key>'.", "invalid_api_key")
        post = request.method == "POST" and path in _POSTS
        get = request.method == "GET" and (path in ("/ready", "/v1/models") or path.startswith("/v1/models/"))
        if not post and not get:
            raise ApiError(404, f"{request.method} {path} is not here: {', '.join(_POSTS)} and /v1/models are.")
        body = await self._body(request)
        headers = tuple(request.headers.raw)
        return await self._sent_on(Call(request.method, path, headers, body, self._adapter(body) if post else None))

    async def _body(self, request: Request) -> bytes:
        body, most = bytearray(), self._settings.max_body_bytes
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise ApiError(413, f"The request is larger than {most} bytes.", "too_large")
        return bytes(body)

    def _adapter(self, body: bytes) -> str | None:
        """The adapter that a body names, where there may be one of that name: replicas refuse all others."""
        try:
            name = json.loads(body)["model"]
        except (ValueError, RecursionError, LookupError, TypeError):
            return None
        if not isinstance(name, str) or not name.isprintable() or not name or name == self._base:
            return None
        allowed = self._places.in_folder(name) is not None or self._places.matches(name)
        return name if allowed or self._settings.resolvers else None

    async def _sent_on(self, call: Call) -> Response:
        from ray import exceptions
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

        lost = (exceptions.RayActorError, exceptions.WorkerCrashedError, ReplicaUnavailableError)
        to = self._replicas.options(multiplexed_model_id=call.adapter) if self._routed(call) else self._replicas
        for left in reversed(range(self._tries)):
            try:
                return await asyncio.wait_for(self._begun(to.http.remote(call)), self._limit_s)
            except lost as error:
                logger.warning("A replica was lost (%s); %d more are tried.", type(error).__name__, left)
                await asyncio.sleep(_AGAIN_S)  # until Serve knows
            except (asyncio.TimeoutError, TimeoutError) as error:
                raise ApiError(504, f"No replica has answered within {self._limit_s:g} s.", "timeout") from error
            except (BackPressureError, DeploymentUnavailableError) as error:
                raise unavailable(f"No replica takes the request: {type(error).__name__}.") from error
            except exceptions.RayError as error:
                logger.exception("A replica failed")
                raise ApiError(500, f"{type(error).__name__}: see the server's log.", "internal_error") from error
        raise unavailable(f"{self._tries} replicas were lost over this request. It was not answered.")

    def _routed(self, call: Call) -> bool:
        return self._by_residency and call.adapter is not None

    async def _begun(self, parts: Any) -> Response:
        """A whole answer, or a stream whose first event is there: until then another replica can begin anew."""
        try:
            head = await anext(parts)
            assert isinstance(head, Head)
            if not head.streamed:
                return Response(b"".join([part async for part in parts]), head.status, head.headers)
            first = await anext(parts, b"")
        except asyncio.CancelledError:
            parts.cancel()
            raise
        return StreamingResponse(self._relayed(first, parts), head.status, head.headers)

    async def _relayed(self, first: bytes, parts: Any) -> AsyncIterator[bytes]:
        from ray.exceptions import RayError

        try:
            yield first
            async for part in parts:
                yield part
        except RayError:
            error = unavailable("The replica that answered was lost; the answer is not whole.")
            yield b"data: " + json.dumps(error.body()).encode() + b"\n\n"
        except (asyncio.CancelledError, GeneratorExit):  # the client has gone
            parts.cancel()
            raise
