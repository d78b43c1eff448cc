"""Ray Data: two actors answer as one process does, and go on where a run was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

import pyarrow.parquet as pq  # noqa: E402
from ray_bed import in_one_process, rows, run_job, write_files  # noqa: E402

JOB = Path(__file__).with_name("interrupted_job.py")


def parts(out: Path) -> list[Path]:
    return sorted(out.rglob("*.parquet"))


def whole(path: Path) -> bool:
    return path.read_bytes()[-4:] == b"PAR1"


def test_interrupted_and_resumed_as_in_one_process(cluster, tmp_path):
    files, out, asked = write_files(tmp_path), tmp_path / "out", rows(200)
    want = in_one_process(files, asked)
    texts = {(row["prompt"], row["text"]) for row in want}
    assert len(texts) == len(want) and all(row["error"] is None for row in want)

    path = os.pathsep.join([str(JOB.parents[2]), str(JOB.parents[1]), str(JOB.parent)])
    command = [sys.executable, str(JOB), json.dumps([cluster, files, asked, str(out)])]
    first = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE)
    end = time.monotonic() + 120
    while sum(map(whole, parts(out))) < 3:
        assert first.poll() is None, first.stderr.read()[-4000:]
        assert time.monotonic() < end, "no part was written"
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stderr.close()
    # What a killed writer leaves of a part.
    torn = parts(out)[0]
    torn.write_bytes(torn.read_bytes()[:-40])
    kept = {row["id"]: row for path in parts(out) if whole(path) for row in pq.read_table(path).to_pylist()}
    assert 10 <= len(kept) < len(asked)

    run_job(files, asked, out)
    assert torn.with_name(f"_{torn.name}.torn").exists()
    got = pq.read_table(out).to_pylist()
    assert sorted(got, key=lambda row: row["id"]) == want, "no row twice, none missing, each as in one process"
    assert all(row in got for row in kept.values())
