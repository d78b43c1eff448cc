"""The kernels for LoRA on experts in the interpreter: right against fp64, no effect of neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch
from experts_kernel_bed import ExpertsBed, Pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bed import DTYPES, TOLERANCE, same_bits

triton = pytest.importorskip("triton")

from hf_multilora.kernels import experts, launch, segments, tuning  # noqa: E402

OLD_INTERPRETER = triton.__version__ < "3.7" and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0"
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"),
    pytest.mark.skipif(OLD_INTERPRETER, reason="the interpreter of Triton < 3.7 fails with NumPy >= 2.4 (int(array))"),
]

RANKS = [[3, 16], [0, 33], [17, 0], [8, 8], [0, 0], [1, 20]]
SHARED = ["", "b", "a", "ab", "", ""]
DISTINCT, MIXED = [0, 1, 2, 3, 4, 5], [-1, 2, 1, 0, 0, 5]


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Planes start as NaN: what shrink did not write, expand must not read. And bf16 as test_kernels_triton has it."""
    shrink_dot, expand_dot, empty = tuning._shrink_dot, tuning._expand_dot, torch.empty
    halves = torch.bfloat16
    monkeypatch.setattr(tuning, "_shrink_dot", lambda x, d: "ieee" if halves in (x, d) else shrink_dot(x, d))
    monkeypatch.setattr(tuning, "_expand_dot", lambda y, d: "ieee" if halves in (y, d) else expand_dot(y, d))
    monkeypatch.setitem(TOLERANCE, torch.bfloat16, 8e-3)
    monkeypatch.setattr(experts.torch, "empty", lambda *a, **kw: empty(*a, **kw).fill_(float("nan")))
    yield


def run(bed: ExpertsBed, p: Pairs, slots: list[int], table: bool = False, buckets: bool = True) -> torch.Tensor:
    """The kernels on a copy of y. table: slots in a row table; buckets: those that a first call has made."""
    named = segments.row_table(slots, bed.slots) if table else [*slots, 7, 7]
    row_slots = torch.tensor([named] if table else named, dtype=torch.int32)
    arena = launch.Arena(bed.data, bed.meta, bed.floats, row_slots, bed.slot_elems, bed.max_rank)
    rows = launch.Rows(row_slots, None, len(slots))
    made = None
    for _ in range(2 if buckets else 1):
        out, rest = p.y.clone(), (p.tokens, p.experts, arena, rows, p.n_tokens, bed.projections, bed.n_experts)
        made = experts.launch_experts(out, p.x, p.x_rows, *rest, made)
    assert (made is None) == (p.n_tokens // len(slots) < tuning.TILE_TOKENS)
    return out


@pytest.mark.parametrize("slots", [DISTINCT, MIXED, [1] * 6, [-1] * 6, [3]])
@pytest.mark.parametrize(("dtype", "interleaved"), list(zip(DTYPES, (True, False, True), strict=True)))
@pytest.mark.parametrize(("tokens", "top"), [(1, 2), (17, 1)])
def test_gate_and_up(dtype: torch.dtype, interleaved: bool, slots: list[int], tokens: int, top: int) -> None:
    bed = ExpertsBed(RANKS, 37, [29, 29], 2, dtype, shared=SHARED, interleaved=interleaved)
    p = bed.pairs(len(slots) * tokens, top, dtype)
    got = run(bed, p, slots, table=interleaved, buckets=False)
    bed.check(got, p, slots)
    torch.testing.assert_close(got, bed.reference(p, slots), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [2, 17])
@pytest.mark.parametrize("gathered", [False, True])
def test_down(dtype: torch.dtype, tokens: int, gathered: bool) -> None:
    bed = ExpertsBed([[16], [0], [33]], 24, [141], 3, dtype, shared=["", "", "b"])
    p = bed.pairs(3 * tokens, 2, dtype, gathered=gathered)
    bed.check(run(bed, p, [2, 1, 0]), p, [2, 1, 0])


@pytest.mark.parametrize(("act", "lora"), [(a, b) for a in DTYPES for b in DTYPES if a != b])
@pytest.mark.parametrize("tokens", [1, 17])
def test_dtypes_may_differ(act: torch.dtype, lora: torch.dtype, tokens: int) -> None:
    bed = ExpertsBed([[16, 3], [40, 40]], 64, [48, 32], 3, lora)
    p = bed.pairs(3 * tokens, 1, act)
    bed.check(run(bed, p, [1, -1, 0]), p, [1, -1, 0])


@pytest.mark.parametrize("tokens", [1, 16])
def test_split_k_and_several_blocks_of_columns(tokens: int) -> None:
    bed = ExpertsBed([[70, 9], [20, 33]], 700, [150, 270], 2)
    p = bed.pairs(2 * tokens, 1, torch.float32)
    bed.check(run(bed, p, [1, 0]), p, [1, 0])


@pytest.mark.parametrize("tokens", [1, 20])
def test_gate_and_up_may_share_an_a(tokens: int) -> None:
    bed = ExpertsBed([[8, 8], [20, 20], [4, 4]], 40, [24, 24], 3, shared=["", "a", ""], same_a=(0, 1))
    p = bed.pairs(3 * tokens, 2, torch.float32)
    bed.check(run(bed, p, [0, 1, 2]), p, [0, 1, 2])


def test_large_tiles() -> None:
    bed = ExpertsBed([[16], [5]], 48, [40], 2)
    for tokens, tile in ((32, 16), (120, 32), (200, 64)):
        p = bed.pairs(2 * tokens, 1, torch.float32, sentinel=False)
        bed.check(run(bed, p, [0, 1]), p, [0, 1])
        slots = torch.tensor([0, 1], dtype=torch.int32)
        assert experts.bucket(p.tokens, p.experts, slots, 2, p.n_tokens, 2, 2).tile in (tile, 2 * tile)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_buckets_hold_every_pair_once(data: st.DataObject) -> None:
    draw = data.draw
    adapters, n_experts, rows = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 6))
    n_tokens, top = rows * draw(st.integers(1, 60)), draw(st.integers(1, 3))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tokens = torch.arange(n_tokens * top) // top
    named = torch.randint(-1, n_experts + 2, (n_tokens * top,), generator=gen)
    slots = [draw(st.integers(-1, adapters - 1)) for _ in range(rows)]
    row_slots = torch.tensor([*slots, 3], dtype=torch.int32)
    order, table, tile = experts.bucket(tokens, named, row_slots, rows, n_tokens, n_experts, adapters)
    assert table.shape == (3, len(tokens) // tile + min(len(tokens), adapters * n_experts))
    seen: dict[int, list[int]] = {}
    for key, start, count in table.t().tolist():
        if key >= 0:
            assert 0 < count <= tile
            seen.setdefault(key, []).extend(order[start : start + count].tolist())
    want: dict[int, list[int]] = {}
    for pair, (token, expert) in enumerate(zip(tokens.tolist(), named.tolist(), strict=True)):
        slot = slots[token // (n_tokens // rows)]
        if slot >= 0 and 0 <= expert < n_experts:
            want.setdefault(slot * n_experts + expert, []).append(pair)
    assert seen == want


@pytest.mark.parametrize("tokens", [1, 18])
def test_a_row_does_not_depend_on_its_neighbours(tokens: int) -> None:
    """Other adapters (larger ranks, NaN, none) and other experts beside it: the row keeps its bits."""
    bed, sick = (ExpertsBed(RANKS, 45, [40, 40], 3, shared=SHARED) for _ in range(2))
    for slot in (1, 5):
        sick.poison(slot)
    p = bed.pairs(3 * tokens, 1 if tokens > 1 else 2, torch.float32)
    mine = p.tokens // tokens == 2
    moved = p._replace(experts=torch.where(mine, p.experts, p.experts.flip(0)))
    for slot, others in ((0, [[-1, -1], [1, 5], [0, 1]]), (3, [[1, 3]])):
        want = run(bed, p, [slot] * 3, buckets=False)[mine]
        for neighbours in others:
            assert same_bits(run(sick, p, [*neighbours, slot], buckets=False)[mine], want)
            assert same_bits(run(bed, moved, [*neighbours, slot], buckets=False)[mine], want)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    draw = data.draw
    slots, n_experts, count = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 2))
    ranks = [[draw(st.integers(0, 33)) for _ in range(count)] for _ in range(slots)]
    shared = [draw(st.sampled_from(("", "a", "b", "ab"))) for _ in range(slots)]
    widths = [draw(st.integers(1, 40))] * count
    interleaved, dtype = draw(st.booleans()), draw(st.sampled_from((torch.float32, torch.float16)))
    bed = ExpertsBed(ranks, draw(st.integers(1, 40)), widths, n_experts, dtype, shared=shared, interleaved=interleaved)
    rows, tokens = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 15, 16, 17)))
    p = bed.pairs(rows * tokens, draw(st.integers(1, 3)), dtype, gathered=draw(st.booleans()))
    chosen = [draw(st.integers(-1, slots - 1)) for _ in range(rows)]
    bed.check(run(bed, p, chosen, table=draw(st.booleans()), buckets=False), p, chosen)


def test_projections_that_cannot_share_a_call() -> None:
    bed = ExpertsBed([[3, 3, 3]], 8, [6, 6, 6], 2)
    with pytest.raises(ValueError, match="one or two"):
        run(bed, bed.pairs(2, 1, torch.float32), [0, 0])
