"""transformers' ContinuousBatchingConfig, under whichever names its version has."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import ContinuousBatchingConfig

_FIELDS = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
_PAGE = "page_size" if "page_size" in _FIELDS else "block_size"


def batching_config(**fields: Any) -> ContinuousBatchingConfig:
    """A config of these fields; `page_size` (tokens of a block of the cache) goes by its older name where need be.

    What is None is left to transformers.
    """
    named = {_PAGE if name == "page_size" else name: value for name, value in fields.items() if value is not None}
    return ContinuousBatchingConfig(**named)


def cache_tokens(config: ContinuousBatchingConfig) -> int:
    """Tokens that the whole cache of a started manager holds: no request can be longer."""
    blocks, page = config.num_blocks, getattr(config, _PAGE)
    assert blocks and page, "the manager has not started"
    return int(blocks * page)
