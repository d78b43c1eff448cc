"""A folder in which the pages' code runs: tiny stand-ins under the names that the pages use, and nothing else."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from tiny_files import build, tokenizer, write_adapter

BASES = ("HuggingFaceTB/SmolLM2-135M-Instruct", "path/or/hub-id")
ADAPTERS = (
    "adapters/sql", "adapters/poet", "adapters/legal", "ADAPTERS/sql", "ADAPTERS/poet", "another/one",
    "org/loaded-on-demand", "org/sql",
)  # fmt: skip
PROMPTS = [{"prompt": "How many users are there?", "adapter": "sql", "id": 7}, {"prompt": "Hello!", "adapter": None}]


def build_stage(folder: Path) -> Path:
    """What the pages name: base models that answer bytes, adapters, a file of prompts."""
    words = copy.deepcopy(tokenizer())
    words.pad_token = "</s>"
    for name in BASES:
        build().save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    for number, name in enumerate(ADAPTERS):
        write_adapter(folder / name, number)
    lines = [json.dumps(line) for line in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return folder
