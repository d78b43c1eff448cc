"""Adapters on quantised bases: every kind of `quant_bed.KINDS`, loaded, in mixed batches, with DoRA, compiled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from quant.quant_bed import (
    KINDS,
    TARGETS,
    Kind,
    adapter,
    enabled,
    logits,
    lora_config,
    relative,
    weight_of,
    with_delta,
)
from torch._dynamo.exc import TorchDynamoException

from hf_multilora import disable_multilora
from hf_multilora.errors import UnsupportedAdapterError
from hf_multilora.layers import LoraLayer
from hf_multilora.layers.dequant import CannotDequantise, dequantised

IDS = ["a", None, "b", "a"]
LORA = {"a": (5, False), "b": (6, False)}
DORA = {"a": (5, True), "b": (6, False)}


@pytest.fixture(params=[pytest.param(kind, id=name) for name, kind in KINDS.items()])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(autouse=True)
def in_context(kind: Kind) -> Iterator[None]:
    with kind.context():
        yield


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [layer for path, layer in model.named_modules() if path.rpartition(".")[2] in TARGETS]


def rows(kind: Kind, adapters: dict[str, tuple[int, bool]]) -> torch.Tensor:
    """What each row of `IDS` has to be: the bare model with that row's adapter in every row."""
    model = kind.build()
    alone: dict[Any, torch.Tensor] = {None: logits(model)}
    for name, (seed, dora) in adapters.items():
        with with_delta(model, seed, dora, kind.dtype):
            alone[name] = logits(model)
    return torch.stack([alone[name][row] for row, name in enumerate(IDS)])


def assert_rows(kind: Kind, got: torch.Tensor, want: torch.Tensor) -> None:
    for row, name in enumerate(IDS):
        error = relative(got[row], want[row])
        assert error <= kind.tolerance, (row, name, error)
        if name is None:
            assert torch.equal(got[row], want[row]), "a base row is not bit-equal to the bare model"


def test_mixed(kind: Kind) -> None:
    """Each row as alone, through slots in the activations' dtype; afterwards the model is what it was."""
    want = rows(kind, LORA)
    model = kind.build()
    bare = {name: value.clone() for name, value in model.state_dict().items()}
    enabled(model, LORA)
    assert all(isinstance(layer, LoraLayer) for layer in layers_of(model))
    assert model.multilora.store.arena.dtype == kind.dtype
    base = logits(model)
    got = logits(model, adapter_ids=IDS)
    assert_rows(kind, got, want)
    for row, name in enumerate(IDS):
        assert name is None or relative(base[row], want[row]) > 10 * kind.tolerance, "an adapter would hardly show"
    others = logits(model, adapter_ids=["a", "b", "a", "b"])
    assert torch.equal(others[0], got[0]), "a neighbour's adapter changes a row"
    disable_multilora(model)
    assert not any(isinstance(module, LoraLayer) for module in model.modules())
    assert torch.equal(logits(model), base)
    if kind.needs != "compressed_tensors":  # whose models are other ones after their first call
        assert set(model.state_dict()) == set(kind.build().state_dict()) == set(bare)


def test_dora(kind: Kind) -> None:
    """The norm is that of the dequantised weight; or the adapter is refused, and the layer named."""
    if not kind.dora:
        with pytest.raises(UnsupportedAdapterError, match=r"DoRA.*layers\.0\.self_attn.*cannot be dequantised"):
            enabled(kind.build(), DORA)
        return
    model = enabled(kind.build(), DORA)
    assert_rows(kind, logits(model, adapter_ids=IDS), rows(kind, DORA))


SAVED = ("lm_head", "model.norm", "model.embed_tokens")


def test_saved_whole(kind: Kind) -> None:
    """What an adapter saves of the layers that are not quantised is its rows' alone, whoever comes afterwards."""
    model, other = kind.build(), kind.build()
    generator = torch.Generator().manual_seed(9)
    tensors = dict(adapter(5))
    with torch.no_grad():
        bare = logits(model)
        for path in SAVED:
            weight = other.get_submodule(path).weight
            own = weight * (1 + 0.5 * torch.randn(weight.shape, generator=generator).to(weight))
            tensors[f"base_model.model.{path}.weight"] = own
            weight.data.copy_(own)
    with with_delta(other, 5, False, kind.dtype):
        want = logits(other)
    enabled(model, {}, slot_bytes=1 << 20)
    config = {**lora_config(), "modules_to_save": [path.rpartition(".")[2] for path in SAVED]}
    model.multilora.load(tensors, "own", config=config)
    for _ in range(2):
        got = logits(model, adapter_ids=["own", None, "own", None])
        for row in (0, 2):
            assert relative(got[row], want[row]) <= kind.tolerance
        for row in (1, 3):
            assert torch.equal(got[row], bare[row]), "another adapter's head, or part of it"
    assert torch.equal(logits(copy.deepcopy(model), adapter_ids=["own", None, "own", None]), got)
    disable_multilora(model)
    assert torch.equal(logits(model), bare)


def test_dequantised(kind: Kind) -> None:
    """What is said to be the weight is what the layer multiplies by, before its first call and afterwards."""
    model = kind.build()
    layers = layers_of(model)
    if not kind.dora:
        for layer in layers:
            with pytest.raises(CannotDequantise, match=type(layer).__name__):
                dequantised(layer)
        return
    before = [dequantised(layer).float() for layer in layers]
    logits(model)
    close = 1e-5 if kind.dtype == torch.float32 and kind.tolerance < 1e-2 else 1e-2  # outputs rounded to 16 bits
    for layer, first in zip(layers, before, strict=True):
        want = weight_of(layer, kind.dtype)
        assert first.shape == (layer.out_features, layer.in_features)
        assert relative(dequantised(layer), want) < close
        assert relative(first, want) < close


def test_compiled(kind: Kind) -> None:
    """One graph where the bare model is one."""
    if kind.compiles is not True:
        pytest.skip("no graph to compare")
    torch.compiler.reset()
    model = enabled(kind.build(), LORA)
    want = logits(model, adapter_ids=IDS)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with model.multilora.use(IDS):
        got = logits(compiled)
    torch.compiler.reset()
    for row in range(len(IDS)):
        assert relative(got[row], want[row]) <= kind.tolerance


def test_no_graph_of_the_bare_model_either(kind: Kind) -> None:
    if kind.compiles is not False:
        pytest.skip("a graph, or none to compare")
    for model in (kind.build(), enabled(kind.build(), LORA)):
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        # BitLinear's context keeps Dynamo from trying.
        with torch.compiler.set_stance("default"), pytest.raises(TorchDynamoException):
            logits(compiled)
    torch.compiler.reset()
