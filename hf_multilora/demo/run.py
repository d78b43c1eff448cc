"""The demo itself: every prompt through the base model and every adapter, first in one mixed batch, then in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..api import enable_multilora
from ..report import Status
from . import ADAPTER_NAMES, ADAPTERS
from .chats import answers, chat

PROMPTS = (
    "The bicycle arrived late and scratched.",
    "Best pizza in town, friendly staff too.",
    "My brother has a house and a boat.",
    "Stop! The boy found the old map.",
    "What is the capital of Germany?",
)
COLUMNS: tuple[str | None, ...] = (None, *ADAPTER_NAMES)  # None is the base model


@dataclass
class DemoResult:
    """Answers and times of one run. Both times are of `generate()` alone, after a short warm-up of either kind."""

    prompts: list[str]
    columns: list[str]  # "base" and the adapters' names
    answers: list[list[str]]  # [prompt][column], from the mixed batch
    mixed_seconds: float  # all rows in one batch
    turns_seconds: float  # the same rows, one batch for each column after another
    same_answers: int  # rows whose two texts are equal
    max_new_tokens: int
    conditions: dict[str, Any]
    status: Status

    @property
    def rows(self) -> int:
        return len(self.prompts) * len(self.columns)

    def to_dict(self) -> dict[str, Any]:
        return {**{k: v for k, v in vars(self).items() if k != "status"}, "status": self.status.to_dict()}


def run_demo(
    folder: Path,
    prompts: Sequence[str] = PROMPTS,
    max_new_tokens: int = 24,
    progress: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> DemoResult:
    """Load the base model in `folder` and the three adapters, answer, and time.

    Runs on a GPU where there is one. In float32, where the text of a row does not depend on how it was batched; in
    bfloat16 padding alone can turn a close decision of a model this small.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    progress("Loading the base model", 0, 0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=device)
    model = enable_multilora(base.eval(), max_loras=4, max_lora_rank=8)
    for done, name in enumerate(ADAPTER_NAMES):
        progress("Loading adapters", done, len(ADAPTER_NAMES))
        model.multilora.load(ADAPTERS / name, name)

    def answer(rows: list[str], ids: list[str | None], tokens: int) -> list[str]:
        inputs = chat(tokenizer, rows).to(device)
        out = model.generate(**inputs, adapter_ids=ids, max_new_tokens=tokens, do_sample=False)
        return answers(tokenizer, inputs, out)

    def mixed(tokens: int) -> list[str]:
        rows = [prompt for prompt in prompts for _ in COLUMNS]
        return answer(rows, list(COLUMNS) * len(prompts), tokens)

    def in_turn(tokens: int) -> list[str]:
        turns = [answer(list(prompts), [column] * len(prompts), tokens) for column in COLUMNS]
        return [turn[i] for i in range(len(prompts)) for turn in turns]

    progress("Warming up", 0, 0)
    mixed(2)
    in_turn(2)
    progress(f"Answering {len(prompts) * len(COLUMNS)} rows in one batch", 0, 0)
    texts, mixed_seconds = _timed(mixed, max_new_tokens)
    progress("Answering the same rows, one adapter after another", 0, 0)
    again, turns_seconds = _timed(in_turn, max_new_tokens)
    width = len(COLUMNS)
    return DemoResult(
        prompts=list(prompts),
        columns=[column or "base" for column in COLUMNS],
        answers=[texts[i * width : (i + 1) * width] for i in range(len(prompts))],
        mixed_seconds=mixed_seconds,
        turns_seconds=turns_seconds,
        same_answers=sum(a == b for a, b in zip(texts, again, strict=True)),
        max_new_tokens=max_new_tokens,
        conditions=_conditions(device),
        status=model.multilora.status(),
    )


def _timed(answer: Callable[[int], list[str]], tokens: int) -> tuple[list[str], float]:
    start = time.perf_counter()
    texts = answer(tokens)  # the texts are on the host, so nothing is left to wait for
    return texts, time.perf_counter() - start


def _conditions(device: str) -> dict[str, Any]:
    return {
        "model": "SmolLM2-135M-Instruct",
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "dtype": "float32",
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }
