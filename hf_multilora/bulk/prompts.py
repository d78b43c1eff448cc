"""The token ids of lines' prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from ..errors import ConfigError, ModelError
from .lines import Line


def check_template(tokenizer: Any, name: str) -> None:
    """Raises: ModelError where the tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(f'The tokenizer of {name!r} has no chat template: it takes no "messages" and no --chat.')


class Prompts:
    """Token ids of prompts.

    Args:
        chat: prompts are a user's message in a chat.
        vocabulary: tokens that the model has.
        room: tokens of a prompt and its answer together, at most.
    """

    def __init__(self, tokenizer: Any, chat: bool, vocabulary: int, room: int) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._vocabulary, self._room = vocabulary, room

    def tokens(self, line: Line, longest: int) -> list[int]:
        """The prompt of a line.

        Args:
            longest: new tokens of its answer, at most.

        Raises:
            ConfigError: it cannot be answered.
        """
        messages = line.fields.get("messages")
        if messages is None and self._chat:
            messages = [{"role": "user", "content": line.fields["prompt"]}]
        text = line.fields["prompt"] if messages is None else self._template(messages)
        # A template brings its own special tokens.
        tokens = list(self._tokenizer(text, add_special_tokens=messages is None)["input_ids"])
        self._check(tokens, longest)
        return tokens

    def _template(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError) as error:
            raise ConfigError(f"The model's chat template refuses these messages: {error}") from error

    def _check(self, tokens: Sequence[int], longest: int) -> None:
        if not tokens:
            raise ConfigError("The prompt has no tokens.")
        if max(tokens) >= self._vocabulary:
            raise ConfigError(f"Token {max(tokens)} is beyond the model's vocabulary of {self._vocabulary} tokens.")
        if len(tokens) + longest > self._room:
            raise ConfigError(
                f"The prompt has {len(tokens)} tokens and the answer up to {longest}: together more than the "
                f"{self._room} that there is room for. Shorten the prompt, or lower max_new_tokens."
            )
