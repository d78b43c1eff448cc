"""Plots from the newest runs in benchmarks/results, into docs/figures. Needs matplotlib (the extra `bench`).

python benchmarks/plots.py [--out FOLDER] [--format svg|png]

decode      a decode step at batch 32 against the number of distinct adapters, beside the bare model and PEFT
batches     the same over the bare model's, against the batch size
registered  throughput against the number of registered adapters
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables import HERE, ROWS, about, columns, newest, on_the_shape

from hf_multilora.bench.results import Run, read_runs

COUNTS = (1, 2, 4, 8, 32)
COLOURS = {"eager": "#0072B2", "compiled": "#009E73", "captured": "#CC79A7", "PEFT, eager": "#D55E00"}
GREY = "#666666"
Series = list[tuple[float, float]]


def decode_series(runs: list[Run]) -> tuple[dict[str, Series], dict[str, float], list[str]]:
    """(way to decode -> (distinct adapters, ms), bare model's way -> ms, where it was measured)."""
    lines: dict[str, Series] = {}
    bare: dict[str, float] = {}
    places: list[str] = []
    for column in columns(runs, ROWS):
        figures = column.run.figures
        named = [(count, column.names.get(f"{count} adapters", "")) for count in COUNTS]
        lines[column.title] = [(count, figures[name]["value"]) for count, name in named if name in figures]
        own = column.names.get("bare model", "")
        if column.title in ("eager", "compiled") and own in figures:
            bare[column.title] = figures[own]["value"]
        places.append(about(column.run))
    return lines, bare, list(dict.fromkeys(places))


def batch_series(runs: list[Run]) -> dict[str, Series]:
    """Way to decode, with as many adapters as rows up to 32 -> (batch size, ratio to the bare model)."""
    lines: dict[str, Series] = {}
    for title, path in (("eager", "eager"), ("compiled", "static")):
        sizes = sorted({row["rows"] for run in runs for row in run.figures.values() if row.get("path") == path})
        points = []
        for rows in sizes:
            figure = f"{path} decode, batch {rows}, {min(rows, 32)} adapters"
            run = newest(runs, figure)
            if run is not None:
                points.append((rows, run.figures[figure]["ratio"]))
        if len(points) > 1:
            lines[title] = points
    return lines


def registered_series(runs: list[Run]) -> Series:
    if not runs:
        return []
    rows = [row for row in runs[-1].figures.values() if row["unit"] == "tokens/s"]
    return sorted((row["registered"], row["value"]) for row in rows)


def new_figure(title: str, below: str, height: float = 4.2) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "hf_multilora", "svg.fonttype": "none", "font.size": 10})
    figure, axes = pyplot.subplots(figsize=(7, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.supxlabel(below, x=0.01, ha="left", fontsize=7, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e0e0e0", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def count_axis(axes: Any, label: str, ticks: list[float]) -> None:
    """A logarithmic axis of counts with the measured ones as its ticks, and room for labels at the right."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(min(ticks) / 1.15, max(ticks) * (max(ticks) / min(ticks)) ** 0.36)
    axes.set_xlabel(label)


def draw_lines(axes: Any, lines: dict[str, Series]) -> None:
    for title, points in lines.items():
        x, y = zip(*points, strict=True)
        axes.plot(x, y, "o-", color=COLOURS[title], markersize=4, linewidth=1.6)


def label_lines(axes: Any, lines: dict[str, Series], form: str) -> None:
    """Names at the lines' ends, one above the other where the ends are close; after the axes have their limits."""
    axes.figure.canvas.draw()
    points_per_pixel = 72 / axes.figure.dpi
    below = float("-inf")
    for title, points in sorted(lines.items(), key=lambda item: item[1][-1][1]):
        x, y = points[-1]
        at = axes.transData.transform((x, y))[1] * points_per_pixel
        below = max(at, below + 13)
        axes.annotate(
            f"{title}, {form.format(y)}", (x, y), (8, below - at), textcoords="offset points", va="center",
            color=COLOURS[title],
        )  # fmt: skip


def plot_decode(runs: list[Run]) -> Any:
    lines, bare, places = decode_series(runs)
    if not lines:
        return None
    title = f"One decode step, batch {ROWS}, 8B shape, bf16, r=16 on seven projections (ms, log)"
    figure, axes = new_figure(title, "; ".join(places))
    draw_lines(axes, lines)
    axes.set_yscale("log")
    count_axis(axes, "distinct adapters in the batch", sorted({x for points in lines.values() for x, _ in points}))
    for way, time_ms in bare.items():
        axes.axhline(time_ms, color=COLOURS[way], linestyle=":", linewidth=1, xmax=0.74)
        axes.annotate(
            f"bare model, {way}, {time_ms:.1f}", (0, time_ms), (3, -3), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="top", fontsize=8, color=COLOURS[way],
        )  # fmt: skip
    values = [y for points in lines.values() for _, y in points] + list(bare.values())
    axes.set_ylim(min(values) * 0.7, max(values) * 1.4)
    ticks = [t for t in (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if min(values) * 0.7 <= t <= max(values) * 1.4]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    label_lines(axes, lines, "{:.1f}")
    return figure


def plot_batches(runs: list[Run]) -> Any:
    lines = batch_series(runs)
    if not lines:
        return None
    title = "Decode step over the bare model's, as many adapters as rows (32 at most)"
    figure, axes = new_figure(title, about(runs[-1]))
    draw_lines(axes, lines)
    count_axis(axes, "rows in the batch", sorted({x for points in lines.values() for x, _ in points}))
    axes.axhline(1, color=GREY, linestyle=":", linewidth=1)
    axes.set_ylim(0.9, max(1.3, 1.05 * max(y for points in lines.values() for _, y in points)))
    label_lines(axes, lines, "{:.2f} x")
    return figure


def plot_registered(_: list[Run]) -> Any:
    runs = [run for run in read_runs(HERE / "results", "registered") if on_the_shape(run)]
    points = registered_series(runs)
    if not points:
        return None
    title = "Throughput with Zipf traffic over registered adapters, 8 slots (new tokens/s)"
    figure, axes = new_figure(title, about(runs[-1]), height=1 + 0.45 * len(points))
    names = [f"{count:g} registered" for count, _ in points]
    bars = axes.barh(names, [value for _, value in points], color=COLOURS["eager"], height=0.5)
    axes.bar_label(bars, fmt="{:.0f}", padding=4)
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(value for _, value in points))
    return figure


PLOTS: dict[str, Callable[[list[Run]], Any]] = {
    "decode": plot_decode,
    "batches": plot_batches,
    "registered": plot_registered,
}


def draw(out: Path, form: str) -> list[Path]:
    """Draw what there are results for; returns the files."""
    from matplotlib import pyplot

    runs = [run for run in read_runs(HERE / "results", "generate") if on_the_shape(run)]
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, plot in PLOTS.items():
        figure = plot(runs)
        if figure is not None:
            written.append(out / f"{name}.{form}")
            figure.savefig(written[-1], dpi=150, metadata={"Date": None} if form == "svg" else None)
            pyplot.close(figure)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "figures")
    parser.add_argument("--format", choices=["svg", "png"], default="svg")
    args = parser.parse_args()
    for path in draw(args.out, args.format):
        print(path)


if __name__ == "__main__":
    main()
