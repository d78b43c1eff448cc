"""Factors of experts by hand in float64, tables to match them, and the formats in which they get saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from adapter_bed import config

from hf_multilora.adapters.load import load_plan
from hf_multilora.adapters.plan import AdapterPlan
from hf_multilora.adapters.targets import ExpertBlock, Target, TargetTable

E, R, H, INNER = 5, 3, 16, 12  # experts, rank, hidden, intermediate: all different, and 2 x INNER too
PROJECTIONS = {"gate_proj": (H, INNER), "up_proj": (H, INNER), "down_proj": (INNER, H)}
OLD = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
PREFIX = "base_model.model."
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

# projection -> A [E, r, in], B [E, out, r], scaling left out
Hand = dict[str, tuple[torch.Tensor, torch.Tensor]]


def block(path: str = "model.layers.0.mlp.experts", **fields: Any) -> ExpertBlock:
    sizes = {"experts": E, "hidden": H, "intermediate": INNER, "gate_up": "gate_up_proj", "down": "down_proj"}
    return ExpertBlock(path=path, **{**sizes, **fields})


def moe_table(
    *, n_layers: int = 2, refused: Mapping[str, str] | None = None, shared: bool = True, **fields: Any
) -> TargetTable:
    """Attention, a router, a shared expert and a block of experts in each layer."""
    targets: dict[str, Target] = {}
    blocks = {}
    for i in range(n_layers):
        stem = f"model.layers.{i}"
        item = block(f"{stem}.mlp.experts", **fields)
        blocks[item.path] = item
        for name in ("self_attn.q_proj", "self_attn.o_proj"):
            targets[f"{stem}.{name}"] = Target(f"{stem}.{name}", "linear", H, H)
        targets[f"{stem}.mlp.gate"] = Target(f"{stem}.mlp.gate", "linear", H, item.experts)
        for name in item.projections:
            path, inside = f"{item.path}.{name}", item.intermediate if name == "down_proj" else item.hidden
            out = item.hidden if name == "down_proj" else item.intermediate
            targets[path] = Target(path, "experts", inside, out, experts=item.experts)
        for name, (inside, out) in PROJECTIONS.items() if shared else ():
            path = f"{stem}.mlp.shared_expert.{name}"
            targets[path] = Target(path, "linear", inside, out)
    if refused:
        targets = {path: target for path, target in targets.items() if path.rpartition(".")[0] not in refused}
    names: dict[str, None] = {}
    for path in targets:
        while path := path.rpartition(".")[0]:
            names[path] = None
    return TargetTable(
        targets, dict(refused or {}), frozenset(), tuple(names), "org/tiny-moe", lambda name: None, blocks=blocks
    )


def hand(seed: int = 0, r: int = R, item: ExpertBlock | None = None, shared_a: bool = False) -> Hand:
    """Random factors of all projections; those of gate and up have one A, as they do in files of one parameter."""
    item = item or block()
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n, h, inner = item.experts, item.hidden, item.intermediate
    a = draw(1, r, h).repeat(n, 1, 1) if shared_a else draw(n, r, h)
    made = {"gate_proj": (a, draw(n, inner, r)), "up_proj": (a, draw(n, inner, r))}
    made["down_proj"] = (draw(n, r, inner), draw(n, h, r))
    return {name: made[name] for name in item.projections}


def matrices(
    a: torch.Tensor, b: torch.Tensor, *, flipped: bool = False, grouped: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E, r, in] and B [E, out, r] as PEFT's lora_A [E r, ·] and lora_B [·, r E]."""
    if flipped:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    n, r = a.shape[:2]
    first = a.reshape(n * r, -1)
    columns = b.permute(1, 0, 2) if grouped else b.permute(1, 2, 0)
    return first.float().contiguous(), columns.reshape(b.shape[1], -1).float().contiguous()


def pair(name: str, factors: tuple[torch.Tensor, torch.Tensor], prefix: str = PREFIX) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}.lora_A.weight": factors[0], f"{prefix}{name}.lora_B.weight": factors[1]}


def gate_up(made: Hand, item: ExpertBlock) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the parameter of gate and up."""
    if not item.has_gate:
        return made["up_proj"]
    (a, gate), (_, up) = made["gate_proj"], made["up_proj"]
    return a, torch.stack([gate, up], 2).flatten(1, 2) if item.interleaved else torch.cat([gate, up], 1)


def three_d(
    made: Hand,
    item: ExpertBlock | None = None,
    *,
    parts: Sequence[str] = ("gate_up", "down"),
    path: str | None = None,
    **options: bool,
) -> dict[str, torch.Tensor]:
    """One block as target_parameters saves it."""
    item = item or block()
    path = path or item.path
    tensors: dict[str, torch.Tensor] = {}
    if "gate_up" in parts:
        inner = f"{path}.base_layer" if "down" in parts else path
        tensors |= pair(inner, matrices(*gate_up(made, item), **options))
    if "down" in parts:
        tensors |= pair(path, matrices(*made["down_proj"], **options))
    return tensors


def two_d(
    made: Hand, path: str = "model.layers.0.mlp.experts", names: Mapping[str, str] = OLD, skip: Sequence[int] = ()
) -> dict[str, torch.Tensor]:
    """One block with a pair for each expert and projection."""
    tensors: dict[str, torch.Tensor] = {}
    for name, (a, b) in made.items():
        for i in range(len(a)):
            if i not in skip:
                factors = a[i].float().contiguous(), b[i].float().contiguous()
                tensors |= pair(f"{path}.{i}.{names.get(name, name)}", factors)
    return tensors


def load(tensors: Mapping[str, torch.Tensor], table: TargetTable, **fields: Any) -> AdapterPlan:
    options = {"max_lora_rank": fields.pop("max_lora_rank", 64)}
    options["ignore_untargeted"] = fields.pop("ignore_untargeted", False)
    return load_plan(dict(tensors), table, config=config(**{"r": R, "lora_alpha": 2 * R, **fields}), **options)


def found(plan: AdapterPlan, path: str = "model.layers.0.mlp.experts") -> dict[str, torch.Tensor]:
    """Projection -> scaling x B A of every expert, [E, out, in], checked against what the plan says of itself."""
    deltas = {}
    for factor in plan.factors:
        if factor.path.rpartition(".")[0] != path:
            continue
        assert factor.kind == "experts" and factor.a is not None and factor.b is not None
        a, b = factor.a.read(), factor.b.read()
        assert (tuple(a.shape), a.dtype) == (factor.a.shape, factor.a.dtype)
        assert (tuple(b.shape), b.dtype) == (factor.b.shape, factor.b.dtype)
        assert a.shape[1] == b.shape[2] == factor.rank
        find = getattr(factor.a, "stored", lambda: None)()
        assert find is None or torch.equal(find.read(), a)
        n = max(len(a), len(b))
        wide = factor.scaling * b.double().expand(n, -1, -1) @ a.double().expand(n, -1, -1)
        deltas[factor.path.rpartition(".")[2]] = wide
    return deltas


def assert_deltas(plan: AdapterPlan, made: Hand, scaling: float = 2.0, **options: Any) -> None:
    """The plan has, for each projection and expert, what was made by hand; and reads every tensor."""
    deltas = found(plan, **options)
    assert set(deltas) == set(made)
    for name, (a, b) in made.items():
        want = scaling * b @ a
        torch.testing.assert_close(deltas[name].expand_as(want), want, rtol=1e-5, atol=1e-5)
    assert plan.facts()["tensors"] == len(plan.checkpoint.infos)


def rslora(alpha: float, r: int) -> float:
    return alpha / math.sqrt(r)
