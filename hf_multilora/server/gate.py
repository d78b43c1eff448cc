"""In front of the app: the API key, and the size of the body. Plain ASGI, so that it sees disconnects as they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import HTTPException

from .clients import Keys
from .problems import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# What an orchestrator asks without a key, and the page that asks for one.
OPEN = frozenset({"/", "/health", "/ready", "/metrics"})


class Gate:
    """Refuses what bears no key (401) or is too large (413) before anything of it is parsed.

    Args:
        told: called with the status of each refusal that the app does not see.
    """

    def __init__(self, app: Any, keys: Keys, max_body_bytes: int, told: Callable[[int], None]) -> None:
        self._app, self._keys, self._most, self._told = app, keys, max_body_bytes, told

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if scope["path"] not in OPEN:
            client = self._keys.client(headers.get(b"authorization"))
            if client is None:
                error = ApiError(401, "No valid API key. Send it as 'Authorization: Bearer <key>'.", "invalid_api_key")
                self._told(error.status)
                await error.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["client"] = client
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._most:
            self._told(413)
            await self._too_large().response({"Connection": "close"})(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise HTTPException(413, self._too_large().message)
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The request is larger than {self._most} bytes.", "too_large")
