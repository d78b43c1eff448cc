"""The plain torch path: right against fp64, base rows untouched, rows independent to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bed import DTYPES, POPULARITY, RANKS_WITH_VECTORS, Bed, draw_slots, draw_starts, same_bits

from hf_multilora.errors import ModelError
from hf_multilora.kernels.ops import EmbeddingOp, LinearOp, Workspace
from hf_multilora.kernels.reference import META, Runs, lora_embedding, lora_linear
from hf_multilora.memory import layout

RANKS = [[1], [3], [8], [11], [16], [33], [64], [128], [0]]


def run(
    bed: Bed,
    y: torch.Tensor,
    x: torch.Tensor,
    slots: list[int],
    cache: dict | None = None,
    starts: list[int] | None = None,
) -> torch.Tensor:
    row_slots = torch.tensor(slots + [7, 7], dtype=torch.int32)  # capacity beyond the rows
    row_starts = None if starts is None else torch.tensor(starts + [0, 0], dtype=torch.int32)
    arena = (bed.data, bed.meta, bed.floats, row_slots, len(slots), bed.site)
    if bed.embedding:
        return lora_embedding(y, x, *arena, bed.widths[0], bed.slot_elems, bed.zero_off, cache, row_starts)
    return lora_linear(y, x, *arena, bed.widths, bed.slot_elems, bed.zero_off, cache, row_starts)


@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_linear(dtype: torch.dtype, popularity: str, tokens: int) -> None:
    bed = Bed(RANKS, 33, [29], dtype)
    slots = draw_slots(popularity, 8, len(RANKS))
    y, x = bed.inputs(8 * tokens, dtype)
    bed.check(run(bed, y, x, slots), y, x, slots)


@pytest.mark.parametrize("shared_a", [False, True])
def test_slices(shared_a: bool) -> None:
    ranks = [[4, 4, 4], [8, 8, 0], [0, 0, 0]] if shared_a else [[4, 0, 9], [8, 1, 3], [0, 16, 0]]
    bed = Bed(ranks, 24, [40, 7, 13], shared_a=shared_a)
    slots = [0, 1, 2, -1, 0]
    y, x = bed.inputs(10, torch.float32)
    bed.check(run(bed, y, x, slots), y, x, slots)


@pytest.mark.parametrize("popularity", POPULARITY)
def test_embedding(popularity: str) -> None:
    bed = Bed(RANKS, 50, [29], torch.float32, embedding=True)
    slots = draw_slots(popularity, 8, len(RANKS))
    y, ids = bed.inputs(24, torch.float32)
    bed.check(run(bed, y, ids, slots), y, ids, slots)


@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("embedding", [False, True])
def test_gains_shifts_and_starts(dtype: torch.dtype, popularity: str, tokens: int, embedding: bool) -> None:
    bed = Bed(RANKS_WITH_VECTORS, 33, [29], dtype, embedding=embedding, vectors=True)
    slots = draw_slots(popularity, 12, len(RANKS_WITH_VECTORS))
    y, x = bed.inputs(12 * tokens, dtype)
    cache: dict = {}
    for starts in (None, draw_starts(12, tokens, seed=3), [0] * 12, None):
        got = run(bed, y, x, slots, cache, starts)
        bed.check(got, y, x, slots, starts)
        assert same_bits(got, run(bed, y, x, slots, None, starts))


@pytest.mark.parametrize("shared_a", [False, True])
def test_gains_and_shifts_of_slices(shared_a: bool) -> None:
    ranks = [[4, 4, 4], [8, 8, 0], [0, 0, 0], [8, 0, 0]]
    bed = Bed(ranks, 24, [40, 7, 13], shared_a=shared_a, vectors=True)
    slots, starts = [0, 1, 2, -1, 0, 3, 2], [0, 1, 0, 0, 2, 0, 1]
    y, x = bed.inputs(14, torch.float32)
    for s in (None, starts):
        bed.check(run(bed, y, x, slots, starts=s), y, x, slots, s)


@pytest.mark.parametrize("embedding", [False, True])
def test_a_batch_without_any_delta(embedding: bool) -> None:
    """Gains and shifts alone; and a row's -0.0 comes out as it does next to rows with a delta."""
    bed = Bed([[0], [0], [0], [0], [16]], 33, [29], torch.bfloat16, embedding=embedding, vectors=True)
    y, x = bed.inputs(5, torch.bfloat16)
    y[1:4, :9] = -0.0
    slots = [0, 1, 2, 3, -1]
    got = run(bed, y, x, slots)
    bed.check(got, y, x, slots)
    assert same_bits(got[:4], run(bed, y, x, [0, 1, 2, 3, 4])[:4])


def test_the_table_is_the_one_that_memory_writes() -> None:
    assert META == layout.META


def test_mixed_dtypes() -> None:
    """The adapters' dtype and the activations' may differ."""
    bed = Bed(RANKS, 33, [29], torch.bfloat16)
    slots = [0, 5, -1, 7]
    for dtype in (torch.float32, torch.float16, torch.float64):
        y, x = bed.inputs(8, dtype)
        bed.check(run(bed, y, x, slots), y, x, slots)


def test_cache_gives_the_same_bits() -> None:
    bed = Bed(RANKS, 33, [29])
    y, x = bed.inputs(8, torch.float32)
    slots, cache = [0, 5, -1, 7], {}
    first = run(bed, y, x, slots)
    for _ in range(2):
        assert same_bits(run(bed, y, x, slots, cache), first)
    assert cache["bytes"] > 0


@pytest.mark.parametrize("embedding", [False, True])
def test_rows_without_an_adapter_keep_their_bits(embedding: bool) -> None:
    bed = Bed([[0], [0], [0], [16]], 33, [29], embedding=embedding, vectors=True)
    y, x = bed.inputs(12, torch.float32)
    y[::2, 0], y[::2, 1], y[::2, 2] = -0.0, float("nan"), float("inf")
    keep = [0, 1, 4, 5, 8, 9, 10]  # the base, a slot without anything here, tokens before their start
    for slots in ([-1, 3, 0, 1, -1, 2], [-1, 1, 0, 2, -1, 3]):
        got = run(bed, y, x, slots, starts=[0, 1, 0, 0, 1, 1])
        assert same_bits(got[keep], y[keep])
        assert all(not same_bits(got[t], y[t]) for t in (3, 6, 7, 11))


@pytest.mark.parametrize("embedding", [False, True])
def test_a_poisoned_adapter_touches_only_its_rows(embedding: bool) -> None:
    bed = Bed([[16], [3], [8]], 33, [29], embedding=embedding, vectors=True)
    y, x = bed.inputs(8, torch.float32)
    clean = run(bed, y, x, [0, 1, 2, -1])
    bed.poison(1)
    got = run(bed, y, x, [0, 1, 2, -1])
    keep = [0, 1, 4, 5, 6, 7]
    assert got[2:4].isnan().all() and same_bits(got[keep], clean[keep])


def test_an_infinite_input_is_no_business_of_the_padding() -> None:
    """x = inf times a padded zero is NaN; it must not depend on the neighbours' ranks how a row comes out."""
    bed = Bed([[16], [64]], 33, [29])
    y, x = bed.inputs(4, torch.float32)
    x[0, 3] = float("inf")
    alone, mixed = run(bed, y, x, [0, -1]), run(bed, y, x, [0, 1])
    assert same_bits(alone[:2], mixed[:2])


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    rows=st.integers(1, 6),
    tokens=st.sampled_from([1, 2, 17]),
    k=st.sampled_from([33, 64, 576]),
    dtype=st.sampled_from(DTYPES),
    embedding=st.booleans(),
)
def test_neighbours_change_no_bit(
    data: st.DataObject, rows: int, tokens: int, k: int, dtype: torch.dtype, embedding: bool
) -> None:
    bed = Bed(RANKS_WITH_VECTORS, k, [96], embedding=embedding, vectors=True)
    slots = st.lists(st.integers(-1, len(RANKS_WITH_VECTORS) - 1), min_size=rows, max_size=rows)
    starts = st.one_of(st.none(), st.lists(st.integers(0, tokens), min_size=rows, max_size=rows))
    first, second = data.draw(slots), data.draw(slots)
    row = data.draw(st.integers(0, rows - 1))
    second[row] = first[row]
    starts1, starts2 = data.draw(starts), data.draw(starts)
    if starts2 is not None:
        starts2[row] = starts1[row] if starts1 is not None else 0
    elif starts1 is not None:
        starts1[row] = 0
    y, x = bed.inputs(rows * tokens, dtype)
    y2, x2 = bed.inputs(rows * tokens, dtype, seed=2)
    span = slice(row * tokens, (row + 1) * tokens)
    y[span, :5] = -0.0
    y2[span], x2[span] = y[span], x[span]
    got = run(bed, y, x, first, starts=starts1)[span]
    assert same_bits(got, run(bed, y2, x2, second, starts=starts2)[span])


def test_ops_on_the_cpu() -> None:
    bed = Bed([[r[0], 2] for r in RANKS], 33, [20, 9], site=0, vectors=True)
    workspace = Workspace()
    op = LinearOp(bed.data, bed.meta, bed.floats, bed.slot_elems, bed.zero_off, 0, 33, (20, 9), 128, workspace)
    y, x = bed.inputs(12, torch.float32)
    slots = [3, -1, 6]
    row_slots = torch.tensor(slots, dtype=torch.int32)
    before = y.clone()
    (got,) = op((y.view(3, 4, 29),), x.view(3, 4, 33), row_slots, 3, {})
    assert got.shape == (3, 4, 29) and same_bits(y, before)
    bed.check(got.view(12, 29), y, x, slots)
    starts = [2, 0, 4]
    row_starts = torch.tensor(starts, dtype=torch.int32)
    (got,) = op((y.view(3, 4, 29),), x.view(3, 4, 33), row_slots, 3, {}, row_starts)
    bed.check(got.view(12, 29), y, x, slots, starts)

    table = Bed(RANKS, 50, [29], embedding=True, vectors=True)
    arena = (table.data, table.meta, table.floats, table.slot_elems, table.zero_off, table.site)
    embed = EmbeddingOp(*arena, 29, 128, workspace)
    y, ids = table.inputs(12, torch.float32)
    got = embed(y.view(3, 4, 29), ids.view(3, 4), row_slots, 3)
    table.check(got.view(12, 29), y, ids, slots)
    got = embed(y.view(3, 4, 29), ids.view(3, 4), row_slots, 3, None, row_starts)
    table.check(got.view(12, 29), y, ids, slots, starts)


def test_gradients_follow_the_input() -> None:
    bed = Bed([[4], [4]], 8, [8], vectors=True)
    y, x = bed.inputs(6, torch.float32)
    x.requires_grad_()
    y.requires_grad_()
    run(bed, y, x, [0, -1, 1], starts=[0, 0, 1]).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and y.grad is not None
    assert (x.grad.abs().sum(dim=1) > 0).tolist() == [True, True, False, False, False, True]
    assert torch.equal(y.grad[:5], torch.ones(5, 8)) and torch.equal(y.grad[5], bed.gain[1, 0])


class Checked:
    """A backend that runs graphs as they are, counts them, and checks the custom ops with their arguments there."""

    def __init__(self) -> None:
        self.graphs = 0
        self.ops: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        checked = self

        class Interpreter(torch.fx.Interpreter):
            def run_node(self, node: torch.fx.Node) -> Any:
                if "hf_multilora" in str(node.target):
                    args, kwargs = copy.deepcopy(self.fetch_args_kwargs_from_env(node))
                    checked.ops[f"{node.target} {isinstance(args[-1], torch.Tensor)}"] = (node.target, args, kwargs)
                return super().run_node(node)

        return lambda *args: Interpreter(graph).run(*args)

    def check(self) -> set[str]:
        for op, args, kwargs in self.ops.values():
            torch.library.opcheck(op, args, kwargs)
        return {str(op).split(".")[1] for op, _, _ in self.ops.values()}


def test_compiled_on_the_cpu() -> None:
    """The custom ops trace as one graph, and one graph serves every mix."""
    bed = Bed([[4], [16], [0]], 24, [20], vectors=True)
    table = Bed([[8], [3], [1]], 50, [24], embedding=True, vectors=True)
    arena = (bed.data, bed.meta, bed.floats, bed.slot_elems, bed.zero_off, bed.site)
    linear = LinearOp(*arena, 24, (20,), 16, Workspace())
    arena = (table.data, table.meta, table.floats, table.slot_elems, table.zero_off, table.site)
    embed = EmbeddingOp(*arena, 24, 8, Workspace())
    words, weight = torch.randn(50, 24), torch.randn(20, 24)
    backend, row_starts = Checked(), torch.zeros(3, dtype=torch.int32)

    def forward(ids: torch.Tensor, row_slots: torch.Tensor) -> torch.Tensor:
        x = embed(torch.nn.functional.embedding(ids, words), ids, row_slots, 3, None, row_starts)
        (x,) = linear((torch.nn.functional.linear(x, weight),), x, row_slots, 3, None, row_starts)
        return linear((x,), torch.nn.functional.silu(x[..., :1]).expand(*x.shape[:2], 24), row_slots, 3)[0]

    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    ids = torch.randint(50, (3, 4))
    with torch.no_grad():
        for slots in ([0, 1, 2], [-1, 2, 0], [-1, -1, -1]):
            row_slots = torch.tensor(slots, dtype=torch.int32)
            row_starts[:] = torch.tensor([slots[0] + 1, 0, 4])
            assert same_bits(compiled(ids, row_slots), forward(ids, row_slots))
    assert backend.graphs == 1
    assert backend.check() >= {"lora_expand_", "lora_embedding_"} and len(backend.ops) >= 3
    torch._dynamo.reset()


GROUPS = [((20, 9), (20, 9)), ((16, 4, 4), (20, 4)), ((5, 4, 3, 2), (5, 4, 3, 2)), ((8, 8), (16,))]


@pytest.mark.parametrize(("widths", "outputs"), GROUPS)
@pytest.mark.parametrize("starting", [False, True])
def test_a_group_is_its_layers_one_by_one(widths: tuple[int, ...], outputs: tuple[int, ...], starting: bool) -> None:
    bed = Bed([[(3 * slot + i) % 7 for i in range(4)] for slot in range(6)], 24, widths, vectors=True)
    arena = (bed.data, bed.meta, bed.floats, bed.slot_elems, bed.zero_off)
    op = LinearOp(*arena, bed.site, 24, widths, 16, Workspace(), outputs)
    y, x = bed.inputs(6, torch.float32)
    row_slots = torch.tensor([4, -1, 2, 5, 5], dtype=torch.int32)  # longer than the rows
    row_starts = torch.tensor([1, 0, 0, 0, 0], dtype=torch.int32) if starting else None
    ys = tuple(piece.contiguous().view(3, 2, -1) for piece in y.split(outputs, dim=-1))
    got = op(ys, x.view(3, 2, 24), row_slots, 3, {}, row_starts)
    assert isinstance(got, tuple) and [g.shape for g in got] == [g.shape for g in ys]
    bed.check(torch.cat(got, -1).view(6, -1), y, x, [4, -1, 2], [1, 0, 0] if starting else None)
    assert op.begin(x, row_slots, 3, row_starts) is None, "in eager mode on the CPU there is nothing to begin"
    site = bed.site
    for i, (one, base) in enumerate(zip(got, ys, strict=True)):
        count = 1
        while sum(widths[site - bed.site : site - bed.site + count]) < outputs[i]:
            count += 1
        alone = LinearOp(*arena, site, 24, widths[site - bed.site : site - bed.site + count], 16, Workspace())
        assert same_bits(alone((base,), x.view(3, 2, 24), row_slots, 3, None, row_starts)[0], one)
        site += count


def test_outputs_are_made_of_whole_slices() -> None:
    bed = Bed([[4, 4, 4]], 8, [4, 4, 4])
    arena = (bed.data, bed.meta, bed.floats, bed.slot_elems, bed.zero_off, bed.site, 8, (4, 4, 4), 4, Workspace())
    for outputs in ((4, 8, 4), (4, 4), (6, 6), (12, 0)):
        with pytest.raises(ValueError, match="not made of"):
            LinearOp(*arena, outputs)
    with pytest.raises(ModelError, match="at most 4"):
        LinearOp(*arena[:7], (4,) * 5, 4, Workspace())


def test_gradients_follow_a_group() -> None:
    """One output in a graph of autograd: nothing is written in place, and each y gets its own gradient."""
    bed = Bed([[4, 2]], 8, [8, 4], vectors=True)
    arena = (bed.data, bed.meta, bed.floats, bed.slot_elems, bed.zero_off, bed.site)
    op = LinearOp(*arena, 8, (8, 4), 4, Workspace(), (8, 4))
    y, x = bed.inputs(2, torch.float32)
    first, second = (piece.contiguous() for piece in y.split((8, 4), dim=-1))
    first.requires_grad_()
    got = op((first, second), x, torch.tensor([0, -1], dtype=torch.int32), 2)
    sum(g.sum() for g in got).backward()
    bed.check(torch.cat(got, -1).detach(), y, x, [0, -1])
    assert first.grad is not None and torch.equal(first.grad[1], torch.ones(8))


@pytest.mark.parametrize("backend", [Checked(), "aot_eager", "inductor"])
def test_a_compiled_group_in_two_steps(backend: Any) -> None:
    bed = Bed([[4, 0, 3], [16, 2, 1]], 24, [20, 8, 8], vectors=True)
    arena = (bed.data, bed.meta, bed.floats, bed.slot_elems, bed.zero_off, bed.site)
    op = LinearOp(*arena, 24, (20, 8, 8), 16, Workspace(), (20, 16))
    weights = torch.randn(20, 24), torch.randn(16, 24)

    def forward(x: torch.Tensor, row_slots: torch.Tensor, row_starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = op.begin(x, row_slots, 3, row_starts)
        ys = tuple(torch.nn.functional.linear(x, weight) for weight in weights)
        return op.end(ys, x, h, row_slots, 3, None, row_starts)

    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    for grad in (False, True):  # True: no base output needs a gradient, and the path is the same
        for slots, starts in (([0, 1, -1], [0, 1, 0]), ([1, 1, 1], [2, 0, 0])):
            x = torch.randn(3, 2, 24)
            row_slots = torch.tensor([*slots, 7], dtype=torch.int32)
            row_starts = torch.tensor(starts, dtype=torch.int32)
            with torch.set_grad_enabled(grad):
                got, want = compiled(x, row_slots, row_starts), forward(x, row_slots, row_starts)
            for one, other in zip(got, want, strict=True):
                assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
    if isinstance(backend, Checked):
        assert "lora_expand_" in backend.check()
    torch._dynamo.reset()


@pytest.mark.parametrize("lengths", [[1, 1, 1], [5, 1, 40, 3], [16, 17, 1], [33]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_tokens_in_runs(dtype: torch.dtype, lengths: list[int]) -> None:
    """Tokens one after another: the same as a row for each, and no row depends on its neighbours."""
    bed = Bed(RANKS, 33, [29], dtype)
    slots = [(3 * i) % 4 - 1 for i in range(len(lengths))]

    def packed(slots: list[int]) -> tuple[torch.Tensor, list[int]]:
        runs = list(zip(slots, lengths, strict=True))
        by_token = [slot for slot, count in runs for _ in range(count)]
        return run(bed, y, x, by_token, {Runs.KEY: Runs(runs)}), by_token

    y, x = bed.inputs(sum(lengths), dtype)
    out, by_token = packed(slots)
    bed.check(out, y, x, by_token)
    others = [slot if i == 0 else (slot + 3) % 9 - 1 for i, slot in enumerate(slots)]
    assert same_bits(packed(others)[0][: lengths[0]], out[: lengths[0]])
    again = {Runs.KEY: Runs(list(zip(slots, lengths, strict=True)))}
    assert same_bits(run(bed, y, x, by_token, again), run(bed, y, x, by_token, again)), "what is kept is the same"
