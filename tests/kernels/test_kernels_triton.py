"""The Triton kernels in the interpreter: right against fp64, rows independent. The device has test_kernels_gpu.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bed import DTYPES, POPULARITY, RANKS_WITH_VECTORS, TOLERANCE, Bed, draw_slots, draw_starts, same_bits

triton = pytest.importorskip("triton")

from hf_multilora.kernels import launch, segments, table, tuning  # noqa: E402

OLD_INTERPRETER = triton.__version__ < "3.7" and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0"
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"),
    pytest.mark.skipif(OLD_INTERPRETER, reason="the interpreter of Triton < 3.7 fails with NumPy >= 2.4 (int(array))"),
]


@pytest.fixture(autouse=True, scope="module")
def bf16_in_the_interpreter() -> Iterator[None]:
    """The interpreter multiplies bf16 as raw integers, so that dots must upcast first, and cuts fp32 to bf16."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tuning, "_shrink_dot", lambda x, data: "ieee")
        monkeypatch.setattr(tuning, "_expand_dot", lambda y, data: "ieee")
        monkeypatch.setitem(TOLERANCE, torch.bfloat16, 8e-3)
        yield


def run(
    bed: Bed,
    y: torch.Tensor,
    x: torch.Tensor,
    slots: list[int],
    max_rank: int | None = None,
    starts: list[int] | None = None,
    table: list[int] | None = None,
    beside: bool = False,
) -> torch.Tensor:
    """The kernels on a copy of y, with planes full of NaN: what shrink did not write, expand must not read.

    Args:
        table: a row table to use instead of the slots alone.
        beside: make the deltas in a buffer of their own, and add them afterwards.
    """
    rows, n = len(slots), y.shape[0]
    row_slots = torch.tensor(slots + [7, 7] if table is None else [table], dtype=torch.int32)
    row_starts = None if starts is None else torch.tensor(starts + [0, 0], dtype=torch.int32)
    counters = torch.zeros(256, dtype=torch.int32)
    arena = launch.Arena(bed.data, bed.meta, bed.floats, counters, bed.slot_elems, max_rank or bed.max_rank)
    row_map = launch.Rows(row_slots, row_starts, rows)
    out = y.clone()
    if bed.embedding:
        planes = torch.full((n * arena.max_rank,), float("nan"))
        launch.embed(out, x, arena, row_map, planes, bed.site, {})
        return out
    call = launch.describe(n, bed.in_features, bed.widths, x.dtype, y.dtype, arena, row_map)
    planes = torch.full((launch.plane_elems(call),), float("nan"))
    views = list(out.split(bed.widths, 1))
    if beside:
        d = torch.full((n, sum(bed.widths)), float("nan"))
        launch.delta(d, bed.widths, x, y.dtype, arena, row_map, planes, bed.site)
        added = (y + d).to(y.dtype)
        launch.finish(views, d, arena, row_map, bed.site)
        assert bed.gain or bed.shift or same_bits(added, out), "compiled forwards add, and get the same"
    else:
        launch.linear(views, x, arena, row_map, planes, bed.site, {})
    assert not counters.any(), "counters are 0 between launches"
    return out


RANKS = [[1], [3], [8], [11], [16], [33], [64], [128], [0]]


@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.float32), (3, torch.bfloat16), (19, torch.float16)])
def test_linear(dtype: torch.dtype, popularity: str, tokens: int) -> None:
    bed = Bed(RANKS, 33, [29], dtype)
    slots = draw_slots(popularity, 6, len(RANKS))
    y, x = bed.inputs(6 * tokens, dtype)
    bed.check(run(bed, y, x, slots), y, x, slots)


@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.bfloat16), (3, torch.float16), (19, torch.float32)])
@pytest.mark.parametrize("embedding", [False, True])
def test_gains_shifts_and_starts(dtype: torch.dtype, popularity: str, tokens: int, embedding: bool) -> None:
    bed = Bed(RANKS_WITH_VECTORS, 33, [29], dtype, embedding=embedding, vectors=True)
    slots = draw_slots(popularity, 12, len(RANKS_WITH_VECTORS))
    y, x = bed.inputs(12 * tokens, dtype)
    for starts in (None, draw_starts(12, tokens, seed=3)):
        bed.check(run(bed, y, x, slots, starts=starts), y, x, slots, starts)


@pytest.mark.parametrize("embedding", [False, True])
def test_starts_inside_and_at_the_edges_of_tiles(embedding: bool) -> None:
    """Tiles take 32 (shrink) and 64 tokens (expand): the last token of one may be the first that is active."""
    bed = Bed([[5], [16], [0], [3]], 40, [130], embedding=embedding, vectors=True)
    slots, starts = [1, 3, 0, 2, 3, -1, 1], [0, 31, 32, 33, 63, 65, 70]
    y, x = bed.inputs(7 * 70, torch.float32)
    bed.check(run(bed, y, x, slots, starts=starts), y, x, slots, starts)


@pytest.mark.parametrize(("k", "n"), [(64, 96), (300, 130), (1000, 17), (1, 1)])
@pytest.mark.parametrize("tokens", [1, 16])
def test_shapes(k: int, n: int, tokens: int) -> None:
    """Several chunks of K and blocks of N, with and without a rest."""
    bed = Bed([[16], [5]], k, [n])
    slots = [1, -1, 0]
    y, x = bed.inputs(3 * tokens, torch.float32)
    bed.check(run(bed, y, x, slots), y, x, slots)


@pytest.mark.parametrize("act", DTYPES)
@pytest.mark.parametrize("lora", DTYPES)
@pytest.mark.parametrize("tokens", [1, 18])
def test_dtypes_may_differ(act: torch.dtype, lora: torch.dtype, tokens: int) -> None:
    bed = Bed([[8], [3]], 40, [24], lora)
    y, x = bed.inputs(2 * tokens, act)
    bed.check(run(bed, y, x, [0, 1]), y, x, [0, 1])


@pytest.mark.parametrize("shared_a", [False, True])
@pytest.mark.parametrize("widths", [[40], [40, 7], [64, 16, 16], [5, 4, 3, 2]])
@pytest.mark.parametrize("tokens", [1, 17])
def test_slices(widths: list[int], shared_a: bool, tokens: int) -> None:
    if shared_a:
        ranks = [[4] * 4, [8, 0, 8, 8], [0, 8, 8, 0], [0] * 4]
    else:
        ranks = [[4, 0, 9, 1], [8, 1, 3, 0], [0, 16, 0, 2], [0] * 4]
    slots, starts = [0, 1, 2, 3, -1, 1], [0, 1, 0, tokens // 2, 0, tokens]
    for vectors in (False, True):
        bed = Bed([r[: len(widths)] for r in ranks], 24, widths, shared_a=shared_a, vectors=vectors)
        y, x = bed.inputs(6 * tokens, torch.float32)
        bed.check(run(bed, y, x, slots, max_rank=16), y, x, slots)
    bed.check(run(bed, y, x, slots, max_rank=16, starts=starts), y, x, slots, starts)


@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.bfloat16), (21, torch.float32), (2, torch.float16)])
def test_embedding(dtype: torch.dtype, popularity: str, tokens: int) -> None:
    bed = Bed(RANKS, 50, [29], dtype, embedding=True)
    slots = draw_slots(popularity, 6, len(RANKS))
    y, ids = bed.inputs(6 * tokens, dtype)
    bed.check(run(bed, y, ids, slots), y, ids, slots)
    assert same_bits(run(bed, y, ids.int(), slots), run(bed, y, ids, slots))


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("tokens", [1, 16])
def test_rows_without_an_adapter_keep_their_bits(embedding: bool, tokens: int) -> None:
    bed = Bed([[0], [0], [16]], 33, [29], embedding=embedding, vectors=True)
    y, x = bed.inputs(4 * tokens, torch.float32)
    y[::tokens, 0], y[::tokens, 1], y[::tokens, 2] = -0.0, float("nan"), float("inf")
    base = [*range(tokens), *range(2 * tokens, 3 * tokens)]
    for slot in (1, 2):
        got = run(bed, y, x, [-1, slot, 0, slot])
        assert same_bits(got[base], y[base])
        assert all(not same_bits(got[t], y[t]) for t in (tokens, 3 * tokens))
        got = run(bed, y, x, [-1, slot, 0, slot], starts=[0, tokens, 0, tokens - 1])
        assert same_bits(got[:-1], y[:-1]) and not same_bits(got[-1], y[-1])


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("tokens", [1, 16])
def test_a_poisoned_adapter_touches_only_its_rows(embedding: bool, tokens: int) -> None:
    bed = Bed([[16], [3], [8]], 33, [29], embedding=embedding, vectors=True)
    y, x = bed.inputs(4 * tokens, torch.float32)
    clean = run(bed, y, x, [0, 1, 2, -1])
    bed.poison(1)
    got = run(bed, y, x, [0, 1, 2, -1])
    keep = [i for i in range(4 * tokens) if i // tokens != 1]
    assert got[tokens : 2 * tokens].isnan().all() and same_bits(got[keep], clean[keep])


def test_strided_inputs() -> None:
    """x and y as columns of wider tensors."""
    bed = Bed([[16], [3]], 32, [32])
    y, x = bed.inputs(2, torch.float32)
    wide_y, wide_x = torch.randn(2, 80), torch.randn(2, 70)
    wide_y[:, 16:48], wide_x[:, 3:35] = y, x
    before = wide_y.clone()
    row_slots = torch.tensor([1, 0], dtype=torch.int32)
    planes = torch.full((1024,), float("nan"))
    arena = launch.Arena(bed.data, bed.meta, bed.floats, row_slots, bed.slot_elems, 16)
    rows = launch.Rows(row_slots, None, 2)
    launch.linear([wide_y[:, 16:48]], wide_x[:, 3:35], arena, rows, planes, bed.site, {})
    bed.check(wide_y[:, 16:48].contiguous(), y, x, [1, 0])
    assert same_bits(wide_y[:, :16], before[:, :16]) and same_bits(wide_y[:, 48:], before[:, 48:])


def with_table(bed: Bed, y: torch.Tensor, x: torch.Tensor, slots: list[int], room: int = 0, **options) -> torch.Tensor:
    """As `run`, from a row table that has room for `room` rows more."""
    adapters, capacity = bed.meta.shape[0], len(slots) + room
    own = segments.row_table(slots, adapters)
    if room:
        tiles, wide = (segments.tile_count(rows, adapters) for rows in (len(slots), capacity))
        table = [-7] * segments.table_size(capacity, adapters)
        table[: len(slots)] = slots
        table[capacity : capacity + wide] = own[len(slots) : len(slots) + tiles] + [-1] * (wide - tiles)
        tile_rows = own[len(slots) + tiles :]
        table[capacity + wide :] = tile_rows + [-1] * (16 * wide - len(tile_rows))
        own = table
    return run(bed, y, x, slots, table=own, **options)


@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize("rows", [8, 20, 40])
@pytest.mark.parametrize("room", [0, 5])
def test_segments(popularity: str, rows: int, room: int) -> None:
    """Rows that share a slot are served together; the interpreter has no bf16 dot, the device tests it."""
    bed = Bed([[16], [3], [33], [0]], 600, [150], torch.float16, vectors=popularity == "uniform")
    slots = draw_slots(popularity, rows, 4)
    y, x = bed.inputs(rows, torch.float16)
    bed.check(with_table(bed, y, x, slots, room), y, x, slots)
    bed.check(with_table(bed, y, x, slots, room, beside=True), y, x, slots)
    starts = draw_starts(rows, 1)
    got = with_table(bed, y, x, slots, room, starts=starts)
    bed.check(got, y, x, slots, starts)
    without = with_table(bed, y, x, slots, room)
    assert all(same_bits(got[row], without[row]) for row in range(rows) if starts[row] <= 0)


def test_the_shape_decides_about_segments() -> None:
    bed = Bed([[4]] * 4, 32, [48], torch.float16)
    arena = launch.Arena(bed.data, bed.meta, bed.floats, bed.meta, bed.slot_elems, 4)

    def kind(rows: int, table: bool = True, **changes: object) -> str:
        values = [segments.row_table([0] * rows, 4)] if table else [0] * rows
        row_map = launch.Rows(torch.tensor(values, dtype=torch.int32), None, rows)
        call = launch.describe(rows, 32, [48], torch.float16, torch.float16, arena, row_map)
        return tuning.kind_of(dataclasses.replace(call, **changes))

    assert [kind(rows) for rows in (1, 7, 8, 64)] == ["rows", "rows", "segments", "segments"]
    assert kind(64, table=False) == kind(64, x=torch.float32) == "rows"
    assert all(kind(rows, starts=True) == kind(rows) for rows in (1, 8, 64)), "a neighbour's start changes no kernel"
    assert kind(64, adapters=33) == kind(64, n=128) == "rows" and kind(64, n=16 * 64) == "tiles"


@pytest.mark.parametrize("widths", [[40, 24], [64, 16, 16], [5, 4, 3, 2]])
@pytest.mark.parametrize("shared_a", [False, True])
def test_segments_of_groups(widths: list[int], shared_a: bool) -> None:
    ranks = [[4] * 4, [8, 0, 8, 8], [0] * 4] if shared_a else [[4, 0, 9, 1], [8, 1, 3, 0], [0] * 4]
    bed = Bed([r[: len(widths)] for r in ranks], 24, widths, torch.float16, shared_a=shared_a, vectors=True)
    slots = [0, 1, 2, -1] * 5
    y, x = bed.inputs(20, torch.float16)
    bed.check(with_table(bed, y, x, slots), y, x, slots)
    bed.check(with_table(bed, y, x, slots, beside=True), y, x, slots)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("vectors", [False, True])
def test_deltas_beside_the_base_layer(tokens: int, vectors: bool) -> None:
    """Made in a buffer of their own and added later, they give the bits of the kernel that writes in place."""
    ranks = [[16, 3], [0, 8], [5, 0], [0, 0]]
    bed = Bed(ranks, 96, [40, 72], torch.float32, vectors=vectors)
    slots = [0, 3, 1, -1, 2]
    y, x = bed.inputs(5 * tokens, torch.float32)
    y[0, 0] = y[3 * tokens, 0] = -0.0
    got = run(bed, y, x, slots, beside=True)
    bed.check(got, y, x, slots)
    assert same_bits(got, run(bed, y, x, slots))


TUNED = [
    ("shrink_rows", 1, {"chunk": 16, "block_k": 16}),
    ("shrink_rows", 3, {"chunk": 64, "block_k": 16, "warps": 1}),
    ("expand_rows", 1, {"block_n": 256}),
    ("shrink_tiles", 19, {"chunk": 96, "block_m": 128, "block_k": 16, "stages": 1}),
    ("shrink_tiles", 19, {"block_k": 256}),
    ("expand_tiles", 70, {"block_n": 16, "steps": 2}),
    ("shrink_segments", 0, {"chunk": 32, "block_k": 16}),
    ("expand_segments", 0, {"block_n": 16, "stages": 2}),
]


@pytest.mark.parametrize(("kernel", "tokens", "sizes"), TUNED)
def test_tuned_sizes_change_no_result(
    kernel: str, tokens: int, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that share a slot where tokens is 0."""
    largest = 13 if kernel == "expand_rows" else 33
    ranks = [[16, 3], [5, largest], [0, 8], [0, 0]]
    bed = Bed(ranks, 200, [40, 72], torch.float16 if tokens == 0 else torch.float32)
    slots = [0, 3, 1, -1, 2] * (4 if tokens == 0 else 1)
    n = len(slots) * max(tokens, 1)
    y, x = bed.inputs(n, bed.dtype)
    shape = {"n": n, "k": 200, "widths": [40, 72], "max_rank": max(16, largest), "dtype": str(bed.dtype).split(".")[1]}
    found = []

    def spy(*args: object) -> object:
        found.append(lookup(*args))  # type: ignore[arg-type]
        return found[-1]

    lookup = table.lookup
    monkeypatch.setattr(table, "lookup", spy)
    with table.tried(kernel, shape, sizes):
        got = with_table(bed, y, x, slots) if tokens == 0 else run(bed, y, x, slots)
    bed.check(got, y, x, slots)
    assert sizes in found


@settings(max_examples=20, deadline=None)
@given(data=st.data(), rows=st.integers(8, 24))
def test_neighbours_in_segments_change_no_bit(data: st.DataObject, rows: int) -> None:
    bed = Bed([[16], [3], [33], [0]], 300, [40], torch.float16, vectors=True)
    draw = st.lists(st.integers(-1, 3), min_size=rows, max_size=rows)
    first, second = data.draw(draw), data.draw(draw)
    row, other = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, rows - 1))
    second[other] = first[row]
    y, x = bed.inputs(rows, torch.float16)
    y2, x2 = bed.inputs(rows, torch.float16, seed=2)
    y2[other], x2[other] = y[row], x[row]
    assert same_bits(with_table(bed, y, x, first)[row], with_table(bed, y2, x2, second)[other])


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    rows=st.integers(1, 4),
    tokens=st.sampled_from([1, 2, 16]),
    k=st.sampled_from([33, 64]),
    dtype=st.sampled_from(DTYPES),
    embedding=st.booleans(),
)
def test_neighbours_change_no_bit(
    data: st.DataObject, rows: int, tokens: int, k: int, dtype: torch.dtype, embedding: bool
) -> None:
    bed = Bed([[1], [3], [16], [33], [0], [0], [8]], k, [40], dtype, embedding=embedding, vectors=True)
    slots = st.lists(st.integers(-1, 6), min_size=rows, max_size=rows)
    starts = st.lists(st.integers(0, tokens), min_size=rows, max_size=rows)
    first, second = data.draw(slots), data.draw(slots)
    row = data.draw(st.integers(0, rows - 1))
    second[row] = first[row]
    starts1, starts2 = (data.draw(starts), data.draw(starts)) if data.draw(st.booleans()) else (None, None)
    if starts1 is not None and starts2 is not None:
        starts2[row] = starts1[row]
    y, x = bed.inputs(rows * tokens, dtype)
    y2, x2 = bed.inputs(rows * tokens, dtype, seed=2)
    span = slice(row * tokens, (row + 1) * tokens)
    y2[span], x2[span] = y[span], x[span]
    got = run(bed, y, x, first, starts=starts1)[span]
    assert same_bits(got, run(bed, y2, x2, second, starts=starts2)[span])


class Kernel:
    """Launches nothing."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., object]:
        return lambda *args, **options: self


def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Replace both kernels; returns what each would have been launched with: (grid, arguments)."""
    prepared: list[tuple] = []
    for module in (launch.shrink, launch.expand):

        def prepare(*args: object, real: Callable = module.prepare) -> tuple:
            _, grid, arguments, options = real(*args)
            prepared.append((grid, arguments))
            return Kernel(), grid, arguments, options

        monkeypatch.setattr(module, "prepare", prepare)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=99))
    return prepared


def test_prepared_launches_pass_what_ordinary_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed([[16], [3]], 32, [48])
    prepared = fake_kernels(monkeypatch)
    calls: list[tuple] = []

    def prepare(kernels: list[launch.driver.Kernel]) -> Callable[..., None]:
        for compiled, grid, args, _ in kernels:
            assert isinstance(compiled, Kernel) and any(args is given and grid == of for of, given in prepared)

        def run(stream: int, *values: int) -> None:
            for _, grid, args, varying in kernels:
                calls.append((grid, stream, *(values[place] for place in varying), *args[len(varying) :]))

        return run

    monkeypatch.setattr(launch.driver, "prepare", prepare)
    recipes: dict = {}

    def call(site: int, seed: int, starts: bool = False) -> tuple[launch.Launch | None, tuple]:
        y, x = bed.inputs(2, torch.float32, seed=seed)
        row_slots = torch.tensor([0, 1], dtype=torch.int32)
        planes = torch.empty(1024)
        arena = launch.Arena(bed.data, bed.meta, bed.floats, bed.meta, bed.slot_elems, 16)
        row_starts = torch.tensor([0, 1], dtype=torch.int32) if starts else None
        rows = launch.Rows(row_slots, row_starts, 2)
        return launch.linear([y], x, arena, rows, planes, site, recipes), (y, x, row_slots, row_starts, planes)

    recipe, keep = call(site=2, seed=1)
    assert recipe is not None and not calls and len(recipes) == 1
    again, other = call(site=5, seed=2)
    assert again is recipe and len(prepared) == 2, "the second call is prepared"
    leading = ([other[1].data_ptr()], [other[0].data_ptr()] * 4)
    for (grid, arguments), got, first in zip(prepared, calls, leading, strict=True):
        slots = other[2].data_ptr()
        varying = [*first, slots, slots, other[4].data_ptr(), 5]
        assert got[: 2 + len(varying)] == (grid, 99, *varying)
        assert all(a is b for a, b in zip(got[2 + len(varying) :], arguments[len(varying) :], strict=True))
    calls.clear()
    with_starts, _ = call(site=2, seed=1, starts=True)
    assert with_starts is not recipe and not calls and len(recipes) == 2
    again, other = call(site=2, seed=2, starts=True)
    assert again is with_starts and len(prepared) == 4
    for got, at in zip(calls, (3, 6), strict=True):
        assert got[at : at + 2] == (other[2].data_ptr(), other[3].data_ptr())
    del keep


def test_kernels_that_cannot_be_prepared_are_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bed = Bed([[16]], 32, [48])
    fake_kernels(monkeypatch)
    launch.logger.warning_once.cache_clear()
    y, x = bed.inputs(1, torch.float32)
    row_slots, planes = torch.zeros(1, dtype=torch.int32), torch.empty(1024)
    for _ in range(2):
        arena = launch.Arena(bed.data, bed.meta, bed.floats, row_slots, bed.slot_elems, 16)
        assert launch.linear([y], x, arena, launch.Rows(row_slots, None, 1), planes, bed.site, {}) is None
    assert len(caplog.records) == 1 and "Launches cannot be prepared" in caplog.text
