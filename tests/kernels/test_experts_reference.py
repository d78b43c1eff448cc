"""LoRA on experts in plain torch: right against fp64, pairs without an adapter untouched, no effect of neighbours."""

from __future__ import annotations

import pytest
import torch
from experts_kernel_bed import ExpertsBed, Pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bed import DTYPES, same_bits

from hf_multilora.kernels import reference_experts

RANKS = [[3, 16], [0, 33], [17, 0], [8, 8], [0, 0], [1, 20]]
SHARED = ["", "b", "a", "ab", "", ""]
MIXES = {
    "distinct": [0, 1, 2, 3, 4, 5],
    "with base": [-1, 2, -1, 0, 0, 5],
    "identical": [1] * 6,
    "all base": [-1] * 6,
    "one row": [3],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("tokens", [1, 3, 19])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gate_and_up(dtype: torch.dtype, mix: str, tokens: int, interleaved: bool) -> None:
    lora = torch.float32 if dtype == torch.float64 else dtype
    bed = ExpertsBed(RANKS, 37, [29, 29], 5, lora, shared=SHARED, interleaved=interleaved)
    slots = MIXES[mix]
    p = bed.pairs(len(slots) * tokens, 3, dtype)
    got = bed.reference(p, slots)
    bed.check(got, p, slots)
    assert (got is p.y) == (mix == "all base")


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("gathered", [False, True])
def test_down(tokens: int, gathered: bool) -> None:
    bed = ExpertsBed([[r[1]] for r in RANKS], 24, [41], 7, shared=SHARED)
    p = bed.pairs(6 * tokens, 2, torch.float32, gathered=gathered)
    bed.check(bed.reference(p, MIXES["distinct"]), p, MIXES["distinct"])


def test_more_than_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_experts, "CHUNK_BYTES", 0)
    bed = ExpertsBed(RANKS, 37, [29, 31], 5, shared=SHARED)
    for tokens in (5, 40):
        p = bed.pairs(6 * tokens, 3, torch.float32)
        bed.check(bed.reference(p, MIXES["distinct"]), p, MIXES["distinct"])


def test_nothing_to_do() -> None:
    bed = ExpertsBed(RANKS, 37, [29, 29], 5)
    p = bed.pairs(6, 3, torch.float32)
    empty = Pairs(p.y[:0], p.x, p.tokens[:0], p.tokens[:0], p.experts[:0], 6)
    assert bed.reference(empty, [0] * 6) is empty.y
    others = p._replace(experts=torch.full_like(p.experts, 5))
    assert bed.reference(others, [0] * 6) is others.y
    below = p._replace(experts=torch.full_like(p.experts, -1))
    assert bed.reference(below, [0] * 6) is below.y


def test_x_has_infinities_where_ranks_are_padded() -> None:
    bed = ExpertsBed([[1]], 8, [6], 2)
    for tokens in (1, 20):
        p = bed.pairs(2 * tokens, 2, torch.float32, sentinel=False)
        p.x[0, 0] = float("inf")
        got = bed.reference(p, [0, 0])
        assert not got.isnan().any() and not got[p.tokens != 0].isinf().any()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "tokens"), [(6, 1), (5, 40), (3, 16)])
@pytest.mark.parametrize("wide", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(rows: int, tokens: int, wide: bool, threads: int) -> None:
    """Other adapters (larger ranks, NaN, none), other experts, other inputs beside it: the row keeps its bits."""
    k, widths = (1300, [300]) if wide else (61, [50, 50])
    ranks = [r[-len(widths) :] for r in RANKS]
    bed = ExpertsBed(ranks, k, widths, 4, shared=SHARED)
    sick = ExpertsBed(ranks, k, widths, 4, shared=SHARED)
    for slot in (1, 5):
        sick.poison(slot)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        p = bed.pairs(rows * tokens, 3, torch.float32)
        mine = p.tokens // tokens == rows - 1
        for slot in (0, 3):
            want = bed.reference(p, [slot] * rows)[mine]
            for seed, others in enumerate(([-1] * rows, [1] * rows, [5, 0, 1] * rows, [slot, 1, 3] * rows)):
                slots = [*others[: rows - 1], slot]
                assert same_bits(bed.reference(p, slots)[mine], want)
                assert same_bits(sick.reference(p, slots)[mine], want)
                other = bed.pairs(rows * tokens, 3, torch.float32, seed=seed + 9)
                x = torch.where((torch.arange(len(p.x)) // tokens == rows - 1)[:, None], p.x, other.x)
                experts = torch.where(mine, p.experts, other.experts)
                moved = p._replace(x=x, experts=experts)
                assert same_bits(bed.reference(moved, slots)[mine], want)
    finally:
        torch.set_num_threads(before)


def test_the_order_of_pairs_does_not_matter() -> None:
    bed = ExpertsBed(RANKS, 61, [50, 50], 4, shared=SHARED)
    for tokens in (1, 40):
        p = bed.pairs(6 * tokens, 3, torch.float32)
        order = torch.randperm(len(p.tokens), generator=torch.Generator().manual_seed(5))
        assert p.x_rows is not None
        moved = Pairs(p.y[order], p.x, p.x_rows[order], p.tokens[order], p.experts[order], p.n_tokens)
        slots = MIXES["distinct"]
        assert same_bits(bed.reference(p, slots)[order], bed.reference(moved, slots))


@pytest.mark.parametrize("tokens", [1, 20])
def test_autograd_follows(tokens: int) -> None:
    bed = ExpertsBed(RANKS, 6, [5, 5], 3, shared=SHARED, interleaved=True)
    p, slots = bed.pairs(2 * tokens, 2, torch.float64), [0, 3]
    y, x = p.y.requires_grad_(), p.x.requires_grad_()
    kept = y.detach().clone()
    bed.reference(p, slots).square().sum().backward()
    got_y, got_x = y.grad, x.grad
    y.grad = x.grad = None
    assert same_bits(y, kept)
    whole = []
    for pair in range(len(p.tokens)):
        row, parts = p.y[pair], {}
        for i, (_, first, step, width) in enumerate(bed.projections):
            found = bed.factors(p, slots, pair, i)
            delta = (found[0] @ x[p.tokens[pair]]) @ found[1] if found else torch.zeros(width, dtype=x.dtype)
            parts.update({first + step * j: delta[j] for j in range(width)})
        whole.append(row + torch.stack([parts[c] for c in range(len(parts))]))
    torch.stack(whole).square().sum().backward()
    torch.testing.assert_close(got_y, y.grad)
    torch.testing.assert_close(got_x, x.grad)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    draw = data.draw
    slots, experts = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    count = draw(st.integers(1, 2))
    ranks = [[draw(st.integers(0, 33)) for _ in range(count)] for _ in range(slots)]
    shared = [draw(st.sampled_from(("", "a", "b", "ab"))) for _ in range(slots)]
    widths = [draw(st.integers(1, 40))] * count
    interleaved = draw(st.booleans())
    bed = ExpertsBed(ranks, draw(st.integers(1, 40)), widths, experts, shared=shared, interleaved=interleaved)
    rows, tokens, top = draw(st.integers(1, 4)), draw(st.sampled_from((1, 2, 15, 16, 33))), draw(st.integers(1, 3))
    p = bed.pairs(rows * tokens, top, torch.float32, gathered=draw(st.booleans()), seed=draw(st.integers(0, 99)))
    chosen = [draw(st.integers(-1, slots - 1)) for _ in range(rows)]
    bed.check(bed.reference(p, chosen), p, chosen)
