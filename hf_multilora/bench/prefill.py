"""One forward over long prompts, the logits of each row's last position."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .measure import alternate, busy_ms, median_ratio, milliseconds
from .models import Models, ids
from .workload import BARE, prompts

GOALS = {0: 1.01, 16: 1.08}


@torch.no_grad()
def run_prefill(models: Models, tokens: int, seconds: float) -> Callable[[], None]:
    """`tokens` in all over `prefill_rows` rows, or as many as make rows of one length; returns what looks at the GPU's
    busy time afterwards."""
    settings = models.settings
    rows = settings.prefill_rows
    inputs = prompts(models.bare, rows, max(1, tokens // rows))
    tokens = inputs["input_ids"].numel()
    ours = models.ours()

    def forward(count: int | None) -> Callable[[], Any]:
        model, kwargs = (models.bare, {}) if count is None else (ours, {"adapter_ids": ids(rows, count)})
        return lambda: model(**inputs, use_cache=False, logits_to_keep=1, **kwargs)

    runs = {count: forward(count) for count in (None, *settings.prefill_adapters)}
    for run in runs.values():
        run(), run()

    def timed(run: Callable[[], Any]) -> Callable[[], float]:
        return lambda: milliseconds(run, settings.device)

    values = alternate(
        {count: timed(run) for count, run in runs.items()}, settings.reps + 4, time.monotonic() + seconds
    )
    base = values[None]
    names = {}
    for count, times in values.items():
        label = BARE if count is None else f"{count} adapters" if count else "enabled, none active"
        names[count] = f"prefill {tokens} tokens, {label}"
        models.results.add(
            names[count],
            statistics.median(times),
            "ms",
            ratio=None if count is None else median_ratio(times, base),
            ratio_goal=GOALS.get(count) if count is not None and settings.full else None,
            all=times,
            **facts(count, tokens, rows),
        )
    models.note(f"prefill {tokens}: {len(base)} repetitions")

    @torch.no_grad()
    def busy() -> None:
        for count, run in runs.items():
            models.results.add(f"{names[count]}, GPU busy", busy_ms(run), "ms", **facts(count, tokens, rows))

    return busy


def facts(count: int | None, tokens: int, rows: int) -> dict[str, Any]:
    side = "bare" if count is None else "ours"
    return {"path": "prefill", "rows": rows, "tokens": tokens, "side": side, "adapters": count}
