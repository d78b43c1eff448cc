"""Who waits for a slot, and for how long: resident adapters first, but nobody is passed over without end."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from continuous.cb_bed import assert_answer, assert_told_apart, batching, enabled, prompt
from continuous.cb_run import WAIT_S, Results, running, wait_for_waiting

from hf_multilora import ConfigError

pytestmark = pytest.mark.timeout(120)

TOKENS = prompt(9, seed=2)
VERSIONS = {f"a{i}": i for i in range(12)}
LONG = 30


def test_the_sources_here_are_told_apart() -> None:
    assert_told_apart([TOKENS], [None, *range(12)], 6)


class Queue:
    """Requests in the order of their arrival, all there before the first that holds the slots has ended."""

    def __init__(self, manager: Any) -> None:
        self.manager, self.results = manager, Results(manager)
        self.asked: list[tuple[str, str | None, int]] = []  # request, adapter, new tokens

    def add(self, name: str | None, new: int = 6, **options: Any) -> str:
        request = self.manager.add_request(TOKENS, adapter_id=name, max_new_tokens=new, **options)
        self.asked.append((request, name, new))
        return request

    def hold(self, *names: str, new: int = LONG) -> None:
        """One running request for each of these."""
        for name in names:
            self.results.started(self.add(name, new, streaming=True), 2)

    def end(self) -> list[str]:
        """Wait for all; returns the requests in the order in which they began."""
        for (_, name, new), output in zip(self.asked, self.results.wait(*[r for r, *_ in self.asked]), strict=True):
            assert_answer(output, None if name is None else VERSIONS[name], new, range(12))
        return sorted(self.results, key=lambda request: self.results[request].lifespan[0])

    def passed(self, request: str) -> list[str | None]:
        """The adapters of those that came after this request and began before it, in the order of their beginning."""
        order, arrived = self.end(), {asked: i for i, (asked, *_) in enumerate(self.asked)}
        before = order[: order.index(request)]
        return [self.asked[arrived[other]][1] for other in before if arrived[other] > arrived[request]]


CONFIG = {"num_blocks": 256, "max_requests_per_batch": 4, "max_batch_tokens": 64}


@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.parametrize("slots", [1, 2])
def test_patience_bounds_how_many_go_first(slots: int, patience: int) -> None:
    """As many as `patience` later requests of resident adapters go first; then one of these adapters gets no more."""
    model = enabled(VERSIONS, max_loras=slots)
    with running(model, batching(**CONFIG), patience=patience) as manager:
        asked, residents = Queue(manager), [f"a{i}" for i in range(slots)]
        asked.hold(*residents)
        late = asked.add("a11")
        for i in range(14):
            asked.add(residents[i % slots])
        passed = asked.passed(late)
        assert len(passed) >= patience, "resident adapters did not go first"
        assert len(set(passed[patience:])) < slots, f"no slot was emptied after {patience}: {passed}"
        status = manager.status().adapters
        assert status["a11"].passed_over >= patience and status["a11"].longest_wait_s > 0
        assert slots > 1 or status["a0"].passed_over == 0


def test_with_much_patience_residents_go_first() -> None:
    """The first six of them begin while the slots' requests run; nothing ever has to wait for a slot that is free."""
    model = enabled(VERSIONS, max_loras=2)
    with running(model, batching(**CONFIG)) as manager:
        asked = Queue(manager)
        asked.hold("a0", "a1")
        late = asked.add("a11")
        residents = [asked.add(f"a{i % 2}", 3) for i in range(6)]
        order = asked.end()
    assert order.index(late) > max(order.index(request) for request in residents)


def test_an_endless_stream_starves_nobody() -> None:
    """A resident adapter that always has the next request: the other one still gets its turn."""
    model = enabled(VERSIONS, max_loras=1)
    with running(model, batching(**CONFIG), patience=8) as manager:
        asked = Queue(manager)
        asked.hold("a0")
        late, end = asked.add("a1"), time.monotonic() + WAIT_S
        while late not in asked.results:
            assert time.monotonic() < end, f"starved: {manager.status()}"
            traffic = manager.status().adapters.get("a0")
            if traffic is None or traffic.waiting < 6:
                asked.add("a0", 4)
            asked.results.take(0.002)
        assert 0 < len(asked.passed(late)) <= 8


def test_requests_that_begin_again_starve_nobody() -> None:
    """Too few pages for the resident adapter's requests: those of it that wait again are not all there is."""
    model = enabled(VERSIONS, max_loras=1)
    config = batching(**{**CONFIG, "num_blocks": 10, "safety_margin": 0.0, "max_requests_per_batch": 8})
    with running(model, config, patience=8) as manager:
        asked = Queue(manager)
        asked.hold("a0")
        late, stream = asked.add("a1", 4), 0
        while late not in asked.results and stream < 150:
            if manager.status().adapters["a0"].waiting < 12:
                asked.add("a0", 20)
                stream += 1
            asked.results.take(0.002)
        assert late in asked.results, f"starved by {stream} later requests: {manager.status()}"
        asked.end()


def test_the_base_needs_no_slot() -> None:
    """Base requests begin although all slots are taken and somebody waits for one; they pass nobody's patience."""
    model = enabled(VERSIONS, max_loras=1)
    with running(model, batching(**CONFIG), patience=1) as manager:
        asked = Queue(manager)
        asked.hold("a0", new=40)
        late = asked.add("a1")
        base = [asked.add(None, 2) for _ in range(3)]
        asked.results.wait(*base)
        assert late not in asked.results
        order = asked.end()
    assert max(order.index(request) for request in base) < order.index(late)


@pytest.mark.parametrize("fairness", ["arrival", "tokens"])
def test_many_adapters_few_slots(fairness: str) -> None:
    model, rng = enabled(VERSIONS, max_loras=2), random.Random(7)
    with running(model, batching(**CONFIG), fairness=fairness, patience=5) as manager:
        asked = Queue(manager)
        for _ in range(60):
            asked.add(rng.choice([None, *VERSIONS]), rng.randint(1, 8))
        order = asked.end()
        assert len(order) == 60
        status = manager.status().adapters
        assert sum(one.finished for one in status.values()) == 60
        assert all(one.waiting == one.running == one.failed == 0 for one in status.values())


def test_arrival_takes_who_came_first() -> None:
    order, late, early = _two_that_wait("arrival")
    assert order.index(early) < order.index(late)


def test_tokens_takes_who_had_least() -> None:
    """The adapter that had many tokens served goes after one that had none, although it came first."""
    order, late, early = _two_that_wait("tokens")
    assert order.index(late) < order.index(early)


def _two_that_wait(fairness: str) -> tuple[list[str], str, str]:
    """a1 has had 60 tokens, a2 none; both wait for the only slot, a1 first. Returns order, a2's request, a1's."""
    model = enabled(VERSIONS, max_loras=1)
    with running(model, batching(**CONFIG), fairness=fairness) as manager:
        asked = Queue(manager)
        asked.results.wait(*[asked.add("a1", 20) for _ in range(3)])
        asked.hold("a0")
        early, late = asked.add("a1"), asked.add("a2")
        wait_for_waiting(manager, "a2")
        assert early not in asked.results
        return asked.end(), late, early


@pytest.mark.parametrize("fairness", ["arrival", "tokens"])
def test_two_adapters_share_a_slot(fairness: str) -> None:
    """Twenty requests of each, in turns: neither adapter is served to its end while the other waits."""
    model = enabled(VERSIONS, max_loras=1)
    with running(model, batching(**CONFIG), fairness=fairness, patience=4) as manager:
        asked = Queue(manager)
        asked.hold("a2")
        first = [asked.add(f"a{i % 2}", 4) for i in range(40)][::2]
        order = [request in first for request in asked.end()[1:]]
    assert 0 < sum(order[:10]) < 10 and 0 < sum(order[-10:]) < 10


def test_an_idle_slot_is_given_at_once() -> None:
    """Nobody is passed over, and nobody waits, where a slot is free or can be emptied."""
    model = enabled(VERSIONS, max_loras=2)
    with running(model, batching(**CONFIG), patience=1) as manager:
        asked = Queue(manager)
        asked.hold("a0", new=40)
        for i in range(1, 6):
            asked.results.wait(asked.add(f"a{i}", 2))
        assert asked.asked[0][0] not in asked.results
        assert all(manager.status().adapters[f"a{i}"].passed_over == 0 for i in range(1, 6))
        asked.end()


@pytest.mark.parametrize("options", [{"fairness": "lottery"}, {"patience": -1}, {"patience": "much"}], ids=str)
def test_impossible_options(options: dict[str, Any]) -> None:
    model = enabled({"a0": 0})
    name, value = next(iter(options.items()))
    for call in (
        lambda: model.init_continuous_batching(continuous_batching_config=batching(), **options),
        lambda: model.generate_batch([TOKENS], continuous_batching_config=batching(), adapter_ids="a0", **options),
    ):
        with pytest.raises(ConfigError, match=name) as raised:
            call()
        assert str(value) in str(raised.value)


def test_adapters_that_wait_are_copied_once_each() -> None:
    """Many more wait than there are slots: what was brought in ahead is not put out again for what comes after it."""
    names = [f"n{number}" for number in range(12)]
    model = enabled({name: number for number, name in enumerate(names)}, max_loras=4)
    before = model.multilora.status().resident
    with running(model, batching(max_requests_per_batch=2)) as manager:
        requests = [
            manager.add_request(prompt(5, seed=i), adapter_id=name, max_new_tokens=20) for i, name in enumerate(names)
        ]
        outputs = Results(manager).wait(*requests)
    for number, output in enumerate(outputs):
        assert_answer(output, number, 20)
    resident = model.multilora.status().resident
    assert resident.evictions - before.evictions <= len(names)
