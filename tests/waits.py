"""Waits that end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(happened: Callable[[], Any], wait_s: float = 60.0) -> None:
    """Wait for something, and fail where it does not come."""
    end = time.monotonic() + wait_s
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
