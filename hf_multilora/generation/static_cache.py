"""What a captured decode step needs of a static cache: its tensors, where they are, and what counts beside them.

A graph writes to the addresses that it was captured with, and generate() makes a new cache for each call. So the
tensors of a cache that is gone are kept, and the next cache of that shape is given them (`kept_caches`). What a layer
holds beside tensors is fixed while it decodes, or counts tokens (`cumulative_length_int` of sliding windows);
`CacheView` tells the two apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

if TYPE_CHECKING:
    from .kept_caches import Kept

COUNTER = "cumulative_length_int"  # tokens that a sliding window has seen; transformers counts them in Python


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
