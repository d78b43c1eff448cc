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
    "cpu": "SmolLM2-135M-Instruct, fp32, r=8 on q and v, batch 16",
}


def newest(benchmark: str) -> list[dict[str, Any]]:
    """Rows of the newest result file of a benchmark, or none."""
    files = sorted((HERE / "results").glob(f"{benchmark}-*.json"), key=lambda path: path.stem[-10:])
    return [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []


def table() -> str:
    """The figures as a markdown table, one part for each benchmark that has results."""
    parts = []
    for benchmark, conditions in CONDITIONS.items():
        rows = newest(benchmark)
        if not rows:
            continue
        about = rows[0]
        lines = [
            f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}, {about['date'][:10]}: "
            f"{conditions}.",
            "",
            "| | median | over the bare model |",
            "|---|---|---|",
        ]
        by_name = {row["what"]: row for row in rows if row["kind"] == "result"}
        for _, what, title in (f for f in FIGURES if f[0] == benchmark and f[1] in by_name):
            row = by_name[what]
            over = f"{row['ratio']:.2f} x" if row["ratio"] and benchmark != "memory" else ""
            lines.append(f"| {title} | {row['value']:.1f} {row['unit']} | {over} |")
        parts.append("\n".join(lines))
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
