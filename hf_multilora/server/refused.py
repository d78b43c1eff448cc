"""Fields of OpenAI's API that continuous batching cannot honour: their neutral values pass, any other is refused.

Clients send many of them with neutral values, which change nothing; those are taken out before validation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic_core import PydanticCustomError

from ..errors import closest

_NO_SEEDS = "requests share batches, whose sampling has one stream of random numbers"
_NO_LOGPROBS = "the engine returns tokens without their probabilities"
_NO_TOOLS = "the server neither constrains nor parses tool calls"
_NO_HISTORY = "the engine's sampler does not see a request's earlier tokens"
_TEXT_ONLY = "the server answers text with text"
_NOT_STORED = "nothing is stored"

Refusals = dict[str, tuple[tuple[Any, ...], str]]  # field -> values that change nothing, why others cannot be honoured

COMMON: Refusals = {
    "seed": ((), _NO_SEEDS),
    "logit_bias": (({},), _NO_HISTORY),
    "presence_penalty": ((0,), _NO_HISTORY),
    "frequency_penalty": ((0,), _NO_HISTORY),
    "repetition_penalty": ((1,), _NO_HISTORY),
    "min_p": ((0,), "the engine samples by temperature, top_p and top_k"),
    "best_of": ((1,), "answers cannot be ranked without their probabilities; use n"),
    "guided_json": ((), "the server does not constrain answers"),
    "guided_regex": ((), "the server does not constrain answers"),
}
CHAT: Refusals = {
    "logprobs": ((False,), _NO_LOGPROBS),
    "top_logprobs": ((0,), _NO_LOGPROBS),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none",), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none",), _NO_TOOLS),
    "response_format": (
        ({"type": "text"},),
        "the server does not constrain answers; only {'type': 'text'} is possible",
    ),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "prediction": ((), "the server has no predicted outputs"),
    "reasoning_effort": ((), "the model has no levels of effort"),
    "verbosity": ((), "the model has no levels of verbosity"),
    "web_search_options": ((), "the server searches nothing"),
    "store": ((False,), _NOT_STORED),
    "metadata": (({},), _NOT_STORED),
    "service_tier": (("auto", "default"), "the server has one tier"),
}
COMPLETION: Refusals = {
    "logprobs": ((), _NO_LOGPROBS),
    "echo": ((False,), "answers hold new text alone"),
    "suffix": (("",), "the server does not fill in the middle"),
}


def check(refusals: Refusals) -> Callable[[Any, Any], Any]:
    """A validator (before others) that takes neutral values out, and refuses the rest by name."""

    def validator(cls: Any, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name not in refusals:
                kept[name] = value
                if name not in cls.model_fields:
                    near = closest(name, cls.model_fields)
                    raise PydanticCustomError(
                        "unknown", "{field}: no such field.{near}", {"field": name, "near": near}
                    )
                continue
            neutral, why = refusals[name]
            if value is not None and not any(_same(value, other) for other in neutral):
                raise PydanticCustomError(
                    "unsupported", "{field} is not supported: {why}.", {"field": name, "why": why}
                )
        return kept

    return validator


def _same(value: Any, other: Any) -> bool:
    """Equal, and both of them truth values or neither."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
