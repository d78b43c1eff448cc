"""What people read: LoadReport (of one load) and Status (of the slots and both levels of cache)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class LoadReport:
    """What `load_adapter` found in a checkpoint and what became of it."""

    name: str
    source: str  # folder, hub id (with revision), or "memory"
    generation: int
    rank: int  # largest rank over its modules
    modules: dict[str, int]  # module path in the model -> rank
    nbytes: int  # of the packed block, header included
    load_ms: float
    fingerprint: str
    base_model: str | None  # base_model_name_or_path of the checkpoint
    ignored: list[str] = field(default_factory=list)  # config fields and tensors without effect on inference
    left_out: list[str] = field(default_factory=list)  # tensors left out because of ignore_untargeted=True
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class AdapterStatus:
    """One registered adapter."""

    name: str
    generation: int
    rank: int
    nbytes: int
    slot: int | None  # None: registered but not resident
    pinned: bool
    in_use: int  # references held by calls in flight
    source: str


@dataclass
class CacheCounters:
    """Statistics of one cache level since enable."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    nbytes: int = 0  # bytes brought in so far
    ms: float = 0.0  # milliseconds spent bringing them in


@dataclass
class Status:
    """A snapshot of slots, adapters and counters."""

    max_loras: int
    max_lora_rank: int
    slot_bytes: int
    device: str
    dtype: str
    adapters: list[AdapterStatus]
    slots: list[str | None]  # name in each slot (mixes as "a*0.7+b*0.3"), None: free
    resident: CacheCounters  # slots
    registered: CacheCounters  # host memory

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
