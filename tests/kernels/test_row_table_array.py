"""Row tables of large batches are those that are made row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_multilora.kernels.segments import TILE, row_table, row_table_array


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(-1, n - 1), min_size=1))))
def test_equal_to_the_one_made_in_python(case):
    adapters, slots = case
    assert row_table_array(np.array(slots, dtype=np.int32), adapters).tolist() == row_table(slots, adapters)


@pytest.mark.parametrize("rows", [1, TILE - 1, TILE, TILE + 1, 4 * TILE, 1000])
@pytest.mark.parametrize("adapters", [1, 3, 32])
def test_long_runs(rows, adapters):
    slots = [(7 * row) // 5 % (adapters + 1) - 1 for row in range(rows)]
    table = row_table_array(np.array(slots, dtype=np.int32), adapters)
    assert table.dtype == np.int32
    assert table.tolist() == row_table(slots, adapters)
