from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import build_stage
from transformers import ContinuousBatchingConfig
from transformers.utils import logging


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stage(tmp_path_factory.mktemp("stage"))


@pytest.fixture
def stage(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stage as the working directory; transformers' switches are as they were afterwards.

    Where a page names no sizes, the cache of continuous batching is small: the default is all free memory.
    """
    monkeypatch.chdir(built)
    whole = ContinuousBatchingConfig.__init__

    def small(config: ContinuousBatchingConfig, *args: Any, **options: Any) -> None:
        whole(config, *args, **{"num_blocks": 32, "max_batch_tokens": 128, **options})

    monkeypatch.setattr(ContinuousBatchingConfig, "__init__", small)
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield built
    logging.set_verbosity(verbosity)
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
