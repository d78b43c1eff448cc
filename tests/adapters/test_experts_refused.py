"""Adapters on experts that are incomplete, or made for another model or by another method: refused by name."""

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
    Hand,
    R,
    assert_deltas,
    block,
    hand,
    load,
    moe_table,
    pair,
    three_d,
    two_d,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_multilora.errors import AdapterFormatError, AdapterMatchError, SlotError, UnsupportedAdapterError

P = "model.layers.0.mlp.experts"
ONE = {"n_layers": 1, "shared": False}
METHODS = [
    ({"use_dora": True}, "use_dora"),
    ({"lora_bias": True}, "lora_bias"),
    ({"init_lora_weights": "pissa"}, "PiSSA"),
    ({"init_lora_weights": "olora"}, "OLoRA"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    ({"use_qalora": True}, "use_qalora"),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
]


@pytest.mark.parametrize("form", [three_d, two_d])
@pytest.mark.parametrize(("fields", "words"), METHODS, ids=lambda x: str(x)[:30])
def test_methods(fields: dict[str, Any], words: str, form: Any) -> None:
    error = UnsupportedAdapterError
    if words in ("use_dora", "lora_bias"):  # announced, and none of their tensors there: incomplete before all else
        error = AdapterFormatError
    with pytest.raises(error, match=words):
        load(form(hand()), moe_table(**ONE), **fields)


@pytest.mark.parametrize(
    ("suffix", "words"), [("lora_magnitude_vector", "DoRA"), ("lora_B.bias", "lora_bias"), ("lora_diag", "KaSA")]
)
def test_companions(suffix: str, words: str) -> None:
    tensors = two_d(hand(), names={})
    tensors |= {f"{name.partition('.lora_')[0]}.{suffix}": torch.ones(3) for name in list(tensors)}
    with pytest.raises(UnsupportedAdapterError, match=rf"{suffix}: .*{words}.* on experts"):
        load(tensors, moe_table(**ONE))


@pytest.mark.parametrize("where", [P, f"{P}.gate_proj"])
@pytest.mark.parametrize("form", [three_d, two_d])
def test_refused_by_the_table(where: str, form: Any) -> None:
    """The reason is given, and attention alone is served."""
    reason = "its experts are computed by one kernel."
    for table in (
        moe_table(refused={where: reason}),
        dataclasses.replace(moe_table(refused={where: reason}), blocks={}),
    ):
        attention = factors("model.layers.0.self_attn.q_proj", H, H, R)
        with pytest.raises(UnsupportedAdapterError, match=f"trained 'model.layers.0.mlp.experts.*{reason}"):
            load(attention | form(hand()), table)
        assert len(load(attention, table).factors) == 1


def test_left_out_when_enabled() -> None:
    table = moe_table(**ONE)
    outside = {path for path, target in table.targets.items() if target.kind == "experts"}
    targets = {path: target for path, target in table.targets.items() if path not in outside}
    table = dataclasses.replace(table, targets=targets, untargeted=frozenset(outside))
    attention = factors("model.layers.0.self_attn.q_proj", H, H, R)
    for tensors in (three_d(hand()), two_d(hand())):
        with pytest.raises(AdapterMatchError, match="left out by target_modules"):
            load(attention | tensors, table)
        plan = load(attention | tensors, table, target_parameters=BOTH, ignore_untargeted=True)
        assert len(plan.factors) == 1 and set(plan.left_out) == set(tensors) and not plan.unmatched


def without(tensors: dict[str, torch.Tensor], *words: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if not any(word in name for word in words)}


def both_layers(form: Any, **options: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for i in range(2):
        path = f"model.layers.{i}.mlp.experts"
        found |= form(hand(i), block(path)) if form is three_d else two_d(hand(i), path, **options)
    return found


LOST_3D = [
    (("layers.1",), "layers.1.mlp.experts.gate_up_proj"),
    (("layers.1.mlp.experts.base_layer",), "layers.1.mlp.experts.gate_up_proj"),
    (("layers.0.mlp.experts.lora",), r"experts.base_layer.lora_A.weight is the inner one"),
    (("base_layer.lora_A",), "never taken as zero"),
]


@pytest.mark.parametrize(("lost", "words"), LOST_3D, ids=str)
def test_lost_parameters(lost: tuple[str, ...], words: str) -> None:
    table, tensors = moe_table(shared=False), both_layers(three_d)
    assert len(load(tensors, table, target_parameters=BOTH).factors) == 6
    with pytest.raises(AdapterFormatError, match=words):
        load(without(tensors, *lost), table, target_parameters=BOTH)


@pytest.mark.parametrize("choice", [["w1", "w2", "w3"], r".*\.experts\.\d+\.w[123]", "list of all"])
def test_lost_projections_of_single_experts(choice: Any) -> None:
    table, tensors = moe_table(shared=False), both_layers(two_d)
    if choice == "list of all":
        choice = [f"model.layers.{i}.mlp.experts.{e}.w{n}" for i in (0, 1) for e in range(E) for n in (1, 2, 3)]
    assert len(load(tensors, table, target_modules=choice).factors) == 6
    assert len(load(without(tensors, "experts.3."), table, target_modules=choice).factors) == 6
    for lost in ("layers.1.", ".w3."):
        with pytest.raises(AdapterFormatError, match=r"layers.1.mlp.experts.\*.up_proj"):
            load(without(tensors, lost), table, target_modules=choice)
    with pytest.raises(AdapterFormatError, match="never taken as zero"):
        load(without(tensors, "0.mlp.experts.2.w1.lora_B"), table, target_modules=choice)


def test_shared_experts_alone() -> None:
    """Where experts are no modules, target_modules means the shared ones, and routed ones are not missed."""
    table = moe_table(n_layers=1)
    tensors: dict[str, torch.Tensor] = {}
    for name in OLD:
        target = table.targets[f"model.layers.0.mlp.shared_expert.{name}"]
        tensors |= factors(target.path, target.in_features, target.out_features, R)
    assert len(load(tensors, table, target_modules=list(OLD)).factors) == 3


def test_experts_alone() -> None:
    """Bare names that shared experts have, too: of these there is nothing in the file, or something is missing."""
    table, made = moe_table(), both_layers(two_d, names={})
    plan = load(made, table, target_modules=list(OLD))
    assert len(plan.factors) == 6
    assert [text for text in plan.warnings if "shared_expert.gate_proj" in text and "2 more" in text]
    one = table.targets["model.layers.0.mlp.shared_expert.up_proj"]
    with pytest.raises(AdapterFormatError, match="layers.1.mlp.shared_expert.up_proj"):
        load(made | factors(one.path, one.in_features, one.out_features, R), table, target_modules=list(OLD))
    with pytest.raises(AdapterFormatError, match="layers.1.mlp.shared_expert.up_proj"):
        load(made, table, target_modules=[*OLD, "model.layers.1.mlp.shared_expert.up_proj"])


def test_lost_router() -> None:
    made = three_d(hand())
    with pytest.raises(AdapterFormatError, match="mlp.gate"):
        load(made, moe_table(**ONE), target_parameters=[*BOTH, "gate.weight"])
    with pytest.raises(AdapterFormatError, match="mlp.gate"):
        load(two_d(hand()), moe_table(**ONE), target_modules=["w1", "w2", "w3", "gate"])


def test_target_parameters_without_tensors() -> None:
    attention = factors("model.layers.0.self_attn.q_proj", H, H, R)
    with pytest.raises(AdapterFormatError, match=r"target_parameters=\['mlp.other'\]"):
        load(attention, moe_table(**ONE), target_parameters=["mlp.other"])
    plan = load(attention | three_d(hand()), moe_table(**ONE), target_parameters=[*BOTH, "mlp.other"])
    assert plan.unmatched == ["target_parameters: 'mlp.other'"]


def named(i: int, name: str, shape_a: tuple[int, int], shape_b: tuple[int, int]) -> dict[str, torch.Tensor]:
    return pair(f"{P}.{i}.{name}", (torch.ones(shape_a), torch.ones(shape_b)))


STRANGE: dict[str, tuple[dict[str, torch.Tensor], type[Exception], str]] = {
    "another size": (three_d(hand(item=block(hidden=H + 4)), block(hidden=H + 4)), AdapterMatchError, "another base"),
    "another number": (
        three_d(hand(item=block(experts=4)), block(experts=4)), AdapterMatchError, "5 experts makes no rank"
    ),
    "another rank": (three_d(hand(r=4)), AdapterFormatError, "rank 4, but the config says r=3"),
    "beyond": (two_d(hand()) | named(E, "w1", (R, H), (INNER, R)), AdapterMatchError, "5 experts, counted from 0"),
    "transposed": (named(0, "w1", (H, R), (R, INNER)), AdapterFormatError, "transposed"),
    "size of one": (named(0, "w1", (R, INNER), (INNER, R)), AdapterMatchError, "of 12 inputs and 12 outputs"),
    "two formats": (three_d(hand()) | two_d(hand(), names={}), AdapterMatchError, "2 formats"),
    "two names": (two_d(hand()) | two_d(hand(), names={}), AdapterMatchError, "both .*mean"),
    "unknown projection": (named(0, "w4", (R, H), (INNER, R)), AdapterMatchError, "experts.0.w4"),
    "part of a parameter": (
        pair(f"{P}.gate_proj", (torch.ones(E * R, H), torch.ones(INNER, E * R))),
        UnsupportedAdapterError, "gate_up_proj",
    ),
    "biases": (
        three_d(hand()) | pair(f"{P}.base_layer.base_layer", (torch.ones(R, H), torch.ones(E, R))),
        UnsupportedAdapterError, "three parameters",
    ),
    "stack of another size": (
        pair(f"{P}.gate_proj", (torch.ones(2, R, H), torch.ones(E, INNER, R))), AdapterMatchError, "5 experts or one"
    ),
    "empty shard": (
        pair(P, (torch.ones(0), torch.ones(0))), AdapterFormatError, "empty shard"
    ),
    "integers": (
        pair(P, (torch.ones(E * R, H, dtype=torch.int8), torch.ones(2 * INNER, E * R))), AdapterFormatError, "int8"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_strange(name: str) -> None:
    tensors, error, words = STRANGE[name]
    with pytest.raises(error, match=words):
        load(tensors, moe_table(**ONE))


def test_no_gate() -> None:
    with pytest.raises(AdapterMatchError, match="have no gate"):
        load(two_d(hand()), moe_table(**ONE, has_gate=False, gate_up="up_proj"))


def test_largest_rank() -> None:
    with pytest.raises(SlotError, match=r"experts.gate_proj' has rank 3, over max_lora_rank=2"):
        load(three_d(hand()), moe_table(**ONE), max_lora_rank=2)


@pytest.mark.parametrize("version", [None, "0.19.0.dev0", "0.19.1.dev0@main", "nightly"])
def test_a_square_parameter_that_nothing_decides(version: str | None) -> None:
    item, table = block(intermediate=H), moe_table(**ONE, intermediate=H)
    made = hand(item=item)
    with pytest.raises(UnsupportedAdapterError, match="more than one way.*Set peft_version"):
        load(three_d(made, item, parts=["down"]), table, peft_version=version)
    # another block of the same file decides
    for flipped in (False, True):
        other = block("model.layers.1.mlp.experts", intermediate=H)
        tensors = three_d(made, item, parts=["down"], flipped=flipped) | three_d(made, other, flipped=flipped)
        plan = load(tensors, moe_table(shared=False, intermediate=H), peft_version=version)
        assert_deltas(plan, {"down_proj": made["down_proj"]})


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_sizes_any_format(data: st.DataObject) -> None:
    """Sizes, layouts and formats at random: where the file is accepted, it is what was made by hand."""
    size = st.integers(1, 7)
    transposed, has_gate = data.draw(st.booleans()), data.draw(st.booleans())
    fields: dict[str, Any] = {
        "experts": data.draw(st.integers(2, 6)),
        "hidden": data.draw(size),
        "intermediate": data.draw(size),
        "transposed": transposed,
        "swapped": transposed and data.draw(st.booleans()),
        "interleaved": has_gate and data.draw(st.booleans()),
        "has_gate": has_gate,
        "gate_up": "gate_up_proj" if has_gate else "up_proj",
    }
    item, r = block(**fields), data.draw(st.integers(1, 4))
    table, made = moe_table(**ONE, **fields), hand(data.draw(st.integers(0, 9)), r, item, data.draw(st.booleans()))
    if data.draw(st.booleans()):
        for a, b in made.values():
            b[:, data.draw(st.integers(0, b.shape[1] - 1))] = 0
            a[data.draw(st.integers(0, len(a) - 1))] = a[0]
    if data.draw(st.booleans()):
        plan = load(two_d(made, names=OLD if data.draw(st.booleans()) else {}), table, r=r, lora_alpha=2 * r)
    else:
        options = {"flipped": data.draw(st.booleans()), "grouped": data.draw(st.booleans())}
        layout = "grouped_by_expert" if options["grouped"] else None
        kept = data.draw(st.sampled_from([["gate_up", "down"], ["gate_up"], ["down"]]))
        tensors = three_d(made, item, parts=kept, **options)
        made = {name: made[name] for name in made if ("down" if name == "down_proj" else "gate_up") in kept}
        targets = [{"gate_up": item.gate_up, "down": item.down}[name] for name in kept]
        more = {"r": r, "lora_alpha": 2 * r, "target_parameters": targets, "lora_B_layout": layout}
        try:
            plan = load(tensors, table, **more)
        except UnsupportedAdapterError as error:
            assert "more than one way" in str(error) and len(kept) == 1 or item.hidden == item.intermediate
            return
        if {reading for reading in squares(item, made)} and options["flipped"]:
            return  # read as the version that writes no number would have it
    assert_deltas(plan, made)


def squares(item: Any, made: Hand) -> list[str]:
    """Parameters whose two sizes are the same, if they are all that there is."""
    wide = item.intermediate * (2 if item.has_gate else 1)
    sides = {"up_proj": wide == item.hidden, "down_proj": item.intermediate == item.hidden}
    alone = [name for name in sides if name in made]
    return alone if all(sides[name] for name in alone) else []


def test_prefixes_that_other_writers_leave() -> None:
    """A headless model's names, a missing prefix, the adapter's own name."""
    made = hand()
    for prefix, start in ((PREFIX, "layers.0"), ("", "model.layers.0"), (PREFIX, "model.layers.0")):
        path = f"{start}.mlp.experts"
        tensors = {
            f"{prefix}{name.removeprefix(PREFIX)}".replace(".weight", ".default.weight"): value
            for name, value in three_d(made, path=path).items()
        }
        assert_deltas(load(tensors, moe_table(**ONE)), made)
        assert_deltas(load(two_d(made, path), moe_table(**ONE)), made)
