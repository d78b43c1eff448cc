"""Prefixes are shared within one adapter's generation, and never across: keys and values depend on the adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from continuous.cb_bed import (
    BASE,
    Source,
    answer,
    assert_answer,
    assert_told_apart,
    batch,
    batching,
    enabled,
    load,
    prompt,
)
from continuous.cb_run import Results, running, several

pytestmark = pytest.mark.timeout(120)

PAGE = 4
TOKENS = prompt(22, seed=3)  # five whole pages and two tokens
WHOLE = 20  # tokens of TOKENS that a later request can take over
MIX, OTHER_MIX = {"a": 0.6, "b": 0.4}, {"a": 0.4, "b": 0.6}
VERSIONS = {"a": 0, "b": 1, "c": 2, "d": 3}
IDS: list[Any] = [None, "a", "b", MIX, OTHER_MIX, "c"]
SOURCES: list[Source] = [None, 0, 1, ((0, 0.6), (1, 0.4)), ((0, 0.4), (1, 0.6)), 2]


@pytest.fixture
def model() -> Any:
    return enabled(VERSIONS, max_loras=6)


class Asking:
    """One request after the other."""

    def __init__(self, model: Any, manager: Any) -> None:
        self.model, self.manager, self.results = model, manager, Results(manager)

    def __call__(self, one: Any, source: Source, tokens: list[int] = TOKENS, new: int = 6) -> int:
        """Ask, compare the answer, and return how many tokens were taken from the prefix cache."""
        before = self.manager.status().prefix_tokens
        request = self.manager.add_request(tokens, adapter_id=one, max_new_tokens=new)
        assert_answer(self.results.wait(request)[0], source, new, SOURCES)
        return self.manager.status().prefix_tokens - before


@pytest.fixture
def ask(model: Any) -> Iterator[Asking]:
    with running(model, batching(PAGE, num_blocks=128)) as manager:
        yield Asking(model, manager)


def test_the_sources_here_are_told_apart() -> None:
    assert_told_apart([TOKENS], [*SOURCES, 3, 9], 6)


def test_equal_prompts_in_turn(ask: Asking) -> None:
    for one, source in zip(IDS, SOURCES, strict=True):
        assert ask(one, source) == 0, f"{one} took over what another adapter had computed"
    for one, source in zip(IDS, SOURCES, strict=True):
        assert ask(one, source) == WHOLE, one
    status = ask.manager.status()
    assert {one.prefix_tokens for one in status.adapters.values()} == {WHOLE} and len(status.adapters) == len(IDS)
    assert status.adapters[BASE].prefix_tokens == WHOLE


@pytest.mark.parametrize("budget", [9, 256])
def test_equal_prompts_at_once(model: Any, budget: int) -> None:
    """Equal blocks that are completed in one batch are merged by transformers: not those of two adapters."""
    rows = 3
    config = batching(PAGE, num_blocks=256, max_batch_tokens=budget, max_requests_per_batch=32)
    outputs = batch(model, [TOKENS] * rows * len(IDS), new=30, config=config, adapter_ids=IDS * rows)
    for output, source in zip(outputs, SOURCES * rows, strict=True):
        assert_answer(output, source, 30, SOURCES)


def test_sharing_can_be_forbidden(model: Any) -> None:
    with running(model, batching(PAGE, allow_block_sharing=False)) as manager:
        ask = Asking(model, manager)
        for one, source in zip(IDS * 2, SOURCES * 2, strict=True):
            assert ask(one, source) == 0


def test_answers_are_shared_too(ask: Asking) -> None:
    """A conversation goes on: its second turn takes over the first one's prompt and answer."""
    longer = TOKENS + answer(TOKENS, 1, 12) + prompt(5, seed=8)
    assert ask("b", 1, new=12) == 0
    assert ask("a", 0, longer) == 0
    assert ask(None, None, longer) == 0
    assert ask("b", 1, longer) >= 32
    assert ask("a", 0, longer) >= 36


def test_nothing_is_shared_across_a_reload(ask: Asking) -> None:
    assert ask("a", 0) == 0 and ask("a", 0) == WHOLE and ask("b", 1) == 0
    load(ask.model, "a", 9, reload=True)
    assert ask("a", 9) == 0, "keys and values of the old weights"
    assert ask("a", 9) == WHOLE
    assert ask("b", 1) == WHOLE, "of another adapter, that nobody touched"
    load(ask.model, "a", 9, reload=True)
    assert ask("a", 9) == 0, "a reload is a new generation, whatever it holds"


def test_nothing_is_shared_across_an_unload(ask: Asking) -> None:
    assert ask("a", 0) == 0
    ask.model.multilora.unload("a")
    load(ask.model, "a", 3)
    assert ask("a", 3) == 0
    ask.model.multilora.unload("a")
    load(ask.model, "a", 0)
    assert ask("a", 0) == 0


def test_a_mix_does_not_outlive_its_parts(ask: Asking) -> None:
    assert ask(MIX, SOURCES[3]) == 0 and ask(MIX, SOURCES[3]) == WHOLE
    assert ask({"b": 0.4, "a": 0.6}, SOURCES[3]) == WHOLE, "the same mix in other words"
    load(ask.model, "b", 9, reload=True)
    assert ask(MIX, ((0, 0.6), (9, 0.4))) == 0
    assert ask(MIX, ((0, 0.6), (9, 0.4))) == WHOLE


def test_old_weights_complete_blocks_after_a_reload(ask: Asking) -> None:
    """A request that began before a reload fills pages after it; they are the old generation's."""
    new = 40
    first = ask.manager.add_request(TOKENS, adapter_id="a", max_new_tokens=new, streaming=True)
    ask.results.started(first, 2)
    load(ask.model, "a", 9, reload=True)
    assert_answer(ask.results.wait(first)[0], 0, new)
    assert ask("a", 9, TOKENS + answer(TOKENS, 0, new)) == 0


def test_an_adapter_that_comes_back_to_a_slot_finds_its_pages() -> None:
    """Evicted and brought in again it is the same generation; another one in the same slot is not."""
    model = enabled(VERSIONS, max_loras=1)
    with running(model, batching(PAGE, num_blocks=128)) as manager:
        ask = Asking(model, manager)
        for name, number in VERSIONS.items():
            assert ask(name, number) == 0
        for name, number in VERSIONS.items():
            assert ask(name, number) == WHOLE


def test_a_short_cache_forgets_and_stays_right(model: Any) -> None:
    """Pages are given to whoever needs them; what was in them is then nobody's."""
    with running(model, batching(PAGE, num_blocks=14)) as manager:
        ask = Asking(model, manager)
        taken = [ask(one, source) for _ in range(3) for one, source in zip(IDS, SOURCES, strict=True)]
        assert taken[: len(IDS)] == [0] * len(IDS)
        assert min(taken[len(IDS) :]) == 0, "the cache is too large for what this tests"


def test_return_sequences_share_within_their_adapter(model: Any) -> None:
    outputs = several(model, [TOKENS] * len(IDS), 2, 6, batching(PAGE), IDS)
    for output, source in zip(outputs, [source for source in SOURCES for _ in range(2)], strict=True):
        assert_answer(output, source, 6, SOURCES)
