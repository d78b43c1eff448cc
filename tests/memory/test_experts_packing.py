"""Stacked factors of experts in a block: layout, sharing, casts, mixes, and what they do not have."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from memory_bed import Shape

from hf_multilora.adapters.plan import Factor
from hf_multilora.errors import AdapterMatchError
from hf_multilora.memory.contents import entries_of, features_of
from hf_multilora.memory.layout import Layout
from hf_multilora.memory.pack import PackedAdapter, compose, pack

E, H, I = 5, 12, 7  # noqa: E741
LAYOUT = Layout.from_targets(
    {
        "q": Shape("q", "linear", H, 9, (9,)),
        "gate": Shape("gate", "experts", H, I, (I,), E),
        "down": Shape("down", "experts", I, H, (H,), E),
    }
)


@dataclass(eq=False)
class Stored:
    tensor: torch.Tensor

    def read(self) -> torch.Tensor:
        return self.tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


def made(path: str, rank: int, seed: int, a_count: int = E, b_count: int = E, scaling: float = 1.5) -> Factor:
    generator = torch.Generator().manual_seed(seed)
    n_in, n_out = (H, I) if path == "gate" else (I, H)
    a = torch.randn(a_count, rank, n_in, generator=generator)
    b = torch.randn(b_count, n_out, rank, generator=generator)
    return Factor(path, 0, "experts", rank, scaling, Stored(a), Stored(b))


def deltas(packed: PackedAdapter, site: int) -> torch.Tensor:
    """[E, out, in] of each expert, read by the header as kernels read it."""
    a_off, b_off, rank, a_step, b_step = packed.header()[site].tolist()
    data, where = packed.block.view(packed.dtype), LAYOUT.sites[site]
    found = []
    for expert in range(E):
        a = data[a_off + expert * a_step :][: rank * where.in_features].view(rank, -1)
        b = data[b_off + expert * b_step :][: rank * where.out_features].view(rank, -1)
        found.append(b.t().float() @ a.float())
    return torch.stack(found)


def wanted(factor: Factor) -> torch.Tensor:
    a, b = factor.a.read(), factor.b.read()  # type: ignore[union-attr]
    return factor.scaling * (b.expand(E, -1, -1) @ a.expand(E, -1, -1))


@pytest.mark.parametrize(("a_count", "b_count"), [(E, E), (1, E), (E, 1)])
def test_each_expert_is_found_by_its_step(a_count, b_count):
    gate, down = made("gate", 3, 1, a_count, b_count), made("down", 2, 2)
    packed = pack([gate, down], LAYOUT, torch.float32, pin=False)
    torch.testing.assert_close(deltas(packed, 1), wanted(gate))
    torch.testing.assert_close(deltas(packed, 2), wanted(down))
    assert packed.ranks == {1: 3, 2: 2} and not packed.has_vectors and features_of(packed) == []
    assert packed.vectors(1) == (None, None)
    sizes = entries_of(packed)
    assert sizes["gate"] >= 4 * 3 * (a_count * H + b_count * I) and sizes["down"] >= 4 * 2 * E * (H + I)
    half = packed.to(torch.bfloat16, pin=False)
    torch.testing.assert_close(deltas(half, 1), wanted(gate), rtol=2e-2, atol=5e-2)
    assert half.header()[1, 3:].ne(0).tolist() == [a_count > 1, b_count > 1]


def test_one_a_under_gate_and_up_is_stored_once():
    layout = Layout.from_targets({name: Shape(name, "experts", H, I, (I,), E) for name in ("gate", "up")})
    gate, a = made("gate", 3, 1), made("gate", 3, 2)
    up = Factor("up", 0, "experts", 3, 1.0, gate.a, a.b)
    packed = pack([gate, up], layout, torch.float32, pin=False)
    assert packed.header()[0, 0] == packed.header()[1, 0] and packed.header()[0, 1] != packed.header()[1, 1]


@pytest.mark.parametrize("shared", [False, True])
def test_mixes(shared):
    one, two = made("gate", 3, 1, 1 if shared else E), made("gate", 2, 2)
    parts = [pack([factor], LAYOUT, torch.float32, pin=False) for factor in (one, two)]
    mixed = compose([(parts[0], 0.5), (parts[1], -2.0)], LAYOUT, torch.float32, pin=False)
    torch.testing.assert_close(deltas(mixed, 1), 0.5 * wanted(one) - 2 * wanted(two))
    assert mixed.ranks == {1: 5}


def test_experts_take_no_part_in_the_usual_budget():
    without = Layout.from_targets({"q": Shape("q", "linear", H, 9, (9,))})
    more = LAYOUT.header_bytes - without.header_bytes
    assert LAYOUT.default_slot_bytes(8, torch.float32) == without.default_slot_bytes(8, torch.float32) + more
    assert LAYOUT.packed_bytes({1: 8, 2: 8}, torch.float32) > 4 * 8 * E * (H + I) * 2


def test_wrong_shapes_are_named():
    factor = made("gate", 3, 1)
    with pytest.raises(AdapterMatchError, match=r"A has shape \(2, 3, 12\)"):
        pack(
            [Factor("gate", 0, "experts", 3, 1.0, Stored(factor.a.read()[:2]), factor.b)],
            LAYOUT,
            torch.float32,
            pin=False,
        )
    with pytest.raises(AdapterMatchError, match="neither gain nor shift"):
        vector = Stored(torch.ones(I))
        pack([Factor("gate", 0, "experts", 3, 1.0, factor.a, factor.b, vector)], LAYOUT, torch.float32, pin=False)
