"""torch.compile with ids from use(): the user's own compiled model, made before or after enabling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from enabled import enabled
from models import FAMILIES, prompts
from oracle import MIX, Id, adapters, relative_error, rows_of
from transformers import CompileConfig, PreTrainedModel

from hf_multilora import disable_multilora, enable_multilora
from hf_multilora.kernels.ops import LinearOp

BATCHES: list[Any] = [["r8", None, "r3"], ["r3", "r3", MIX], [None, "r64", None], "r8", None, ["r64", "r8", None]]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Backend:
    """Runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return self  # generate() copies its configuration, and what is counted is this one


def load(model: PreTrainedModel) -> None:
    for name in ("r8", "r3", "r64"):
        model.load_adapter(adapters()[name], adapter_name=name)


@torch.no_grad()
def call(compiled: Callable[..., Any]) -> torch.Tensor:
    return compiled(**prompts(3, side=None), use_cache=False).logits


def assert_answers(model: PreTrainedModel, compiled: Callable[..., Any]) -> None:
    for batch in BATCHES:
        ids: list[Id] = batch if isinstance(batch, list) else [batch] * 3
        want = rows_of("llama", ids, call)
        with model.multilora.use(batch):
            got = call(compiled)
        for row in range(3):
            assert relative_error(got[row], want[row]) <= 1e-5, (batch, row)


def test_compiled_after_enabling() -> None:
    model, backend = enabled("llama", ["r8", "r3", "r64"]), Backend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_answers(model, compiled)
    assert backend.graphs <= 2, "one graph with adapters, one without, serve every mix"
    assert torch.equal(call(compiled), call(FAMILIES["llama"].build()))


def test_compiled_before_enabling() -> None:
    model, backend = FAMILIES["llama"].build(), Backend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    base = call(compiled)
    enable_multilora(model, max_lora_rank=128)
    load(model)
    assert_answers(model, compiled)
    disable_multilora(model)
    assert torch.equal(call(compiled), base)
    assert backend.graphs <= 4


def test_compiled_call() -> None:
    """The method is what generate() compiles: its own cache of it must not outlive enabling."""
    model, backend = FAMILIES["llama"].build(), Backend()
    compiled = torch.compile(model.__call__, fullgraph=True, backend=backend)
    call(compiled)
    model._compiled_call = compiled
    enable_multilora(model, max_lora_rank=128)
    assert getattr(model, "_compiled_call", None) is None
    load(model)
    assert_answers(model, torch.compile(model.__call__, fullgraph=True, backend=backend))


def test_loads_and_reloads_compile_nothing_new() -> None:
    model, backend = enabled("llama", ["r8", "r3", "r64"]), Backend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with model.multilora.use(["r8", None, "r3"]):
        call(compiled)
    before = backend.graphs
    for name in ("r16", "r33", "r1"):
        model.load_adapter(adapters()[name], adapter_name="r8", reload=True)
        with model.multilora.use(["r8", None, "r3"]):
            got = call(compiled)
        want = rows_of("llama", [name, None, "r3"], call)
        assert relative_error(got, want) <= 1e-5, name
    assert backend.graphs == before


def test_embeddings_and_heads_are_served_once_an_adapter_trains_them() -> None:
    """Graphs leave them alone until then; one more graph, and they do not any more."""
    model, backend = enabled("llama", ["r8"]), Backend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)

    def check(ids: list[Id]) -> None:
        with model.multilora.use(ids):
            got = call(compiled)
        assert relative_error(got, rows_of("llama", ids, call)) <= 1e-5, ids

    check(["r8", None, "r8"])
    assert backend.graphs == 1
    for name in ("r33", "r3", "r64"):  # the head, the embedding, both
        model.load_adapter(adapters()[name], adapter_name=name)
        check([name, "r8", None])
        assert backend.graphs == 2, name
    check(["r8", None, "r8"])
    assert backend.graphs == 2


@pytest.mark.parametrize("family", ["gpt2", "phi3", "gemma3", "opt"])
def test_other_families(family: str) -> None:
    model = enabled(family, ["r8", "r3", "r64"])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids: list[Id] = ["r3", None, "r64"]
    with model.multilora.use(ids):
        got = call(compiled)
    assert relative_error(got, rows_of(family, ids, call)) <= 1e-5


def test_generate_that_compiles_itself() -> None:
    """transformers compiles the decoding step of a static cache: one graph for every mix, one for the bare model."""
    model, backend = enabled("llama", ["r8", "r3", "r64"]), Backend()
    config = CompileConfig(backend=backend, fullgraph=True, mode=None)
    config._compile_all_devices = True  # on a CPU, for the test
    options = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
    for batch in BATCHES:
        ids: list[Id] = batch if isinstance(batch, list) else [batch] * 3
        got = model.generate(**prompts(3), **options, compile_config=config, adapter_ids=batch)
        assert torch.equal(got, rows_of("llama", ids, lambda ref: ref.generate(**prompts(3), **options))), batch
    assert 1 <= backend.graphs <= 2


def test_an_adapter_with_shifts_makes_one_more_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deltas that are made beside the base layers know nothing of shifts: from the first one on there are none."""
    begun: list[int] = []
    monkeypatch.setattr(LinearOp, "begin", lambda self, *args: begun.append(self.site))
    model, backend = enabled("llama", ["r8"]), Backend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    ids: Any = ["r8", None, "biased"]
    with model.multilora.use(["r8", None, "r8"]):
        call(compiled)
    assert begun and backend.graphs == 1
    path = "model.layers.0.mlp.down_proj"
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    width, k = shapes[f"{path}.weight"]
    tensors = {
        f"base_model.model.{path}.lora_A.weight": torch.randn(4, k),
        f"base_model.model.{path}.lora_B.weight": torch.randn(width, 4),
        f"base_model.model.{path}.lora_B.bias": torch.randn(width),
    }
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "lora_bias": True, "target_modules": [path]}
    model.multilora.load(tensors, "biased", config=config)
    begun.clear()
    for batch in (ids, ["r8", None, "r8"], ids):
        with model.multilora.use(batch):
            got = call(compiled)
        with torch.no_grad():
            want = model(**prompts(3, side=None), use_cache=False, adapter_ids=batch).logits
        assert relative_error(got, want) <= 1e-6
    assert not begun and backend.graphs == 2
