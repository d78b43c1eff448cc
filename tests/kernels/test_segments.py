"""Row tables: every row once, in a tile of its own slot, and room for every mix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_multilora import routing
from hf_multilora import rows as batch
from hf_multilora.kernels.segments import TILE, capacity_of, row_table, table_size, tile_count

MIXES = st.integers(1, 9).flatmap(
    lambda adapters: st.tuples(st.just(adapters), st.lists(st.integers(-1, adapters - 1), min_size=1, max_size=70))
)


def read(table: list[int], capacity: int, tiles: int, rows: int, adapters: int) -> dict[int, int]:
    """row -> slot, as the kernels see it: from the tiles that a call of so many rows reads."""
    found: dict[int, int] = {}
    for tile in range(tile_count(rows, adapters)):
        start = capacity + tiles + tile * TILE
        for row in table[start : start + TILE]:
            if 0 <= row < rows:
                assert row not in found, "a row in two tiles"
                found[row] = table[capacity + tile]
    return found


@given(MIXES)
def test_every_row_is_in_one_tile_of_its_slot(mix: tuple[int, list[int]]) -> None:
    adapters, slots = mix
    table, tiles = row_table(slots, adapters), tile_count(len(slots), adapters)
    assert len(table) == table_size(len(slots), adapters) and table[: len(slots)] == slots
    assert read(table, len(slots), tiles, len(slots), adapters) == dict(enumerate(slots))


@given(st.integers(1, 3000), st.integers(1, 300))
def test_the_size_tells_the_capacity(capacity: int, adapters: int) -> None:
    assert capacity_of(table_size(capacity, adapters), adapters) == capacity


def test_a_size_that_no_table_has() -> None:
    with pytest.raises(ValueError, match="has 19 elements"):
        capacity_of(19, 4)


@given(st.lists(MIXES, min_size=1, max_size=4), st.sampled_from([None, 1, 17, 40]))
def test_compiled_forwards_read_the_same_from_one_buffer(mixes: list[tuple[int, list[int]]], rows: int | None) -> None:
    """One buffer is filled for one mix after another, and for one id that stands for any number of rows."""
    adapters = mixes[0][0]
    with pytest.MonkeyPatch.context() as patch:
        for module in (routing, batch):
            patch.setattr(module, "tabled", lambda device: True)
        found, force = routing.Routing(torch.device("cpu"), adapters, capacity=50), routing.Force()
        found.compiled = True
        for _, slots in mixes:
            slots = [min(slot, adapters - 1) for slot in slots]
            state = batch.RowState(tuple(slots), torch.device("cpu"), (), adapters=adapters)
            found.trace(state, force, "block")
            table = found.static.view(-1).tolist()
            room = tile_count(found.capacity, adapters)
            assert capacity_of(len(table), adapters) == found.capacity
            assert read(table, found.capacity, room, len(slots), adapters) == dict(enumerate(slots))
            if rows is not None:
                one = batch.RowState((slots[0],), torch.device("cpu"), (), uniform=True, adapters=adapters)
                found.trace(one, force, "block")
                table, rows = found.static.view(-1).tolist(), min(rows, found.capacity)
                room = tile_count(found.capacity, adapters)
                assert table[:rows] == [slots[0]] * rows
                assert read(table, found.capacity, room, rows, adapters) == dict.fromkeys(range(rows), slots[0])
