"""PEFT over the same weights: its mixed batch (adapter_names), eager, as in its documentation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .measure import alternate, median_ratio, milliseconds
from .models import Models, ids
from .workload import BARE, prompts


def inject(models: Models, count: int) -> Any:
    """A PeftModel with adapters a0 ... of the same numbers as ours, put in without files.

    The layers are PEFT's own; only its initialisation is skipped, and the weights are those of one buffer per adapter
    on the device. Loading them as PEFT loads takes about a second each.
    """
    from peft import LoraConfig, get_peft_model

    rank = models.settings.rank

    def config() -> Any:
        return LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=sorted(models.shapes), lora_dropout=0.0, bias="none"
        )

    model = get_peft_model(models.base(), config(), adapter_name="a0", low_cpu_mem_usage=True)
    layers = {path: model.base_model.model.get_submodule(path) for path in models.shapes}
    for number in range(count):
        name = f"a{number}"
        if number:
            for layer in layers.values():
                _add(layer, name, rank)
            model.peft_config[name] = config()
        tensors = models.adapter(number, host=False)
        for path, layer in layers.items():
            for kind, linear in (("A", layer.lora_A[name]), ("B", layer.lora_B[name])):
                weight = tensors[f"base_model.model.{path}.lora_{kind}.weight"]
                linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model.eval().requires_grad_(False)


def _add(layer: Any, name: str, rank: int) -> None:
    """One more plain LoRA in a layer of PEFT, with the entries that its forward reads."""
    first = next(iter(layer.lora_A))
    with torch.device("meta"):
        layer.lora_A[name] = torch.nn.Linear(layer.in_features, rank, bias=False)
        layer.lora_B[name] = torch.nn.Linear(rank, layer.out_features, bias=False)
    layer.lora_dropout[name] = torch.nn.Identity()
    for entries in ("r", "lora_alpha", "scaling", "use_rslora", "use_dora", "lora_bias"):
        known = getattr(layer, entries, {})
        if first in known:
            known[name] = known[first]


def run_peft(models: Models, seconds: float) -> None:
    """Decode steps of PEFT beside the bare model's, eager; few tokens, for a step may take a second."""
    settings = models.settings
    largest = max(settings.peft_adapters)
    start = time.monotonic()
    model = inject(models, largest)
    models.note(f"PEFT has {largest} adapters, after {time.monotonic() - start:.1f} s")
    for rows in settings.peft_batch:
        _decode(models, model, rows, seconds)


def _decode(models: Models, model: Any, rows: int, seconds: float) -> None:
    settings = models.settings
    counts = sorted(count for count in settings.peft_adapters if 0 < count <= rows)
    inputs = prompts(models.bare, rows, 32)
    tokens = settings.peft_tokens

    def case(one: Any, **kwargs: Any) -> Callable[[], float]:
        def run(new: int) -> None:
            one.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, **kwargs)

        def measure() -> float:
            longer = milliseconds(lambda: run(tokens), settings.device)
            return (longer - milliseconds(lambda: run(1), settings.device)) / (tokens - 1)

        return measure

    cases: dict[int | None, Callable[[], float]] = {None: case(models.bare), 0: case(model)}
    cases |= {count: case(model, adapter_names=ids(rows, count)) for count in counts}
    check_equal(models, model, rows, min(counts[-1], settings.slots))
    for count in (None, 0, counts[0]):
        cases[count]()
    values = alternate(cases, settings.peft_reps, time.monotonic() + seconds)
    base = values[None]
    for count, times in values.items():
        label = (
            f"{BARE} beside PEFT"
            if count is None
            else f"PEFT mixed batch, {count} adapters"
            if count
            else "PEFT, one active adapter"
        )
        models.results.add(
            f"eager decode, batch {rows}, {label}",
            statistics.median(times),
            "ms",
            ratio=None if count is None else median_ratio(times, base),
            all=times,
            path="eager",
            rows=rows,
            side="bare" if count is None else "peft" if count else "peft one active",
            adapters=count or 1 if count is not None else None,
        )
    models.note(f"PEFT, batch {rows}: {len(base)} repetitions")


@torch.no_grad()
def check_equal(models: Models, model: Any, rows: int, count: int) -> None:
    """Both sides compute the same: fp32 rounding apart in fp32; in 16 bits PEFT rounds more often than we do."""
    inputs = prompts(models.bare, rows, 8)
    theirs = model(**inputs, logits_to_keep=1, adapter_names=ids(rows, count)).logits.float()
    own = models.ours()(**inputs, logits_to_keep=1, adapter_ids=ids(rows, count)).logits.float()
    plain = models.bare(**inputs, logits_to_keep=1).logits.float()
    error = float((own - theirs).norm() / theirs.norm())
    moved = float((theirs - plain).norm() / plain.norm())
    models.results.add(
        "logits, ours against PEFT's, same mixed batch", error, "rel", rows=rows, moved_by_adapters=moved
    )
    # Two ways to round 32 layers differ by a tenth; one row with another row's adapter by as much as adapters do.
    limit = 1e-4 if models.settings.dtype == "fp32" else 0.5 * moved
    if not error <= limit:
        models.results.fail(f"logits differ from PEFT's by {error:.3g}; the limit is {limit:.3g}")
