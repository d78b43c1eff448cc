"""Factors of experts that ranks split by both dimensions: what each stores, and that their parts make up the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from memory_bed import Part, Ref
from together import Together, unwritten_is_nan

from hf_multilora.adapters.shards import BlockShard, part_of
from hf_multilora.adapters.targets import ExpertBlock
from hf_multilora.errors import ModelError
from hf_multilora.kernels import launch
from hf_multilora.kernels.experts_op import ExpertsOp, Pairs, projections_of
from hf_multilora.kernels.ops import Workspace
from hf_multilora.kernels.sharded_experts import ShardedExpertsOp
from hf_multilora.memory.arena import Arena
from hf_multilora.memory.layout import Layout
from hf_multilora.memory.pack import PackedAdapter, compose, pack

EXPERTS, HIDDEN, INNER, MAX_RANK, TOP = 5, 20, 12, 24, 2
BLOCK = ExpertBlock("moe", "gate_up_proj", "down_proj", EXPERTS, HIDDEN, INNER)
# Ranks of gate and up, and of down; factors that all experts share; whether up has the A of gate.
ADAPTERS = [(4, 2, "", True), (3, 7, "a", False), (1, 1, "b", False), (0, 5, "ab", False), (8, 0, "ab", True)]
MIX = [0, -1, 5, 1, 2, 3, 4, 0]


def block_of(part: int, parts: int, interleaved: bool) -> ExpertBlock:
    shard = BlockShard((0, EXPERTS), part_of(INNER, part, parts), part, part_of(HIDDEN, part, parts))
    return replace(BLOCK, interleaved=interleaved, shard=shard if parts > 1 else None)


def layout_of(block: ExpertBlock, parts: int) -> Layout:
    return Layout.from_targets({target.path: target for target in block.targets}, parts=parts)


def factors_of(number: int, block: ExpertBlock) -> list[Part]:
    """One adapter, as a rank reads it: its part of B, and of down's A."""
    inner, down, shared, same = ADAPTERS[number]
    generator, found = torch.Generator().manual_seed(number), []
    for name in block.projections:
        rank = down if name == "down_proj" else inner
        into, out = (INNER, HIDDEN) if name == "down_proj" else (HIDDEN, INNER)
        a, b = (
            torch.randn(1 if which in shared else EXPERTS, *size, generator=generator)
            for which, size in (("a", (rank, into)), ("b", (out, rank)))
        )
        a_name = f"{number}.gate_proj.a" if same and name == "up_proj" else f"{number}.{name}.a"
        a = next((part.a.tensor for part in found if part.a.key == a_name), a)
        (_, rows), columns = block.rows_of(name)[0], block.columns_of(name)
        a, b = a[..., slice(columns[0], columns[1] or None)], b[:, slice(rows[0], rows[1] or None)]
        if rank:
            found.append(Part(f"moe.{name}", 0, "experts", rank, 0.5, Ref(a_name, a), Ref(f"{number}.{name}.b", b)))
    return found


def packed_for(block: ExpertBlock, layout: Layout, dtype: torch.dtype) -> list[PackedAdapter]:
    """The adapters, and last a mix of three, of padded ranks and of such that all experts share."""
    found = [pack(factors_of(i, block), layout, dtype, pin=False) for i in range(len(ADAPTERS))]
    return [*found, compose([(found[1], 2.0), (found[2], -1.0), (found[0], 0.5)], layout, dtype, pin=False)]


def slot_of(number: int, turn: int) -> int:
    """Where an adapter is: every rank has slots of its own, and need not have the same adapter in the same one."""
    return -1 if number < 0 else (number + turn) % (len(ADAPTERS) + 1)


def op_of(
    block: ExpertBlock, parts: int, ranks: Together | None, dtype: torch.dtype, device: str = "cpu", turn: int = 0
) -> ExpertsOp:
    """The op of one rank over slots with all adapters."""
    layout = layout_of(block, parts)
    blocks = packed_for(block, layout, dtype)
    arena = Arena(layout, len(blocks), max(packed.nbytes for packed in blocks), device, dtype)
    for number, packed in enumerate(blocks):
        arena.slot(slot_of(number, turn))[: packed.nbytes].copy_(packed.block)
    where = (arena.data, arena.meta, arena.floats, arena.slot_elems, arena.zero_off)
    given = (*where, *projections_of(block.local, 0), MAX_RANK, Workspace())
    if ranks is None:
        return ExpertsOp(*given)
    return ShardedExpertsOp(*given, sites=layout.n_sites, ranks=ranks, span=layout.site("moe.down_proj").span)


def by_call(op: ExpertsOp, y: torch.Tensor, x: torch.Tensor, pairs: Pairs, up: bool) -> torch.Tensor:
    return op(y, x, pairs, up=up)


def check(
    parts: int, tokens: int, interleaved: bool, dtype: torch.dtype, device: str, apply: Callable[..., Any]
) -> None:
    """Ranks' outputs, put together, are what one process computes."""
    together, generator = Together(parts), torch.Generator().manual_seed(1)
    blocks = [block_of(part, parts, interleaved) for part in range(parts)]
    whole = op_of(block_of(0, 1, interleaved), 1, None, torch.float32)
    ops = [op_of(block, parts, together, dtype, device, part) for part, block in enumerate(blocks)]
    count = len(MIX) * tokens
    of = torch.arange(count).repeat_interleave(TOP)
    experts = torch.randint(EXPERTS, (count * TOP,), generator=generator)
    order = torch.randperm(count * TOP, generator=generator)
    of, experts = of[order], experts[order]
    base = torch.tensor(MIX)[of // tokens] < 0

    def pairs(device: str, turn: int = 0) -> Pairs:
        rows = torch.tensor([slot_of(number, turn) for number in MIX], dtype=torch.int32, device=device)
        return Pairs(of.to(device), experts.to(device), count, rows, len(MIX))

    for up, into, out in ((True, HIDDEN, 2 * INNER), (False, INNER, HIDDEN)):
        x = torch.randn(count * TOP, into, generator=generator).to(dtype)
        y = torch.randn(count * TOP, out, generator=generator).to(dtype)
        want = whole(y.float(), x.float(), pairs("cpu"), up=up)
        assert (want - y.float()).norm() > 0.2 * want.norm(), "adapters change something"
        mine = [[n for _, span in block.rows_of("gate_up_proj") for n in range(*span)] for block in blocks]
        mine = [sorted(numbers) for numbers in mine] if interleaved else mine

        def one(part: int, up=up, x=x, y=y, mine=mine) -> torch.Tensor:
            x = x if up else x[:, slice(*part_of(INNER, part, parts))]
            y = y[:, mine[part]] if up else y / parts
            made = apply(ops[part], y.to(device), x.to(device).contiguous(), pairs(device, part), up).cpu()
            assert torch.equal(made[base], y[base]), "rows without an adapter keep their bits"
            return made.float()

        found = together.run(one)
        got = sum(found)
        if up:
            got = torch.empty_like(want)
            for part, made in enumerate(found):
                got[:, mine[part]] = made
        assert (got - want).norm() <= (2e-6 if dtype == torch.float32 else 2e-2) * want.norm(), up


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("interleaved", [False, True])
def test_parts_make_up_the_whole(parts: int, tokens: int, interleaved: bool) -> None:
    check(parts, tokens, interleaved, torch.float32, "cpu", by_call)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("interleaved", [False, True])
def test_parts_make_up_the_whole_on_a_gpu(tokens: int, interleaved: bool, dtype: torch.dtype) -> None:
    check(2, tokens, interleaved, dtype, "cuda", by_call)


@pytest.mark.parametrize("tokens", [1, 20])
def test_kernels_in_the_interpreter(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What shrink leaves unwritten, NaN here, expand does not read."""
    unwritten_is_nan(monkeypatch)

    def apply(op: ShardedExpertsOp, y: torch.Tensor, x: torch.Tensor, pairs: Pairs, up: bool) -> torch.Tensor:
        counters = torch.zeros(64, dtype=torch.int32)
        op.arena = launch.Arena(op.data, op.meta, op.floats, counters, op.slot_elems, op.max_rank)
        op._launch(out := y.clone(), x, pairs, up)
        return out

    check(2, tokens, False, torch.float32, "cpu", apply)


def test_neighbours_change_no_bit() -> None:
    together = Together(2)
    ops = [op_of(block_of(part, 2, False), 2, together, torch.float32) for part in range(2)]
    tokens, experts = torch.arange(6).repeat_interleave(TOP), torch.arange(6 * TOP) % EXPERTS
    xs = {True: torch.randn(6 * TOP, HIDDEN), False: torch.randn(6 * TOP, INNER // 2)}

    def outputs(slots: list[int]) -> list[list[torch.Tensor]]:
        rows = torch.tensor(slots, dtype=torch.int32)

        def one(part: int) -> list[torch.Tensor]:
            pairs = Pairs(tokens, experts, 6, rows, 3)
            return [
                ops[part](torch.ones(6 * TOP, INNER if up else HIDDEN), x, pairs, up=up)[4:8] for up, x in xs.items()
            ]

        return together.run(one)

    for slot in range(6):
        alone, beside = outputs([-1, slot, -1]), outputs([1, slot, 5])
        for one, two in zip(alone, beside, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_bytes_of_factors_are_divided() -> None:
    for part in range(2):
        block = block_of(part, 2, False)
        plain, fully = layout_of(replace(block, shard=replace(block.shard, outputs=None)), 1), layout_of(block, 2)
        for site, other in zip(plain.sites, fully.sites, strict=True):
            (e, rank, into), (_, _, out) = site.a_shape(6), site.b_shape(6)
            if site.path == "moe.down_proj":
                assert (other.a_shape(6), other.b_shape(6)) == ((e, rank, into), (e, rank, out // 2))
            else:
                assert (other.a_shape(6), other.b_shape(6)) == ((e, rank // 2, into), (e, rank, out))


def test_more_ranks_than_outputs_are_refused() -> None:
    block = replace(BLOCK, hidden=2, shard=BlockShard((0, EXPERTS), (0, 3), 0, (0, 0)))
    with pytest.raises(ModelError, match="moe.down_proj has 2 outputs"):
        layout_of(block, 4)
