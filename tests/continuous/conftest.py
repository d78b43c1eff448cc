"""Managers collect garbage when they stop."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """A collection takes a second for all that has been imported by then; what is there before a test is left out."""
    gc.freeze()
    yield
    gc.unfreeze()
