"""Requests and answers of OpenAI's API, as far as continuous batching can honour them.

Fields that it cannot honour are refused by name (`refused`), unknown ones as unknown; none is ignored.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from .refused import CHAT, COMMON, COMPLETION, check

MAX_STOPS = 4
Name = Annotated[str, Field(min_length=1, max_length=512)]
Count = Annotated[int, Field(ge=1, le=1 << 30, strict=True)]
TokenId = Annotated[int, Field(ge=0, le=1 << 31, strict=True)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Strict):
    include_usage: StrictBool = False
    include_obfuscation: Literal[False] | None = None


class Generation(Strict):
    """What both kinds of request have in common. `top_k` and `ignore_eos` are extensions, as vLLM has them."""

    model: Name = Field(description="An adapter's name, or the base model's.")
    n: Annotated[int, Field(ge=1, le=128, strict=True)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, strict=True)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 30, strict=True)] | None = None
    ignore_eos: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def longest(self) -> int | None:
        """Tokens of the longest answer that is wanted; None: not said."""
        return self.max_tokens

    @property
    def usage_streamed(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _fits(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed together with stream=true.")
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: Annotated[str, Field(max_length=256)] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: one text. `developer` is OpenAI's newer word for `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text, **({"name": self.name} if self.name is not None else {})}


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None

    _refuse = model_validator(mode="before")(check({**COMMON, **CHAT}))

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_tokens and max_completion_tokens: the same limit twice, with two values. Give one.")
        return self


class CompletionRequest(Generation):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )

    _refuse = model_validator(mode="before")(check({**COMMON, **COMPLETION}))

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One text, or list of token ids, for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class AdapterName(Strict):
    lora_name: Name


class LoadAdapter(AdapterName):
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: StrictBool = Field(False, description="Replace an adapter of this name.")


class ReloadAdapter(AdapterName):
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None


class PinAdapter(AdapterName):
    pinned: StrictBool = True


class AdapterAnswer(BaseModel):
    id: str
    object: Literal["lora_adapter"] = "lora_adapter"
    message: str
    generation: int | None = None
    rank: int | None = None
    warnings: list[str] = []


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


Finish = Literal["stop", "length"]


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    finish_reason: Finish
    logprobs: None = None


class TextChoice(BaseModel):
    index: int
    text: str
    finish_reason: Finish
    logprobs: None = None


class Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage


class ChatAnswer(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class TextAnswer(Answer):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "hf_multilora"
    root: str
    parent: str | None = Field(description="None for the base, the base's id for an adapter.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())
