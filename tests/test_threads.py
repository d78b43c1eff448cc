"""Threads call one model at once, while others load, evict, reload and unload: each gets what it would alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from enabled import enabled, in_use
from models import prompts
from oracle import MIX, Id, adapters, alone, rows_of
from transformers import LogitsProcessor, PreTrainedModel

from hf_multilora import disable_multilora
from hf_multilora.errors import ModelError, MultiLoraError, SlotError

THREADS = 8
TIMEOUT = 120
IDS: list[list[Id]] = [
    ["r1", None],
    ["r3", "r8"],
    [None, None],
    [MIX, "r64"],
    ["r16", "r16"],
    ["r33", "r1"],
    ["r64", None],
    ["r8", MIX],
]
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run all calls at the same moment, one thread each; the first error is raised, a hang is an error."""
    barrier = threading.Barrier(len(calls))

    def start(call: Callable[[], Any]) -> Any:
        barrier.wait(TIMEOUT)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(start, call) for call in calls]
        return [future.result(TIMEOUT) for future in futures]


def expected(number: int, **options: Any) -> torch.Tensor:
    inputs = prompts(2, seed=number)
    return rows_of("llama", IDS[number], lambda ref: ref.generate(**inputs, **GREEDY, **options))


def generate(model: PreTrainedModel, number: int, **options: Any) -> torch.Tensor:
    return model.generate(**prompts(2, seed=number), **GREEDY, **options, adapter_ids=IDS[number])


@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("slots", [8, 3, 2])
def test_eight_threads(slots: int) -> None:
    model = enabled("llama", max_loras=slots)
    want = [expected(number) for number in range(THREADS)]

    def work(number: int) -> None:
        for _ in range(3):
            assert torch.equal(generate(model, number), want[number]), IDS[number]

    together([lambda number=number: work(number) for number in range(THREADS)])
    assert in_use(model) == 0


@pytest.mark.timeout(TIMEOUT)
def test_eight_threads_in_waves() -> None:
    """One slot for batches that name up to two adapters."""
    model = enabled("llama", max_loras=1)
    want = [expected(number) for number in range(THREADS)]
    for got, right in zip(
        together([lambda number=number: generate(model, number) for number in range(THREADS)]), want, strict=True
    ):
        assert torch.equal(got, right)


@pytest.mark.timeout(TIMEOUT)
def test_loading_and_evicting_meanwhile() -> None:
    """Six threads generate; two others turn over host memory and slots with names of their own."""
    model = enabled("llama", max_loras=3, max_cpu_loras=7)
    want = [expected(number) for number in range(6)]
    done = threading.Event()

    def work(number: int) -> None:
        for _ in range(4):
            assert torch.equal(generate(model, number), want[number]), IDS[number]

    def turn_over(name: str) -> None:
        sources = [adapters()["r16"], adapters()["r3"], adapters()["r64"]]
        references = [alone("llama", adapter).generate(**prompts(1), **GREEDY) for adapter in ("r16", "r3", "r64")]
        round = 0
        while not done.is_set() or round == 0:
            model.load_adapter(sources[round % 3], adapter_name=name, reload=True)
            got = model.generate(**prompts(1), **GREEDY, adapter_ids=name)
            assert torch.equal(got, references[round % 3])
            if round % 3 == 2:
                model.multilora.unload(name)
            round += 1

    def six() -> None:
        try:
            together([lambda number=number: work(number) for number in range(6)])
        finally:
            done.set()

    together([six, lambda: turn_over("x"), lambda: turn_over("y")])
    assert in_use(model) == 0


class Gate(LogitsProcessor):
    """Stops the generate() that it is given to at its second step, until told to go on."""

    def __init__(self) -> None:
        self.steps = 0
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 2:
            self.reached.set()
            assert self.go.wait(TIMEOUT)
        return scores


def in_flight(model: PreTrainedModel, meanwhile: Callable[[], None], ids: Any = "r8") -> torch.Tensor:
    """The result of a generate() that stands between two steps while `meanwhile` runs in this thread."""
    gate = Gate()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: model.generate(**prompts(2), **GREEDY, logits_processor=[gate], adapter_ids=ids))
        assert gate.reached.wait(TIMEOUT)
        try:
            meanwhile()
        finally:
            gate.go.set()
        return future.result(TIMEOUT)


@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("ids", ["r8", MIX], ids=str)
def test_a_reload_leaves_rows_in_flight_alone(ids: Id) -> None:
    """They end on the weights they began with; the next call has the new ones."""
    model = enabled("llama", ["r8", "r3"], max_loras=2)
    want = alone("llama", ids).generate(**prompts(2), **GREEDY)

    def reload() -> None:
        model.load_adapter(adapters()["r64"], adapter_name="r8", reload=True)
        got = model.generate(**prompts(2), **GREEDY, adapter_ids="r8")
        assert torch.equal(got, alone("llama", "r64").generate(**prompts(2), **GREEDY))

    assert torch.equal(in_flight(model, reload, ids), want)
    assert in_use(model) == 0


@pytest.mark.timeout(TIMEOUT)
def test_an_unload_waits_for_rows_in_flight() -> None:
    model = enabled("llama", ["r8", "r3"], max_loras=2)
    want = alone("llama", "r8").generate(**prompts(2), **GREEDY)
    unloaded = threading.Event()

    def unload() -> None:
        model.multilora.unload("r8")
        unloaded.set()

    thread = threading.Thread(target=unload, daemon=True)

    def meanwhile() -> None:
        thread.start()
        assert not unloaded.wait(0.3), "unload came back while its adapter was in use"
        with pytest.raises(KeyError):  # new calls no longer see the name
            model.generate(**prompts(2), **GREEDY, adapter_ids="r8")
        got = model.generate(**prompts(2), **GREEDY, adapter_ids="r3")
        assert torch.equal(got, alone("llama", "r3").generate(**prompts(2), **GREEDY))

    assert torch.equal(in_flight(model, meanwhile), want)
    assert unloaded.wait(TIMEOUT)
    assert {adapter.name for adapter in model.multilora.status().adapters} == {"r3"}


@pytest.mark.timeout(TIMEOUT)
def test_eviction_leaves_rows_in_flight_alone() -> None:
    """The only other slot turns over and over beside a running batch."""
    model = enabled("llama", max_loras=2, max_cpu_loras=3)

    def turn() -> None:
        for name in ("r1", "r3", "r16", "r33", "r64", "r1"):
            got = model.generate(**prompts(2), **GREEDY, adapter_ids=name)
            assert torch.equal(got, alone("llama", name).generate(**prompts(2), **GREEDY)), name

    assert torch.equal(in_flight(model, turn), alone("llama", "r8").generate(**prompts(2), **GREEDY))


@pytest.mark.timeout(TIMEOUT)
def test_a_call_waits_for_a_slot() -> None:
    """All slots in use by others is not an error: the call begins when one is free."""
    model = enabled("llama", ["r8", "r3"], max_loras=1)
    results: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: results.append(model.generate(**prompts(2), **GREEDY, adapter_ids="r3")), daemon=True
    )

    def meanwhile() -> None:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not results

    got = in_flight(model, meanwhile)
    thread.join(TIMEOUT)
    assert torch.equal(got, alone("llama", "r8").generate(**prompts(2), **GREEDY))
    assert torch.equal(results[0], alone("llama", "r3").generate(**prompts(2), **GREEDY))


@pytest.mark.timeout(TIMEOUT)
def test_nesting_that_cannot_fit_raises() -> None:
    """One thread that holds the only slot and asks for another adapter would wait for itself."""
    model = enabled("llama", ["r8", "r3"], max_loras=1)
    with model.multilora.use("r8"), pytest.raises(SlotError, match="max_loras"):
        model.generate(**prompts(2), **GREEDY, adapter_ids="r3")
    got = model.generate(**prompts(2), **GREEDY, adapter_ids="r3")
    assert torch.equal(got, alone("llama", "r3").generate(**prompts(2), **GREEDY))


@pytest.mark.timeout(TIMEOUT)
def test_ids_do_not_leak_between_threads() -> None:
    """use() in one thread says nothing to another, which may have to wait for it."""
    model = enabled("llama", ["r8", "r3"])
    with ThreadPoolExecutor(1) as pool:
        with model.multilora.use("r8"):
            future = pool.submit(lambda: model.generate(**prompts(2), **GREEDY))
            got = model.generate(**prompts(2), **GREEDY)
        assert torch.equal(got, alone("llama", "r8").generate(**prompts(2), **GREEDY))
        assert torch.equal(future.result(TIMEOUT), alone("llama", None).generate(**prompts(2), **GREEDY))


@pytest.mark.timeout(TIMEOUT)
def test_an_error_in_one_thread_is_only_its_own() -> None:
    model = enabled("llama", max_loras=3)
    want = [expected(number) for number in range(THREADS)]

    class Failing(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    def work(number: int) -> None:
        for _ in range(3):
            if number % 2:
                with pytest.raises(ZeroDivisionError):
                    generate(model, number, logits_processor=[Failing()])
            else:
                assert torch.equal(generate(model, number), want[number])

    together([lambda number=number: work(number) for number in range(THREADS)])
    assert in_use(model) == 0


@pytest.mark.timeout(TIMEOUT)
def test_beams_and_forwards_in_threads() -> None:
    model = enabled("llama", max_loras=4)
    beams = [expected(number, num_beams=3) for number in range(4)]
    logits = []
    for number in range(4, THREADS):
        with torch.no_grad():
            logits.append(rows_of("llama", IDS[number], lambda ref, n=number: ref(**prompts(2, seed=n)).logits))

    def work(number: int) -> None:
        for _ in range(3):
            if number < 4:
                assert torch.equal(generate(model, number, num_beams=3), beams[number])
            else:
                with torch.no_grad():
                    got = model(**prompts(2, seed=number), adapter_ids=IDS[number]).logits
                torch.testing.assert_close(got, logits[number - 4], rtol=1e-4, atol=1e-5)

    together([lambda number=number: work(number) for number in range(THREADS)])


@pytest.mark.timeout(TIMEOUT)
def test_deepcopy_meanwhile() -> None:
    """A copy is made while others generate: neither they nor the copy answer as the base for a moment."""
    model = enabled("llama", ["r8", "r3", "r64"], max_loras=3)
    want = expected_of("r8")
    done = threading.Event()

    def work() -> None:
        try:
            for _ in range(12):
                assert torch.equal(model.generate(**prompts(2), **GREEDY, adapter_ids="r8"), want)
                with torch.no_grad():
                    assert not torch.equal(model(**prompts(2), adapter_ids="r8").logits, base)
        finally:
            done.set()

    def duplicate() -> None:
        while not done.is_set():
            twin = copy.deepcopy(model)
            assert torch.equal(twin.generate(**prompts(2), **GREEDY, adapter_ids="r8"), want)

    with torch.no_grad():
        base = alone("llama", None)(**prompts(2)).logits
    together([work, work, work, duplicate])


def expected_of(adapter: Id) -> torch.Tensor:
    return alone("llama", adapter).generate(**prompts(2), **GREEDY)


@pytest.mark.timeout(TIMEOUT)
def test_a_cast_meanwhile() -> None:
    """model.to() beside a running generate(): it waits or raises; it neither hangs nor changes rows in flight."""
    model = enabled("llama", ["r8"])
    gate = Gate()
    errors: list[MultiLoraError] = []

    def cast() -> None:
        try:
            model.to(torch.bfloat16)
        except MultiLoraError as error:
            errors.append(error)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: model.generate(**prompts(2), **GREEDY, logits_processor=[gate], adapter_ids="r8"))
        assert gate.reached.wait(TIMEOUT)
        caster = threading.Thread(target=cast, daemon=True)
        caster.start()
        caster.join(0.3)
        gate.go.set()
        got = future.result(20)
        caster.join(20)
        assert not caster.is_alive()
    assert torch.equal(got, expected_of("r8"))
    dtype = torch.float32 if errors else torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(**prompts(2), adapter_ids="r8").logits.dtype == dtype


@pytest.mark.timeout(TIMEOUT)
def test_disable_meanwhile() -> None:
    """The model is in use: an error that says so, and everything goes on."""
    model = enabled("llama", ["r8"])

    def disable() -> None:
        with pytest.raises(ModelError):
            disable_multilora(model)

    assert torch.equal(in_flight(model, disable), expected_of("r8"))
    disable_multilora(model)
