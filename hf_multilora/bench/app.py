"""`hf-multilora bench`: what adapters cost on this machine, on the user's model or on one of a known shape."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..options import Json
from ..terminal import notes, show_result

app = typer.Typer(no_args_is_help=False, rich_markup_mode="rich", help="Measure what adapters cost on this machine.")

Out = Annotated[Path | None, typer.Option(help="Folder of the result files.", show_default=False)]
Seconds = Annotated[float, typer.Option(min=0, help="Time to search for.")]
Table_ = Annotated[Path, typer.Option("--table", help="The tuning table to write.")]
Shape = Annotated[str, typer.Option(help="A random model of this shape: 8B or tiny.")]
TABLE = Path("hf_multilora_tuning.json")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    search: Annotated[bool, typer.Option("--tune", help="As `bench tune`.")] = False,
    seconds: Seconds = 300,
    table: Table_ = TABLE,
) -> None:
    if context.invoked_subcommand is None:
        if not search:
            print(context.get_help())
            raise typer.Exit(2)
        _tune(seconds, table, as_json=False)


@app.command()
def generate(
    model: Annotated[str | None, typer.Argument(help="Folder or hub id of a model.", show_default=False)] = None,
    shape: Annotated[str | None, typer.Option(help="In its place a random one of this shape: 8B or tiny.")] = None,
    rows: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "32",
    adapters: Annotated[str, typer.Option(help="Distinct adapters in the batch, with commas.")] = "0,1,8,32",
    rank: Annotated[int, typer.Option(min=1, help="Rank of the random adapters.")] = 16,
    parts: Annotated[str, typer.Option(help="Of check, eager, prefill, peft, static, graphs, mixes.")] = "eager",
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of a timed generate().")] = 48,
    prefill: Annotated[str, typer.Option(help="Tokens of the prefills, with commas.")] = "4096",
    reps: Annotated[int, typer.Option(min=1, help="Alternated repetitions.")] = 7,
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer decoder layers than the shape has.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.", show_default=False)] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time generate() with random adapters, beside the bare model: a decode step, prefill, and how long until ready.

    [dim]hf-multilora bench generate org/model --rows 1,32 --adapters 0,1,32 --parts eager,static,graphs[/]
    """
    import torch

    from ..errors import ConfigError
    from .generate import PARTS, run
    from .models import Settings
    from .results import DEVICES, Results, default_folder
    from .workload import DTYPES, SHAPES

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    shape = shape or ("8B" if device == "cuda" else "tiny")
    dtype = dtype or ("bf16" if device == "cuda" else "fp32")
    for name, value, known in (("--device", device, DEVICES), ("--shape", shape, SHAPES), ("--dtype", dtype, DTYPES)):
        if value not in known:
            raise ConfigError(f"{name} {value}: expected one of {', '.join(known)}.")
    chosen = [part.strip() for part in parts.split(",")]
    for part in chosen:
        if part not in PARTS:
            raise ConfigError(f"--parts {part}: expected some of {', '.join(PARTS)}.")
    counts = _numbers("--adapters", adapters)
    batch = _numbers("--rows", rows, least=1)
    settings = Settings(
        shape=shape,
        model=model,
        device=device,
        dtype=dtype,
        layers=layers,
        rank=rank,
        reps=reps,
        parts=chosen,
        batch=batch,
        adapters=counts,
        new_tokens=new_tokens,
        prefill=_numbers("--prefill", prefill, least=1),
        peft_adapters=[count for count in counts if count] or [1],
        peft_batch=batch,
    )
    results = Results("generate", out or default_folder(), device, say=_say)
    run(settings, results)
    _finish(results, as_json)


@app.command()
def kernels(
    shape: Shape = "8B",
    rows: Annotated[str, typer.Option(help="Rows of the batch, with commas.")] = "1,8,32",
    adapters: Annotated[str, typer.Option(help="Distinct adapters, with commas.")] = "1,8,32",
    ranks: Annotated[str, typer.Option(help="Ranks, with commas.")] = "16,64",
    prefill: Annotated[str | None, typer.Option(help="Tokens of prefills, with commas, instead of decode.")] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Leave out the figures over the base GEMMs.")] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Time the kernels of one decoder layer, alone and over the base GEMMs. Needs a CUDA device."""
    import torch

    from ..errors import ConfigError
    from .kernels import run
    from .results import Results, default_folder
    from .workload import SHAPES

    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape}: expected one of {', '.join(SHAPES)}.")
    if not torch.cuda.is_available():
        raise ConfigError("The kernels are Triton's: `bench kernels` needs a CUDA device.")
    results = Results("layer", out or default_folder(), "cuda", say=_say)
    sizes = [
        _numbers(name, text, 1) for name, text in (("--rows", rows), ("--adapters", adapters), ("--ranks", ranks))
    ]
    tokens = _numbers("--prefill", prefill, 1) if prefill else []
    run(results, shape, sizes[0], sizes[1], sizes[2], tokens, not alone)
    _finish(results, as_json)


@app.command()
def tune(seconds: Seconds = 300, table: Table_ = TABLE, as_json: Json = False) -> None:
    """Search block sizes for this GPU and write them as a table; say how to use it. Needs a CUDA device."""
    _tune(seconds, table, as_json)


def _tune(seconds: float, table: Path, as_json: bool) -> None:
    from ..kernels.table import TABLE_ENV
    from .tune import gain
    from .tune import tune as search

    found = search(seconds, table, say=_say)
    if as_json:
        show_result(found)
        return
    show_result(f"{len(found['rows'])} shapes, {gain(found):.3f} x of the untuned time (geometric mean).")
    show_result(f"export {TABLE_ENV}={table.resolve()}")


def _numbers(option: str, text: str, least: int = 0) -> list[int]:
    from ..errors import ConfigError

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r}: expected numbers with commas between them, as 1,8,32.") from None
    if min(numbers) < least:
        raise ConfigError(f"{option} {text!r}: expected numbers of at least {least}.")
    return numbers


def _say(line: str) -> None:
    notes.print(line, markup=False, soft_wrap=True)


def _finish(results: Any, as_json: bool) -> None:
    if as_json:
        show_result(results.summary())
    else:
        show_result(render(results))
        show_result(f"Written to {results.path}")
    if results.failed:
        raise typer.Exit(1)


def render(results: Any) -> Table:
    """The figures of one run as a table."""
    about = results.about
    title = f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}, {about['date'][:10]}"
    table = Table(title=title, title_justify="left")
    table.add_column("what", min_width=40)
    with_goals = any(row["goal"] is not None or row["ratio_goal"] is not None for row in results.rows)
    for name in ("median", "range", "over bare", *(["goal"] if with_goals else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for row in results.rows:
        values = row.get("all") or ()
        goals = [f"{row['goal']:g} {row['unit']}"] if row["goal"] is not None else []
        goals += [f"{row['ratio_goal']:g} x"] if row["ratio_goal"] is not None else []
        cells = [
            row["what"],
            f"{row['value']:.4g} {row['unit']}",
            f"{min(values):.4g} to {max(values):.4g}" if len(values) > 1 else "",
            "" if row["ratio"] is None else f"{row['ratio']:.3f} x",
            ("missed: " if row["missed"] else "") + ", ".join(goals),
        ]
        table.add_row(*cells[: 5 if with_goals else 4])
    for message in results.failed:
        table.add_row(f"FAILED: {message}", style="bold red")
    return table
