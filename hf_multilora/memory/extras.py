"""Extras: what an adapter has in its block, or about it, beside factors, gains and shifts. Plain data on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from ..adapters.stored import Stored
from ..errors import AdapterMatchError
from .build import Builder, copied
from .direct import Recipe, stored_of

if TYPE_CHECKING:
    from ..adapters.plan import SavedParam, TokenRows

BaseDtype = Callable[
    [str, str], "torch.dtype | None"
]  # (module path, parameter name) -> dtype of the base's parameter


@dataclass(frozen=True)
class SavedTensor:
    """Where a tensor lies in its block.

    Attributes:
        offset: bytes from the first byte of its group's part of the block, and so of the slot; a multiple of 64.
        shape, dtype: of the tensor, row-major.
        group: of the device where the module computes.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor itself, as a view of its part of a block, or of a slot (uint8, flat)."""
        return block[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Extras:
    """Saved tensors, token rows, invocation and vocabulary of one adapter. False for an adapter that has none.

    Attributes:
        saved: module path -> parameter name inside it ("weight", "dense.bias") -> its values, in the dtype of the
            base's parameter.
        tokens: path of an embedding or head -> (ids, int64 [n]; the rows that replace those, [n, d]).
        invocation: aLoRA's token sequence; empty: the adapter counts everywhere.
        vocab_size: rows of the adapter's own vocabulary; None: the base's.
    """

    saved: Mapping[str, Mapping[str, SavedTensor]] = field(default_factory=lambda: MappingProxyType({}))
    tokens: Mapping[str, tuple[SavedTensor, SavedTensor]] = field(default_factory=lambda: MappingProxyType({}))
    invocation: tuple[int, ...] = ()
    vocab_size: int | None = None

    def __bool__(self) -> bool:
        return bool(self.saved or self.tokens or self.invocation or self.vocab_size is not None)

    def parameters(self) -> Iterator[tuple[str, str, SavedTensor]]:
        """(module path, parameter name, tensor) of everything that has the dtype of a parameter of the base."""
        for path, tensors in self.saved.items():
            yield from ((path, name, tensor) for name, tensor in tensors.items())
        yield from ((path, "weight", rows) for path, (_, rows) in self.tokens.items())

    def follows(self, base: BaseDtype | None) -> bool:
        """Whether every saved tensor has the dtype that `base` says."""
        return all(
            followed(tensor.dtype, path, name, base) == tensor.dtype for path, name, tensor in self.parameters()
        )

    def features(self) -> list[str]:
        """In words: "saved modules (score)", "token rows (model.embed_tokens)", ..."""
        found = [f"saved modules ({', '.join(self.saved)})"] if self.saved else []
        found += [f"token rows ({', '.join(self.tokens)})"] if self.tokens else []
        found += ["aLoRA's invocation tokens"] if self.invocation else []
        return found + ([f"a vocabulary of {self.vocab_size}"] if self.vocab_size is not None else [])

    def packed_by(
        self, builder: Builder, view: Callable[[SavedTensor], torch.Tensor], base: BaseDtype | None
    ) -> Extras:
        """Place these tensors, as `view` finds them, in another block; cast where the base's dtypes changed."""

        def moved(tensor: SavedTensor, dtype: torch.dtype) -> SavedTensor:
            key, group = ("extra", tensor, dtype), tensor.group
            place = builder.place(key, tensor.shape, dtype, copied(view(tensor)), group)
            return SavedTensor(place, tensor.shape, dtype, group)

        saved = {
            path: {name: moved(tensor, followed(tensor.dtype, path, name, base)) for name, tensor in tensors.items()}
            for path, tensors in self.saved.items()
        }
        tokens = {
            path: (moved(ids, ids.dtype), moved(rows, followed(rows.dtype, path, "weight", base)))
            for path, (ids, rows) in self.tokens.items()
        }
        return frozen(saved, tokens, self.invocation, self.vocab_size)


def followed(dtype: torch.dtype, path: str, name: str, base: BaseDtype | None) -> torch.dtype:
    """The dtype in which a tensor of `dtype` is kept: that of the base's parameter, where both are floating."""
    wanted = None if base is None else base(path, name)
    return wanted if wanted is not None and wanted.is_floating_point and dtype.is_floating_point else dtype


def frozen(
    saved: Mapping[str, Mapping[str, SavedTensor]],
    tokens: Mapping[str, tuple[SavedTensor, SavedTensor]],
    invocation: Sequence[int],
    vocab_size: int | None,
) -> Extras:
    """Extras that nobody can write to."""
    modules = MappingProxyType({path: MappingProxyType(dict(tensors)) for path, tensors in saved.items()})
    return Extras(modules, MappingProxyType(dict(tokens)), tuple(invocation), vocab_size)


def place_extras(
    builder: Builder,
    saved: Iterable[SavedParam],
    tokens: Iterable[TokenRows],
    invocation: Sequence[int],
    vocab_size: int | None,
    base: BaseDtype | None,
) -> Extras:
    """Place what a plan has beside its factors (`pack` says how); equal references are stored once per dtype.

    Raises:
        AdapterMatchError: a parameter or a module that comes twice, or token rows that are not one for each id.
    """

    def placed(ref: object, tensor: torch.Tensor | Stored, dtype: torch.dtype, name: str) -> SavedTensor:
        shape, group = tuple(tensor.shape), builder.layout.group_of(name.rpartition(".")[0])
        fill = Recipe(tensor) if isinstance(tensor, Stored) else copied(tensor)
        return SavedTensor(builder.place(("extra", ref, dtype), shape, dtype, fill, group), shape, dtype, group)

    modules: dict[str, dict[str, SavedTensor]] = {}
    for item in saved:
        tensor = stored_of(item.ref) or item.ref.read()
        module = modules.setdefault(item.path, {})
        if item.name in module:
            raise AdapterMatchError(f"{item.path!r}: {item.name!r} is saved twice.")
        dtype = followed(tensor.dtype, item.path, item.name, base)
        module[item.name] = placed(item.ref, tensor, dtype, f"{item.path}.{item.name}")
    rows: dict[str, tuple[SavedTensor, SavedTensor]] = {}
    for group in tokens:
        tensor, ids = (
            stored_of(group.ref) or group.ref.read(),
            torch.tensor(group.ids, dtype=torch.int64, device="cpu"),
        )
        if group.path in rows:
            raise AdapterMatchError(f"{group.path!r}: token rows come twice.")
        if len(tensor.shape) != 2 or tensor.shape[0] != len(ids):
            raise AdapterMatchError(f"{group.path!r}: rows of {len(ids)} tokens have the shape {tuple(tensor.shape)}.")
        rows[group.path] = (
            placed(tuple(group.ids), ids, torch.int64, f"{group.path}.weight"),
            placed(group.ref, tensor, followed(tensor.dtype, group.path, "weight", base), f"{group.path}.weight"),
        )
    return frozen(modules, rows, invocation, vocab_size)
