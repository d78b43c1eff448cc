"""On the device: the kernels for LoRA on experts against fp64, in CUDA graphs, without syncs, bits of neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from experts_kernel_bed import ExpertsBed, Pairs
from kernel_bed import DTYPES, same_bits

from hf_multilora.kernels.custom import HAS_TRITON
from hf_multilora.kernels.reference import META

if HAS_TRITON:
    from hf_multilora.kernels import experts, launch

pytestmark = pytest.mark.gpu

RANKS = [[3, 16], [0, 33], [17, 0], [64, 64], [0, 0], [1, 20]]
SHARED = ["", "b", "a", "ab", "", ""]
MIXES = {"distinct": [0, 1, 2, 3, 4, 5], "with base": [-1, 2, 1, 0, 0, 5], "identical": [1] * 6, "one row": [3]}


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Planes start as NaN: what shrink did not write, expand must not read."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: empty(*a, **kw).fill_(float("nan")))
    yield


class Call:
    """The launches of one batch; tensors stay where they are, so that a captured graph can be replayed on others."""

    def __init__(self, bed: ExpertsBed, p: Pairs, slots: list[int]) -> None:
        self.bed, self.p, self.rows = bed, p.to("cuda"), len(slots)
        self.row_slots = torch.tensor([*slots, 7, 7], dtype=torch.int32, device="cuda")
        self.arena = launch.Arena(bed.data, bed.meta, bed.floats, self.row_slots, bed.slot_elems, bed.max_rank)
        self.out = self.p.y.clone()

    def __call__(self) -> torch.Tensor:
        p, rows = self.p, launch.Rows(self.row_slots, None, self.rows)
        self.out.copy_(p.y)
        rest = (p.tokens, p.experts, self.arena, rows, p.n_tokens, self.bed.projections, self.bed.n_experts)
        experts.launch_experts(self.out, p.x, p.x_rows, *rest)
        return self.out.clone()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 16, 70])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gate_and_up(dtype: torch.dtype, mix: str, tokens: int, interleaved: bool) -> None:
    bed = ExpertsBed(RANKS, 528, [272, 272], 5, dtype, shared=SHARED, interleaved=interleaved, device="cuda")
    p = bed.pairs(len(MIXES[mix]) * tokens, 2, dtype)
    call = Call(bed, p, MIXES[mix])
    first = call()
    bed.check(first, p, MIXES[mix])
    assert same_bits(first, call())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [3, 90])
@pytest.mark.parametrize(("k", "width"), [(272, 528), (2880, 640), (77, 131)])
def test_down(dtype: torch.dtype, tokens: int, k: int, width: int) -> None:
    bed = ExpertsBed([[16], [0], [33], [128]], k, [width], 3, dtype, shared=["", "", "b"], device="cuda")
    p = bed.pairs(4 * tokens, 2, dtype, gathered=False)
    bed.check(Call(bed, p, [2, 1, 3, 0])(), p, [2, 1, 3, 0])


@pytest.mark.parametrize("tokens", [32, 120, 300])
def test_tiles_of_every_size(tokens: int) -> None:
    bed = ExpertsBed([[16, 16], [5, 40]], 528, [272, 272], 2, torch.bfloat16, same_a=(0,), device="cuda")
    p = bed.pairs(2 * tokens, 1, torch.bfloat16)
    bed.check(Call(bed, p, [0, 1])(), p, [0, 1])


@pytest.mark.parametrize(("act", "lora"), [(a, b) for a in DTYPES for b in DTYPES if a != b])
@pytest.mark.parametrize("tokens", [1, 64])
def test_dtypes_may_differ(act: torch.dtype, lora: torch.dtype, tokens: int) -> None:
    bed = ExpertsBed([[64, 16], [3, 40]], 512, [256, 256], 3, lora, device="cuda")
    p = bed.pairs(3 * tokens, 2, act)
    bed.check(Call(bed, p, [0, -1, 1])(), p, [0, -1, 1])


@pytest.mark.parametrize("tokens", [1, 50])
def test_a_captured_graph_serves_every_mix_without_a_sync(tokens: int) -> None:
    bed = ExpertsBed(RANKS, 528, [272, 272], 5, torch.bfloat16, shared=SHARED, device="cuda")
    p = bed.pairs(6 * tokens, 2, torch.bfloat16)
    call = Call(bed, p, [-1] * 6)
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for seed, slots in enumerate(MIXES.values()):
        if len(slots) < 6:
            continue
        other = bed.pairs(6 * tokens, 2, torch.bfloat16, seed=seed)
        for mine, theirs in zip(call.p[:5], other[:5], strict=True):
            mine.copy_(theirs)
        call.row_slots[:6].copy_(torch.tensor(slots))
        graph.replay()
        replayed = got.clone()
        bed.check(replayed, other, slots)
        assert same_bits(replayed, call())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 30])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype, tokens: int) -> None:
    """Other adapters (larger ranks, NaN, none) and other experts beside it: the row keeps its bits."""
    bed, sick = (ExpertsBed(RANKS, 528, [272, 272], 4, dtype, shared=SHARED, device="cuda") for _ in range(2))
    for slot in (1, 5):
        sick.poison(slot)
    p = bed.pairs(6 * tokens, 3, dtype)
    mine = p.tokens // tokens == 5
    moved = p._replace(experts=torch.where(mine, p.experts, p.experts.flip(0)))
    for slot in (0, 3):
        want = Call(bed, p, [slot] * 6)().cpu()[mine]
        for others in ([-1] * 5, [1] * 5, [5, 0, 1, 3, -1], [slot, 1, 3, slot, 0]):
            assert same_bits(Call(sick, p, [*others, slot])().cpu()[mine], want)
            assert same_bits(Call(bed, moved, [*others, slot])().cpu()[mine], want)


@pytest.mark.parametrize("tokens", [1, 40])
def test_stacks_beyond_32_bits(tokens: int) -> None:
    """The second expert's factors lie 2**31 elements behind the first's."""
    bed = ExpertsBed([[16]], 128, [64], 2, torch.bfloat16)
    far = 1 << 31
    data = torch.zeros(far + bed.slot_elems, dtype=torch.bfloat16, device="cuda")
    data[: bed.slot_elems] = bed.data[: bed.slot_elems].cuda()
    entry = bed.meta[0, META * bed.projections[0][0] :]
    for which in (0, 1):
        start, step = int(entry[which]), int(entry[3 + which])
        data[far + start : far + start + step] = data[start + step : start + 2 * step].clone()
        data[start + step : start + 2 * step] = float("nan")
        entry[3 + which] = far
    bed.data, bed.meta, bed.slot_elems = data, bed.meta.cuda(), far + bed.slot_elems
    bed.floats = bed.meta.view(torch.float32)
    p = bed.pairs(2 * tokens, 2, torch.bfloat16)
    bed.check(Call(bed, p, [0, 0])(), p, [0, 0])
