"""Factors that are no plain A and B: for a base that the method altered first, block-diagonal, or on pooled input.

PiSSA, OLoRA and KaSA take a part of rank r out of the base before training: W_trained_on = W - s B0 A0. On the clean
base the same function is a LoRA of rank 2r, A' = [A; A0] and B' = [B, -B0], and (A0, B0) follow from W alone (layer.py
and variants.py of PEFT's lora). What PEFT draws at random, or from data, cannot be computed again and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..errors import AdapterFormatError, UnsupportedAdapterError
from .base import Base
from .checkpoint import TensorRef
from .computed import Computed
from .config import AdapterSpec
from .plan import Readable
from .targets import Part

TITLES = {"pissa": "PiSSA", "olora": "OLoRA", "kasa": "KaSA"}


def rows_of(ref: Readable, start: int, stop: int) -> Readable:
    """The rows [start, stop) of a stored or computed matrix or vector."""
    if (start, stop) == (0, ref.shape[0]):
        return ref
    if isinstance(ref, TensorRef):
        return TensorRef(ref.checkpoint, ref.key, (start, stop))
    return Computed((stop - start, *ref.shape[1:]), lambda: ref.read()[start:stop])


def expanded(spec: AdapterSpec, a: Readable, b: Readable, inside: int) -> tuple[Readable, Readable, str | None]:
    """A and B as full matrices, and in words what was done to them.

    The tensors say whether a factor is block-diagonal (BD-LoRA: [r, in / n] or [out, r / n]) or on pooled input
    (QALoRA: [r, in / g]); the config says by how much.

    Args:
        inside: inputs of the layer.
    """
    rank, width = a.shape
    n, group = spec.blocks, spec.group
    if n > 1 and width != inside and width * n == inside and rank % n == 0:
        whole = Computed((rank, inside), lambda: block_diagonal(a.read(), n))
        return whole, b, "A is block-diagonal (BD-LoRA), filled up with zeros"
    if n > 1 and b.shape[1] * n == rank and b.shape[0] % n == 0:
        whole = Computed((b.shape[0], rank), lambda: block_diagonal(b.read(), n))
        return a, whole, "B is block-diagonal (BD-LoRA), filled up with zeros"
    if group > 1 and width != inside and width * group == inside:
        # PEFT takes the mean over each group and multiplies it by the number of groups
        spread = Computed((rank, inside), lambda: a.read().float().repeat_interleave(group, 1) * (width / group))
        return spread, b, "A acts on pooled input (QALoRA), spread over each group"
    return a, b, None


def unused_layouts(spec: AdapterSpec, converted: Iterable[str]) -> list[str]:
    """Warnings for a layout that the config announces and no tensor has; the tensors decide."""
    said = {"use_bdlora": (spec.blocks, "BD-LoRA"), "use_qalora": (spec.group, "QALoRA")}
    return [
        f"the config says {field}, and no factor is of {title}'s shape: they count as they are."
        for field, (n, title) in said.items()
        if n > 1 and not any(title in text for text in converted)
    ]


def block_diagonal(stacked: torch.Tensor, n: int) -> torch.Tensor:
    """Blocks that are stored one under the other, on the diagonal."""
    return torch.block_diag(*stacked.float().chunk(n, dim=0))


def check_altered(spec: AdapterSpec, base: Base, parts: Sequence[Part], name: str) -> None:
    """Raises: UnsupportedAdapterError for a layer whose altered base PEFT does not define."""
    title = TITLES[spec.altered]
    targets = [base.table.targets[part.path] for part in parts]
    if any(target.kind == "embedding" for target in targets):
        raise UnsupportedAdapterError(f"{base.where}: {name!r} is an embedding: PEFT has no {title} for it.")
    if spec.altered != "pissa" and any(target.transposed for target in targets):
        raise UnsupportedAdapterError(
            f"{base.where}: {name!r} is a Conv1D (weight [in, out]), for which PEFT's {title} is not defined."
        )


def check_removable(spec: AdapterSpec, base: Base, parts: Sequence[Part], name: str) -> None:
    """Raises: UnsupportedAdapterError for a weight that another module shares, and so lost the part there as well."""
    shared = next((part.path for part in parts if f"{part.path}.weight" in base.table.tied), None)
    if shared is not None:
        raise UnsupportedAdapterError(
            f"{base.where}: {TITLES[spec.altered]} altered the weight of {name!r}, and with it the module that "
            f"{shared!r} is tied to; the file does not hold it. Save it again with save_embedding_layers=True."
        )


def with_diagonal(b: Readable, diagonal: Readable | None) -> Readable:
    """B with KaSA's singular values, which go between B and A, multiplied in."""
    return b if diagonal is None else Computed(b.shape, lambda: b.read().float() * diagonal.read().float())


def with_removed(
    spec: AdapterSpec,
    base: Base,
    parts: Sequence[Part],
    a: Readable,
    b: Readable,
    scaling: float,
    name: str,
) -> tuple[Readable, Readable]:
    """A' and B' of rank 2r, which do on the clean base what A and B do on the altered one.

    Args:
        parts: of the model, that make up the layer of training.
        a, b: [r, in] and [out, r].
        name: of the module in training, for errors.

    Raises:
        AdapterFormatError: a rank that the method cannot have.
    """
    title = TITLES[spec.altered]
    (rank, inside), out = a.shape, b.shape[0]
    if rank > min(inside, out):
        raise AdapterFormatError(f"{base.where}: {name!r}: {title} of rank {rank} on a layer of {inside} x {out}.")
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def removed() -> tuple[torch.Tensor, torch.Tensor]:
        if not held:
            weight = base.whole(parts, f"{title}'s part of {name}")
            down, up = _removed(spec.altered, weight, rank, scaling)
            held.append((down.cpu(), up.cpu()))
        return held[0]

    return (
        Computed((2 * rank, inside), lambda: torch.cat([a.read().float(), removed()[0]])),
        Computed((out, 2 * rank), lambda: torch.cat([b.read().float(), -removed()[1]], 1)),
    )


def _removed(method: str, weight: torch.Tensor, rank: int, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(A0, B0) with W - scaling B0 A0 the base that the adapter was trained on; W float32 [out, in]."""
    if method == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank], q[:, :rank]
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    # PiSSA takes the largest components, KaSA drops the smallest
    piece = slice(0, rank) if method == "pissa" else slice(s.numel() - rank, None)
    return v[piece], u[:, piece] * (s[piece] / scaling)
