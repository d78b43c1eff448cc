"""One request in work: how it is sampled, and what has come of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .problems import ApiError

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class Sampling:
    """How one answer is sampled.

    Args:
        max_tokens: the longest answer.
        temperature: 0: greedy.
        top_k: 0: all tokens.
        stream: whether tokens are told as they come.
        ignore_eos: go on after the end token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stream: bool = False
    ignore_eos: bool = False


class Ticket:
    """One request in work; an asynchronous context that cancels what has not ended.

    Attributes:
        tokens: generated so far.
        ended: whether there will be no others.
        first_s, last_s: `time.perf_counter()` of the first and the newest token; None where there is none yet.
        error: why it failed.
    """

    def __init__(self, engine: Engine, request_id: str, adapter: str | None) -> None:
        self.request_id, self.adapter = request_id, adapter
        self.tokens: list[int] = []
        self.ended = False
        self.error: ApiError | None = None
        self.created_s = time.perf_counter()
        self.first_s: float | None = None
        self.last_s: float | None = None
        self._engine, self._news = engine, asyncio.Event()

    async def news(self) -> list[int]:
        """Wait for tokens that were not there at the last call, or for the end; returns all tokens so far.

        Raises:
            ApiError: the request failed.
        """
        await self._news.wait()
        if not self.ended:
            self._news.clear()
        if self.error is not None:
            raise self.error
        return self.tokens

    def cancel(self, why: ApiError | None = None) -> None:
        """Let go of a request that has not ended; nothing otherwise. Whoever waits for it gets the error."""
        self._engine.cancel(self, why)

    def take(self, output: Any) -> None:
        """A result of the manager's, on the event loop."""
        if self.ended:
            return
        fresh = len(output.generated_tokens) > len(self.tokens)
        self.tokens = output.generated_tokens
        if fresh:
            self.last_s = time.perf_counter()
            times = output.timestamps
            self.first_s = self.first_s or (times[0] if times else self.last_s)
        if output.is_finished():
            self._engine.close(self, None if output.error is None else self._engine.failure(self, output.error))
        self._news.set()

    def end(self, error: ApiError | None) -> None:
        if not self.ended:
            self.ended, self.error = True, error
            self._news.set()

    async def __aenter__(self) -> Ticket:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
