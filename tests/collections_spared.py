"""For folders whose tests stop many managers."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_collections():
    """A manager collects garbage when it stops, which takes a second for all that has been imported by then."""
    gc.freeze()
    yield
    gc.unfreeze()
