"""What the loader hands over: factors by site, lazily readable, and what a report says about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .checkpoint import Checkpoint, TensorRef
from .config import AdapterSpec


@dataclass(frozen=True)
class Factor:
    """The two factors of one site that an adapter trained.

    linear: a.read() is [rank, in], b.read() is [width of the slice, rank].
    embedding: a.read() is [rank, V], b.read() is [d, rank].

    Args:
        path, slice: the site.
        kind: "linear" or "embedding".
        rank: of both factors.
        scaling: the whole factor of the update: alpha/r or alpha/sqrt(r) with patterns, times the layer's own scale.
        a, b: read lazily; equal references mean the same stored factor.
    """

    path: str
    slice: int
    kind: str
    rank: int
    scaling: float
    a: TensorRef
    b: TensorRef


@dataclass(frozen=True)
class AdapterPlan:
    """What one checkpoint becomes on one model. A context manager: leaving it closes the files.

    Args:
        factors: trained sites, in the order of the model.
        rank: the largest rank among them.
        spec: the checkpoint's config.
        source: folder, hub id with revision, or "memory".
        fingerprint_of_source: commit of the hub where there is one.
        base_model: base_model_name_or_path of the checkpoint.
        ignored: config fields and tensors without effect on inference.
        left_out: tensors left out because of ignore_untargeted=True.
        warnings: what a reader should know.
    """

    factors: tuple[Factor, ...]
    rank: int
    spec: AdapterSpec
    source: str
    fingerprint_of_source: str | None
    base_model: str | None
    checkpoint: Checkpoint
    ignored: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Release the files; the factors cannot be read afterwards."""
        self.checkpoint.close()

    def __enter__(self) -> AdapterPlan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
