"""Blocks that ranks share: each rank's factors are its part of the whole ones, whatever the format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experts_bed import INNER, PREFIX, E, H, Hand, assert_deltas, block, hand, load, moe_table, pair, three_d, two_d

from hf_multilora.adapters.checkpoint import Checkpoint
from hf_multilora.adapters.shards import BlockShard
from hf_multilora.memory.layout import Layout

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt_oss": {"transposed": True, "interleaved": True},
    "llama4": {"transposed": True, "swapped": True},
    "no gate": {"has_gate": False, "gate_up": "up_proj"},
}
SHARDS = {
    "first experts": BlockShard((0, 3), (0, INNER)),
    "last experts": BlockShard((3, E), (0, INNER)),
    "one expert": BlockShard((2, 3), (0, INNER)),
    "first half": BlockShard((0, E), (0, 6)),
    "second half": BlockShard((0, E), (6, INNER)),
    "uneven part": BlockShard((0, E), (7, INNER)),
    "fully sharded": BlockShard((0, E), (6, INNER), 1, (H // 2, H)),
}
P = "model.layers.0.mlp.experts"
ONE: dict[str, Any] = {"n_layers": 1, "shared": False}


def part(made: Hand, shard: BlockShard) -> Hand:
    """What a rank should have of factors by hand."""
    experts, inner, out = slice(*shard.experts), slice(*shard.intermediate), slice(*(shard.outputs or (0, H)))
    return {
        name: (a[experts, :, inner], b[experts, out]) if name == "down_proj" else (a[experts], b[experts, inner])
        for name, (a, b) in made.items()
    }


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_matrix_for_all_experts(layout: str, shard: str, flipped: bool) -> None:
    item, where = block(**LAYOUTS[layout]), SHARDS[shard]
    table = moe_table(**ONE, **LAYOUTS[layout], shard=where)
    made = hand(item=item)
    plan = load(three_d(made, item, flipped=flipped), table, target_parameters=[item.gate_up, item.down])
    assert_deltas(plan, part(made, where))
    targets = {target.path: target for target in block(**LAYOUTS[layout], shard=where).targets}
    sites = Layout.from_targets(targets)
    for factor in plan.factors:
        target = sites.site(factor.path)
        assert factor.a.shape[1:] == (factor.rank, target.in_features)
        outputs = where.outputs if where.outputs and "down" in factor.path else (0, target.out_features)
        assert factor.b.shape[1:] == (outputs[1] - outputs[0], factor.rank)
        assert factor.a.shape[0] in (1, target.experts) and factor.b.shape[0] in (1, target.experts)


@pytest.mark.parametrize("skip", [(), (0, 1, 2), (3,)])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_matrix_for_each_expert(shard: str, skip: tuple[int, ...]) -> None:
    """A rank none of whose experts was trained has zeros, at the rank that others have."""
    made, table = hand(), moe_table(**ONE, shard=SHARDS[shard])
    plan = load(two_d(made, skip=skip), table, target_modules=["w1", "w2", "w3"])
    for _, b in made.values():
        b[list(skip)] = 0
    assert_deltas(plan, part(made, SHARDS[shard]))


@pytest.mark.parametrize("alpha", [{}, {r"experts\.2\..*": 4}], ids=["two scalings", "one scaling"])
@pytest.mark.parametrize("shard", SHARDS)
def test_an_expert_of_a_lower_rank(shard: str, alpha: dict[str, int]) -> None:
    """A rank that has it alone makes room for the rank of the others, too."""
    made = hand(r=4)
    tensors = two_d(made, names={})
    for name, tensor in tensors.items():
        if ".experts.2." in name:
            tensors[name] = (tensor[:2] if "lora_A" in name else tensor[:, :2]).contiguous()
    for a, b in made.values():
        a[2, 2:], b[2, :, 2:] = 0, 0
        if not alpha:
            b[2] *= 2
    fields = {"r": 4, "lora_alpha": 8, "rank_pattern": {r"experts\.2\..*": 2}, "alpha_pattern": alpha}
    plan = load(tensors, moe_table(**ONE, shard=SHARDS[shard]), target_modules=list(made), **fields)
    assert [factor.rank for factor in plan.factors] == [4, 4, 4]
    assert_deltas(plan, part(made, SHARDS[shard]))


@pytest.mark.parametrize("shard", SHARDS)
def test_gate_and_up_in_one_matrix_for_each_expert(shard: str) -> None:
    made, tensors = hand(), {}
    for i in range(E):
        (a, gate), (_, up) = made["gate_proj"], made["up_proj"]
        both = torch.cat([gate[i], up[i]]).float()
        tensors |= pair(f"{P}.{i}.gate_up_proj", (a[i].float(), both))
        tensors |= pair(f"{P}.{i}.down_proj", tuple(t[i].float().contiguous() for t in made["down_proj"]))
    table = moe_table(**ONE, shard=SHARDS[shard])
    assert_deltas(load(tensors, table, target_modules=["gate_up_proj", "down_proj"]), part(made, SHARDS[shard]))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shard", SHARDS)
def test_stacks(shard: str, shared: bool) -> None:
    made, tensors = hand(shared_a=shared), {}
    for name, (a, b) in made.items():
        a = a[:1] if shared and name != "down_proj" else a
        tensors |= pair(f"{P}.{name}", (a.float().contiguous(), b.float().contiguous()))
    plan = load(tensors, moe_table(**ONE, shard=SHARDS[shard]), target_modules=list(made))
    assert_deltas(plan, part(made, SHARDS[shard]))


@pytest.mark.parametrize("shard", SHARDS)
def test_ranks_of_a_block_diagonal_file_agree(shard: str) -> None:
    """Whether gate and up have ranks of their own is told by all experts, so that every rank takes it alike."""
    made = hand(r=4)
    gate, up = made["gate_proj"][1], made["up_proj"][1]
    gate[:, :, 2:], up[:, :, :2] = 0, 0
    assert [f.rank for f in _loaded(made, SHARDS[shard]).factors] == [2, 2, 4]
    gate[0, 0, 2:] = 1  # no longer so, for the first of all
    plan = _loaded(made, SHARDS[shard])
    assert [f.rank for f in plan.factors] == [4, 4, 4]
    assert_deltas(plan, part(made, SHARDS[shard]), scaling=2.0)


def _loaded(made: Hand, shard: BlockShard) -> Any:
    names = ["gate_up_proj", "down_proj"]
    return load(three_d(made), moe_table(**ONE, shard=shard), target_parameters=names, r=4, lora_alpha=8)


def test_only_the_experts_of_a_rank_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()
    plain = Checkpoint.find
    monkeypatch.setattr(Checkpoint, "find", lambda self, key: found.add(key) or plain(self, key))
    plan = load(two_d(hand(), names={}), moe_table(**ONE, shard=SHARDS["last experts"]), target_modules=["down_proj"])
    for factor in plan.factors:
        factor.a.read(), factor.b.read()
    assert {int(key.removeprefix(f"{PREFIX}{P}.").partition(".")[0]) for key in found} == {3, 4}


def test_blocks_of_a_rank() -> None:
    item = block(shard=BlockShard((3, E), (6, INNER)))
    assert (item.local.experts, item.local.intermediate, item.local.hidden) == (2, 6, H)
    assert item.whole == block() and item.local.shard is None
    sites = Layout.from_targets({target.path: target for target in item.targets}).sites
    sizes = {site.path.rpartition(".")[2]: site for site in sites}
    assert (sizes["down_proj"].experts, sizes["down_proj"].in_features, sizes["down_proj"].out_features) == (2, 6, H)
