"""Make a table that is shipped from the results of a search on the 8B shape: `tuning_table.py SEARCH.json OUT.json`.

SEARCH.json: a list of ["rows,adapters,rank[,tokens of a row]", group of layers, kind, results], where a result is
[us over the base GEMMs, us alone, "d" | "s" | "e", sizes or null]: the setting of that time first ("d"), then others
of the shrink ("s") and of the expand ("e"). `bench tune` writes tables itself, but by the time alone.

A candidate is judged by its time over the base plus half of its time alone, against the setting that the rule gives
today, if that was among those measured, and otherwise against the first. It has to be better by 4 %, and by more than
such differences scatter: at one row both figures are a launch, and the same setting was up to 0.9 us apart. Settings
that a table may not give are passed over, and so is the shrink where several groups of layers share a k: its row would
serve them all, whatever their widths.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_multilora.bench.kernels import groups_of
from hf_multilora.errors import ConfigError
from hf_multilora.kernels.table import FIELDS, FORMAT, read, tried
from hf_multilora.kernels.tuning import call_of, expand_rule, kind_of, shrink_rule, with_sizes

GROUPS = dict(zip(("qkv", "o", "gate_up", "down"), groups_of("8B"), strict=True))
KINDS = ("rows", "segments")
BETTER, SCATTER_US = 0.96, 0.5


def score(result: list[Any]) -> float:
    return float(result[0] + 0.5 * result[1])


def legal(kernel: str, shape: dict[str, Any], rule: Any, sizes: dict[str, int] | None) -> dict[str, int] | None:
    """What a table says for these sizes; None where it may not give them."""
    if sizes is None or any(getattr(rule, name) != sizes[name] for name in sizes.keys() - FIELDS[kernel]):
        return None
    kept = {name: value for name, value in sizes.items() if name in FIELDS[kernel]}
    try:
        with tried(kernel, shape, kept):
            return kept
    except ConfigError:
        return None


def rows_of(point: str, group: str, kind: str, results: list[Any]) -> list[dict[str, Any]]:
    """Rows for the shrink and the expand of one problem, where something is better."""
    n, adapters, rank = (int(number) for number in point.split(","))
    k, widths = GROUPS[group]
    shape = {"n": n, "rows": n, "adapters": adapters, "k": k, "widths": list(widths), "max_rank": rank}
    shape["dtype"] = "bfloat16"
    call, found = call_of(shape), []
    assert kind_of(call) == kind, point
    for op, rule in (("shrink", shrink_rule(call)), ("expand", expand_rule(call))):
        kernel = f"{op}_{kind}"
        if op == "shrink" and sum(k == other for other, _ in GROUPS.values()) > 1:
            continue
        timed = [(result, legal(kernel, shape, rule, result[3])) for result in results if result[2] == op[0]]
        timed = [(result, sizes) for result, sizes in timed if sizes is not None]
        if not timed:
            continue
        usual = next((result for result, sizes in timed if with_sizes(rule, call, sizes) == rule), results[0])
        best, tiling = min(timed, key=lambda item: score(item[0]))
        # Less than nothing over the base is scatter, too.
        if best[0] <= 0 or score(best) > min(BETTER * score(usual), score(usual) - SCATTER_US):
            continue
        row = {"kind": kernel, "shape": shape, "tiling": tiling, "over_us": best[0], "us": best[1]}
        row |= {"untuned_over_us": usual[0], "untuned_us": usual[1]}
        row["untuned"] = "the rule's" if usual is not results[0] else "the setting before"
        found.append({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="NVIDIA H200")
    parser.add_argument("--torch", default="2.11")
    parser.add_argument("--triton", default="3.6")
    parser.add_argument("--date", default="2026-11-30")
    options = parser.parse_args()
    problems = json.loads(options.search.read_text(encoding="utf-8"))
    rows = [row for problem in problems if problem[2] in KINDS for row in rows_of(*problem)]
    about = {"format": FORMAT, **{name: getattr(options, name) for name in ("device", "torch", "triton", "date")}}
    about["origin"] = "benchmarks/tuning_table.py: decode of the 8B shape, judged over the base GEMMs and alone"
    head = json.dumps(about, indent=1)[:-2]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    options.out.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    read(options.out)
    for row in rows:
        print(row["kind"], row["shape"], row["tiling"], row["over_us"], row["us"], "from", row["untuned_over_us"])


if __name__ == "__main__":
    main()
