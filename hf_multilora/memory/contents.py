"""What a packed adapter consists of, in words and in bytes, for errors and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UnsupportedAdapterError
from .layout import FACTOR_ALIGN, align

if TYPE_CHECKING:
    from .pack import PackedAdapter


def features_of(packed: PackedAdapter) -> list[str]:
    """What an adapter has beside plain LoRA: "DoRA", "biases", "saved modules (score)", ...; empty for a plain one."""
    gains, shifts = packed.vector_offsets().ne(0).unbind(1)
    found = ["DoRA"] if gains.any() else []
    # DoRA on a layer with a bias has a shift of its own.
    found += ["biases"] if (shifts & ~gains).any() else []
    return found + packed.extras.features()


def check_plain(what: str, packed: PackedAdapter) -> None:
    """Raises: UnsupportedAdapterError if `packed` is more than plain LoRA, of which alone mixes are made."""
    features = features_of(packed)
    if features:
        raise UnsupportedAdapterError(
            f"{what} has {', '.join(features)}, and only plain LoRA adapters can be mixed. Name it on its own."
        )


def entries_of(packed: PackedAdapter) -> dict[str, int]:
    """Bytes of what a block holds beside its header, alignment included.

    Module path -> its factors, gains and shifts; parameter name -> a saved tensor; "token rows of" a module. What is
    shared counts where it comes first.
    """
    sizes: dict[str, int] = {}
    seen: set[int] = set()

    def count(name: str, start: int, nbytes: int) -> None:
        sizes.setdefault(name, 0)
        if start not in seen:
            sizes[name] += align(nbytes, FACTOR_ALIGN)
            seen.add(start)

    header, itemsize = packed.header().tolist(), packed.dtype.itemsize
    for index in packed.ranks:
        site = packed.layout.sites[index]
        a_off, b_off, rank, *vectors = header[index]
        if rank:
            for offset, factor in zip((a_off, b_off), packed.factors(index), strict=True):
                count(site.path, offset * itemsize, factor.nbytes)
        for start in filter(None, () if site.kind == "experts" else vectors):
            count(site.path, 4 * start, 4 * site.out_features)
    starts = [start for start, _ in packed.parts]
    for path, tensors in packed.extras.saved.items():
        for name, tensor in tensors.items():
            count(f"{path}.{name}", starts[tensor.group] + tensor.offset, tensor.nbytes)
    for path, both in packed.extras.tokens.items():
        for tensor in both:
            count(f"token rows of {path}", starts[tensor.group] + tensor.offset, tensor.nbytes)
    return sizes
