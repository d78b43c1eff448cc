"""The KV tag: which adapter, in which generation, wrote each row of a cache.

A tag rides on the cache object itself and follows it through repeat, select, reorder, crop and deepcopy. The cache's
class is replaced by a subclass of the same name that carries these methods on; nothing else about it changes. A cache
without a tag was written by the base model.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..errors import CacheMismatchError
from .alora import Activated

_KWARGS = ("cache", "past_key_values", "cache_params")


class KVTag:
    """Writers of the rows of one cache: None for the base, else (name, unique version)."""

    def __init__(self, rows: Sequence[Hashable | None], owner: object) -> None:
        self._rows = tuple(rows)
        self.owner = owner  # the call that wrote last; while it goes on, its own steps need no check
        self._order: torch.Tensor | None = None

    @property
    def rows(self) -> tuple[Hashable | None, ...]:
        if self._order is not None:
            self._rows = tuple(self._rows[i] for i in self._order.tolist())
            self._order = None
        return self._rows

    def take(self, indices: torch.Tensor) -> None:
        """Rows are now those at `indices` (int64 `[rows]`). Read from the device only when somebody asks."""
        if len(set(self._rows)) == 1 and indices.numel() == len(self._rows):
            return
        self.owner = None  # the rows may have changed places: whoever goes on is compared with them
        self._order = indices.reshape(-1) if self._order is None else self._order[indices.reshape(-1)]

    def repeat(self, times: int) -> None:
        self.owner = None
        self._rows = tuple(row for row in self.rows for _ in range(times))

    def __deepcopy__(self, memo: dict[int, Any]) -> KVTag:
        return KVTag(self.rows, None)

    def __getstate__(self) -> dict[str, Any]:
        return {"_rows": self.rows, "owner": None, "_order": None}


class _Tagged:
    """What a tagged cache adds to its class."""

    multilora_tag: KVTag

    def reorder_cache(self, beam_idx: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = super().reorder_cache(beam_idx, *args, **kwargs)  # type: ignore[misc]
        self.multilora_tag.take(beam_idx)
        return result

    def batch_select_indices(self, indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = super().batch_select_indices(indices, *args, **kwargs)  # type: ignore[misc]
        chosen = indices.nonzero() if indices.dtype == torch.bool else indices
        self.multilora_tag.take(chosen)
        return result

    def batch_repeat_interleave(self, repeats: int, *args: Any, **kwargs: Any) -> Any:
        result = super().batch_repeat_interleave(repeats, *args, **kwargs)  # type: ignore[misc]
        self.multilora_tag.repeat(repeats)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self).__mro__[2],), self.__dict__.copy()


@functools.cache
def _tagged_class(cache_type: type[Any]) -> type[Any]:
    names = {"__module__": cache_type.__module__, "__qualname__": cache_type.__qualname__, "__doc__": None}
    return type(cache_type.__name__, (_Tagged, cache_type), names)


def _rebuild(cache_type: type[Any]) -> Any:
    return object.__new__(_tagged_class(cache_type))  # type: ignore[arg-type]


def find_cache(kwargs: dict[str, Any], output: Any = None) -> Any:
    """The cache that a forward was given or has made, or None."""
    for name in _KWARGS:
        cache = kwargs.get(name)
        if cache is not None:
            return cache
    if output is not None:
        for name in _KWARGS:
            cache = getattr(output, name, None)
            if cache is not None:
                return cache
    return None


def check_cache(cache: Any, rows: Sequence[Hashable | None], owner: object) -> None:
    """Refuse to go on from a cache that others have written.

    Args:
        cache: the cache of this forward; one that holds nothing yet is free for anybody.
        rows: tags of the rows that are about to run.
        owner: the call that runs them.

    Raises:
        CacheMismatchError: a row was written under another adapter, an older generation of it, or the base model.
    """
    tag = getattr(cache, "multilora_tag", None)
    if tag is not None and owner is not None and tag.owner is owner:
        return
    if tag is None and not any(row is not None for row in rows):
        return  # base rows go on where base rows were; the length of a static cache lies on the device
    if tag is not None and tag.rows == tuple(rows):
        return
    written = cached_length(cache)
    if not written:
        return
    before = tag.rows if tag is not None else (None,) * len(rows)
    if len(before) != len(rows):
        raise CacheMismatchError(
            f"The KV cache holds {len(before)} rows, the batch has {len(rows)}. Repeat or select its rows first "
            "(batch_repeat_interleave, batch_select_indices)."
        )
    for i, (old, new) in enumerate(zip(before, rows, strict=True)):
        if isinstance(old, Activated) and old.start >= written:
            old = None  # cropped to what the base wrote, before the invocation
        if old != new and not (old is None and isinstance(new, Activated) and new.start >= written):
            raise CacheMismatchError(
                f"Row {i} of the KV cache was written by {_describe(old)}, and would go on under {_describe(new)}. "
                + (_RELOADED if _same_name(old, new) else _OTHER)
            )


def write_tag(cache: Any, rows: Sequence[Hashable | None], owner: object) -> None:
    """Note on a cache that these rows have written it; `owner`: the call, None for the base model alone."""
    tag = getattr(cache, "multilora_tag", None)
    if tag is not None:
        if tag.owner is not owner or owner is None:
            cache.multilora_tag = KVTag(rows, owner)
        return
    if not any(row is not None for row in rows) or not isinstance(cache, (Cache, EncoderDecoderCache)):
        return
    tagged: Any = cache
    tagged.__class__ = _tagged_class(type(tagged))  # type: ignore[arg-type]
    tagged.multilora_tag = KVTag(rows, owner)


def cached_length(cache: Any) -> int:
    """Tokens that a cache holds; of one that keeps no count, 1 if it holds anything."""
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError, TypeError):
        # Layers of linear attention hold a state and no count; tuples of old models say nothing, and count as written.
        layers = getattr(cache, "layers", None)
        return 1 if layers is None else int(any(map(_holds_state, layers)))


def _holds_state(layer: Any) -> bool:
    state = getattr(layer, "has_previous_state", getattr(layer, "is_initialized", True))
    return any(state.values()) if isinstance(state, dict) else bool(state)


class StateTags:
    """Tags of states that are no Cache and cannot carry one: RWKV's `state`, XLNet's `mems`, Reformer's buckets.

    They are known by their first tensor, as long as it lives; one that nobody here has seen is let pass.
    """

    _names = ("state", "mems", "past_buckets_states")

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], tuple[Hashable | None, ...]]] = {}

    def check(self, kwargs: dict[str, Any], rows: Sequence[Hashable | None]) -> None:
        """Raises: CacheMismatchError where a state was written under other ids."""
        for name in self._names if self._known else ():
            tensor = _first_tensor(kwargs.get(name))
            seen = self._known.get(id(tensor)) if tensor is not None else None
            if seen is None or seen[0]() is not tensor:
                continue
            for row, (old, new) in enumerate(zip(seen[1], rows, strict=False)):
                if old != new:
                    raise CacheMismatchError(
                        f"Row {row} of {name} was written by {_describe(old)}, and would go on under "
                        f"{_describe(new)}. Pass the same adapter_ids, or start anew."
                    )

    def write(self, output: Any, rows: Sequence[Hashable | None]) -> None:
        """Note who has written the states that a forward returns."""
        for name in self._names:
            value = getattr(output, name, None)
            tensor = _first_tensor(value) if value is not None else None
            if tensor is not None:
                gone = functools.partial(_forget, self._known, id(tensor))
                self._known[id(tensor)] = (weakref.ref(tensor, gone), tuple(rows))


def _forget(known: dict[int, Any], key: int, gone: weakref.ref[torch.Tensor]) -> None:
    if key in known and known[key][0] is gone:
        del known[key]


def _first_tensor(value: Any) -> torch.Tensor | None:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


_OTHER = (
    "Keys and values of one adapter mean nothing to another: pass the same adapter_ids, or start from an empty cache."
)
_RELOADED = (
    "It was loaded anew in between, and keys and values of the old weights mean nothing to it: start from an empty "
    "cache."
)


def _same_name(old: Hashable | None, new: Hashable | None) -> bool:
    old, new = (tag.tag if isinstance(tag, Activated) else tag for tag in (old, new))
    return isinstance(old, tuple) and isinstance(new, tuple) and old[0] == new[0] and old != new


def _describe(tag: Hashable | None) -> str:
    if tag is None:
        return "the base model"
    if isinstance(tag, Activated):
        return f"{_describe(tag.tag)} from token {tag.start} on"
    label, version = tag if isinstance(tag, tuple) else (tag, None)
    if isinstance(version, tuple) and all(isinstance(part, int) for part in version):
        return f"adapter {label!r} (generation {version[-1]})"
    return f"adapter {label!r}"
