"""aLoRA: an adapter that is active from its invocation tokens on; what lies before them is the base model's.

As in PEFT the prompt alone invokes: the last occurrence of the tokens counts, and a prompt without them leaves its row
to the base model.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Activated:
    """KV tag of a row under an aLoRA: its adapter, and the position from which on it was active."""

    tag: Hashable
    start: int


def last_occurrence(prompt: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Where `tokens` begin in `prompt` for the last time, or None.

    Example:
        >>> last_occurrence([5, 1, 2, 5, 1, 2, 9], [1, 2])
        4
        >>> last_occurrence([5, 1], [1, 2]) is None
        True
    """
    n = len(tokens)
    for start in range(len(prompt) - n, -1, -1):
        if list(prompt[start : start + n]) == list(tokens):
            return start
    return None


def invocations(input_ids: torch.Tensor, wanted: Sequence[Sequence[int] | None]) -> list[int | None]:
    """Start of each row's invocation in `input_ids` `[rows, tokens]`; rows without one wanted start at 0.

    Returns:
        list: position of the first invocation token, 0 for rows that need none, None where they were not found.
    """
    rows = input_ids.tolist()
    return [0 if not tokens else last_occurrence(row, tokens) for row, tokens in zip(rows, wanted, strict=True)]
