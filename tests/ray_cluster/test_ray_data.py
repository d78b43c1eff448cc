"""Ray Data: actors answer as one process does, and go on where a run was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

import pyarrow.parquet as pq  # noqa: E402
from ray_bed import in_one_process, rows, run_job, write_files  # noqa: E402

from hf_multilora.integrations.ray import MultiLoraPredictor, unanswered  # noqa: E402


class Killed(MultiLoraPredictor):
    """Its process is killed at the ninth batch."""

    batches = 0

    def __call__(self, batch: Any) -> Any:
        Killed.batches += 1
        if Killed.batches == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


def parts(out: Path) -> list[Path]:
    return sorted(out.rglob("*.parquet"))


def test_killed_and_resumed_as_in_one_process(cluster, tmp_path):
    files, out, asked = write_files(tmp_path), tmp_path / "out", rows(200)
    with pytest.raises(ray.exceptions.RayError):
        # Ray would start the actor anew, and nothing would be lost: the run is to end here.
        run_job(files, asked, out, Killed, concurrency=1, max_restarts=0, max_task_retries=0)
    written = parts(out)
    assert 2 <= len(written) < 10
    # What a killed writer leaves of a part.
    torn = written.pop()
    torn.write_bytes(torn.read_bytes()[:-40])
    kept = [row for path in written for row in pq.read_table(path).to_pylist()]

    run_job(files, asked, out, concurrency=2)
    assert torn.with_name(f"_{torn.name}.torn").exists() and set(written) < set(parts(out))
    got, want = pq.read_table(out).to_pylist(), in_one_process(files, asked)
    assert sorted(got, key=lambda row: row["id"]) == want, "no row twice, none missing, each as in one process"
    assert all(row in got for row in kept)
    assert all(row["error"] is None for row in want) and len({row["text"] for row in want}) > 100
    assert unanswered(ray.data.from_items(asked), out).count() == 0


def test_keys_that_are_not_there_are_refused(cluster, tmp_path):
    ds = ray.data.from_items([{"id": 1}, {"id": 2}])
    assert unanswered(ds, tmp_path / "none").count() == 2
    with pytest.raises(ray.exceptions.RayTaskError, match="no column 'key'. It has id"):
        unanswered(ds, tmp_path, "key").materialize()
