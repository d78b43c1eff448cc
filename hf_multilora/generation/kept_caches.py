"""Tensors of static caches, kept from one cache to the next, as long as there is memory for it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache

from .static_cache import CacheView, NotCapturable, dicts_of

MAX_KEPT = 8  # sets of tensors that no cache uses, where steps are captured
MAX_COMPILED = 1  # the same where they are compiled: a graph that finds others is recorded once more


class Kept:
    """The tensors of one cache, and how its layers looked with them.

    Args:
        shape: what a cache must have to be given them; None: they serve this one only.
        batch, length: rows, and tokens that the cache has room for.
    """

    def __init__(self, cache: Any, shape: Hashable = None, batch: int = 0, length: int = 0) -> None:
        self.batch, self.length = batch, length
        self.tokens: dict[Hashable, object] = {}
        self.user: weakref.ref[Any] | None = weakref.ref(cache)
        self._own_tensors(cache)
        self._state = [dict(holder) for holder in dicts_of(cache)]
        self._tensors = [v for state in self._state for v in state.values() if isinstance(v, torch.Tensor)]
        self.device = self._tensors[0].device if self._tensors else torch.device("cpu")
        self.nbytes = sum(tensor.untyped_storage().nbytes() for tensor in self._tensors)
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

    def unused(self) -> bool:
        """Whether its cache is gone."""
        return self.user is None or self.user() is None

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


def available_bytes(device: torch.device, enough: int) -> int:
    """Bytes that can be allocated on a device; `enough` where that is at least as much, or nothing is known."""
    if device.type != "cuda":
        return enough
    free = torch.cuda.mem_get_info(device)[0]
    if free < enough:  # the allocator holds more, but takes longer to tell
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(free, enough)


class KeptCaches:
    """Tensors of caches that have been decoded with graphs, to be used by one cache after another.

    Args:
        most: sets of tensors that are kept while no cache uses them.
    """

    def __init__(self, most: int = MAX_KEPT) -> None:
        self._most = most
        self._kept: list[Kept] = []  # the one that was used last is the last
        self._shapes: weakref.WeakKeyDictionary[Any, tuple[Hashable, int, int]] = weakref.WeakKeyDictionary()
        self._views: weakref.WeakKeyDictionary[Any, CacheView] = weakref.WeakKeyDictionary()
        self._longest = 0

    def prepare(self, cache: Any, batch: int, length: int, others: Hashable = None) -> list[Kept]:
        """Give a new, empty cache of generate() the tensors of one that is gone, if there are any of its shape.

        Before it makes tensors of its own, others make room: what is forgotten for it is returned (see `sweep`).

        Args:
            batch, length: rows, and tokens that it has room for. Shorter ones are not made again (transformers sees
                to that), and their tensors not kept.
            others: what else decides about the tensors (their dtype, for example).
        """
        self._longest = max(self._longest, length)
        try:
            shape = (batch, others, _shape(cache))
        except NotCapturable:
            return self.sweep()
        self._shapes[cache] = (shape, batch, length)
        found = next((kept for kept in self._kept if kept.shape == shape and kept.free()), None)
        if found is not None:
            found.give(cache)
            self._kept.remove(found)
            self._kept.append(found)
        gone = self.sweep()
        unused = [kept for kept in self._kept if kept.unused()]
        if not unused:
            return gone
        # What is kept for later takes no more than what stays for all else: activations, other caches, other models.
        needed = 0 if found is not None else self._expected(batch, length)
        over = sum(kept.nbytes for kept in unused) + needed
        over -= available_bytes(unused[0].device, over)
        for kept in unused:
            if over > 0:
                gone.append(kept)
                self._kept.remove(kept)
                over -= 2 * kept.nbytes  # less is kept, and as much more is there
        return gone

    def _expected(self, batch: int, length: int) -> int:
        """Bytes of a new cache, judged by others of this model."""
        rates = [kept.nbytes / (kept.batch * kept.length) for kept in self._kept if kept.batch and kept.length]
        return int(max(rates, default=0.0) * batch * length)

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
        """Forget what no cache will use again, and the oldest beyond what may be kept; returns it."""
        unused = [kept for kept in self._kept if kept.unused()]
        gone = [kept for kept in unused if kept.shape is None or kept.length < self._longest]
        left = [kept for kept in unused if kept not in gone]
        gone += left[: max(0, len(left) - self._most)]
        self._kept = [kept for kept in self._kept if kept not in gone]
        return gone
