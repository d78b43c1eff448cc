"""adapter_config.json -> AdapterSpec."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterSpec:
    """What a checkpoint's config says about its mathematics."""

    r: int
    alpha: float
