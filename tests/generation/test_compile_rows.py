"""Compiled calls run under the rows of their own thread's block or forward, whatever others do, or say why not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from enabled import enabled
from models import BUILDS, ONE_LAYER, prompts
from oracle import Id, relative_error, rows_of
from test_compile import Backend
from torch._dynamo.exc import Unsupported
from transformers import XLNetConfig, XLNetLMHeadModel

from hf_multilora import RoutingError, enable_multilora
from hf_multilora.generation.calls import Calls
from hf_multilora.memory.lease import Lease
from hf_multilora.rows import RowState

TIMEOUT = 120
NAMES = ["r8", "r3", "r64"]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@torch.no_grad()
def call(model: Callable[..., Any], rows: int = 3, **options: Any) -> torch.Tensor:
    return model(**prompts(rows, side=None), use_cache=False, **options).logits


def assert_rows(got: torch.Tensor, ids: list[Id], family: str = ONE_LAYER) -> None:
    want = rows_of(family, ids, lambda model: call(model, len(ids)))
    for row in range(len(ids)):
        assert relative_error(got[row], want[row]) <= 1e-5, (row, ids)


def test_a_block_waits_for_its_slots_and_its_predecessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the compiled call, for its own sake; and after it, so that whoever is next waits for it."""
    model, seen = enabled(ONE_LAYER, NAMES), []
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    wait, order, trace = Lease.wait, Calls.order_streams, Calls._trace
    monkeypatch.setattr(Lease, "wait", lambda self, *a: (seen.append("wait"), wait(self, *a))[1])
    monkeypatch.setattr(Calls, "order_streams", lambda self: (seen.append("order"), order(self))[1])
    monkeypatch.setattr(Calls, "_trace", lambda self, *a: (seen.append("trace"), trace(self, *a))[1])
    for ids in (["r8", None, "r3"], ["r3", None, "r64"]):
        seen.clear()
        with model.multilora.use(ids):
            assert seen == ["order", "wait", "trace"]
            seen.clear()
            call(compiled)
            seen.clear()
        assert seen == ["order", "wait", "trace"]


@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("regional", [False, True], ids=["eager", "regional"])
def test_a_compiled_call_without_ids_is_the_base(regional: bool) -> None:
    """Whoever else is in the middle of a forward with adapters."""
    model, ids = enabled(ONE_LAYER, NAMES), ["r8", "r3", "r64"]
    compiled = torch.compile(model, backend="eager")
    base = call(BUILDS[ONE_LAYER].build())
    with model.multilora.use(ids):
        assert_rows(call(compiled), ids)
    assert torch.equal(call(compiled), base)
    if regional:
        for layer in model.model.layers:
            layer.compile(backend="eager")
    inside, go = threading.Event(), threading.Event()

    def hook(*_: Any) -> None:
        if not torch.compiler.is_dynamo_compiling() and threading.get_ident() != main:
            inside.set()
            assert go.wait(TIMEOUT)

    main = threading.get_ident()
    model.lm_head.register_forward_pre_hook(hook)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(4):
            future = pool.submit(call, model, adapter_ids=ids)
            assert inside.wait(TIMEOUT)
            try:
                assert torch.equal(call(compiled), base)
            finally:
                go.set()
            assert_rows(future.result(TIMEOUT), ids)
            inside.clear()
            go.clear()
            with model.multilora.use(ids):
                assert_rows(call(compiled), ids)


@pytest.mark.timeout(TIMEOUT)
def test_blocks_that_are_open_when_compilation_begins() -> None:
    model = enabled(ONE_LAYER, NAMES)
    compiled = torch.compile(model, backend="eager")
    began, entered, done = threading.Event(), threading.Event(), threading.Event()
    got: dict[str, torch.Tensor] = {}

    def first() -> None:
        with model.multilora.use(["r8"] * 3):
            began.set()
            assert entered.wait(TIMEOUT)
            got["first"] = call(compiled)
            got["again"] = call(compiled)
        done.set()

    def second() -> None:
        assert began.wait(TIMEOUT)
        with model.multilora.use(["r3"] * 3):
            entered.set()
            assert done.wait(TIMEOUT)
            with pytest.raises(RoutingError, match="began before"):
                call(compiled)
            got["eager"] = call(model)
            with model.multilora.use(["r64"] * 3):
                got["inner"] = call(compiled)
        with model.multilora.use(["r3"] * 3):
            got["anew"] = call(compiled)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(first), pool.submit(second)]:
            future.result(TIMEOUT)
    for name, adapter in {"first": "r8", "again": "r8", "eager": "r3", "inner": "r64", "anew": "r3"}.items():
        assert_rows(got[name], [adapter] * 3)


@pytest.mark.timeout(TIMEOUT)
def test_the_first_compiled_call_keeps_other_forwards_out() -> None:
    """They used to write their rows where the compiled forward reads its own."""
    model, stop = enabled(ONE_LAYER, NAMES), threading.Event()
    compiled = torch.compile(model, backend="eager")

    def others() -> None:
        while not stop.is_set():
            assert_rows(call(model, adapter_ids=["r3", "r64", "r8"]), ["r3", "r64", "r8"])

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(others)
        try:
            with model.multilora.use("r64"), model.multilora.use(["r8", "r64", "r3"]):
                for _ in range(5):
                    assert_rows(call(compiled), ["r8", "r64", "r3"])
            with model.multilora.use("r3"):
                assert_rows(call(compiled), ["r3"] * 3)
        finally:
            stop.set()
        future.result(TIMEOUT)
    assert not model.multilora.calls._users


@pytest.mark.timeout(TIMEOUT)
def test_a_thread_in_the_context_of_a_block() -> None:
    """Compiled calls know threads, not contexts: better an error than the base."""
    import contextvars

    model = enabled(ONE_LAYER, NAMES)
    compiled = torch.compile(model, backend="eager")
    with ThreadPoolExecutor(1) as pool, model.multilora.use("r8"):
        future = pool.submit(contextvars.copy_context().run, call, compiled)
        with pytest.raises(Exception, match="another thread than the `use` block"):
            future.result(TIMEOUT)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_default_adapter_needs_a_block(fullgraph: bool) -> None:
    model, backend = enabled(ONE_LAYER, NAMES), Backend()
    compiled = torch.compile(model, fullgraph=fullgraph, backend=backend)
    base = call(compiled)
    error: Any = Unsupported if fullgraph else RoutingError
    for _ in range(2):
        model.set_adapter("r8")
        with pytest.raises(error, match=r"multilora\.use"):
            call(compiled)
        with model.multilora.use("r8"):
            assert_rows(call(compiled), ["r8"] * 3)
        with model.multilora.use(None):
            assert torch.equal(call(compiled), base)
        assert_rows(call(model), ["r8"] * 3)
        model.disable_adapters()
        assert torch.equal(call(compiled), base)
    assert backend.graphs <= 4
    part = torch.compile(model.model, backend="eager")
    model.set_adapter("r8")
    with pytest.raises(RoutingError, match=r"multilora\.use"):
        part(**prompts(3, side=None))


def xlnet() -> Any:
    torch.manual_seed(0)
    model = XLNetLMHeadModel(XLNetConfig(vocab_size=99, d_model=32, n_layer=1, n_head=2, d_inner=48)).eval()
    enable_multilora(model, max_lora_rank=4)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["layer_1"]}
    for name in ("a", "b"):
        tensors = {
            "base_model.model.transformer.layer.0.ff.layer_1.lora_A.weight": torch.randn(4, 32),
            "base_model.model.transformer.layer.0.ff.layer_1.lora_B.weight": torch.randn(48, 4),
        }
        model.load_adapter(adapter_state_dict=tensors, peft_config=config, adapter_name=name)
    return model


@pytest.mark.parametrize("tokens", [2, 5])
def test_sequence_first_models_take_one_adapter_at_a_time(tokens: int) -> None:
    model = xlnet()
    compiled = torch.compile(model, backend="eager")
    ids = torch.randint(1, 99, (2, tokens))
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(RoutingError, match="one adapter at a time"), model.multilora.use(["a", "b"]):
                compiled(input_ids=ids, use_mems=False)
            for name in ("a", "b"):
                with model.multilora.use(name):
                    got = compiled(input_ids=ids, use_mems=False).logits
                want = model(input_ids=ids, use_mems=False, adapter_ids=name).logits
                assert relative_error(got, want) <= 1e-5


@pytest.mark.parametrize("dynamic", [None, False])
def test_another_number_of_rows_is_an_error(dynamic: bool | None) -> None:
    """Before there is a result; a later call of the same block that fits changes nothing about it."""
    model = enabled(ONE_LAYER, NAMES)
    compiled = torch.compile(model, backend="eager", dynamic=dynamic)
    with model.multilora.use(["r8", "r3", "r64"]):
        assert_rows(call(compiled), ["r8", "r3", "r64"])
    with model.multilora.use(["r8", None]):
        for rows in (3, 1):
            with pytest.raises(RoutingError, match="2 rows"):
                call(compiled, rows)
        assert_rows(call(compiled, 2), ["r8", None])
    with model.multilora.use("r3"):
        for rows in (1, 2, 4):
            assert_rows(call(compiled, rows), ["r3"] * rows)


def test_any_batch_size_is_one_graph() -> None:
    """The check of the rows makes none of its own."""
    model, backend = enabled(ONE_LAYER, NAMES), Backend()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for rows in (3, 2, 5, 4, 3):
        for ids in ([*["r8"] * (rows - 1), None], "r3", [None, *["r64"] * (rows - 1)]):
            with model.multilora.use(ids):
                got = call(compiled, rows)
            assert_rows(got, ids if isinstance(ids, list) else [ids] * rows)
    assert backend.graphs == 1


def test_slots_that_a_larger_batch_has_left() -> None:
    model = enabled(ONE_LAYER, NAMES)
    compiled = torch.compile(model, backend="eager")
    for ids in (["r8", "r3", "r64"], "r8", ["r3", None]):
        with model.multilora.use(ids):
            call(compiled, len(ids) if isinstance(ids, list) else 3)
    slots = model.multilora.calls.routing.static.tolist()
    assert slots[0] >= 0 and set(slots[1:]) == {-1}


@pytest.mark.parametrize("whole", [False, True], ids=["layers", "model"])
def test_compiled_parts_take_adapter_ids(whole: bool) -> None:
    """Modules compiled in place run inside of the model's own call, which publishes for them."""
    model, backend = enabled("llama", NAMES), Backend()
    for module in [model] if whole else model.model.layers:
        module.compile(backend=backend)
    base = call(BUILDS["llama"].build())
    for ids in (["r8", None, "r3"], ["r64", "r8", None]):
        assert_rows(call(model, adapter_ids=ids), ids, "llama")
        assert torch.equal(call(model), base)
    model.set_adapter("r8")
    assert_rows(call(model), ["r8"] * 3, "llama")
    assert backend.graphs


class Stream:
    """Stands for a CUDA stream."""

    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


def test_rows_that_are_read_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the stream that they were made on, and their memory for it."""
    made_on, other = Stream(), Stream()
    recorded: list[tuple[int, Any]] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: recorded.append((id(self), stream)), raising=False
    )
    state = RowState((0, 1), torch.device("cpu"), frozenset({0}), adapters=2)
    state._streams = [made_on]  # type: ignore[list-item]
    state.starts = torch.tensor([0, 1])
    for _ in range(2):
        state.follow(made_on)  # type: ignore[arg-type]
        state.follow(other)  # type: ignore[arg-type]
    assert other.waited == [made_on] and not made_on.waited
    assert recorded == [(id(state.tensor), other), (id(state.starts), other)]
