"""Rows for twenty adapters, and what one process answers to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_files

from hf_multilora.integrations.ray import MultiLoraPredictor, unanswered

SMALL = {"num_blocks": 64, "page_size": 16, "max_batch_tokens": 128, "max_requests_per_batch": 8}
NEW = 6
ADAPTERS = 20


def write_files(root: Path, adapters: int = ADAPTERS) -> dict[str, str]:
    """The model and the adapters `a0`, `a1`, …; returns the predictor's arguments for them."""
    tiny_files.build().save_pretrained(root / "tiny")
    tiny_files.tokenizer().save_pretrained(root / "tiny")
    for number in range(adapters):
        tiny_files.write_adapter(root / "adapters" / f"a{number}", number + 1)
    return {"model": str(root / "tiny"), "adapters": str(root / "adapters")}


def options(files: dict[str, str], **more: Any) -> dict[str, Any]:
    """All arguments of a predictor: fewer slots than adapters, and host memory for fewer, too."""
    slots = {"max_loras": 4, "max_cpu_loras": 8, "max_lora_rank": 8}
    return {**files, "max_new_tokens": NEW, "device": "cpu", "offline": True, "batching": SMALL, **slots, **more}


def rows(count: int, adapters: int = ADAPTERS) -> list[dict[str, Any]]:
    """Adapters by turns, every 21st row of the base."""
    names = [None, *(f"a{number}" for number in range(adapters))]
    return [{"id": i, "prompt": f"Say {i}", "adapter": names[i % len(names)]} for i in range(count)]


def columns(asked: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in asked for name in row)
    return {name: [row.get(name) for row in asked] for name in names}


def in_one_process(files: dict[str, str], asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their answers."""
    predictor = MultiLoraPredictor(**options(files))
    try:
        made = predictor(columns(asked))
    finally:
        predictor.close()
    values = [column if isinstance(column, list) else column.to_pylist() for column in made.values()]
    return [dict(zip(made, row, strict=True)) for row in zip(*values, strict=True)]


def run_job(
    files: dict[str, str],
    asked: list[dict[str, Any]],
    out: Path,
    predictor: type = MultiLoraPredictor,
    **options_: Any,
) -> None:
    """What a user's script does, with blocks of ten to forty rows; the same again goes on from what is there."""
    import ray

    size = max(10, min(40, len(asked) // 20))
    ds = ray.data.from_items(asked, override_num_blocks=len(asked) // size)
    ds = unanswered(ds, out).map_batches(
        predictor, fn_constructor_kwargs=options(files), batch_size=size, batch_format="pyarrow", **options_
    )
    ds.write_parquet(str(out))
