"""One local cluster of several processes for all tests here."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest

pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster():
    """Ray's address. Workers find the same modules as this process."""
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # workers would wait for whatever else runs, other tests first
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])
    context = ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=200 << 20,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    for name in ("ray.data", "ray.serve"):
        logging.getLogger(name).setLevel(logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="module")
def app(cluster, tmp_path_factory):
    """Three replicas of the model, each with room for four adapters of twelve, behind HTTP."""
    from ray import serve
    from serve_bed import App

    port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
    running = App(tmp_path_factory.mktemp("serve"), port)
    yield running
    running.http.close()
