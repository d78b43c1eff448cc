"""Requests that travel between Serve's deployments, and an app that answers them without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

STREAM = "text/event-stream"


@dataclass(frozen=True)
class Call:
    """A request.

    Args:
        adapter: that it is for, where that may be loaded by this name; None: the base, or nothing that exists.
        headers: in lower case.
    """

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    adapter: str | None = None


@dataclass(frozen=True)
class Head:
    """The beginning of an answer; its body follows in pieces."""

    status: int
    headers: dict[str, str]

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith(STREAM)


async def respond(app: Any, call: Call) -> AsyncGenerator[Head | bytes, None]:
    """A head, then the body's pieces. An app whose answer nobody reads to its end is cancelled.

    Args:
        app: ASGI.
    """
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "scheme": "http",
        "method": call.method, "path": call.path, "raw_path": call.path.encode(), "root_path": "", "query_string": b"",
        "headers": list(call.headers), "server": None, "client": None, "state": {},
    }  # fmt: skip
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    given = False

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            await asyncio.Event().wait()  # there is no connection that could close
        given = True
        return {"type": "http.request", "body": call.body, "more_body": False}

    task = asyncio.create_task(app(scope, receive, sent.put))
    task.add_done_callback(lambda _: sent.put_nowait({"type": "end"}))
    try:
        while (message := await sent.get())["type"] != "end":
            if message["type"] == "http.response.start":
                yield Head(
                    message["status"], {n.decode("latin-1"): v.decode("latin-1") for n, v in message["headers"]}
                )
            elif message.get("body"):
                yield message["body"]
        await task
    finally:
        task.cancel()
        await asyncio.wait({task})
