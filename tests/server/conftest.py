"""One server for all tests that leave it as they found it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from server_bed import Running, engine, write  # noqa: E402

from hf_multilora.server import Settings  # noqa: E402


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Adapters `a`, `b` and `c`, of the versions 1, 2 and 3."""
    root = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate("abc", 1):
        write(root / name, number)
    return root


@pytest.fixture(scope="session")
def server(folder):
    running = Running(engine(), Settings(adapters=folder, allow_runtime_updates=True))
    yield running
    running.stop()


@pytest.fixture
def serve():
    """Starts servers of other settings; they end with the test."""
    started = []

    def start(**settings) -> Running:
        started.append(Running(engine(**settings.pop("options", {})), Settings(**settings)))
        return started[-1]

    yield start
    for running in started:
        running.stop()
