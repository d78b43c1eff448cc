"""OpenAI's endpoints: models, chat completions and completions, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from sse_starlette import EventSourceResponse

from .answers import Answers, Choice, Job
from .clients import ANYBODY
from .problems import ApiError
from .protocol import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatRequest,
    CompletionRequest,
    ModelCard,
    ModelList,
    TextAnswer,
    TextChoice,
    new_id,
    now,
)

T = TypeVar("T")
_PING_S = 15
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


class Events(EventSourceResponse):
    """A stream that lets go of its job however it ends, also where the client has gone before the first event."""

    def __init__(self, events: AsyncIterator[bytes], stack: AsyncExitStack, send_timeout: float, grace: float) -> None:
        # While the server is being stopped, streams go on until they end or the engine fails them.
        super().__init__(events, ping=_PING_S, sep="\n", send_timeout=send_timeout, shutdown_grace_period=grace)
        self._stack = stack

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stack.aclose()


def router(answers: Answers, created: int) -> APIRouter:
    """The endpoints, for one engine."""
    routes, settings = APIRouter(prefix="/v1"), answers.settings

    @routes.get("/models", response_model=ModelList)
    def models() -> ModelList:  # in a thread, as the next: a load may hold the locks for a while
        """The base model, and each adapter that can be named."""
        return ModelList(data=[_card(answers, None, created), *(_card(answers, n, created) for n in _names(answers))])

    @routes.get("/models/{name:path}", response_model=ModelCard)
    def model(name: str) -> ModelCard:
        if name == answers.resolver.base:
            return _card(answers, None, created)
        if name not in _names(answers):
            raise answers.resolver.not_found(name)
        return _card(answers, name, created)

    @routes.post("/chat/completions", response_model=ChatAnswer, responses=_STREAMED)
    async def chat(body: ChatRequest, request: Request) -> Any:
        """An answer to a conversation."""
        return await answer(body, request)

    @routes.post("/completions", response_model=TextAnswer, responses=_STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Any:
        """A continuation of each prompt."""
        return await answer(body, request)

    async def answer(body: ChatRequest | CompletionRequest, request: Request) -> Any:
        client = getattr(request.state, "client", ANYBODY)
        stack = AsyncExitStack()
        handed_on = False
        try:
            job = await _unless_gone(request, stack.enter_async_context(answers.job(body, client)))
            if body.stream:
                events = _stream(body, job)
                handed_on = True
                return Events(events, stack, settings.send_timeout_s, settings.shutdown_timeout_s + 5)
            await _unless_gone(request, job.finish())
            return _whole(body, job)
        except _Gone:
            return Response(status_code=499)  # nobody reads it
        finally:
            if not handed_on:
                await stack.aclose()

    return routes


class _Gone(Exception):
    """The client has closed the connection."""


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await work; where the client goes away meanwhile, cancel it and raise."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    worker, watcher = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise _Gone
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


def _names(answers: Answers) -> list[str]:
    return answers.resolver.names()


def _card(answers: Answers, name: str | None, created: int) -> ModelCard:
    base = answers.resolver.base
    return ModelCard(id=name or base, created=created, root=name or base, parent=base if name else None)


def _whole(body: ChatRequest | CompletionRequest, job: Job) -> ChatAnswer | TextAnswer:
    common = {"created": now(), "model": body.model, "usage": job.usage()}
    if isinstance(body, ChatRequest):
        chosen = [
            ChatChoice(index=i, message=AnswerMessage(content=choice.text), finish_reason=_finish(choice))
            for i, choice in enumerate(job.choices)
        ]
        return ChatAnswer(id=new_id("chatcmpl"), choices=chosen, **common)  # type: ignore[arg-type]
    texts = [
        TextChoice(index=i, text=choice.text, finish_reason=_finish(choice)) for i, choice in enumerate(job.choices)
    ]
    return TextAnswer(id=new_id("cmpl"), choices=texts, **common)  # type: ignore[arg-type]


def _finish(choice: Choice) -> Any:
    assert choice.finish is not None
    return choice.finish


async def _stream(body: ChatRequest | CompletionRequest, job: Job) -> AsyncIterator[bytes]:
    """Server-sent events: a chunk for each piece of text, one with the finish reason, then the usage if asked for."""
    is_chat = isinstance(body, ChatRequest)
    head = {
        "id": new_id("chatcmpl" if is_chat else "cmpl"),
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": now(),
        "model": body.model,
    }
    usage = {"usage": None} if body.usage_streamed else {}

    def chunk(index: int, text: str | None, finish: str | None = None, **delta: Any) -> bytes:
        if is_chat:
            content = {**delta, **({} if text is None else {"content": text})}
            choice: dict[str, Any] = {"index": index, "delta": content}
        else:
            choice = {"index": index, "text": text or ""}
        return _event({**head, "choices": [{**choice, "logprobs": None, "finish_reason": finish}], **usage})

    try:
        if is_chat:
            for index in range(len(job.choices)):
                yield chunk(index, "", role="assistant")
        async with aclosing(job.events()) as pieces:
            async for index, text in pieces:
                yield chunk(index, text) if text else chunk(index, None, job.choices[index].finish)
        if body.usage_streamed:
            yield _event({**head, "choices": [], "usage": job.usage().model_dump()})
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield _event(error.body())


def _event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"
