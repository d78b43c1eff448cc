"""The file of prompts: one JSON object a line, all of them checked before anything is loaded.

A line has "prompt" (a text) or "messages" (a chat), and may have "adapter" (a name; null or none: the base) and
"max_new_tokens". Whatever else it has is given back with the answer.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..errors import ConfigError, MultiLoraError, closest

ANSWER = ("text", "tokens", "finish_reason", "error")  # what an answer adds to its line's fields
_SHOWN = 10  # problems of one file


@dataclass(frozen=True)
class Line:
    """One line.

    Args:
        number: from 1.
        fields: as they came.
    """

    number: int
    fields: dict[str, Any]

    @property
    def adapter(self) -> str | None:
        return self.fields.get("adapter")


class Lines:
    """The lines of a file that is read more than once; empty ones are passed over.

    Args:
        file: binary and seekable.
        name: of the file, for errors.
        known: raises MultiLoraError for an adapter that there cannot be.

    Attributes:
        count: lines that are not empty.
        last: number of the last line.
        sha256: of the whole file, in hexadecimal.
        chats: whether any line has messages.

    Raises:
        ConfigError: lines that cannot be answered, each with the name of the file and its number.
    """

    def __init__(self, file: BinaryIO, name: str, known: Callable[[str], Any]) -> None:
        self._file, self._name = file, name
        self.count, self.last, self.sha256, self.chats = 0, 0, "", False
        problems: list[str] = []
        for number, raw in self._raw():
            self.count, self.last = self.count + 1, number
            try:
                fields = parse(raw)
                if fields.get("adapter") is not None:
                    known(fields["adapter"])
            except (ValueError, MultiLoraError) as error:
                problems.append(f"{name}:{number}: {error}")
                if len(problems) == _SHOWN:
                    problems.append(f"There may be others: these are the first {_SHOWN}.")
                    break
            else:
                self.chats = self.chats or "messages" in fields
        if problems:
            raise ConfigError("\n".join(problems))
        if not self.count:
            raise ConfigError(f"{name} holds no line.")

    def __iter__(self) -> Iterator[Line]:
        """All lines, read again. Raises: ConfigError where the file has changed since."""
        before = self.sha256
        for number, raw in self._raw():
            try:
                yield Line(number, parse(raw))
            except ValueError as error:
                raise ConfigError(f"{self._name}:{number}: {error} The file has changed meanwhile.") from error
        if self.sha256 != before:
            raise ConfigError(f"{self._name} has changed while it was being answered.")

    def _raw(self) -> Iterator[tuple[int, bytes]]:
        digest = hashlib.sha256()
        self._file.seek(0)
        for number, raw in enumerate(self._file, 1):
            digest.update(raw)
            if raw.strip():
                yield number, raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        self.sha256 = digest.hexdigest()


def parse(raw: bytes) -> dict[str, Any]:
    """The fields of a line.

    >>> parse(b'{"prompt": "Who?", "adapter": "sql", "id": 7}')
    {'prompt': 'Who?', 'adapter': 'sql', 'id': 7}

    Raises:
        ValueError: it is no request; the message says what is wrong.
    """
    try:
        fields = json.loads(raw.decode(), parse_constant=_no_number, object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 from byte {error.start + 1} on.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at column {error.colno}.") from None
    except RecursionError:
        raise ValueError("it is nested too deeply.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, not {_kind(fields)}.")
    check(fields)
    check_names(fields)
    return fields


def check(fields: dict[str, Any]) -> None:
    """Raises: ValueError where these fields are no request; the message says what is wrong."""
    _check_prompt(fields)
    name = fields.get("adapter")
    if name is not None and not isinstance(name, str):
        raise ValueError(f'"adapter": expected a name or null, not {_kind(name)}.')
    if name == "":
        raise ValueError('"adapter" is empty. null is the base model.')
    limit = fields.get("max_new_tokens")
    if "max_new_tokens" in fields and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError('"max_new_tokens": expected a whole number of at least 1.')
    try:
        json.dumps(fields, ensure_ascii=False, allow_nan=False, default=str).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a character (a lone surrogate).") from None
    except ValueError:
        raise ValueError("it holds a number that is too large.") from None


def check_names(names: Collection[str]) -> None:
    """Raises: ValueError where the names of a request's fields cannot be meant."""
    if "adapter" not in names:
        # Given back unread, a misspelt field would be an answer of the base model that nobody asked for.
        like = next((name for name in names if _misspelt(name)), None)
        if like is not None:
            raise ValueError(f'"{like}" names no adapter: "adapter" does. Rename it, or say "adapter": null.')
    taken = [f'"{name}"' for name in ANSWER if name in names]
    if taken:
        raise ValueError(f"{', '.join(taken)}: the answer will have a field of that name. Rename it.")


def _check_prompt(fields: dict[str, Any]) -> None:
    if ("prompt" in fields) == ("messages" in fields):
        both = "both of them" if "prompt" in fields else "neither"
        near = "" if both != "neither" else closest("prompt", fields)
        raise ValueError(f'expected "prompt" or "messages"; there is {both}.{near}')
    if "prompt" in fields:
        if not isinstance(fields["prompt"], str):
            raise ValueError(f'"prompt": expected a text, not {_kind(fields["prompt"])}.')
        if not fields["prompt"]:
            raise ValueError('"prompt" is empty.')
        return
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages": expected a list of messages.')
    for place, message in enumerate(messages):
        for name in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(name), str):
                raise ValueError(f'"messages", {place}: expected an object with the texts "role" and "content".')


def _misspelt(field: str) -> bool:
    """Whether a field was probably to be "adapter".

    >>> [_misspelt(field) for field in ("adaptor", "Adapter", "adapter_name", "lora", "chapter", "id")]
    [True, True, True, True, False, False]
    """
    plain = field.lower()
    return plain.startswith(("adapter", "adaptor")) or plain in ("lora", "lora_name", "lora_path")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Of a field that comes twice json would take the last one, and another adapter than was meant."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f'"{next(name for name in names if names.count(name) > 1)}" comes twice.')
    return fields


def _no_number(text: str) -> None:
    raise ValueError(f"no JSON: {text} is no number.")


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    return "null" if value is None else kinds.get(type(value), "an object")
