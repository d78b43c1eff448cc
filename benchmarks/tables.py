"""The figures of the README and the docs, from the newest runs in benchmarks/results: nothing there is typed by hand.

python benchmarks/tables.py --write     # puts them, and the missed goals, between the markers of the pages
python benchmarks/tables.py             # prints them

Figures that are compared stand in one run: each column of the decode table is one run, and so is each other table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_multilora.bench.results import Run, read_runs
from hf_multilora.bench.workload import SHAPES

HERE = Path(__file__).parent
PAGES = tuple(HERE.parent / name for name in ("README.md", "docs/figures.md"))
START, END = "<!-- figures: python benchmarks/tables.py --write -->", "<!-- end of figures -->"
SPEED = HERE.parent / "docs/speed.md"
MISSED, MISSED_END = "<!-- missed: python benchmarks/tables.py --write -->", "<!-- end of missed -->"
ROWS = 32  # batch size of the decode table

# (what the row is called, what the benchmark calls the case)
MIXES = [
    ("the bare model", "bare model"),
    ("enabled, no row with an adapter", "enabled, none active"),
    (f"4 rows of {ROWS} with one each", f"4 rows of {ROWS} adapted"),
    ("1 adapter", "1 adapters"),
    *((f"{count} different adapters", f"{count} adapters") for count in (2, 4, 8, 32)),
]
PEFT_MIXES = {
    "bare model": "bare model beside PEFT",
    **{f"{count} adapters": f"PEFT mixed batch, {count} adapters" for count in (1, 2, 4, 8, 32)},
}
# Tables of a benchmark whose rows are figures: (what it calls the figure, what the README calls it).
LISTS = {
    "memory": [
        ("bring an adapter into a slot (wall, with eviction)", "bring an adapter of 84 MB into a slot, one copy"),
        ("load from a warm file", "load an adapter of 84 MB from a warm file"),
    ],
    "kinds": [
        ("decode step, 24 plain, 8 base", "decode step, 24 rows of plain LoRA, 8 of the base"),
        (
            "decode step, 8 plain, 8 DoRA, 8 lora_bias, 8 base",
            "decode step, 8 rows of LoRA, 8 of DoRA, 8 with lora_bias, 8 of the base",
        ),
    ],
    "cpu": [
        ("decode step, 16 rows, bare model", "decode step, the bare model"),
        ("decode step, 16 rows, 16 adapters", "decode step, 16 different adapters in the batch"),
        (
            "decode step, 16 rows, PEFT adapter_names, 16 adapters",
            "decode step, PEFT's `adapter_names`, the same 16",
        ),
    ],
}
CONDITIONS = {
    "memory": "adapters of r=16 on the seven projections of the 8B shape",
    "kinds": "the 8B shape, eager, each row its own adapter; the ratio is to the row above",
    "cpu": "SmolLM2-135M-Instruct, fp32, r=8 on q and v, batch 16",
}


@dataclass(frozen=True)
class Column:
    """One way to decode, in the run that has its figures."""

    title: str
    run: Run
    names: dict[str, str]  # mix -> what the run calls it

    def cell(self, mix: str) -> str:
        row = self.run.figures.get(self.names.get(mix, ""))
        if row is None:
            return ""
        return f"{row['value']:.1f} ms" + (f", {row['ratio']:.2f} x" if row["ratio"] else "")

    def _rows(self) -> list[dict[str, Any]]:
        found = [self.run.figures.get(name) for name in self.names.values()]
        return [row for row in found if row is not None and row.get("all")]

    def spread(self) -> str:
        """How far single repetitions lie from their medians."""
        deviations = [(min(row["all"]) / row["value"] - 1, max(row["all"]) / row["value"] - 1) for row in self._rows()]
        low, high = min(low for low, _ in deviations), max(high for _, high in deviations)
        if all(len(row["all"]) == 1 for row in self._rows()):
            return f"{self.title}: one repetition"
        return f"{self.title} {low * 100:+.0f} to {high * 100:+.0f} %"


def on_the_shape(run: Run) -> bool:
    """Whether a run is of the whole 8B shape on a GPU; the first files do not say, and were."""
    asked, whole = run.settings, (None, SHAPES["8B"]["num_hidden_layers"])
    return run.about.get("cuda") is not None and (
        not asked or (asked["shape"] == "8B" and asked.get("layers") in whole and asked.get("model") is None)
    )


def newest(runs: Iterable[Run], figure: str) -> Run | None:
    return next((run for run in reversed(list(runs)) if figure in run.figures), None)


def columns(runs: list[Run], rows: int) -> list[Column]:
    """The ways to decode that were measured at this batch size, each from its newest run with the largest mix."""
    found = []
    for title, path in (("eager", "eager"), ("compiled", "static"), ("captured", "graphs")):
        names = {mix: f"{path} decode, batch {rows}, {mix}" for _, mix in mixes(rows)}
        run = newest(runs, names["32 adapters"])
        if run is not None:
            found.append(Column(title, run, names))
    names = {mix: f"eager decode, batch {rows}, {label}" for mix, label in PEFT_MIXES.items()}
    run = newest(runs, names["32 adapters"])
    return [*found, Column("PEFT, eager", run, names)] if run is not None else found


def mixes(rows: int) -> list[tuple[str, str]]:
    return [
        (title.replace(f"of {ROWS}", f"of {rows}"), mix.replace(f"of {ROWS}", f"of {rows}")) for title, mix in MIXES
    ]


def about(run: Run) -> str:
    facts = run.about
    return f"{facts['device']}, torch {facts['torch']}, transformers {facts['transformers']}, {facts['date'][:10]}"


def decode(runs: list[Run]) -> list[str]:
    """A decode step at batch 32: mixes of adapters by ways to decode."""
    shown = columns(runs, ROWS)
    if not shown:
        return []
    places = list(dict.fromkeys(about(column.run) for column in shown))
    lines = [
        f"{'; '.join(places)}: one decode step at batch {ROWS}, Llama-3-8B shape, random bf16 weights, r=16 on all "
        f"seven projections; the ratio is to the bare model in the same repetition{compared(shown)}.",
        "",
        "| in the batch | " + " | ".join(column.title for column in shown) + " |",
        "|---|" + "---|" * len(shown),
    ]
    for title, mix in mixes(ROWS):
        cells = [column.cell(mix) for column in shown]
        if any(cells):
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Medians; single repetitions differ from them by: {', '.join(column.spread() for column in shown)}.",
    ]
    lines += [sentence for column in shown if (sentence := busy(column) or captured(column, runs))]
    lines += [text for column in shown if (text := other_runs(runs, column))]
    lines += [text for text in (batch_of_one(runs),) if text]
    return ["\n".join(lines)]


def compared(shown: list[Column]) -> str:
    """Which bare model each column is compared with, where there is a choice."""
    texts = []
    for column in shown:
        row = column.run.figures[column.names["32 adapters"]]
        over = {"static bare": "compiled", "eager bare": "eager"}.get(row.get("over"))
        if over is not None and column.title in ("compiled", "captured"):
            texts.append(f"{column.title}: {over}")
    return f" ({', '.join(texts)})" if texts else ""


def busy(column: Column) -> str:
    """Beside compiled steps' wall times, how long the GPU was busy: the host's part is another one for each side."""
    names = [column.names[mix] for mix in ("bare model", "32 adapters")]
    times = [row["value"] for name in names if (row := column.run.figures.get(f"{name}, GPU busy"))]
    if column.title != "compiled" or len(times) < 2:
        return ""
    return (
        f"In a compiled step the GPU is busy for {times[0]:.1f} ms with the bare model, for {times[1]:.1f} ms with 32 "
        f"adapters ({times[1] / times[0]:.2f} x); ours has fewer guards for the host to evaluate."
    )


def captured(column: Column, runs: list[Run]) -> str:
    """How the captured path compares, and how long it takes to be ready."""
    figures = column.run.figures
    first = f"graphs decode, batch {ROWS}, 32 adapters"
    ready, over = figures.get(f"{first}, ready"), figures.get(f"{first}, over the compiled step")
    compiled = figures.get(f"static decode, batch {ROWS}, 32 adapters, ready")
    if column.title != "captured" or ready is None:
        return ""
    text = f"Captured (`decode_graphs=True`) is ready in {ready['value']:.1f} s for a batch size"
    text += f", compiled in {compiled['value']:.0f} s" if compiled else ""
    text += f"; its step takes {over['value']:.2f} x the compiled one." if over else "."
    times = [run.figures[f"{first}, ready"]["value"] for run in runs if f"{first}, ready" in run.figures]
    if max(times) > 2 * ready["value"]:
        text += f" Where Triton's kernels were not on disk yet, ready took {max(times):.1f} s."
    return text


def other_runs(runs: list[Run], column: Column) -> str:
    """What earlier runs gave for the step that counts most: hosts differ, and most steps are bound by their host."""
    names = [column.names.get(mix, "") for mix in ("bare model", "32 adapters")]
    found = [[run.figures.get(name) for name in names] for run in runs if run is not column.run]
    both = [[bare, mixed] for bare, mixed in found if bare and mixed]
    return earlier(column.title, both) if column.title in ("eager", "compiled") and both else ""


def earlier(title: str, steps: Iterable[list[dict[str, Any]]]) -> str:
    """What earlier runs gave: of each a step of the bare model and one with 32 adapters."""
    texts = [f"{bare['value']:.1f} and {mixed['value']:.1f} ms, {mixed['ratio']:.2f} x" for bare, mixed in steps]
    return f"Earlier runs, {title}, bare and with 32 adapters: {'; '.join(texts)}."


def batch_of_one(runs: list[Run]) -> str:
    """One prompt alone, compiled."""
    bare, one = (f"static decode, batch 1, {label}" for label in ("bare model", "1 adapters"))
    run = newest(runs, one)
    if run is None:
        return ""
    times = [run.figures[name]["value"] for name in (bare, one)]
    return (
        f"At batch 1, compiled: {times[0]:.1f} ms with the bare model, {times[1]:.1f} ms with an adapter, "
        f"{run.figures[one]['ratio']:.2f} x."
    )


def prefill(runs: list[Run]) -> list[str]:
    """Prompts: one table of tokens by adapters, from the newest run that has the longest."""
    run = next(
        (run for run in reversed(runs) if any(row.get("path") == "prefill" for row in run.figures.values())), None
    )
    if run is None:
        return []
    rows = [row for row in run.figures.values() if row.get("path") == "prefill" and "all" in row]
    counts = sorted({row["adapters"] for row in rows if row["adapters"] is not None})
    lines = [f"{about(run)}: prefill of the same model, {rows[0]['rows']} rows.", ""]
    lines.append(
        "| tokens | the bare model | " + " | ".join(f"{c} adapters" if c else "none active" for c in counts) + " |"
    )
    lines.append("|---|---|" + "---|" * len(counts))
    for tokens in sorted({row["tokens"] for row in rows}):
        by_count = {row["adapters"]: row for row in rows if row["tokens"] == tokens}
        cells = [f"{by_count[None]['value']:.1f} ms"] if None in by_count else [""]
        cells += [
            f"{by_count[c]['value']:.1f} ms, {by_count[c]['ratio']:.2f} x" if c in by_count else "" for c in counts
        ]
        lines.append(f"| {tokens} | " + " | ".join(cells) + " |")
    return ["\n".join(lines)]


def registered() -> list[str]:
    """Throughput with few and with many registered adapters."""
    runs = [run for run in read_runs(HERE / "results", "registered") if on_the_shape(run)]
    if not runs:
        return []
    rows = [row for row in runs[-1].figures.values() if row["unit"] == "tokens/s"]
    first = rows[0]
    lines = [
        f"{about(runs[-1])}: the same model, {first['path']}, r=8 on q and v, Zipf traffic, batches of {ROWS} rows "
        f"that name at most 8 adapters, {first['slots']} slots.",
        "",
        "| registered | new tokens/s | of all repetitions | adapters brought in for a batch |",
        "|---|---|---|---|",
    ]
    for row in rows:
        spread = f"{min(row['all']):.0f} to {max(row['all']):.0f}"
        lines.append(f"| {row['registered']} | {row['value']:.0f} | {spread} | {row['brought_in']:.1f} |")
    return ["\n".join(lines)]


# Groups of bench_continuous.py: (the part that says how it ran, the parts of its rows, what they have in common).
GROUPS = [
    ("slots32", ("base", "slots32", "slots8"), "r=16 on all seven projections"),
    ("registered", ("registered",), "r=8 on q and v"),
    ("graphs", ("graphs",), "r=16 on all seven projections, CUDA graphs"),
]


def continuous() -> list[str]:
    """Throughput of continuous batching: one table, whose groups are one run each."""
    runs = [run for run in read_runs(HERE / "results", "continuous") if on_the_shape(run)]
    lines: list[str] = []
    for key, parts, title in GROUPS:
        run = next(
            (run for run in reversed(runs) if any(row.get("part") == key for row in run.figures.values())), None
        )
        if run is None:
            continue
        rows = [row for row in run.figures.values() if row.get("part") in parts and row["unit"] == "tokens/s"]
        first = rows[0]
        low, high = first["prompt_tokens"]
        traffic = f"{first['requests']} requests, prompts of {low} to {high} tokens, {first['new_tokens']} new"
        lines.append(f"| **{title}: {traffic}**, {first['attention']}, {about(run)} | | | | |")
        for row in rows:
            spread = f"{min(row['all']):.0f} to {max(row['all']):.0f}"
            cells = [f"{row['value']:.0f}", spread, f"{row['of_bare']:.2f} x", f"{row['tokens_a_step']:.0f}"]
            lines.append(f"| {row['what'].removeprefix('throughput, ')} | " + " | ".join(cells) + " |")
    if not lines:
        return []
    head = [
        "Continuous batching of the same model; ratios are to the bare model's throughput in the same repetition.",
        "",
        "| | new tokens/s | of all repetitions | of the bare model | new tokens a step |",
        "|---|---|---|---|---|",
    ]
    return ["\n".join(head + lines)]


def listed(benchmark: str) -> list[str]:
    """A table whose rows are figures, with the spread of their repetitions."""
    runs = [run for run in read_runs(HERE / "results", benchmark) if benchmark == "cpu" or on_the_shape(run)]
    if not runs:
        return []
    run = newest(runs, LISTS[benchmark][0][0]) or runs[-1]
    lines = [
        f"{about(run)}: {CONDITIONS[benchmark]}.",
        "",
        "| | median | of all repetitions | ratio |",
        "|---|---|---|---|",
    ]
    for what, title in LISTS[benchmark]:
        row: dict[str, Any] | None = run.figures.get(what)
        if row is None:
            continue
        over = f"{row['ratio']:.2f} x" if row["ratio"] and benchmark != "memory" else ""
        spread = f"{min(row['all']):.1f} to {max(row['all']):.1f}" if row.get("all") else ""
        lines.append(f"| {title} | {row['value']:.1f} {row['unit']} | {spread} | {over} |")
    return ["\n".join(lines)]


def ranks() -> list[str]:
    """Tensor parallelism: decode steps beside the bare model's, and a prefill in both ways of splitting adapters."""
    found = [run for run in read_runs(HERE / "results", "tp") if on_the_shape(run)]
    newest_rows = {what: row for run in found for what, row in run.figures.items()}
    if not newest_rows:
        return []
    lines = [
        f"{about(found[-1])}, two GPUs, a rank on each: the same model, batch {ROWS}, r=16; the ratio is to the bare "
        "model, split alike, and of fully sharded adapters to those that are split as the model is.",
        "",
        "| | median | of all repetitions | ratio |",
        "|---|---|---|---|",
    ]
    for what, row in newest_rows.items():
        title = what.replace(" over 2 ranks", "").replace("static", "compiled")
        over = f"{row['ratio']:.2f} x" if row["ratio"] else ""
        spread = f"{min(row['all']):.1f} to {max(row['all']):.1f}" if row.get("all") else ""
        lines.append(f"| {title} | {row['value']:.1f} {row['unit']} | {spread} | {over} |")
    for title, path in (("eager", "eager"), ("compiled", "static")):
        names = [f"{path} decode over 2 ranks, {label}" for label in ("bare", "32 adapters")]
        times = [[run.figures[name] for name in names] for run in found if all(name in run.figures for name in names)]
        if times[:-1]:
            lines += ["", earlier(title, times[:-1])]
    return ["\n".join(lines)]


def kernels() -> list[str]:
    """One layer's kernels by batch, beside the best peer's."""
    runs = read_runs(HERE / "results", "kernels")
    if not runs:
        return []
    figures = runs[-1].figures.values()
    points: dict[tuple[int, int, int], dict[str, dict[str, Any]]] = {}
    for row in figures:
        if row.get("part") and row["tokens"] == row["rows"]:
            points.setdefault((row["rows"], row["adapters"], row["rank"]), {})[row["part"]] = row
    peers = {row["what"].removesuffix(", to the best peer"): row["peer_us"] for row in figures if "peer_us" in row}
    lines = [
        f"{about(runs[-1])}: the kernels of one 8B decoder layer at decode, microseconds over the base GEMMs; "
        "the best peer is the faster of vLLM's and SGLang's kernels, measured likewise (benchmarks/peers.json).",
        "",
        "| rows | adapters | rank | floor | added by the compiler | added by a kernel | in place | best peer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (rows, adapters, rank), parts in sorted(points.items()):
        over = [parts[f"over base, {way}"] for way in ("deltas", "beside", "in place") if f"over base, {way}" in parts]
        if over:
            cells = " | ".join(f"{row['value']:.1f}" for row in over)
            peer = peers[over[0]["what"]]
            lines.append(f"| {rows} | {adapters} | {rank} | {over[0]['floor_us']:.1f} | {cells} | {peer:.0f} |")
    means = [row for row in figures if "geometric mean" in row["what"] and "over base" in row["what"]]
    if means:
        named = {"deltas": "added by the compiler", "beside": "added by a kernel", "in place": "in place"}
        texts = [f"{named[row['what'].split('over base, ')[1].split(':')[0]]} {row['value']:.2f} x" for row in means]
        lines += ["", f"Geometric means to the best peer: {', '.join(texts)}."]
    return ["\n".join(lines)]


def table() -> str:
    """All parts that have results, as markdown."""
    runs = [run for run in read_runs(HERE / "results", "generate") if on_the_shape(run)]
    parts = decode(runs) + prefill(runs) + kernels() + listed("memory") + registered() + continuous()
    parts += ranks() + listed("kinds") + listed("cpu")
    return "\n\n".join(parts)


def missed() -> str:
    """Every figure whose newest value misses its goal, by the names in the result files."""
    folder = HERE / "results"
    lines = ["| benchmark | figure | goal | newest run | |", "|---|---|---|---|---|"]
    for benchmark in sorted({path.name.partition("-")[0] for path in folder.glob("*.json")}):
        newest_rows = {what: (run, row) for run in read_runs(folder, benchmark) for what, row in run.figures.items()}
        for what, (run, row) in newest_rows.items():
            if row.get("missed"):
                goals = [f"{row['goal']:g} {row['unit']}"] if row["goal"] is not None else []
                goals += [f"{row['ratio_goal']:.3g} x"] if row["ratio_goal"] is not None else []
                seen = [] if row["unit"] == "x" else [f"{row['value']:.4g} {row['unit']}"]
                seen += [f"{row['ratio']:.3f} x"] if row["ratio"] is not None else []
                cells = (benchmark, what, ", ".join(goals), ", ".join(seen), run.about["date"][:10])
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def put(page: Path, block: str) -> None:
    """The block in the place of what stands between its first and its last line in the page."""
    lines = block.splitlines()
    start, end = lines[0], lines[-1]
    text = page.read_text()
    page.write_text(text[: text.index(start)] + block + text[text.index(end) + len(end) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the README and the docs")
    blocks = f"{START}\n{table()}\n{END}", f"{MISSED}\n{missed()}\n{MISSED_END}"
    if not parser.parse_args().write:
        print("\n\n".join(blocks))
        return
    for page in PAGES:
        put(page, blocks[0])
    put(SPEED, blocks[1])


if __name__ == "__main__":
    main()
