"""Tensors of static caches that go from one cache to the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import FAMILIES, cache_argument
from transformers import StaticCache

from hf_multilora.generation import kept_caches
from hf_multilora.generation.kept_caches import MAX_KEPT, KeptCaches


def new_cache(model: Any, length: int = 16) -> Any:
    return StaticCache(config=model.config, max_cache_len=length)


def fill(model: Any, cache: Any, rows: int = 2) -> None:
    with torch.no_grad():
        model(torch.ones(rows, 3, dtype=torch.long), **{cache_argument(model): cache})


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
    gone = []
    for rows, length, others in ((3, 16, None), (2, 16, torch.float64), (2, 20, None)):
        other = new_cache(model, length=length)
        gone.append(len(kept.prepare(other, rows, length, others)))
        assert other.layers[0].keys is None
    assert gone == [0, 0, 1], "a longer one is made, so that the shorter one is never asked for again"
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


@pytest.mark.parametrize("total", [80, 20, 12, 8])
def test_what_is_kept_leaves_as_much_free(monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    """On a device with room for `total` rows: what was kept made a generate() fail that has room for its cache."""
    model, kept = FAMILIES["llama"].build(), KeptCaches()
    row = _bytes_of_a_row(model)

    def in_use() -> int:
        return sum(held.nbytes for held in kept._kept)

    monkeypatch.setattr(kept_caches, "available_bytes", lambda device, enough: min(enough, total * row - in_use()))
    for rows in (8, 7, 6, 5, 4, 3, 2, 1, 8):
        before, cache = len(kept._kept), new_cache(model)
        gone = kept.prepare(cache, rows, 16)
        assert before - len(kept._kept) == len(gone)
        new = rows * row if cache.layers[0].keys is None else 0
        unused = sum(held.nbytes for held in kept._kept if held.unused())
        assert unused <= max(0, total * row - in_use() - new), rows
        fill(model, cache, rows)
        assert kept.view(cache) is not None
        del cache
    assert (len(kept._kept) == 8) == (total == 80)


def _bytes_of_a_row(model: Any) -> int:
    kept, cache = KeptCaches(), new_cache(model)
    kept.prepare(cache, 1, 16)
    fill(model, cache, 1)
    kept.view(cache)
    assert kept._kept[0].nbytes == sum(layer.keys.nbytes + layer.values.nbytes + 8 for layer in cache.layers)
    return kept._kept[0].nbytes
