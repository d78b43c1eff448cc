"""What a captured decode step needs of a static cache: its tensors, where they are, and what counts beside them.

A graph writes to the addresses that it was captured with, and generate() makes a new cache for each call. So the
tensors of a cache that is gone are kept, and the next cache of that shape is given them (`KeptCaches`). What a layer
holds beside tensors is fixed while it decodes, or counts tokens (`cumulative_length_int` of sliding windows);
`CacheView` tells the two apart.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

COUNTER = "cumulative_length_int"  # tokens that a sliding window has seen; transformers counts them in Python
MAX_KEPT = 8  # sets of tensors that no cache uses


class NotCapturable(Exception):
    """A decode step cannot be captured, and why; it runs uncaptured then."""


def dicts_of(cache: Any) -> Iterator[dict[Any, Any]]:
    """The dictionaries that hold the state of a cache: its layers', and what these keep in dictionaries.

    Raises:
        NotCapturable: a cache of another kind, or one that moves its layers to and from the device.
    """
    halves = [cache]
    if isinstance(cache, EncoderDecoderCache):
        halves = [cache.self_attention_cache, cache.cross_attention_cache]
        yield cache.is_updated
    for half in halves:
        if not isinstance(half, Cache) or not isinstance(getattr(half, "layers", None), list):
            raise NotCapturable(f"a {type(half).__name__} is not a cache of layers")
        if getattr(half, "offloading", False):
            raise NotCapturable("the cache is offloaded")
        for layer in half.layers:
            yield layer.__dict__
            for value in layer.__dict__.values():
                if isinstance(value, dict):
                    yield value


class CacheView:
    """One cache, as a captured step sees it.

    Args:
        cache: a cache that holds tokens; its tensors are to stay where they are from now on.

    Attributes:
        kept: the tensors' keeper.
        token: stands for the tensors and for all of the state that does not count: what is captured with one cache
            runs with any cache of the same token.
        length: tokens that the longest layer has room for.
    """

    def __init__(self, cache: Any, kept: Kept) -> None:
        self.kept = kept
        self._fixed: list[tuple[dict[Any, Any], Any, Any]] = []
        self.counters: list[tuple[dict[Any, Any], int]] = []
        rest: list[Hashable] = []
        self.length = 0
        for holder in dicts_of(cache):
            self.length = max(self.length, int(holder.get("max_cache_len", 0)))
            for name, value in holder.items():
                if name == COUNTER:
                    self.counters.append((holder, int(holder.get("max_cache_len", 0))))
                    continue
                self._fixed.append((holder, name, value))
                rest.append((name, None if isinstance(value, (torch.Tensor, dict)) else _plain(name, value)))
        self.token = kept.tokens.setdefault(tuple(rest), object())

    def same(self) -> bool:
        """Whether all but the counters is as it was when the view was made."""
        return all(holder.get(name) is value for holder, name, value in self._fixed)

    def full(self) -> tuple[bool, ...]:
        """Of each sliding window, whether it is full: another way through the layer's update."""
        return tuple(holder[COUNTER] >= limit for holder, limit in self.counters)

    def counts(self) -> list[int]:
        return [holder[COUNTER] for holder, _ in self.counters]

    def count(self, values: list[int]) -> None:
        for (holder, _), value in zip(self.counters, values, strict=True):
            holder[COUNTER] = value

    def tensors(self) -> list[torch.Tensor]:
        return [value for _, _, value in self._fixed if isinstance(value, torch.Tensor)]

    def save(self) -> Saved:
        """The state, to be put back after a step that must leave no trace."""
        return Saved(self)


class Saved:
    """A copy of what a decode step changes in a cache, but for places that the next step writes again."""

    def __init__(self, view: CacheView) -> None:
        self._view = view
        self._counts = view.counts()
        self._copies = [
            (value, value.clone())
            for holder, name, value in view._fixed
            if isinstance(value, torch.Tensor) and not (name in ("keys", "values") and _appends(holder))
        ]

    def restore(self) -> None:
        """Put it back.

        Raises:
            NotCapturable: the step had replaced tensors, or changed what should stay. All is put back all the same.
        """
        view = self._view
        same = view.same()
        view.count(self._counts)
        for holder, name, value in view._fixed:
            holder[name] = value
        for value, copy in self._copies:
            value.copy_(copy)
        if not same:
            raise NotCapturable("a step changes what its cache holds beside tensors")


def _appends(layer: dict[Any, Any]) -> bool:
    """Whether keys and values are written at the next place, so that writing them twice is writing them once."""
    return COUNTER not in layer and isinstance(layer.get("cumulative_length"), torch.Tensor)


def _plain(name: Any, value: Any) -> Hashable:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, torch.Size, tuple)):
        return value
    raise NotCapturable(f"{name} of a cache layer is a {type(value).__name__}")


class Kept:
    """The tensors of one cache, and how its layers looked with them.

    Args:
        shape: what a cache must have to be given them; None: they serve this one only.
        batch, length: rows, and tokens that the cache has room for.
    """

    def __init__(self, cache: Any, shape: Hashable = None, batch: int = 0, length: int = 0) -> None:
        self.length = length
        self.tokens: dict[Hashable, object] = {}
        self.user: weakref.ref[Any] | None = weakref.ref(cache)
        self._own_tensors(cache)
        self._state = [dict(holder) for holder in dicts_of(cache)]
        self._tensors = [v for state in self._state for v in state.values() if isinstance(v, torch.Tensor)]
        # Some models run more rows than generate() knows of: a cache of theirs does not say for whom it is.
        fits = all(tensor.shape[0] == batch for tensor in self._tensors if tensor.dim())
        self.shape = shape if fits else None
        self._counts = _references(self._tensors)

    @staticmethod
    def _own_tensors(cache: Any) -> None:
        """Tensors made under inference_mode could not be written outside of it: these are replaced."""
        for holder in dicts_of(cache):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor) and value.is_inference():
                    with torch.inference_mode(False), torch.no_grad():
                        own = torch.empty_like(value)
                        own.copy_(value)
                    holder[name] = own

    def free(self) -> bool:
        """Whether nobody uses the tensors: their cache is gone, and no one has taken a tensor out of it."""
        if self.user is not None and self.user() is None:
            self.user = None
        if self.user is not None:
            return False
        # While its cache lived, each tensor had one reference more.
        now = _references(self._tensors)
        return all(a < b and c <= d for (a, c), (b, d) in zip(now, self._counts, strict=True))

    def still(self, cache: Any) -> bool:
        """Whether the cache that was seen or given last has the tensors still."""
        has = [v for holder in dicts_of(cache) for v in holder.values() if isinstance(v, torch.Tensor)]
        return len(has) == len(self._tensors) and all(a is b for a, b in zip(has, self._tensors, strict=True))

    def give(self, cache: Any) -> None:
        """Let a new cache use the tensors, empty."""
        self.user = weakref.ref(cache)
        states = iter(self._state)
        for holder in _top_dicts(cache):
            state = next(states)
            for name, value in state.items():
                if isinstance(value, dict):
                    holder[name] = dict(next(states))
                else:
                    holder[name] = value
        with torch.no_grad():
            cache.reset()


def _top_dicts(cache: Any) -> Iterator[dict[Any, Any]]:
    """The dictionaries of `dicts_of` but for those that are inside of others."""
    if isinstance(cache, EncoderDecoderCache):
        yield cache.is_updated
        yield from _top_dicts(cache.self_attention_cache)
        yield from _top_dicts(cache.cross_attention_cache)
    else:
        for layer in cache.layers:
            yield layer.__dict__


def _references(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """References to each tensor, and to its memory (by views, too); they mean something beside others of here."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return [(sys.getrefcount(t), count(t.untyped_storage()._cdata) if count is not None else 0) for t in tensors]


def _shape(cache: Any) -> Hashable:
    """What two new caches must have in common for one to use the tensors of the other."""
    halves = [cache]
    if isinstance(cache, EncoderDecoderCache):
        halves = [cache.self_attention_cache, cache.cross_attention_cache]
    plain = [
        tuple((name, value) for name, value in holder.items() if isinstance(value, (bool, int, str)))
        for holder in dicts_of(cache)
    ]
    return tuple(type(layer) for half in halves for layer in half.layers), tuple(plain)


class KeptCaches:
    """Tensors of caches that have been decoded with graphs, to be used by one cache after another."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []  # the one that was used last is the last
        self._shapes: weakref.WeakKeyDictionary[Any, tuple[Hashable, int, int]] = weakref.WeakKeyDictionary()
        self._views: weakref.WeakKeyDictionary[Any, CacheView] = weakref.WeakKeyDictionary()
        self._longest = 0

    def prepare(self, cache: Any, batch: int, length: int, others: Hashable = None) -> None:
        """Give a new, empty cache of generate() the tensors of one that is gone, if there are any of its shape.

        Args:
            batch, length: rows, and tokens that it has room for. Shorter ones are not made again (transformers sees
                to that), and their tensors not kept.
            others: what else decides about the tensors (their dtype, for example).
        """
        self._longest = max(self._longest, length)
        try:
            shape = (batch, others, _shape(cache))
        except NotCapturable:
            return
        self._shapes[cache] = (shape, batch, length)
        found = next((kept for kept in self._kept if kept.shape == shape and kept.free()), None)
        if found is None:
            return
        found.give(cache)
        self._kept.remove(found)
        self._kept.append(found)

    def view(self, cache: Any) -> CacheView | None:
        """The view of a cache, or None where it holds nothing yet; its tensors are kept from now on.

        Raises:
            NotCapturable: see `dicts_of`.
        """
        view = self._views.get(cache)
        if view is not None and view.same():
            return view
        if not all(holder.get("is_initialized", True) for holder in dicts_of(cache)):
            return None
        kept = next((kept for kept in self._kept if kept.user is not None and kept.user() is cache), None)
        made_for = self._shapes.pop(cache, ())
        if kept is None or not kept.still(cache):  # a new one, or one whose tensors were replaced since
            kept = Kept(cache, *made_for)
            self._kept.append(kept)
        view = self._views[cache] = CacheView(cache, kept)
        return view

    def clear(self) -> None:
        """Forget all tensors. Caches that have been prepared are known still."""
        self._kept.clear()
        self._views.clear()
        self._longest = max((length for _, _, length in self._shapes.values()), default=0)

    def sweep(self) -> list[Kept]:
        """Forget what no cache will use again, and the oldest beyond MAX_KEPT; returns it."""
        unused = [kept for kept in self._kept if kept.user is None or kept.user() is None]
        gone = [kept for kept in unused if kept.shape is None or kept.length < self._longest]
        left = [kept for kept in unused if kept not in gone]
        gone += left[: max(0, len(left) - MAX_KEPT)]
        self._kept = [kept for kept in self._kept if kept not in gone]
        return gone
