"""Hundreds of random requests, forty adapters, four slots, and adapters that come and go: see `cb_soak`."""

from __future__ import annotations

import pytest
from continuous.cb_bed import answer, prompt
from continuous.cb_soak import soak

REQUESTS = 500

pytestmark = pytest.mark.timeout(240)


def test_versions_are_told_apart() -> None:
    """Else the soak would show nothing: no two of the versions that it begins with give the same eight tokens."""
    for tokens in (prompt(9), prompt(20, seed=1)):
        answers = [tuple(answer(tokens, source, 8)) for source in [None, *range(40)]]
        assert len(set(answers)) == len(answers)


@pytest.mark.parametrize("seed", [0, 1])
def test_soak(seed: int) -> None:
    ended, events = soak(seed, requests=REQUESTS)
    assert sum(ended.values()) == len(events["asked"]) >= REQUESTS
    assert ended["one version"] >= REQUESTS * 0.4, ended
    assert ended.get("tie", 0) <= 2, ended
    assert ended["poisoned"] > 0 and ended["cancelled"] > 0, ended
    assert events["reload"] > 8 and events["unload"] > 0, events
    assert events["resets"] > 0, "no request was reset: the cache was too large for what this tests"
    status = events["traffic"]
    assert status.prefix_tokens > 0, "nothing was shared"
    traffic = status.adapters.values()
    assert status.prefix_tokens == sum(one.prefix_tokens for one in traffic)
    assert sum(one.requests for one in traffic) == len(events["asked"])
    assert sum(one.finished + one.failed + one.cancelled for one in traffic) == len(events["asked"])
    assert sum(one.failed for one in traffic) == ended["poisoned"] + ended.get("unloaded", 0)
    used = {name for one in events["asked"].values() for name in one.names}
    assert len(used) >= 35, f"only {len(used)} adapters were asked for"
