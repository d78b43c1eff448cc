"""Which modules of a model are sized by its vocabulary, and what an adapter with a vocabulary of its own must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import AdapterFormatError, AdapterMatchError
from .targets import TargetTable, is_head

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "shared", "embed_in", "tok_embeddings")
_HEADS = ("lm_head", "embed_out")


@dataclass(frozen=True)
class Vocabulary:
    """The base's vocabulary.

    Args:
        size: its rows; 0 where the model has none.
        embeddings, heads: module paths with one row for each token.
        tied: those of both whose weights are one and the same.
    """

    size: int
    embeddings: tuple[str, ...]
    heads: tuple[str, ...]
    tied: frozenset[str]

    @classmethod
    def of(cls, table: TargetTable) -> Vocabulary:
        embeddings = {path: t.in_features for path, t in table.targets.items() if t.kind == "embedding"}
        heads = {path: t.out_features for path, t in table.targets.items() if t.kind == "linear" and is_head(path)}
        for name, shape in table.parameters.items():
            path, _, leaf = name.rpartition(".")
            last = path.rpartition(".")[2]
            if leaf == "weight" and last in _EMBEDDINGS:
                embeddings.setdefault(path, shape[0])
            elif leaf == "weight" and last in _HEADS:
                heads.setdefault(path, shape[0])
        sizes = set(heads.values())
        size = next((rows for rows in embeddings.values() if rows in sizes), next(iter(embeddings.values()), 0))
        found = tuple(path for path, rows in embeddings.items() if rows == size)
        out = tuple(path for path, rows in heads.items() if rows == size)
        tied = frozenset(path for path in (*found, *out) if f"{path}.weight" in table.tied)
        return cls(size, found, out, tied)

    def __contains__(self, path: object) -> bool:
        return path in self.embeddings or path in self.heads

    def same_table(self, path: str) -> list[str]:
        """The other modules that use the weight of `path` as theirs."""
        return [other for other in (*self.embeddings, *self.heads) if other != path and {other, path} <= self.tied]

    def resized(self, rows: Mapping[str, int], held: Mapping[str, int], where: str) -> int | None:
        """The adapter's own size, or None for the base's.

        Args:
            rows: module path -> rows of what the adapter saves whole.
            held: module path -> rows of its table once single new rows are added.

        Raises:
            AdapterMatchError: several sizes at once.
            AdapterFormatError: an embedding or a head of that size is missing.
        """
        sizes = {path: n for path, n in {**held, **rows}.items() if path in self}
        changed = {n for n in sizes.values() if n != self.size}
        if not changed:
            return None
        said = ", ".join(f"{path} {n}" for path, n in sizes.items())
        if len(changed) > 1:
            raise AdapterMatchError(f"{where}: vocabularies of different sizes in one adapter: {said}.")
        (size,) = changed
        for path in (*self.embeddings, *self.heads):
            if sizes.get(path, self.size) != size:
                kind = "head" if path in self.heads else "embedding"
                raise AdapterFormatError(
                    f"{where}: its vocabulary has {size} tokens ({said}), the base's has {self.size}, and the rows "
                    f"of the {kind} {path!r} for it are not in the file. Save it again with "
                    "save_embedding_layers=True, or with both in modules_to_save."
                )
        return size
