"""Tensors of static caches that go from one cache to the next."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from models import FAMILIES
from transformers import StaticCache

from hf_multilora.generation.static_cache import MAX_KEPT, KeptCaches


def new_cache(model: Any, length: int = 16) -> Any:
    return StaticCache(config=model.config, max_cache_len=length)


def _argument(model: Any) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def fill(model: Any, cache: Any, rows: int = 2) -> None:
    with torch.no_grad():
        model(torch.ones(rows, 3, dtype=torch.long), **{_argument(model): cache})


def test_tensors_go_from_cache_to_cache() -> None:
    model, kept = FAMILIES["gemma3"].build(), KeptCaches()
    first = new_cache(model)
    kept.prepare(first, 2, 16)
    assert kept.view(first) is None, "it holds nothing yet"
    fill(model, first)
    view = kept.view(first)
    assert view is not None and view is kept.view(first)
    addresses = [layer.keys.data_ptr() for layer in first.layers]
    second = new_cache(model)
    kept.prepare(second, 2, 16)
    fill(model, second)
    other = kept.view(second)
    assert other.token is not view.token
    del first, view
    third = new_cache(model)
    kept.prepare(third, 2, 16)
    assert third.layers[0].keys is not None and third.get_seq_length() == 0
    assert all(not layer.keys.any() and not layer.values.any() for layer in third.layers)
    assert [layer.keys.data_ptr() for layer in third.layers] == addresses
    fill(model, third)
    assert kept.view(third).token is not other.token
    assert all(map(torch.equal, [x.keys for x in second.layers], [x.keys for x in third.layers]))


def test_tensors_that_somebody_holds_are_not_given() -> None:
    model = FAMILIES["llama"].build()
    for take in (lambda cache: cache.layers[0].keys, lambda cache: cache.layers[1].values[:1], lambda cache: cache):
        kept, cache = KeptCaches(), new_cache(model)
        kept.prepare(cache, 2, 16)
        fill(model, cache)
        kept.view(cache)
        taken = take(cache)
        del cache
        assert not kept._kept[0].free(), take
        del taken
        assert kept._kept[0].free()


def test_tensors_of_other_shapes_are_not_given() -> None:
    model = FAMILIES["llama"].build()
    kept, cache = KeptCaches(), new_cache(model)
    kept.prepare(cache, 2, 16)
    fill(model, cache)
    kept.view(cache)
    del cache
    for rows, length, others in ((3, 16, None), (2, 20, None), (2, 16, torch.float64)):
        other = new_cache(model, length=length)
        kept.prepare(other, rows, length, others)
        assert other.layers[0].keys is None
    assert len(kept.sweep()) == 1, "a longer one was made, so that the shorter one is never asked for again"
    wrong = new_cache(model, length=20)  # generate() believes that it has 3 rows
    kept.prepare(wrong, 3, 20)
    fill(model, wrong, rows=4)
    kept.view(wrong)
    del wrong
    other = new_cache(model, length=20)
    kept.prepare(other, 3, 20)
    assert other.layers[0].keys is None


def test_few_caches_are_kept() -> None:
    model, kept = FAMILIES["llama"].build(), KeptCaches()
    for rows in range(1, MAX_KEPT + 4):
        cache = new_cache(model)
        kept.prepare(cache, rows, 16)
        fill(model, cache, rows)
        kept.view(cache)
        del cache
        kept.sweep()
    assert len(kept._kept) == MAX_KEPT
