"""Experts in each format that is saved: what the plan hands over is what was made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from adapter_bed import factors
from experts_bed import (
    BOTH,
    INNER,
    OLD,
    PREFIX,
    E,
    H,
    R,
    assert_deltas,
    block,
    found,
    gate_up,
    hand,
    load,
    matrices,
    moe_table,
    pair,
    rslora,
    three_d,
    two_d,
)

from hf_multilora.adapters.experts_3d import flipped_by

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt_oss": {"transposed": True, "interleaved": True},
    "aria": {"transposed": True},
    "llama4": {"transposed": True, "swapped": True},
    "no gate": {"has_gate": False, "gate_up": "up_proj"},
}
P = "model.layers.0.mlp.experts"
ONE = {"n_layers": 1, "shared": False}


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_d(layout: str, flipped: bool) -> None:
    """Roles are told by shapes, whatever the base's layout: no size equals another."""
    item, table = block(**LAYOUTS[layout]), moe_table(**ONE, **LAYOUTS[layout])
    made = hand(item=item)
    plan = load(three_d(made, item, flipped=flipped), table, target_parameters=[item.gate_up, item.down])
    assert_deltas(plan, made)
    assert [factor.path.rpartition(".")[2] for factor in plan.factors] == list(item.projections)
    if item.has_gate:
        gate, up, _ = plan.factors
        assert gate.a == up.a and hash(gate.a) == hash(up.a) and gate.b != up.b
    assert not plan.unmatched and not plan.warnings


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("part", ["gate_up", "down"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "no gate"])
def test_one_parameter(layout: str, part: str, flipped: bool) -> None:
    """Both come under the same key; shapes tell which it is."""
    item, table = block(**LAYOUTS[layout]), moe_table(**ONE, **LAYOUTS[layout])
    made = hand(item=item)
    tensors = three_d(made, item, parts=[part], flipped=flipped)
    assert set(tensors) == {f"{PREFIX}{P}.lora_{x}.weight" for x in "AB"}
    plan = load(tensors, table, target_parameters=[f"experts.{item.down if part == 'down' else item.gate_up}"])
    kept = {name: made[name] for name in made if (name == "down_proj") == (part == "down")}
    assert_deltas(plan, kept)


def test_one_parameter_without_a_gate() -> None:
    """up_proj [I, H] and down_proj [H, I] have the same sizes: the config tells, or the version."""
    item = block(**LAYOUTS["no gate"])
    table, made = moe_table(**ONE, **LAYOUTS["no gate"]), hand(item=item)
    for part, name in (("gate_up", "up_proj"), ("down", "down_proj")):
        tensors = three_d(made, item, parts=[part])
        assert_deltas(load(tensors, table, target_parameters=[f"experts.{name}"]), {name: made[name]})
        assert_deltas(load(tensors, table, peft_version="0.19.1"), {name: made[name]})


@pytest.mark.parametrize("names", [OLD, {}], ids=["w1", "gate_proj"])
@pytest.mark.parametrize("path", [P, "model.layers.0.block_sparse_moe.experts"])
def test_two_d(path: str, names: dict[str, str]) -> None:
    made = hand()
    apart = made | {"up_proj": (made["up_proj"][0].flip(2), made["up_proj"][1])}
    targets = [names.get(name, name) for name in made]
    plan = load(two_d(apart, path, names), moe_table(**ONE), target_modules=targets)
    assert_deltas(plan, apart)
    assert not plan.unmatched and not plan.warnings


@pytest.mark.parametrize("skip", [(0,), (1, 4), (0, 1, 2, 3)])
def test_missing_experts_are_zero(skip: tuple[int, ...]) -> None:
    made = hand(shared_a=True)
    plan = load(two_d(made, skip=skip), moe_table(**ONE), target_modules=["w1", "w2", "w3"])
    for a, _ in made.values():
        a[list(skip)] = 0
    assert_deltas(plan, made)
    assert any(f"{len(skip)} of {E} experts" in text for text in plan.converted)


def test_ranks_and_scalings_of_single_experts() -> None:
    """Smaller ranks are filled up, scalings that differ are worked into B."""
    made = hand(r=4)
    tensors, want = {}, {}
    ranks = {0: 2, 3: 1}
    for name, (a, b) in made.items():
        want[name] = []
        for i in range(E):
            r = ranks.get(i, 4)
            tensors |= pair(f"{P}.{i}.{name}", (a[i, :r].float(), b[i, :, :r].float().contiguous()))
            alpha = 5 if i == 4 and name == "up_proj" else 6
            want[name].append(alpha / r * b[i, :, :r] @ a[i, :r])
    pattern = {rf"experts\.{i}\..*": r for i, r in ranks.items()}
    plan = load(
        tensors, moe_table(**ONE), r=4, lora_alpha=6, rank_pattern=pattern, alpha_pattern={"experts.4.up_proj": 5}
    )
    for name, delta in found(plan).items():
        torch.testing.assert_close(delta, torch.stack(want[name]), rtol=1e-5, atol=1e-5)
    assert {factor.rank for factor in plan.factors} == {4}


def test_beside_everything_else() -> None:
    """Attention, router and shared experts are ordinary layers, whatever the format of the experts."""
    table = moe_table()
    rest = {}
    for path, target in table.targets.items():
        if target.kind == "linear":
            rest |= factors(path, target.in_features, target.out_features, R)
    made = {i: hand(i) for i in range(2)}
    for form in (three_d, two_d):
        tensors = dict(rest)
        for i in made:
            item = block(f"model.layers.{i}.mlp.experts")
            tensors |= three_d(made[i], item) if form is three_d else two_d(made[i], item.path, {})
        plan = load(tensors, table)
        assert {(factor.path, factor.slice) for factor in plan.factors} == set(table.position)
        assert [factor.path for factor in plan.factors] == list(table.targets)
        for i in made:
            assert_deltas(plan, made[i], path=f"model.layers.{i}.mlp.experts")
        for factor in plan.factors:
            if factor.kind == "linear":
                assert torch.equal(factor.a.read(), rest[f"{PREFIX}{factor.path}.lora_A.weight"])


def test_patterns_match_parameters() -> None:
    """PEFT's patterns speak of `experts.gate_up_proj` and of `gate.weight`, which no key says."""
    made, down = hand(r=4), hand(r=R)["down_proj"]
    tensors = three_d(made | {"down_proj": down})
    router = factors("model.layers.0.mlp.gate", H, E, 2)
    fields = {
        "rank_pattern": {r".*\.gate_up_proj": 4, r"mlp.gate.weight": 2},
        "alpha_pattern": {"experts.gate_up_proj": 10, "experts.down_proj": 7, "gate.weight": 9, "experts": 1},
        "target_parameters": [*BOTH, "gate.weight"],
    }
    plan = load(tensors | router, moe_table(**ONE), **fields)
    scalings = {factor.path.rpartition(".")[2]: factor.scaling for factor in plan.factors}
    assert scalings == {"gate": 4.5, "gate_proj": 2.5, "up_proj": 2.5, "down_proj": 7 / 3}
    assert plan.unmatched == ["alpha_pattern: 'experts'"]
    rs = load(tensors | router, moe_table(**ONE), use_rslora=True, **fields)
    assert {factor.path.rpartition(".")[2]: factor.scaling for factor in rs.factors} == {
        "gate": rslora(9, 2), "gate_proj": rslora(10, 4), "up_proj": rslora(10, 4), "down_proj": rslora(7, 3)
    }  # fmt: skip


@pytest.mark.parametrize("router", ["gate", "router"])
def test_names_before_transformers_5(router: str) -> None:
    """Mixtral's module was called otherwise, and PhiMoE's gate besides."""
    table = moe_table(**ONE)
    targets = {path.replace("mlp.gate", f"mlp.{router}"): target for path, target in table.targets.items()}
    for path in targets:
        targets[path] = dataclasses.replace(targets[path], path=path)
    table = dataclasses.replace(table, targets=targets)
    old, made = "model.layers.0.block_sparse_moe", hand()
    tensors = two_d(made, f"{old}.experts") | factors(f"{old}.gate", H, E, R)
    plan = load(tensors, table, target_modules=["w1", "w2", "w3", "gate"])
    assert_deltas(plan, made)
    assert f"model.layers.0.mlp.{router}" in {factor.path for factor in plan.factors}


def test_parameters_taken_apart() -> None:
    """A file of single experts with the config of stacked parameters: patterns speak of those."""
    made = hand()
    plan = load(two_d(made, names={}), moe_table(**ONE), target_parameters=BOTH, alpha_pattern={"gate_up_proj": 9})
    assert {factor.path.rpartition(".")[2]: factor.scaling for factor in plan.factors} == {
        "gate_proj": 3, "up_proj": 3, "down_proj": 2
    }  # fmt: skip


def test_rslora_of_single_experts() -> None:
    """Each expert's own LoRA is the definition; PEFT's conversion of it is too large by the square root of two."""
    made = hand()
    plan = load(two_d(made), moe_table(**ONE), use_rslora=True)
    assert_deltas(plan, made, rslora(2 * R, R))


@pytest.mark.parametrize("r", [1, 3])
def test_doubled_rank(r: int) -> None:
    """What PEFT makes of a pair for each expert: gate and up on the diagonal of a B of twice the rank."""
    made = hand(r=r)
    made["up_proj"] = made["up_proj"][0].flip(2), made["up_proj"][1]
    (a, gate), (a_up, up) = made["gate_proj"], made["up_proj"]
    wide = torch.zeros(E, 2 * INNER, 2 * r, dtype=torch.float64)
    wide[:, :INNER, :r], wide[:, INNER:, r:] = gate, up
    both = pair(f"{P}.base_layer", matrices(torch.cat([a, a_up], 1), wide))
    fields = {
        "r": r, "lora_alpha": 2 * r, "rank_pattern": {r".*\.gate_up_proj": 2 * r},
        "alpha_pattern": {r".*\.gate_up_proj": 4 * r}, "target_parameters": ["gate_up_proj", "down_proj"],
    }  # fmt: skip
    plan = load(both | pair(P, matrices(*made["down_proj"])), moe_table(**ONE), **fields)
    assert_deltas(plan, made)
    assert {factor.rank for factor in plan.factors} == {r}
    # trained any further it is a plain pair of twice the rank
    both[f"{PREFIX}{P}.base_layer.lora_B.weight"][0, -1] = 1e-3
    plan = load(both | pair(P, matrices(*made["down_proj"])), moe_table(**ONE), **fields)
    assert [factor.rank for factor in plan.factors] == [2 * r, 2 * r, r]
    rs = load(both | pair(P, matrices(*made["down_proj"])), moe_table(**ONE), use_rslora=True, **fields)
    assert rs.factors[0].scaling == rslora(4 * r, 2 * r)


@pytest.mark.parametrize("form", ["3d", "2d", "once", "named"])
def test_shared_outer_factors(form: str) -> None:
    """A of gate and up, and B of down, the same for all experts: handed over once."""
    made = hand(shared_a=True)
    made["down_proj"] = made["down_proj"][0], made["down_proj"][1][:1].repeat(E, 1, 1)
    tensors = two_d(made) if form == "2d" else three_d(made)
    if form == "once":
        name = f"{PREFIX}{P}.base_layer.lora_A.weight"
        tensors[name] = tensors[name][:R].clone()
        name = f"{PREFIX}{P}.lora_B.weight"
        tensors[name] = tensors[name][:, ::E].clone()
    if form == "named":
        short = {"gate_proj": (1, E), "up_proj": (1, E), "down_proj": (E, 1)}
        tensors = {}
        for name, (n_a, n_b) in short.items():
            tensors |= pair(f"{P}.{OLD[name]}", (made[name][0][:n_a].float(), made[name][1][:n_b].float()))
    plan = load(tensors, moe_table(**ONE))
    assert_deltas(plan, made)
    shapes = {factor.path.rpartition(".")[2]: (factor.a.shape, factor.b.shape) for factor in plan.factors}
    assert shapes == {
        "gate_proj": ((1, R, H), (E, INNER, R)),
        "up_proj": ((1, R, H), (E, INNER, R)),
        "down_proj": ((E, R, INNER), (1, H, R)),
    }


def test_shared_outer_factors_flipped() -> None:
    made = hand(shared_a=True)
    plan = load(three_d(made, flipped=True), moe_table(**ONE))
    assert_deltas(plan, made)
    assert [factor.a.shape[0] for factor in plan.factors] == [1, 1, E]


def test_almost_shared() -> None:
    """One number of the last expert differs, in the last place."""
    made = hand(shared_a=True)
    made["gate_proj"][0][-1, -1, -1] += 1e-3
    assert made["up_proj"][0] is made["gate_proj"][0]
    for tensors in (three_d(made), two_d(made)):
        plan = load(tensors, moe_table(**ONE))
        assert_deltas(plan, made)
        assert all(factor.a.shape[0] == E for factor in plan.factors)


@pytest.mark.parametrize("layout", ["rank_major", "grouped_by_expert", None])
def test_columns_as_older_unsloth_trained_them(layout: str | None) -> None:
    """Its note decides; without one the columns are PEFT's."""
    made = hand()
    plan = load(three_d(made, grouped=layout == "grouped_by_expert"), moe_table(**ONE), lora_B_layout=layout)
    assert_deltas(plan, made)
    assert any("lora_B_layout" in text for text in plan.converted) == (layout == "grouped_by_expert")


def test_listed_experts() -> None:
    """GPT-OSS in four bits has a list of layers for gate and up, interleaved, and one for down."""
    item = block(**LAYOUTS["gpt_oss"])
    made = hand(item=item)
    a, b = gate_up(made, item)
    tensors = {}
    for i in range(E):
        tensors |= pair(f"{P}.gate_up_projs.{i}", (a[i].float(), b[i].float()))
        tensors |= pair(f"{P}.down_projs.{i}", tuple(t[i].float() for t in made["down_proj"]))
    plan = load(tensors, moe_table(**ONE, **LAYOUTS["gpt_oss"]))
    assert_deltas(plan, made)
    assert plan.factors[0].a == plan.factors[1].a


SQUARE = {"intermediate": H}  # a square down_proj
VERSIONS = [
    ("plain", "0.18.1", True), ("plain", "0.19.0", True), ("plain", "0.19.1", False), ("plain", "0.21.2", False),
    ("gpt_oss", "0.18.1", False), ("gpt_oss", "0.19.0", True), ("gpt_oss", "0.19.1", False), ("gpt_oss", None, False),
    ("llama4", "0.18.0", False), ("llama4", "0.19.0", False), ("llama4", "0.20.0", True),
    ("plain", "1.0.0.dev0@abc", False),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "version", "flipped"), VERSIONS)
def test_square_parameters_go_by_the_version(layout: str, version: str | None, flipped: bool) -> None:
    options = LAYOUTS[layout] | SQUARE
    item = block(**options)
    made = hand(item=item)
    tensors = three_d(made, item, parts=["down"], flipped=flipped)
    plan = load(tensors, moe_table(**ONE, **options), peft_version=version)
    assert_deltas(plan, {"down_proj": made["down_proj"]})
    # with the other parameter beside, shapes decide, whatever the version says
    tensors = three_d(made, item, flipped=not flipped)
    assert_deltas(load(tensors, moe_table(**ONE, **options), peft_version=version), made)
    assert flipped_by(version, item) == flipped


def test_a_block_right_inside_of_a_layer() -> None:
    """No module between the layer's number and the block, as in Gemma 4."""
    item = block("model.layers.0.experts")
    table = moe_table(**ONE)
    targets = {
        path: target
        for name, target in table.targets.items()
        for path in [name.replace(".mlp.experts", ".experts")]
        for target in [dataclasses.replace(target, path=path)]
    }
    table = dataclasses.replace(table, targets=targets, blocks={item.path: item})
    made = hand()
    for tensors in (three_d(made, item), two_d(made, item.path, {})):
        plan = load(tensors, table, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
        assert_deltas(plan, made, path=item.path)
