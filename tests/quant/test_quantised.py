"""Adapters on quantised bases: every kind of `quant_bed.KINDS`, loaded, in mixed batches, with DoRA, compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from quant_bed import KINDS, TARGETS, Kind, enabled, logits, relative, weight_of, with_delta

from hf_multilora import disable_multilora
from hf_multilora.errors import UnsupportedAdapterError
from hf_multilora.layers import LoraLayer
from hf_multilora.layers.dequant import CannotDequantise, dequantised

IDS = ["a", None, "b", "a"]
SEEDS = {"a": (5, False), "b": (6, False)}


@pytest.fixture(params=[pytest.param(kind, id=name) for name, kind in KINDS.items()])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    kind: Kind = request.param
    with kind.context():
        yield kind


def rows(kind: Kind, adapters: dict, ids: list) -> torch.Tensor:
    """What each row has to be: the bare model with that row's adapter in every row."""
    model = kind.build()
    alone = {None: logits(model)}
    for name, (seed, dora) in adapters.items():
        with with_delta(model, seed, dora, kind.dtype):
            alone[name] = logits(model)
    return torch.stack([alone[name][row] for row, name in enumerate(ids)])


def test_mixed(kind: Kind) -> None:
    want = rows(kind, SEEDS, IDS)
    model = enabled(kind.build(), SEEDS)
    wrapped = {path.rpartition(".")[2] for path, m in model.named_modules() if isinstance(m, LoraLayer)}
    assert set(TARGETS) <= wrapped
    assert model.multilora.store.arena.dtype == kind.dtype
    got = logits(model, adapter_ids=IDS)
    base = logits(model)
    for row, name in enumerate(IDS):
        error = relative(got[row], want[row])
        print(kind.name, name, error)
        assert error <= kind.tolerance, (row, name, error)
        if name is None:
            assert torch.equal(got[row], want[row])
        else:
            assert relative(base[row], want[row]) > 0.05, "the adapter would hardly show"


DORA = {"a": (5, True), "b": (6, False)}


def test_dora(kind: Kind) -> None:
    """The norm is that of the dequantised weight; or the adapter is refused by the layer's name."""
    if not kind.dora:
        with pytest.raises(UnsupportedAdapterError, match=r"(?s)DoRA.*cannot be dequantised"):
            enabled(kind.build(), DORA)
        return
    want = rows(kind, DORA, IDS)
    got = logits(enabled(kind.build(), DORA), adapter_ids=IDS)
    for row, name in enumerate(IDS):
        error = relative(got[row], want[row])
        print(kind.name, name, error)
        assert error <= kind.tolerance, (row, name, error)


def test_dequantised(kind: Kind) -> None:
    """What is said to be the weight is what the layer multiplies by, before its first call and afterwards."""
    model = kind.build()
    for when in ("before", "after"):
        for path, layer in model.named_modules():
            if path.rpartition(".")[2] not in TARGETS:
                continue
            if not kind.dora:
                with pytest.raises(CannotDequantise, match=type(layer).__name__):
                    dequantised(layer)
                continue
            got = dequantised(layer)
            assert got.shape == (layer.out_features, layer.in_features)
            if when == "after":
                error = relative(got, weight_of(layer, kind.dtype))
                print(kind.name, path, error)
                assert error < 5e-3, (path, error)
        logits(model)


def test_compiled(kind: Kind) -> None:
    torch.compiler.reset()
    model = enabled(kind.build(), SEEDS)
    want = logits(model, adapter_ids=IDS)
    compiled = torch.compile(model, backend="eager")
    with model.multilora.use(IDS):
        got = logits(compiled)
    torch.compiler.reset()
    for row in range(len(IDS)):
        assert relative(got[row], want[row]) <= kind.tolerance
