"""`hf-multilora generate`: a file of prompts, each with the name of its adapter, and a file of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..errors import ConfigError
from ..terminal import progress, show_error, show_result


def generate(
    model: options.Model,
    source: Annotated[str, typer.Argument(metavar="INPUT", help="JSONL file of prompts; - is stdin.")],
    output: Annotated[Path, typer.Option(help="JSONL file of answers, in the order of the prompts.")],
    adapters: options.Adapters = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, where a line does not say.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token. There are no seeds.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample among the likeliest tokens of this sum.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among so many tokens; 0: all.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's message in a chat.")] = False,
    max_loras: options.MaxLoras = 8,
    max_lora_rank: options.MaxLoraRank = 64,
    max_cpu_loras: options.MaxCpuLoras = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    offline: options.Offline = False,
    max_batch_tokens: options.MaxBatchTokens = None,
    max_requests: options.MaxRequests = None,
    num_blocks: options.NumBlocks = None,
    block_tokens: options.BlockTokens = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an output, or what a run of other settings has left.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Answer a file of prompts, each through its own adapter.

    Lines of the input: {"prompt": "...", "adapter": "sql"}, or "messages" of a chat in place of the prompt. No adapter
    is the base model; "max_new_tokens" is possible; other fields are given back. Lines of the output have "text",
    "tokens" and "finish_reason" in addition, or "error".

    Answers are kept as they come, in OUTPUT.partial: after an interruption, the same command goes on from there.
    Remove that file to begin anew. Exit code 1: a line has failed.
    """
    from .job import Job, Sampling, run

    job = Job(
        model,
        source,
        output,
        adapters,
        overwrite,
        Sampling(max_new_tokens, temperature, top_p, top_k, chat),
        dtype=dtype,
        device=device,
        offline=offline,
        slots={"max_loras": max_loras, "max_lora_rank": max_lora_rank, "max_cpu_loras": max_cpu_loras},
        batching={
            "max_batch_tokens": max_batch_tokens,
            "max_requests_per_batch": max_requests,
            "num_blocks": num_blocks,
            "page_size": block_tokens,
        },
    )
    try:
        with progress() as show:
            done = run(job, show)
    except KeyboardInterrupt as stopped:
        show_error("Interrupted", str(stopped) or "Nothing has changed.", as_json)
        raise typer.Exit(130) from None
    except OSError as error:
        raise ConfigError(f"{error.filename or output}: {error.strerror or error}") from error
    show_result(done.to_dict() if as_json else str(done))
    if done.failed:
        raise typer.Exit(1)
