"""trainable_token_indices: rows of an embedding that an adapter replaces. The config says which, the file has them."""

from __future__ import annotations

import torch

from ..errors import AdapterFormatError, AdapterMatchError
from .base import Base
from .checkpoint import Checkpoint, TensorRef
from .computed import Computed
from .config import AdapterSpec
from .keys import Key
from .plan import Readable, SavedParam, TokenRows
from .vocabulary import Vocabulary


def token_rows(
    keys: list[Key],
    names: dict[str, str],
    spec: AdapterSpec,
    checkpoint: Checkpoint,
    base: Base,
    vocabulary: Vocabulary,
    saved: list[SavedParam],
) -> tuple[tuple[TokenRows, ...], dict[str, int]]:
    """Rows by module, and for those that reach beyond the base's vocabulary its new size there.

    Rows of an input embedding count for a head that shares its weight too, unless the head has rows of its own. Rows
    of a table that is saved whole besides are worked into that.

    Args:
        keys: those of role "tokens".
        names: module path in the checkpoint -> in the model.
        saved: what is saved whole; tables with rows of their own are replaced here.

    Raises:
        AdapterFormatError: rows without their tokens, or tokens without their rows.
        AdapterMatchError: no such embedding, another width, tokens beyond the vocabulary.
    """
    where = checkpoint.where
    found: dict[str, TokenRows] = {}
    used: set[str] = set()
    for key in keys:
        path = names[key.path]
        layer = _layer(key.path, path, spec, vocabulary)
        if layer is None:
            raise AdapterFormatError(
                f"{where}: {key.name} holds rows of {path!r}, and the config's trainable_token_indices does not say "
                "for which tokens."
            )
        if not checkpoint.infos[key.name].dtype.is_floating_point:
            raise AdapterFormatError(
                f"{where}: {key.name} has the dtype {checkpoint.infos[key.name].dtype}: expected floating-point rows."
            )
        used.add(layer)
        if path in found:
            raise AdapterFormatError(f"{where}: two tensors hold trained rows of {path!r}.")
        found[path] = TokenRows(path, spec.token_indices[layer], TensorRef(checkpoint, key.name))
    whole = {item.path: i for i, item in enumerate(saved) if item.name == "weight"}
    sizes = {path: saved[i].ref.shape[0] for path, i in whole.items()}
    held = {path: _check(rows, base, vocabulary, sizes.get(path), where) for path, rows in found.items()}
    for path, rows in list(found.items()):
        for other in vocabulary.same_table(path) if path in vocabulary.embeddings else ():
            if other not in found:
                found[other], held[other] = TokenRows(other, rows.ids, rows.ref), held[path]
    for layer, ids in spec.token_indices.items():
        if layer not in used and not any(_named(layer, p) and rows.ids == ids for p, rows in found.items()):
            raise AdapterFormatError(
                f"{where}: trainable_token_indices names {len(ids)} tokens{f' of {layer!r}' if layer else ''}, and "
                "the file holds no rows for them: it is incomplete. Copy or download it again."
            )
    for path in [path for path in found if path in whole]:
        rows, item = found.pop(path), saved[whole[path]]
        saved[whole[path]] = SavedParam(path, "weight", _replaced(item.ref, rows))
        del held[path]
    return tuple(found.values()), {path: size for path, size in held.items() if size > vocabulary.size}


def _replaced(table: Readable, rows: TokenRows) -> Computed:
    def compute() -> torch.Tensor:
        index = torch.tensor(rows.ids)
        return table.read().to("cpu", torch.float32).index_copy(0, index, rows.ref.read().to("cpu", torch.float32))

    return Computed(table.shape, compute)


def _layer(trained: str, path: str, spec: AdapterSpec, vocabulary: Vocabulary) -> str | None:
    """The entry of the config that speaks of this module."""
    shared = vocabulary.same_table(path)
    for place in (trained, path, *shared):
        for name in spec.token_indices:
            if name and _named(name, place):
                return name
    embeds = any(place in vocabulary.embeddings for place in (path, *shared))
    return "" if "" in spec.token_indices and embeds else None


def _named(name: str, path: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _check(rows: TokenRows, base: Base, vocabulary: Vocabulary, saved: int | None, where: str) -> int:
    """Check the shape and the tokens; returns the rows that the table needs for them."""
    known = base.shape(f"{rows.path}.weight")
    if known is None or len(known) != 2:
        raise AdapterMatchError(f"{where}: trained rows of {rows.path!r}, which is no embedding of this model.")
    if rows.ref.shape != (len(rows.ids), known[1]):
        raise AdapterMatchError(
            f"{where}: {len(rows.ids)} trained rows of {rows.path!r} need the shape {(len(rows.ids), known[1])}, the "
            f"file has {rows.ref.shape}."
        )
    size = saved or known[0]
    beyond = sorted(token for token in rows.ids if token >= size)
    if beyond and (rows.path not in vocabulary or beyond != list(range(size, size + len(beyond)))):
        raise AdapterMatchError(
            f"{where}: trained rows of {rows.path!r} for the tokens {beyond[:4]}, beyond its vocabulary of {size}. "
            "Tokens that were added have to be there without a gap."
        )
    return size + len(beyond)
