"""What the loader hands over: factors by site, lazily readable, and what a report says about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .checkpoint import Checkpoint
from .config import AdapterSpec


class Readable(Protocol):
    """A tensor that is read, or computed, when asked for. Equal objects (==, hash) mean the same numbers."""

    def read(self) -> torch.Tensor: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Factor:
    """What an adapter does at one site, with the base's output y0 (its bias included):

        y = gain * y0 + shift + gain * scaling * B (A x)

    linear: a.read() is [rank, in], b.read() is [width of the slice, rank].
    embedding: a.read() is [rank, V], b.read() is [d, rank].
    experts: a.read() is [E, rank, in], b.read() is [E, width, rank], where a first dimension of 1 stands for all
    experts; no gain, no shift. An expert that was not trained has zeros. Where ranks share the block, E and the
    intermediate width are this rank's.

    Args:
        path, slice: the site.
        kind: "linear", "embedding" or "experts".
        rank: of both factors.
        scaling: the whole factor of the update: alpha/r or alpha/sqrt(r) with patterns, times the layer's own scale.
        a, b: read lazily; equal references mean the same stored factor. None for rank 0: a site with nothing but a
            shift.
        gain: DoRA's m / |W + scaling B A| for each output column, float32 [width]; None: 1. B is read as stored, and
            whoever packs it multiplies it by the gain.
        shift: what a bias of the adapter adds, float32 [width], on top of the base's own bias; None: 0.
    """

    path: str
    slice: int
    kind: str
    rank: int
    scaling: float
    a: Readable | None
    b: Readable | None
    gain: Readable | None = None
    shift: Readable | None = None


@dataclass(frozen=True)
class SavedParam:
    """A whole parameter that takes the place of the base's for the rows of this adapter.

    Args:
        path: the module that is replaced: one of `modules_to_save`, a norm, an embedding or head of another size.
        name: the parameter inside it, such as "weight" or "dense.bias".
        ref: the tensor, in the shape that the module wants, or with more rows where the vocabulary is larger.
    """

    path: str
    name: str
    ref: Readable


@dataclass(frozen=True)
class TokenRows:
    """Rows of an embedding (or of the head tied to it) that this adapter replaces.

    Args:
        path: the embedding or head.
        ids: which rows.
        ref: their new values, [len(ids), d]; all that counts for them: no factor of the layer comes on top.
    """

    path: str
    ids: tuple[int, ...]
    ref: Readable


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
        saved: whole parameters that replace the base's, by module.
        tokens: rows of embeddings and heads that replace the base's.
        invocation: aLoRA's token sequence: the adapter counts from its last occurrence in the prompt on; empty: it
            counts everywhere.
        vocab_size: rows of the adapter's own vocabulary; None: the base's.
        converted: tensors that were not taken as stored, each with what became of it.
        unmatched: names and patterns of the config that mean no trained module.
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
    saved: tuple[SavedParam, ...] = ()
    tokens: tuple[TokenRows, ...] = ()
    invocation: tuple[int, ...] = ()
    vocab_size: int | None = None
    converted: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """What a LoadReport says beyond names and sizes, as fields of it: plain values, fit for JSON."""
        ignored = {text.partition(":")[0] for text in self.ignored}
        unused = ignored.union(self.left_out)
        return {
            "tensors": sum(name not in unused for name in self.checkpoint.infos),
            "features": self._features(),
            "scalings": {factor.path: factor.scaling for factor in self.factors if factor.rank},
            "saved": {f"{item.path}.{item.name}": list(item.ref.shape) for item in self.saved},
            "tokens": {rows.path: list(rows.ids) for rows in self.tokens},
            "invocation": list(self.invocation),
            "vocab_size": self.vocab_size,
            "converted": list(self.converted),
            "unmatched": list(self.unmatched),
        }

    def _features(self) -> list[str]:
        """What the adapter has beside plain LoRA, in words."""
        experts = sum(factor.kind == "experts" for factor in self.factors)
        gains = sum(factor.gain is not None for factor in self.factors)
        shifts = sum(factor.shift is not None and factor.gain is None for factor in self.factors)
        altered = {"pissa": "PiSSA", "olora": "OLoRA", "kasa": "KaSA"}.get(self.spec.altered)
        found = [
            f"experts ({experts})" if experts else "",
            f"DoRA ({gains})" if gains else "",
            f"biases ({shifts})" if shifts else "",
            f"{altered}'s base" if altered else "",
            f"saved modules ({', '.join(dict.fromkeys(item.path for item in self.saved))})" if self.saved else "",
            f"token rows ({', '.join(rows.path for rows in self.tokens)})" if self.tokens else "",
            f"aLoRA, invoked by {list(self.invocation)}" if self.invocation else "",
            f"a vocabulary of {self.vocab_size}" if self.vocab_size is not None else "",
        ]
        return [text for text in found if text]

    def close(self) -> None:
        """Release the files; the factors cannot be read afterwards."""
        self.checkpoint.close()

    def __enter__(self) -> AdapterPlan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
