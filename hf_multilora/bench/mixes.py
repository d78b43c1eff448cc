"""Random mixes, loads and evictions: how many compilations and captures they cost once both graphs are there."""

from __future__ import annotations

import random
from typing import Any

from .decode import PROMPT_TOKENS, static_options
from .measure import Counter
from .models import Models
from .workload import prompts

MORE = 4  # adapters registered beyond the slots, so that naming them evicts
EVERY = 10  # a load, an unload or a reload after so many mixes
SEED = 20261129


def run_mixes(models: Models, path: str, rows: int, counter: Counter) -> None:
    """`settings.mixes` batches of random adapters, counts and orders on a path that is warm for this batch size."""
    settings = models.settings
    model = models.ours(decode_graphs=path == "graphs")
    handle = model.multilora
    inputs = prompts(models.bare, rows, PROMPT_TOKENS)
    draw = random.Random(SEED)
    tensors = models.adapter(1000)
    for number in range(MORE):
        handle.load(tensors, f"more{number}", config=models.config())
    options = static_options(settings.device, compiled=path == "static")

    def generate(names: Any) -> None:
        # As many new tokens as were timed: longer caches would be other shapes. The steps that matter are the first.
        model.generate(
            **inputs, max_new_tokens=settings.new_tokens, do_sample=False, adapter_ids=names, eos_token_id=None,
            stopping_criteria=[_after(3)], **options,
        )  # fmt: skip

    generate(["a0"] * rows)
    generate(None)
    before, evicted = counter.now(), handle.status().resident.evictions
    for number in range(settings.mixes):
        known = sorted(handle.adapters)
        distinct = draw.sample(known, draw.randint(0, min(rows, settings.slots)))
        generate([draw.choice([None, *distinct]) for _ in range(rows)])
        if number % EVERY == EVERY - 1:
            name = f"more{draw.randrange(MORE)}"
            if draw.random() < 0.5:
                handle.unload(name)
                handle.load(tensors, name, config=models.config())
            else:
                handle.load(tensors, name, config=models.config(), reload=True)
    done = counter.now().since(before)
    what = f"{path}, batch {rows}, {settings.mixes} random mixes, loads and evictions"
    evictions = handle.status().resident.evictions - evicted
    models.results.add(f"{what}: compiled", done.compiled, "graphs", goal=0, evictions=evictions, seed=SEED)
    models.results.add(f"{what}: captured", done.captured, "graphs", goal=0, evictions=evictions, seed=SEED)
    for number in range(MORE):
        handle.unload(f"more{number}")
    models.note(f"{settings.mixes} mixes, {path}, batch {rows}")


def _after(steps: int) -> Any:
    """A stopping criterion: every row is done after so many tokens."""
    import torch
    from transformers import StoppingCriteria

    class After(StoppingCriteria):
        def __init__(self) -> None:
            self.seen = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            self.seen += 1
            return torch.full((input_ids.shape[0],), self.seen >= steps, dtype=torch.bool, device=input_ids.device)

    return After()
