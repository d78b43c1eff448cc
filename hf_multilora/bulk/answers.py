"""Answering lines through continuous batching: a window of them at a time, each under its own adapter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from ..base_model import end_tokens
from ..errors import ModelError, MultiLoraError
from ..generation.continuous.options import batching_config, cache_tokens
from .adapters import Place
from .lines import Line
from .partial import Answer
from .prompts import Prompts

_WAIT_S = 1.0  # between two looks at the generation thread


@dataclass(frozen=True)
class Sampling:
    """How answers are made.

    Args:
        max_new_tokens: of an answer, where its line does not say.
        temperature: 0: greedy.
        top_k: 0: all tokens.
        chat: prompts are a user's message in a chat.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    chat: bool = False

    def config(self, eos: list[int]) -> GenerationConfig:
        common = {"max_new_tokens": self.max_new_tokens, "eos_token_id": eos or -1}
        if self.temperature == 0:
            return GenerationConfig(do_sample=False, **common)
        return GenerationConfig(
            do_sample=True, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, **common
        )


@contextmanager
def answering(
    model: Any, tokenizer: Any, sampling: Sampling, batching: Mapping[str, int | None]
) -> Iterator[Answering]:
    """A running generation thread, which ends with the block.

    Args:
        model: enabled.
        batching: see `batching_config`.

    Raises:
        ModelError: nothing can be answered.
    """
    eos = end_tokens(model, tokenizer)
    with _manager(model, sampling.config(eos), batching) as manager:
        yield Answering(manager, model, tokenizer, sampling, eos)


class Answering:
    """Answers lines, as often as it is asked to, by one generation thread; made by `answering`."""

    def __init__(self, manager: Any, model: Any, tokenizer: Any, sampling: Sampling, eos: list[int]) -> None:
        settled = manager.continuous_batching_config
        room = cache_tokens(settled)
        room = min(room, getattr(model.config.get_text_config(), "max_position_embeddings", None) or room)
        self._prompts = Prompts(tokenizer, sampling.chat, model.get_input_embeddings().num_embeddings, room)
        self._manager, self._tokenizer, self._sampling, self._eos = manager, tokenizer, sampling, eos
        self._at_once = 2 * settled.max_requests_per_batch
        self._numbers = itertools.count()  # of requests: an id comes once, so that no late answer is taken for another

    def answers(
        self, lines: Iterable[Line], find: Callable[[str | None], Place]
    ) -> Generator[tuple[Line, Answer], None, None]:
        """Lines with their answers, as they finish.

        Lines are read as others finish: at most two batches of them are under way. An answer is {"text", "tokens"
        (their number, the end token among them), "finish_reason" ("stop" or "length")}, or {"error"}.

        Args:
            lines: of which those that are under way are given up where the iteration ends early.

        Raises:
            ModelError: nothing can be answered any more.
        """
        manager = self._manager
        under_way: dict[str, Line] = {}
        left = iter(lines)
        try:
            while True:
                while len(under_way) < self._at_once and (line := next(left, None)) is not None:
                    try:
                        under_way[self._ask(line, find(line.adapter))] = line
                    except MultiLoraError as error:
                        _check_alive(manager)
                        yield line, {"error": str(error)}
                if not under_way:
                    return
                output = manager.get_result(timeout=_WAIT_S)
                if output is None or output.error is not None:
                    _check_alive(manager, output and output.error)
                if output is not None and output.request_id in under_way:
                    yield under_way.pop(output.request_id), self._answer(output)
        finally:
            for request in under_way:
                manager.cancel_request(request)

    def _ask(self, line: Line, place: Place) -> str:
        """Add the request of a line; returns its id."""
        longest = line.fields.get("max_new_tokens", self._sampling.max_new_tokens)
        tokens = self._prompts.tokens(line, longest)
        request = self._manager.add_request(
            tokens, str(next(self._numbers)), max_new_tokens=longest, adapter_id=place.source or None
        )
        if request is None:
            raise ModelError("The request was not taken.")
        return request

    def _answer(self, output: Any) -> Answer:
        if output.error is not None:
            return {"error": str(output.error)}
        tokens = output.generated_tokens
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        reason = "stop" if tokens and tokens[-1] in self._eos else "length"
        return {"text": text, "tokens": len(tokens), "finish_reason": reason}


@contextmanager
def _manager(model: Any, config: GenerationConfig, batching: Mapping[str, int | None]) -> Iterator[Any]:
    """A running manager; what has not ended at the end of the block is given up at once."""
    try:
        manager = model.init_continuous_batching(config, continuous_batching_config=batching_config(**batching))
        manager.warmup()  # the cache is made here, so that what it lacks is known before the first request
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"Continuous batching cannot start: {error}") from error
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True, hard_stop=True)
        manager.destroy()


def _check_alive(manager: Any, why: str | None = None) -> None:
    """Raises: ModelError where the generation thread has ended, or is about to."""
    status = manager.background_thread_status
    # Requests are failed before the error is recorded.
    if status.can_accept_new_requests() is not None or not manager.is_running():
        reason = status.fatal_error or why or "it does not say why"
        raise ModelError(f"Generation has ended: {reason}.")
