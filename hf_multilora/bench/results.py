"""Result files (JSON lines with GPU, versions and date), and the options that every benchmark takes."""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .workload import DTYPES, SHAPES

DEVICES = ("cuda", "cpu")  # of several GPUs the first; CUDA_VISIBLE_DEVICES chooses another


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _nvidia_smi(fields: str) -> str | None:
    return _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0")


def clocks() -> str | None:
    """SM and memory clocks, power and temperature of the first GPU, as nvidia-smi reads them (nothing is set)."""
    return _nvidia_smi("clocks.sm,clocks.mem,power.draw,temperature.gpu")


def environment(device: str) -> dict[str, Any]:
    cuda = device.startswith("cuda")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "driver": _nvidia_smi("driver_version") if cuda else None,
        "clocks": clocks() if cuda else None,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in ("torch", "triton", "transformers", "peft", "safetensors")},
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
    }


class Results:
    """JSON lines: the environment, then one line per figure, written as soon as it is known; a table at the end.

    Args:
        name: of the benchmark; with the device and the date it makes the file's name.
        out: folder of the file, which is added to.
        device: "cuda" or "cpu".
        say: takes each line of progress; print, where none is given.
    """

    def __init__(self, name: str, out: str | Path, device: str, say: Callable[[str], Any] | None = None) -> None:
        env = environment(device)
        self._say = say or functools.partial(print, flush=True)
        self._started = time.monotonic()
        label = env["device"].replace("NVIDIA", "").strip() if device.startswith("cuda") else "cpu"
        stem = f"{name}-{label}-{env['date'][:10]}".replace(" ", "_").replace("/", "_").lower()
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{stem}.json"
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self._device = device
        self.about = {"benchmark": name, **env}
        self._write({"kind": "environment", **self.about})

    def _write(self, row: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def add(
        self,
        what: str,
        value: float,
        unit: str,
        *,
        goal: float | None = None,
        ratio: float | None = None,
        ratio_goal: float | None = None,
        **conditions: Any,
    ) -> None:
        """One figure. `goal` bounds the value, `ratio_goal` the ratio; both from above."""
        # "not <=" rather than ">": NaN misses every goal
        missed = (goal is not None and not value <= goal) or (
            ratio_goal is not None and (ratio is None or not ratio <= ratio_goal)
        )
        row = {"what": what, "value": value, "unit": unit, "goal": goal, "ratio": ratio, "ratio_goal": ratio_goal}
        row |= {"missed": missed, **conditions}
        self.rows.append(row)
        self._write({"kind": "result", **row})
        self._say(self._line(row))

    def fail(self, message: str) -> None:
        """A check that does not hold: the figures of this run are not to be quoted."""
        self.failed.append(message)
        self._write({"kind": "failure", "message": message})
        self._say(f"FAILED: {message}")

    def settings(self, **settings: Any) -> None:
        """What the run was asked for. Folders of this machine do not belong into a file that others read."""
        settings.pop("out", None)
        if settings.get("model") and Path(settings["model"]).is_dir():
            settings["model"] = Path(settings["model"]).name
        self._write({"kind": "settings", **settings})

    def note(self, what: str) -> None:
        """A line of progress with the seconds since the start."""
        self._say(f"[{time.monotonic() - self._started:5.0f} s] {what}")

    @staticmethod
    def _line(row: Mapping[str, Any]) -> str:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}x"
        goals = [f"<= {row['goal']:g} {row['unit']}"] if row["goal"] is not None else []
        goals += [f"<= {row['ratio_goal']:g}x"] if row["ratio_goal"] is not None else []
        mark = "" if not goals else "MISSED" if row["missed"] else "ok"
        return f"{row['what']:<52} {row['value']:>10.4g} {row['unit']:<8} {ratio:>8}  {', '.join(goals):<22} {mark}"

    def summary(self) -> dict[str, Any]:
        """The run as one object, as `--json` prints it."""
        return {"about": self.about, "results": self.rows, "failed": self.failed, "file": str(self.path)}

    def finish(self) -> int:
        """Print the table; return the process's exit status (1: a check failed; a missed goal is not a failure)."""
        if self._device.startswith("cuda"):
            self._write({"kind": "clocks", "clocks": clocks()})
            print(f"\nclocks at the end: {clocks()}")
        print(f"\n{'what':<52} {'median':>10} {'unit':<8} {'ratio':>8}  {'goal':<22}")
        for row in self.rows:
            print(self._line(row))
        for message in self.failed:
            print(f"FAILED: {message}")
        print(f"written to {self.path}")
        return 1 if self.failed else 0


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=list(SHAPES), default="8B" if cuda else "tiny", help="model shape")
    parser.add_argument("--device", choices=DEVICES, default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="bf16" if cuda else "fp32", help="of base and adapters"
    )
    parser.add_argument("--layers", type=int, default=None, help="fewer decoder layers than the shape has")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--reps", type=int, default=7, help="alternated repetitions")
    parser.add_argument("--budget-s", type=float, default=220, help="no new repetition starts after this many seconds")
    parser.add_argument("--out", default=default_folder(), help="folder of the result files")
    return parser


def default_folder() -> str:
    """benchmarks/results in a checkout of the project, hf_multilora_bench in the working directory elsewhere."""
    root = Path(__file__).parents[2]
    in_checkout = (root / "benchmarks").is_dir() and (root / "pyproject.toml").is_file()
    return str(root / "benchmarks" / "results" if in_checkout else Path("hf_multilora_bench"))


@dataclass
class Run:
    """One run of a benchmark: the environment, what it was asked for, and its figures by what they are called."""

    about: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def read_runs(folder: str | Path, benchmark: str) -> list[Run]:
    """The runs of a benchmark in a folder of result files, oldest first. A file may hold several.

    Runs in which a check failed are left out: their figures are not to be quoted.
    """
    runs: list[Run] = []
    for path in sorted(Path(folder).glob(f"{benchmark}-*.json")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            kind = row.pop("kind")
            if kind == "environment":
                runs.append(Run(row))
            elif kind == "settings":
                runs[-1].settings = row
            elif kind == "result":
                runs[-1].figures[row["what"]] = row
            elif kind == "failure":
                runs[-1].failed.append(row["message"])
    found = [run for run in runs if run.about.get("benchmark") == benchmark and not run.failed]
    return sorted(found, key=lambda run: run.about["date"])
