"""A running manager, its results, and waits that end: each fails after WAIT_S seconds and says where things stand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from continuous.cb_bed import assert_answer, batching, greedy, prompt, sequences

WAIT_S = 40.0


def wait_until(done: Callable[[], Any], what: str, manager: Any = None, timeout: float = WAIT_S) -> None:
    end = time.monotonic() + timeout
    while not done():
        state = manager.status() if manager is not None else ""
        assert time.monotonic() < end, f"{what}: not so after {timeout} s. {state}"
        time.sleep(0.005)


def idle(manager: Any) -> bool:
    return all(traffic.waiting == 0 == traffic.running for traffic in manager.status().adapters.values())


def wait_for_waiting(manager: Any, name: str, count: int = 1) -> None:
    """Until so many of an adapter's requests have arrived and wait."""
    wait_until(
        lambda: name in manager.status().adapters and manager.status().adapters[name].waiting == count,
        f"{count} requests of {name} wait",
        manager,
    )


@contextmanager
def running(model: Any, config: Any = None, **options: Any) -> Iterator[Any]:
    """A running manager. Where the test fails it stops at once, and does not wait for requests that never end."""
    options = {"generation_config": greedy(), "timeout": WAIT_S, **options}
    with model.continuous_batching_context_manager(
        continuous_batching_config=config or batching(), **options
    ) as manager:
        try:
            yield manager
            wait_until(lambda: idle(manager), "nothing waits or runs", manager)
        except BaseException:
            manager.stop(block=False, hard_stop=True)
            raise
    assert not manager.is_running(), "the manager's thread did not end"


class Results(dict[str, Any]):
    """Finished outputs by request. `parts`: what streamed requests gave before."""

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self.manager = manager
        self.parts: dict[str, list[Any]] = {}

    def take(self, timeout: float = 0.05) -> None:
        """Take one output, if there is one within so many seconds."""
        output = self.manager.get_result(timeout=timeout)
        if output is None:
            return
        if output.is_finished():
            assert output.request_id not in self, f"{output.request_id} ended twice"
            self[output.request_id] = output
        else:
            self.parts.setdefault(output.request_id, []).append(output)

    def wait(self, *requests: str, timeout: float = WAIT_S) -> list[Any]:
        """The outputs of these requests, once all of them have ended."""
        self._until(lambda: all(request in self for request in requests), requests, timeout)
        return [self[request] for request in requests]

    def started(self, request: str, tokens: int = 1, timeout: float = WAIT_S) -> Any:
        """Wait until a streamed request has given so many tokens and goes on; returns its last part."""
        self._until(lambda: request in self or len(self.parts.get(request, ())) >= tokens, [request], timeout)
        assert request not in self, f"{request} ended before that: {self[request]}"
        return self.parts[request][-1]

    def _until(self, done: Callable[[], bool], requests: Sequence[str], timeout: float) -> None:
        end = time.monotonic() + timeout
        while not done():
            left = [request for request in requests if request not in self]
            assert time.monotonic() < end, f"after {timeout} s still without {left}: {self.manager.status()}"
            assert self.manager.is_running(), f"the manager ended without {left}"
            self.take()


def assert_serves(manager: Any, versions: Mapping[str, int], results: Results | None = None) -> None:
    """Every adapter and the base, as if nothing had happened; `results`: who else takes what the manager gives."""
    results, names = Results(manager) if results is None else results, [*versions, None]
    requests = [manager.add_request(prompt(8, seed=1), adapter_id=name) for name in names]
    for output, name in zip(results.wait(*requests), names, strict=True):
        assert_answer(output, None if name is None else versions[name], 8)


def several(model: Any, inputs: list[list[int]], each: int, new: int, config: Any, adapter_ids: Any) -> list[Any]:
    """`each` outputs for each input. (transformers 5.17's generate_batch returns the first of them only.)"""
    with running(model, config, generation_config=sequences(each, new)) as manager:
        parents = manager.add_requests(inputs, adapter_ids=adapter_ids, max_new_tokens=new)
        names = [[*(f"{parent}__child#{i}" for i in range(each - 1)), parent] for parent in parents]
        return Results(manager).wait(*(name for family in names for name in family))


@contextmanager
def counted(where: Any, name: str) -> Iterator[list[Any]]:
    """What each call of `where.name` returned meanwhile: for things that transformers does, as soft resets."""
    returned: list[Any] = []
    plain = getattr(where, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        returned.append(plain(*args, **kwargs))
        return returned[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, counting)
        yield returned
