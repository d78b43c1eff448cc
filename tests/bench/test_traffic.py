"""The rule by which batches are formed from waiting requests."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_multilora.bench.traffic import DISTINCT, ROWS, Traffic


@pytest.mark.parametrize("adapters", [8, 2000])
def test_batches_are_full_and_name_few(adapters):
    traffic = Traffic(adapters, seed=0)
    batches = [traffic.batch() for _ in range(100)]
    assert {len(batch) for batch in batches} == {ROWS}
    assert max(len(set(batch)) for batch in batches) == DISTINCT
    assert len({adapter for batch in batches for adapter in batch}) > (500 if adapters == 2000 else 7)


def test_popularity_is_zipf():
    """With one adapter a batch at most, nothing but arrivals decides how often each is served in the long run."""
    traffic = Traffic(4, seed=1, rows=1, waiting=1)
    served = Counter(adapter for _ in range(20_000) for adapter in traffic.batch())
    total = 1 + 1 / 2 + 1 / 3 + 1 / 4
    for adapter in range(4):
        assert served[adapter] / 20_000 == pytest.approx(1 / (adapter + 1) / total, abs=0.02)


def test_a_seed_decides():
    first, again, other = (Traffic(50, seed=seed) for seed in (3, 3, 4))
    batches = [traffic.batch() for traffic in (first, again, other) for _ in range(1)]
    assert batches[0] == batches[1] != batches[2]


@given(
    adapters=st.integers(1, 60),
    rows=st.integers(1, 12),
    distinct=st.integers(1, 12),
    waiting=st.integers(1, 80),
    seed=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_and_the_oldest_is_served(adapters, rows, distinct, waiting, seed):
    traffic = Traffic(adapters, seed, rows=rows, distinct=distinct, waiting=waiting)
    for _ in range(6):
        before = {adapter: list(arrivals) for adapter, arrivals in traffic._waiting.items()}
        oldest = min(arrivals[0] for arrivals in before.values())
        last = max(arrivals[-1] for arrivals in before.values())
        batch = traffic.batch()
        after = traffic._waiting
        assert 1 <= len(batch) <= min(rows, waiting) and len(set(batch)) <= distinct
        assert all(arrivals for arrivals in after.values())
        assert sum(map(len, after.values())) == waiting
        kept = {arrival for arrivals in after.values() for arrival in arrivals if arrival <= last}
        assert oldest not in kept
        for adapter, count in Counter(batch).items():
            left = [arrival for arrival in after.get(adapter, ()) if arrival <= last]
            assert left == before[adapter][count:], "of one adapter, the oldest requests go first"
