"""From a validated request to its answer: prompts to tokens, requests of the engine, their text, their usage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from jinja2 import TemplateError

from .clients import Shares
from .engine import Engine
from .metrics import Metrics
from .problems import ApiError, unavailable
from .protocol import ChatRequest, CompletionRequest, Finish, Generation, Usage
from .resolve import Resolver
from .settings import Settings
from .text import Detokenizer, Stops
from .tickets import Sampling, Ticket

_COMPLETION_TOKENS = 16  # OpenAI's default


@dataclass
class Choice:
    """One answer while it comes."""

    ticket: Ticket
    detokenizer: Detokenizer
    stops: Stops
    eos: frozenset[int]
    seen: int = 0  # tokens
    text: str = ""
    finish: Finish | None = None

    async def pieces(self) -> AsyncGenerator[str, None]:
        """The text as it comes, until `finish` is known. Raises: ApiError where the request failed."""
        while self.finish is None:
            tokens = await self.ticket.news()
            ended, spoken = self.ticket.ended, len(tokens)
            by_eos = ended and bool(tokens) and tokens[-1] in self.eos
            piece = self.stops.feed(self.detokenizer.feed(tokens[: spoken - by_eos], end=ended), end=ended)
            self.seen = spoken
            if self.stops.found:
                self.finish = "stop"
                self.ticket.cancel()
            elif ended:
                self.finish = "stop" if by_eos else "length"
            self.text += piece
            if piece:
                yield piece


@dataclass
class Job:
    """All answers to one request."""

    adapter: str | None
    prompt_tokens: int
    deadline: float  # on the event loop's clock
    timeout_s: float
    choices: list[Choice] = field(default_factory=list)
    outcome: str = "cancelled"

    def usage(self) -> Usage:
        new = sum(choice.seen for choice in self.choices)
        total = self.prompt_tokens + new
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=new, total_tokens=total)

    async def finish(self) -> None:
        """Wait for all answers. Raises: ApiError of the first that failed, or 504."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass

    async def events(self) -> AsyncGenerator[tuple[int, str], None]:
        """(index, text) of whichever answer has news, until all are finished; an empty text at the end of each.

        Raises:
            ApiError: one of them failed, or took too long.
        """
        timer = asyncio.get_running_loop().call_at(self.deadline, self._expire)
        try:
            if len(self.choices) == 1:  # the usual case needs no task of its own
                async with aclosing(self.choices[0].pieces()) as pieces:
                    async for piece in pieces:
                        yield 0, piece
                yield 0, ""
            else:
                async with aclosing(self._merged()) as items:
                    async for item in items:
                        yield item
            self.outcome = "ok"
        except ApiError:
            self.outcome = "timeout" if self.outcome == "timeout" else "failed"
            raise
        finally:
            timer.cancel()

    async def _merged(self) -> AsyncGenerator[tuple[int, str], None]:
        queue: asyncio.Queue[tuple[int, str] | Exception] = asyncio.Queue(maxsize=1)

        async def follow(index: int, choice: Choice) -> None:
            try:
                async for piece in choice.pieces():
                    await queue.put((index, piece))
                await queue.put((index, ""))
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(follow(index, choice)) for index, choice in enumerate(self.choices)]
        left = len(tasks)
        try:
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                left -= not item[1]
                yield item
        finally:
            for task in tasks:
                task.cancel()

    def _expire(self) -> None:
        self.outcome = "timeout"
        for choice in self.choices:
            choice.ticket.cancel(ApiError(504, f"No answer within {self.timeout_s:g} s.", "timeout"))


class Answers:
    """Makes jobs of requests, within the limits."""

    def __init__(self, engine: Engine, settings: Settings, resolver: Resolver, metrics: Metrics) -> None:
        self.engine, self.settings, self.resolver, self.metrics = engine, settings, resolver, metrics
        self._shares = Shares(settings)
        self.max_len = min(engine.context, settings.max_model_len or engine.context)

    @asynccontextmanager
    async def job(self, request: ChatRequest | CompletionRequest, client: str) -> AsyncIterator[Job]:
        """The running answers of a request; what has not ended at the end of the block is cancelled.

        Raises:
            ApiError: 400 a request that cannot be served, 404 no such model, 429 and 503 beyond a limit.
        """
        began = asyncio.get_running_loop().time()
        count = request.choices * (len(request.prompts) if isinstance(request, CompletionRequest) else 1)
        if count > self.settings.max_choices:
            raise ApiError(400, f"{count} answers in one request; at most {self.settings.max_choices}.", None, "n")
        prompts = await self.engine.quickly(self._prompts, request)
        longest = [self._longest(request, len(prompt)) for prompt in prompts]
        timeout = self.settings.request_timeout_s
        eos = frozenset() if request.ignore_eos else frozenset(self.engine.eos)
        async with AsyncExitStack() as stack:
            adapter = await self._adapter(stack, request.model, client)
            if self.engine.in_work + count > self.settings.max_queue:
                raise unavailable(
                    f"{self.engine.in_work} answers are in work or waiting; the limit is {self.settings.max_queue}."
                )
            job = Job(adapter, sum(map(len, prompts)), began + timeout, timeout)
            try:
                for prompt, most in zip(prompts, longest, strict=True):
                    sampling = self._sampling(request, most)
                    for _ in range(request.choices):
                        ticket = await stack.enter_async_context(await self.engine.submit(prompt, adapter, sampling))
                        detokenizer, stops = Detokenizer(self.engine.decoder()), Stops(request.stops)
                        job.choices.append(Choice(ticket, detokenizer, stops, eos))
                yield job
            except ApiError:
                job.outcome = job.outcome if job.outcome == "timeout" else "failed"
                raise
            finally:
                tickets = [choice.ticket for choice in job.choices]
                self.metrics.ended(adapter, job.outcome, job.prompt_tokens, tickets)

    async def _adapter(self, stack: AsyncExitStack, name: str, client: str) -> str | None:
        """The adapter of a request, registered until the stack is closed."""
        if name == self.resolver.base:
            return None
        new = self._shares.take(client, name)
        try:
            return await stack.enter_async_context(self.resolver.use(name))
        except ApiError:
            if new:  # what does not exist is nobody's
                self._shares.give_back(client, name)
            raise

    def _sampling(self, request: Generation, most: int) -> Sampling:
        return Sampling(
            max_tokens=most,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(request.top_k or 0, 0),
            stream=bool(request.stream or request.stops),
            ignore_eos=bool(request.ignore_eos),
        )

    def _longest(self, request: ChatRequest | CompletionRequest, prompt: int) -> int:
        """Tokens of an answer's limit. Raises: ApiError where there is no room for it."""
        room = self.max_len - prompt
        wanted = request.longest
        if wanted is None:
            default = None if isinstance(request, ChatRequest) else _COMPLETION_TOKENS
            wanted = min(self.settings.default_max_tokens or default or room, room)
        if room < 1 or wanted > room:
            field = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise ApiError(
                400,
                f"The prompt has {prompt} tokens and the answer up to {max(wanted, 1)}: together more than the "
                f"{self.max_len} that there is room for. Shorten the prompt, or lower max_tokens.",
                "context_length_exceeded",
                field,
            )
        return wanted

    # -- prompts

    def _prompts(self, request: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Token ids of each prompt. Raises: ApiError for what cannot be one."""
        if isinstance(request, ChatRequest):
            return [self._checked(self._chat(request), "messages")]
        prompts = request.prompts
        return [self._checked(self._encode(p) if isinstance(p, str) else p, "prompt") for p in prompts]

    def _encode(self, text: str, special: bool = True) -> list[int]:
        # A token has at most some ten characters on average; what is far beyond is not worth encoding.
        if len(text) > 64 * self.max_len:
            raise ApiError(
                400, f"The prompt has {len(text)} characters; there is room for {self.max_len} tokens.",
                "context_length_exceeded", "prompt",
            )  # fmt: skip
        text.encode()  # half a character raises here, and not as whatever the tokenizer makes of it
        return list(self.engine.tokenizer(text, add_special_tokens=special)["input_ids"])

    def _chat(self, request: ChatRequest) -> list[int]:
        tokenizer = self.engine.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ApiError(
                400, "The model's tokenizer has no chat template. Use /v1/completions.", "no_chat_template", "messages"
            )
        messages = [message.for_template() for message in request.messages]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError) as error:
            raise ApiError(
                400, f"The model's chat template refuses these messages: {error}", "chat_template", "messages"
            ) from error
        return self._encode(text, special=False)

    def _checked(self, tokens: Sequence[int], param: str) -> list[int]:
        if not tokens:
            raise ApiError(400, f"{param}: the prompt has no tokens.", "empty_prompt", param)
        if max(tokens) >= self.engine.vocab_size:
            raise ApiError(
                400,
                f"{param}: token {max(tokens)} is beyond the model's vocabulary of {self.engine.vocab_size} tokens.",
                "unknown_token",
                param,
            )
        return list(tokens)
