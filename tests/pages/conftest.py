from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import build_stage
from transformers.utils import logging


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stage(tmp_path_factory.mktemp("stage"))


@pytest.fixture
def stage(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stage as the working directory; transformers' switches are as they were afterwards."""
    monkeypatch.chdir(built)
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield built
    logging.set_verbosity(verbosity)
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
