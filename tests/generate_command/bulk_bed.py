"""A tiny model and its adapters (`tiny_files`), files of prompts, and what each line is answered alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import tiny_files
import torch
from tiny_files import alone, chat_prompt, tokenizer, version, write_adapter
from transformers import LlamaForCausalLM

__all__ = ["chat_prompt", "tokenizer", "version", "write_adapter"]

# Two requests in a batch: answers come one after the other, and what runs at once is little.
SMALL = ("--num-blocks", "32", "--block-tokens", "16", "--max-batch-tokens", "64", "--max-requests", "2")
ENDS = 2.0


def build() -> LlamaForCausalLM:
    """The base model; it ends now and then."""
    return tiny_files.build(ENDS)


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """A file of prompts: objects as JSON, texts as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def piped(content: bytes) -> TextIO:
    """A pipe that gives this, and then ends."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as end:
        end.write(content)
    return os.fdopen(reading)


@cache
def answer(prompt: str, number: int | None, new: int) -> dict[str, Any]:
    """What generate() answers to a plain prompt, greedily, as a line of the output has it."""
    ids = torch.tensor([tokenizer()(prompt)["input_ids"]])
    out = alone(number, ENDS).generate(ids, do_sample=False, max_new_tokens=new, attention_mask=torch.ones_like(ids))
    tokens = out[0, ids.shape[1] :].tolist()
    text = tokenizer().decode(tokens, skip_special_tokens=True)
    return {"text": text, "tokens": len(tokens), "finish_reason": "stop" if tokens[-1] == 257 else "length"}
