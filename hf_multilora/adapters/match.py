"""Spec + tensors + model -> a plan in which every tensor is accounted for, or an error that names it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ..errors import (
    AdapterFormatError,
    AdapterMatchError,
    MultiLoraError,
    SlotError,
    UnsupportedAdapterError,
    closest,
)
from .altered import TITLES, unused_layouts
from .base import Base
from .checkpoint import Checkpoint, TensorRef
from .complete import check_biases, check_whole
from .config import AdapterSpec
from .convert import Pair, bias_factors, check_rows, merged, to_factors, with_update
from .experts import Experts, check_experts, expert_factors, sort_experts
from .group import group, some
from .keys import FACTORS, Key, Renaming, find_renaming, foreign_format, parse_keys
from .plan import AdapterPlan, Factor, Readable
from .saved import move_biases, sort_others
from .select import Selector, incomplete, unmatched
from .targets import TargetTable
from .tokens import token_rows
from .vocabulary import Vocabulary

__all__ = ["AdapterPlan", "Factor", "TensorRef", "match"]

# Roles that are understood and not served: role -> what they are.
_REFUSED = {
    "adalora": "the singular values of AdaLoRA",
}


def match(
    spec: AdapterSpec,
    checkpoint: Checkpoint,
    table: TargetTable,
    *,
    max_lora_rank: int,
    ignore_untargeted: bool = False,
) -> AdapterPlan:
    """Fit a checkpoint to a model.

    Args:
        spec: the checkpoint's config.
        checkpoint: its tensors; the plan keeps it open.
        table: what the model offers.
        max_lora_rank: the largest rank that a slot takes.
        ignore_untargeted: leave out tensors of modules that enable's target_modules left out, instead of raising.

    Raises:
        AdapterFormatError: not a LoRA, incomplete, or not what its config says.
        AdapterMatchError: tensors without a place in the model, or of the wrong shape.
        UnsupportedAdapterError: tensors of a feature that is not served.
        SlotError: a rank over max_lora_rank.
    """
    where = checkpoint.where
    keys = parse_keys(checkpoint.infos, where)
    _check_roles(keys, spec, where)
    modules, disagreements = group(keys, spec, where)
    if any("kasa" in roles for roles in modules.values()):
        spec = replace(spec, altered="kasa")
    rest = [key for key in keys if key.role in ("base", "param", "original")]
    rows = [key for key in keys if key.role == "tokens"]
    renaming = find_renaming(modules, (key.path for key in (*rest, *rows)), table, where)
    experts = sort_experts(modules, renaming, table, where)
    placed, outside = _place(modules, renaming, table, where)
    outside.update(experts.outside)
    if outside and not ignore_untargeted:
        raise AdapterMatchError(
            f"{where}: {len(outside)} of {len(modules)} trained modules were left out by target_modules when the "
            f"model was enabled: {some(outside)}. Enable it with them, or pass ignore_untargeted=True to do without."
        )
    if outside and not placed and not experts.pairs:
        raise AdapterMatchError(f"{where}: every trained module was left out by target_modules: {some(outside)}.")

    vocabulary = Vocabulary.of(table)
    others = sort_others(rest, renaming.names, spec, checkpoint, Base(table, where), vocabulary)
    own = {f"{item.path}.{item.name}": item.ref for item in others.saved}
    base = Base(table, where, own, _shipped(rest, renaming, vocabulary))
    strange = check_whole(others.saved, rest, renaming.names, spec, base)
    others.warnings += check_biases(rest, renaming.names, [pair.path for pair in placed], base, spec.bias)
    move_biases(others, base)
    before = list(others.saved)
    tokens, held = token_rows(rows, renaming.names, spec, checkpoint, base, vocabulary, others.saved)
    vocab_size = vocabulary.resized(others.rows, held, where)

    under = {rows.path for rows in tokens} | {item.path for item in others.saved if item not in before}

    factors: list[Factor] = []
    converted: Counter[str] = Counter()
    for pair in placed:
        if pair.path in under:
            check_rows(pair, checkpoint, spec)
        weights = {f"{part.path}.weight" for part in table.parts[pair.path]}
        at = [i for i, item in enumerate(others.saved) if f"{item.path}.{item.name}" in weights]
        if at:
            item = others.saved[at[0]] = merged(pair, others.saved[at[0]], checkpoint, spec, base)
            others.converted.append(
                f"{pair.a.name}, {pair.b.name}: worked into the {item.ref.shape[0]} rows of {pair.path}"
            )
            continue
        factors += to_factors(pair, checkpoint, spec, base, others.biases, converted)
        tokens = tuple(
            with_update(rows, pair, checkpoint, spec) if rows.path == pair.path else rows for rows in tokens
        )
    factors += expert_factors(experts, checkpoint, spec, table, converted)
    factors += bias_factors(factors, others.biases, base)
    factors.sort(key=lambda factor: table.position[factor.path, factor.slice])
    _check_once(factors, placed, table, where)
    _check_invocation(spec, factors, others.biases, vocab_size or vocabulary.size, where)
    loose = _check_complete(spec, renaming, table, placed, experts, where)
    check_experts(experts, factors, spec, renaming, table, where)
    strangers = _unmatched(spec, modules, experts, table, renaming, where)
    _check_rank(factors, max_lora_rank, spec, where)
    return AdapterPlan(
        factors=tuple(factors),
        rank=max((factor.rank for factor in factors), default=0),
        spec=spec,
        source=where,
        fingerprint_of_source=None,
        base_model=spec.base_model,
        checkpoint=checkpoint,
        ignored=[
            *spec.ignored,
            *(f"modules_to_save={name!r}: neither the model nor the file has it" for name in strange),
            *others.ignored,
            *(f"{key.name}: used in training only" for key in keys if key.role == "training"),
        ],
        left_out=[key.name for path in outside.values() for key in modules[path].values()],
        warnings=[*spec.warnings, *loose, *disagreements, *others.warnings, *unused_layouts(spec, converted)],
        saved=tuple(others.saved),
        tokens=tokens,
        invocation=spec.invocation,
        vocab_size=vocab_size,
        unmatched=strangers,
        converted=[*others.converted, *(f"{text} ({n} x)" for text, n in converted.items())],
    )


def _shipped(keys: list[Key], renaming: Renaming, vocabulary: Vocabulary) -> frozenset[str]:
    """Modules whose weight is in the file, or is one with such a weight."""
    held = {renaming.names[key.path] for key in keys if key.role in ("base", "param") and key.leaf == "weight"}
    return frozenset(held.union(*(vocabulary.same_table(path) for path in held)))


def _check_roles(keys: list[Key], spec: AdapterSpec, where: str) -> None:
    for key in keys:
        if key.role in _REFUSED:
            raise UnsupportedAdapterError(f"{where}: {key.name} is {_REFUSED[key.role]}, which is not served yet.")
    # PEFT also writes LoRA adapters that train nothing but rows of tokens, or whole modules
    others = any(key.role in ("tokens", "param") for key in keys) and (spec.token_indices or spec.modules_to_save)
    if not others and not any(key.role in FACTORS for key in keys):
        if not keys:
            raise AdapterFormatError(
                f"{where}: holds no tensor at all. Copy it again, or save the adapter again where it was trained."
            )
        owner = foreign_format(keys[0].name)
        hint = f" They look like {owner}, not PEFT's LoRA." if owner else " Is it a full model, or merged already?"
        names = some(dict.fromkeys(key.name for key in keys))
        raise AdapterFormatError(f"{where}: holds no LoRA factors (lora_A, lora_B) among {len(keys)}: {names}.{hint}")


def _place(
    modules: dict[str, dict[str, Key]], renaming: Renaming, table: TargetTable, where: str
) -> tuple[list[Pair], dict[str, str]]:
    """Sort trained modules into those with a place, and those left out by target_modules (model path -> trained)."""
    placed: list[Pair] = []
    outside: dict[str, str] = {}
    strangers: dict[str, str] = {}
    for trained, roles in modules.items():
        path = renaming.names[trained]
        if table.expert_place(path) is not None:
            continue
        if path in table.parts:
            a, b = (roles[role] for role in sorted(FACTORS.intersection(roles)))
            placed.append(Pair(trained, path, a, b, roles.get("dora"), roles.get("bias_B"), roles.get("kasa")))
        elif path in table.left_out:
            outside[path] = trained
        else:
            reason = _refusal(path, table)
            if reason:
                raise UnsupportedAdapterError(f"{where}: it trained {path!r}: {reason}")
            strangers[path] = trained
    if strangers:
        raise _no_such_module(strangers, len(modules), table, where)
    return placed, outside


def _refusal(path: str, table: TargetTable) -> str | None:
    """Why the module, or the one that it lies in, carries no adapter."""
    place = path
    while place:
        if place in table.refused:
            return table.refused[place]
        if place in table.blocks:
            return None
        place = place.rpartition(".")[0]
    if ".experts." in f".{path}.":
        return "the model has no block of experts there that could carry an adapter."
    return None


def _no_such_module(strangers: dict[str, str], total: int, table: TargetTable, where: str) -> MultiLoraError:
    path = next(iter(strangers))
    share = "none of its" if len(strangers) == total else f"{len(strangers)} of"
    base = f" ({table.base_name})" if table.base_name else ""
    known = path in table.modules
    near = " That module is no linear layer or embedding." if known else closest(path, table.parts)
    return AdapterMatchError(
        f"{where}: {share} {total} trained modules {'exist' if len(strangers) == total else 'do not exist'} in the "
        f"model{base}: {some(strangers)}.{near} Was it trained on another base, or with other module names?"
    )


def _check_once(factors: list[Factor], placed: list[Pair], table: TargetTable, where: str) -> None:
    for before, after in zip(factors, factors[1:], strict=False):
        site = after.path, after.slice
        if (before.path, before.slice) == site:
            both = [p.a.name for p in placed if site in ((part.path, part.slice) for part in table.parts[p.path])]
            raise AdapterMatchError(f"{where}: {' and '.join(both)} both train {after.path!r}: one fused, one split.")


def _check_invocation(
    spec: AdapterSpec, factors: list[Factor], biases: Mapping[tuple[str, int], Readable], vocabulary: int, where: str
) -> None:
    if not spec.invocation:
        return
    beyond = [token for token in spec.invocation if vocabulary and token >= vocabulary]
    if beyond:
        raise AdapterMatchError(
            f"{where}: alora_invocation_tokens has {beyond}, beyond the vocabulary of {vocabulary}: it would never be "
            "invoked. Is it an adapter of another base?"
        )
    what = next((f"{factor.path!r}, an embedding" for factor in factors if factor.kind == "embedding"), None)
    what = what or ("biases" if biases else None)
    what = what or ("magnitudes (DoRA)" if any(factor.gain is not None for factor in factors) else None)
    what = what or (f"against {TITLES[spec.altered]}'s base" if spec.altered else None)
    if what:
        raise UnsupportedAdapterError(
            f"{where}: an aLoRA (alora_invocation_tokens) that trains {what}, which PEFT does not start at the "
            "invocation."
        )


def _check_complete(
    spec: AdapterSpec, renaming: Renaming, table: TargetTable, placed: list[Pair], experts: Experts, where: str
) -> list[str]:
    """Every module that the config chose must be there; warnings for those that its names may not have meant."""
    sites = ((part.path, part.slice) for pair in placed for part in table.parts[pair.path])
    missing = incomplete(spec, renaming, table, sites)
    # a bare "gate_proj" may be that of the experts alone, where no other layer of that name was trained
    alone = experts.words().difference(pair.path.rpartition(".")[2] for pair in placed)
    selector = Selector(spec)
    loose = [
        name
        for name in missing
        if name.rpartition(".")[2] in alone and selector.names_ending(renaming.trained_as(name) or name)
    ]
    missing = [name for name in missing if name not in loose]
    if missing:
        raise AdapterFormatError(
            f"{where}: the config's target_modules choose {len(missing)} modules of this model that have no tensors: "
            f"{some(dict.fromkeys(missing))}. PEFT saves every module that it trains, so the file is incomplete; a "
            "missing factor is never taken as zero. Copy or download it again; or, if it never trained them, name in "
            "target_modules only what it did."
        )
    if not loose:
        return []
    return [
        f"target_modules also fit {some(dict.fromkeys(loose))}, of which there are no tensors: taken as untrained."
    ]


def _unmatched(
    spec: AdapterSpec,
    modules: Mapping[str, object],
    experts: Experts,
    table: TargetTable,
    renaming: Renaming,
    where: str,
) -> list[str]:
    """What the config names and the file does not have.

    Raises:
        AdapterFormatError: that is all of target_parameters.
    """
    linear = [name for name in modules if table.expert_place(renaming.names[name]) is None]
    weights = [f"{name}.weight" for name in linear]
    names = experts.names(table)
    found = unmatched(spec, [*linear, *filter(spec.chooses_parameter, weights), *names])
    parameters = [*weights, *experts.parameters(table)]
    strange = [key for key in spec.target_parameters if not any(f".{name}".endswith(f".{key}") for name in parameters)]
    if strange and len(strange) == len(spec.target_parameters):
        raise AdapterFormatError(
            f"{where}: target_parameters={list(strange)}, and the file has no tensor of any of them: it is "
            "incomplete. Copy or download it again; or, if it never trained them, set target_parameters to null."
        )
    return [*found, *(f"target_parameters: {key!r}" for key in strange)]


def _check_rank(factors: list[Factor], max_lora_rank: int, spec: AdapterSpec, where: str) -> None:
    largest = max(factors, key=lambda factor: factor.rank, default=None)
    if largest is not None and largest.rank > max_lora_rank:
        twice = f" (twice its own, for {TITLES[spec.altered]} on the clean base)" if spec.altered else ""
        raise SlotError(
            f"{where}: {largest.path!r} has rank {largest.rank}{twice}, over max_lora_rank={max_lora_rank}. Enable "
            f"the model with max_lora_rank={largest.rank} or more."
        )
