"""Requests from several threads and from an event loop, schedulers of both kinds, two models side by side."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from continuous.cb_bed import answer, assert_answer, assert_told_apart, batch, batching, enabled, load, prompt
from continuous.cb_run import WAIT_S, Results, running

pytestmark = pytest.mark.timeout(120)

VERSIONS = {f"a{i}": i for i in range(6)}
INPUTS = [prompt(4 + i, seed=i) for i in range(12)]
NAMES = [None, *VERSIONS]


def source_of(name: str | None) -> int | None:
    return None if name is None else VERSIONS[name]


def test_the_sources_here_are_told_apart() -> None:
    assert_told_apart(INPUTS, [None, *range(6), 9], 6)


def test_threads_that_add_requests() -> None:
    model = enabled(VERSIONS, max_loras=3)
    with running(model) as manager, ThreadPoolExecutor(4) as threads:
        results = Results(manager)

        def add(thread: int) -> list[tuple[str, str | None]]:
            names = [NAMES[(thread + i) % len(NAMES)] for i in range(len(INPUTS))]
            pairs = zip(INPUTS, names, strict=True)
            return [(manager.add_request(tokens, adapter_id=name, max_new_tokens=6), name) for tokens, name in pairs]

        asked = [one for each in [threads.submit(add, i) for i in range(4)] for one in each.result(WAIT_S)]
        assert len({request for request, _ in asked}) == 4 * len(INPUTS)
        for (_, name), output in zip(asked, results.wait(*(request for request, _ in asked)), strict=True):
            assert_answer(output, source_of(name), 6, range(6))


def test_an_event_loop_gets_the_parts_of_each_request() -> None:
    model = enabled(VERSIONS, max_loras=2)

    async def one(manager: Any, number: int) -> None:
        name, tokens, parts = NAMES[number % len(NAMES)], INPUTS[number], asyncio.Queue()  # type: ignore[var-annotated]
        manager.register_result_handler(f"mine-{number}", parts.put_nowait)
        manager.add_request(tokens, request_id=f"mine-{number}", adapter_id=name, max_new_tokens=6, streaming=True)
        want = answer(tokens, source_of(name), 6)
        for count in range(1, 7):
            part = await asyncio.wait_for(parts.get(), WAIT_S)
            assert part.error is None and part.generated_tokens == want[:count], (number, part)
        assert part.is_finished()

    async def every(manager: Any) -> None:
        await asyncio.gather(*(one(manager, number) for number in range(len(INPUTS))))

    with running(model) as manager:
        asyncio.run(every(manager))


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
@pytest.mark.parametrize("slots", [1, 3])
def test_schedulers(scheduler: str, slots: int) -> None:
    model = enabled(VERSIONS, max_loras=slots)
    names = [NAMES[i % len(NAMES)] for i in range(len(INPUTS))]
    config = batching(scheduler_type=scheduler, max_batch_tokens=13, num_blocks=12)
    for name, output in zip(names, batch(model, INPUTS, 6, config, adapter_ids=names), strict=True):
        assert_answer(output, source_of(name), 6, range(6))


def test_two_models_do_not_meet() -> None:
    """The same names, other weights, two managers at once."""
    one, other = enabled({"a": 0, "b": 1}), enabled({"a": 2, "b": 3})
    with running(one) as first, running(other) as second:
        answers = []
        for manager, sources in ((first, (0, 1, None)), (second, (2, 3, None))):
            results = Results(manager)
            requests = [manager.add_request(INPUTS[5], adapter_id=name) for name in ("a", "b", None)]
            answers.append((results, requests, sources))
        load(one, "a", 9, reload=True)
        for results, requests, sources in answers:
            for output, source in zip(results.wait(*requests)[1:], sources[1:], strict=True):
                assert_answer(output, source, 8, range(4))
        assert_answer(answers[1][0][answers[1][1][0]], 2, 8, [0, 9])
        results = Results(first)
        assert_answer(results.wait(first.add_request(INPUTS[5], adapter_id="a"))[0], 9, 8, [0, 2])
