"""Slots of the tokens on their way to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_multilora.generation.continuous.table import Lanes, slots_of
from hf_multilora.kernels.segments import row_table


@pytest.mark.parametrize("adapters", [None, 1, 5, 40])
@pytest.mark.parametrize("tokens, kept", [(1, 1), (13, 4), (64, 64), (700, 31)])
def test_both_maps_come_back_from_the_first_columns_of_the_lines(tokens, kept, adapters):
    most = Lanes(700, 64, adapters)
    lanes = Lanes(tokens, kept, adapters)
    bulk = torch.full((7 + most.lines(), 704), 99, dtype=torch.int32)
    count = adapters or 3
    slots = np.array([t % (count + 1) - 1 for t in range(tokens)], dtype=np.int32)
    chosen = np.array([t % count for t in range(kept)], dtype=np.int32)
    lanes.write(slots, chosen, bulk[7:])
    one, two = lanes.views(bulk[7:, :kept])  # what a forward is given
    for view, expected in ((one, slots), (two, chosen)):
        wanted = expected.tolist() if adapters is None else row_table(expected.tolist(), adapters)
        assert view.view(-1).tolist() == wanted
        assert view.dim() == (1 if adapters is None else 2)
        assert view.storage_offset() % 4 == 0, "kernels assume 16 bytes"
    assert (bulk[:7] == 99).all()


def test_an_adapter_is_active_from_its_start_on():
    slots = slots_of([(2, 0, 3), (-1, 0, 2), (0, 2, 4)], Lanes(12, 3, None))
    assert slots.tolist() == [2, 2, 2, -1, -1, -1, -1, 0, 0, -1, -1, -1]
