"""generate() and prefill, part by part: the bare model, the same weights with adapters, and PEFT, in one process.

    check     logits of four layers of the shape against merged weights in fp32
    eager     decode steps
    prefill   one forward over long prompts
    peft      decode steps of PEFT's mixed batch, few of them
    static    compiled decode (cache_implementation="static"); a minute of compilation for each batch size and model
    graphs    decode captured without the compiler (decode_graphs=True); with `static` both alternate
    mixes     random mixes, loads and evictions on `static` and `graphs`: what they compile and capture

Each part prints and writes its rows as soon as it has them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields

import torch

from .correctness import check
from .decode import reset_compiler, run_decode
from .measure import Counter
from .mixes import run_mixes
from .models import Models, Settings
from .peft_side import run_peft
from .prefill import run_prefill
from .results import Results, arguments

PARTS = ("check", "eager", "prefill", "peft", "static", "graphs", "mixes")


def run(settings: Settings, results: Results) -> Models:
    """Run the parts that `settings` names, in the order of PARTS."""
    results.settings(**asdict(settings))
    parts = [part for part in PARTS if part in settings.parts]
    if "check" in parts:
        check(results, settings, rows=min(32, max(8, *settings.batch)))
        if settings.cuda:
            torch.cuda.empty_cache()
    models = Models(settings, results)
    counter = Counter()
    # The profiler comes after everything that is bound by the host's launches, for it may slow them from then on.
    busy: list[Callable[[], None]] = []
    with counter.counting():
        if "eager" in parts:
            for rows in settings.batch:
                busy.append(run_decode(models, ["eager"], rows, counter, settings.budget_s))
        if "prefill" in parts:
            for tokens in settings.prefill:
                busy.append(run_prefill(models, tokens, settings.budget_s))
        if "peft" in parts:
            run_peft(models, settings.budget_s)
            if settings.cuda:
                torch.cuda.empty_cache()
        _run_all(settings, models, busy)
        captured = [path for path in ("static", "graphs") if path in parts]
        for rows in settings.batch if captured else ():
            reset_compiler()
            looks = run_decode(models, captured, rows, counter, settings.budget_s)
            if "mixes" in parts and rows == settings.batch[-1]:
                for path in captured:
                    run_mixes(models, path, rows, counter)
            _run_all(settings, models, [looks])
    return models


def _run_all(settings: Settings, models: Models, busy: list[Callable[[], None]]) -> None:
    if settings.busy and settings.cuda and busy:
        for look in busy:
            look()
        models.note("GPU busy time")


def parser(description: str | None = __doc__) -> argparse.ArgumentParser:
    options = arguments(description)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--parts", nargs="+", choices=PARTS, default=["check", "eager", "prefill"])
    options.add_argument("--model", help="a transformers model (folder or hub id) in place of a random one of --shape")
    options.add_argument("--batch", type=int, nargs="+", default=[32], help="rows (default: 32)")
    options.add_argument(
        "--adapters", type=int, nargs="+", default=[0, 1, 8, 32], help="distinct adapters (default: 0 1 8 32)"
    )
    options.add_argument("--no-sparse", dest="sparse", action="store_false", help="leave out '4 rows adapted'")
    options.add_argument("--max-lora-rank", type=int, help="of the enabled model; default: --rank")
    options.add_argument("--max-loras", type=int, help="slots; default: 8, or as many as a part mixes")
    options.add_argument("--new-tokens", type=int, default=48)
    options.add_argument("--prefill", type=int, nargs="+", default=[8192], metavar="TOKENS", help="default: 8192")
    options.add_argument("--prefill-rows", type=int, default=16)
    options.add_argument("--prefill-adapters", type=int, nargs="+", default=[0, 1, 4, 16])
    options.add_argument("--peft-adapters", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--peft-batch", type=int, nargs="+", default=[32])
    options.add_argument("--peft-tokens", type=int, default=5, help="new tokens of PEFT's generate() (default: 5)")
    options.add_argument("--peft-reps", type=int, default=3)
    options.add_argument("--mixes", type=int, default=100)
    options.add_argument("--no-busy", dest="busy", action="store_false", help="leave out the profiler's busy time")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a script; returns the exit status (1: a check failed)."""
    given = vars(parser().parse_args(arguments))
    settings = Settings(**{field.name: given[field.name] for field in fields(Settings)})
    results = Results("generate", settings.out, settings.device)
    run(settings, results)
    return results.finish()
