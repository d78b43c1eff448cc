"""Options that several commands have. Needs the `demo` extra."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .base_model import DTYPES

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Offline = Annotated[bool, typer.Option("--offline", help="Use what is on this machine; ask no hub.")]

Model = Annotated[str, typer.Argument(help="Folder or hub id of the base model.", show_default=False)]
Adapters = Annotated[Path | None, typer.Option(help="Folder whose sub-folders are adapters.")]
MaxLoras = Annotated[int, typer.Option(min=1, help="Slots: adapters that one batch can mix.")]
MaxLoraRank = Annotated[int, typer.Option(min=1, help="Largest rank of an adapter.")]
MaxCpuLoras = Annotated[int | None, typer.Option(min=1, help="Adapters kept in host memory.")]
Dtype = Annotated[str, typer.Option(help=f"Of the base model: {', '.join(DTYPES)}.")]
Device = Annotated[str | None, typer.Option(help="Where the model goes: cuda, cuda:1, cpu, auto.")]
MaxBatchTokens = Annotated[int | None, typer.Option(min=1, help="Tokens of one batch.")]
MaxRequests = Annotated[int | None, typer.Option(min=1, help="Requests of one batch.")]
NumBlocks = Annotated[int | None, typer.Option(min=1, help="Blocks of the cache; by default from memory.")]
BlockTokens = Annotated[int | None, typer.Option(min=4, help="Tokens of one block.")]
