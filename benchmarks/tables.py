"""The README's figures, from the newest file of each benchmark in benchmarks/results: nothing there is typed by hand.

python benchmarks/tables.py --write     # puts them between the README's markers
python benchmarks/tables.py             # prints them
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
START, END = "<!-- figures: python benchmarks/tables.py --write -->", "<!-- end of figures -->"

# (benchmark, what it calls the figure, what the README calls it)
FIGURES = [
    ("generate", "eager decode, batch 32, bare model", "decode step, the bare model"),
    ("generate", "eager decode, batch 32, enabled, none active", "decode step, enabled, no row with an adapter"),
    ("generate", "eager decode, batch 32, 1 adapters", "decode step, 1 adapter in the batch"),
    ("generate", "eager decode, batch 32, 32 adapters", "decode step, 32 different adapters in the batch"),
    (
        "memory",
        "bring an adapter into a slot (wall, with eviction)",
        "bring an adapter of 84 MB into a slot, one copy",
    ),
    ("memory", "load from a warm file", "load an adapter of 84 MB from a warm file"),
    ("kinds", "decode step, 24 plain, 8 base", "decode step, 24 rows of plain LoRA, 8 of the base"),
    (
        "kinds",
        "decode step, 8 plain, 8 DoRA, 8 lora_bias, 8 base",
        "decode step, 8 rows of LoRA, 8 of DoRA, 8 with lora_bias, 8 of the base",
    ),
    ("cpu", "decode step, 16 rows, bare model", "decode step, the bare model"),
    ("cpu", "decode step, 16 rows, 16 adapters", "decode step, 16 different adapters in the batch"),
    (
        "cpu",
        "decode step, 16 rows, PEFT adapter_names, 16 adapters",
        "decode step, PEFT's `adapter_names`, the same 16",
    ),
]
CONDITIONS = {
    "generate": "Llama-3-8B shape, random bf16 weights, r=16 on all seven projections, batch 32, eager",
    "memory": "the same adapters",
    "kinds": "the same model, each row its own adapter; the ratio is to the row above",
    "cpu": "SmolLM2-135M-Instruct, fp32, r=8 on q and v, batch 16",
}


def runs(benchmark: str) -> list[list[dict[str, Any]]]:
    """Rows of each result file of a benchmark, the newest file last."""
    files = sorted((HERE / "results").glob(f"{benchmark}-*.json"), key=lambda path: (path.stem[-10:], path.stem))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def others(earlier: list[list[dict[str, Any]]]) -> str:
    """What earlier runs gave for the step that counts most: hosts differ, and an eager step is bound by its host."""
    bare, mixed = "eager decode, batch 32, bare model", "eager decode, batch 32, 32 adapters"
    found = []
    for rows in earlier:
        by_name = {row["what"]: row for row in rows if row["kind"] == "result"}
        if bare in by_name and mixed in by_name:
            found.append(f"{by_name[bare]['value']:.1f} and {by_name[mixed]['value']:.1f} ms")
    return f"Earlier runs on other hosts, bare and with 32 adapters: {'; '.join(found)}." if found else ""


def table() -> str:
    """The figures as a markdown table, one part for each benchmark that has results."""
    parts = []
    for benchmark, conditions in CONDITIONS.items():
        files = runs(benchmark)
        if not files:
            continue
        rows = files[-1]
        about = rows[0]
        lines = [
            f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}, {about['date'][:10]}: "
            f"{conditions}.",
            "",
            "| | median | of all repetitions | over the bare model |",
            "|---|---|---|---|",
        ]
        by_name = {row["what"]: row for row in rows if row["kind"] == "result"}
        for _, what, title in (f for f in FIGURES if f[0] == benchmark and f[1] in by_name):
            row = by_name[what]
            over = f"{row['ratio']:.2f} x" if row["ratio"] and benchmark != "memory" else ""
            spread = f"{min(row['all']):.1f} to {max(row['all']):.1f}" if row.get("all") else ""
            lines.append(f"| {title} | {row['value']:.1f} {row['unit']} | {spread} | {over} |")
        more = others(files[:-1])
        parts.append("\n".join([*lines, "", more] if more else lines))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    block = f"{START}\n{table()}\n{END}"
    if not parser.parse_args().write:
        print(block)
        return
    text = README.read_text()
    start, end = text.index(START), text.index(END) + len(END)
    README.write_text(text[:start] + block + text[end:])


if __name__ == "__main__":
    main()
