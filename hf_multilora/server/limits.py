"""How large an adapter may be, found out before any of its weights is read."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download

from ..errors import AdapterFormatError, AdapterNotFoundError
from .problems import ApiError

CONFIG = "adapter_config.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)
_MAX_CONFIG = 1 << 20  # bytes
_WEIGHTS = re.compile(r".+\.safetensors|adapter_model\.(bin|pt)")  # an index may name shards as it likes


@dataclass(frozen=True)
class Limits:
    """Of one adapter.

    Args:
        max_bytes: of its weight files.
        max_rank: that its config names.
        offline: take hub ids from the cache alone.
    """

    max_bytes: int
    max_rank: int
    offline: bool

    def check(self, source: str) -> str:
        """A source whose size and rank are within the limits, seen before any weight is read.

        Raises:
            ApiError, AdapterFormatError: beyond a limit, or no adapter.
        """
        folder = Path(source)
        if folder.is_dir():
            config = folder / CONFIG
            files = [path for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name)]
            top = folder.resolve()
            for path in (config, *files):
                # In the hub's cache, files are links into the folder beside `snapshots`.
                home = top.parent.parent if top.parent.name == "snapshots" else top
                if path.exists() and home not in path.resolve().parents:
                    raise ApiError(
                        403, f"{path.name} of this adapter is a link to outside of its folder.", "not_allowed"
                    )
            nbytes = sum(path.stat().st_size for path in files)
        elif HUB_ID.fullmatch(source):
            config, nbytes = self._of_hub(source)
        else:
            raise AdapterNotFoundError(f"No adapter at {source!r}.")
        if nbytes > self.max_bytes:
            raise ApiError(
                400, f"The adapter has {nbytes} bytes; the server's limit is {self.max_bytes}.", "too_large"
            )
        rank = _rank(config)
        if rank > self.max_rank:
            raise ApiError(
                400,
                f"The adapter has rank {rank}; the server's limit is {self.max_rank} (--max-lora-rank).",
                "too_large",
            )
        return source

    def _of_hub(self, repo: str) -> tuple[Path, int]:
        """The config (fetched) and the bytes of the weight files (not fetched) of a repository."""
        offline = self.offline or bool(os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", ""))
        try:
            config = Path(hf_hub_download(repo, CONFIG, local_files_only=offline))
            if offline:
                files = [path for path in config.parent.iterdir() if _WEIGHTS.fullmatch(path.name)]
                return config, sum(path.stat().st_size for path in files)
            siblings = HfApi().model_info(repo, files_metadata=True).siblings or []
        except Exception as error:
            raise AdapterNotFoundError(f"{repo!r} cannot be had from the hub ({type(error).__name__}).") from error
        return config, sum(s.size or 0 for s in siblings if _WEIGHTS.fullmatch(s.rfilename))


def _rank(config: Path) -> int:
    """The largest rank that a config names. Raises: AdapterFormatError where it cannot be read."""
    try:
        if config.stat().st_size > _MAX_CONFIG:
            raise AdapterFormatError(f"{CONFIG} has more than {_MAX_CONFIG} bytes.")
        fields = json.loads(config.read_text(encoding="utf-8"))
        pattern = fields.get("rank_pattern") or {}
        ranks = [fields.get("r") or 0, *pattern.values()]
    except (ValueError, AttributeError, RecursionError, OSError) as error:
        raise AdapterFormatError(f"{CONFIG} cannot be read ({type(error).__name__}).") from error
    return max((rank for rank in ranks if isinstance(rank, (int, float))), default=0)  # type: ignore[return-value]
