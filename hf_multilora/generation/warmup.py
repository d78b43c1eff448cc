"""Warm-up: generate() with dummy prompts, so that what it compiles or captures is there when requests come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ConfigError, ModelError
from .calls import Calls

PROMPT = 2
NEW = 4  # the prompt, then: compile or capture, record or verify, replay


def warm_up(model: Any, calls: Calls, rows: int | Sequence[int], max_length: int, options: dict[str, Any]) -> None:
    """Generate a few tokens for each number of rows, with adapters and without, with padding and without.

    Raises:
        ConfigError: a number of rows or a length that cannot be.
        ModelError: a model whose prompts are not token ids.
    """
    counts = [rows] if isinstance(rows, int) else list(rows)
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"rows={rows!r}: expected numbers of rows of at least 1.")
    if max_length < PROMPT + NEW:
        raise ConfigError(f"max_length={max_length}: expected at least {PROMPT + NEW} tokens.")
    if not hasattr(model, "generate") or model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
        raise ModelError("Warm-up runs generate() of decoder-only models that take input_ids.")
    settings = {
        "cache_implementation": "static",
        "max_cache_len": max_length - 1,  # the last token is not cached
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "num_beams": 1,
        "num_return_sequences": 1,
        **options,
    }
    for count in sorted(counts, reverse=True):  # the largest first: what is reserved for it serves the others
        for active in (True, False):
            for padded in (False, True):
                ids = torch.ones(count, PROMPT, dtype=torch.long, device=model.device)
                mask = torch.ones_like(ids)
                if padded:
                    mask[:, 0] = 0
                with calls.rehearsal(count, active):
                    model.generate(input_ids=ids, attention_mask=mask, **settings)
