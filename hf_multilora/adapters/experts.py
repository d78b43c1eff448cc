"""LoRA on blocks of experts: from the modules of a checkpoint to one stack of factors for each projection.

Whatever the format, a factor acts on the input, is stacked by expert, and has the rank of its projection. The formats
are read by `experts_3d` (PEFT's target_parameters: one matrix for all experts) and `experts_2d` (a matrix for each).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..errors import AdapterFormatError, AdapterMatchError, UnsupportedAdapterError
from .altered import TITLES
from .checkpoint import Checkpoint
from .config import AdapterSpec
from .convert import Pair
from .experts_2d import gathered_factors, parameter_names
from .experts_3d import Stacked, named_factor, stacked_factors
from .group import some
from .keys import FACTORS, Key, Renaming
from .plan import Factor
from .select import Selector
from .targets import EXPERT_NAMES, ExpertBlock, ExpertPlace, TargetTable

_COMPANIONS = {"dora": "DoRA (use_dora)", "bias_B": "a bias of B (lora_bias)", "kasa": "KaSA (kasa_config)"}
_MIXTRAL = ("w1", "w2", "w3")


@dataclass
class Experts:
    """The modules of a checkpoint that lie in blocks of experts.

    Args:
        pairs: those with a place, each with what its name means.
        outside: those left out by enable's target_modules: path in the model -> in the checkpoint.
    """

    pairs: list[tuple[ExpertPlace, Pair]] = field(default_factory=list)
    outside: dict[str, str] = field(default_factory=dict)

    def names(self, table: TargetTable) -> list[str]:
        """What the config's patterns call them: parameters where one matrix holds all experts, else modules."""
        found: list[str] = []
        for place, trained in self._all(table):
            found += parameter_names(place, trained, table) if place.expert is None else [trained]
        return found

    def parameters(self, table: TargetTable) -> list[str]:
        """The parameters that they train, or may train, under the names of training."""
        return [name for place, trained in self._all(table) for name in parameter_names(place, trained, table)]

    def words(self) -> set[str]:
        """Last names of the modules of single experts, in training."""
        return {pair.trained.rpartition(".")[2] for place, pair in self.pairs if place.expert is not None}

    def _all(self, table: TargetTable) -> list[tuple[ExpertPlace, str]]:
        outside = [(table.expert_place(path), trained) for path, trained in self.outside.items()]
        here = [(place, pair.trained) for place, pair in self.pairs]
        return [*here, *((place, trained) for place, trained in outside if place is not None)]


def sort_experts(modules: Mapping[str, dict[str, Key]], renaming: Renaming, table: TargetTable, where: str) -> Experts:
    """Find the modules that lie in blocks of experts.

    Raises:
        UnsupportedAdapterError: a block that carries no adapters, or factors that are more than A and B.
    """
    found = Experts()
    for trained, roles in modules.items():
        path = renaming.names[trained]
        place = table.expert_place(path)
        if place is None:
            continue
        for refused in (place.block, *_paths(place, table)):
            if refused in table.refused:
                raise UnsupportedAdapterError(f"{where}: it trained {path!r}: {table.refused[refused]}")
        for role, what in _COMPANIONS.items():
            if role in roles:
                raise UnsupportedAdapterError(f"{where}: {roles[role].name}: {what} on experts is not served.")
        if all(name in table.left_out for name in _paths(place, table)):
            found.outside[path] = trained
            continue
        factors = sorted(FACTORS.intersection(roles))
        if factors != ["A", "B"]:
            raise AdapterFormatError(f"{where}: {path!r} has the factors {factors}, but lies in a block of experts.")
        found.pairs.append((place, Pair(trained, path, roles["A"], roles["B"])))
    return found


def _paths(place: ExpertPlace, table: TargetTable) -> list[str]:
    """The targets that a place may mean."""
    block = table.blocks.get(place.block)
    every = block.projections if block else ("gate_proj", "up_proj", "down_proj")
    if place.name == "gate_up_proj":
        every = every[:-1]
    return [f"{place.block}.{name}" for name in ([place.name] if place.name in every else every)]


def expert_factors(
    experts: Experts, checkpoint: Checkpoint, spec: AdapterSpec, table: TargetTable, converted: Counter[str]
) -> list[Factor]:
    """The factors of every projection that the checkpoint trained, in no particular order.

    Args:
        converted: what is not taken as stored -> how often; counted up.

    Raises:
        AdapterFormatError: not factors of experts, or not of the config's rank.
        AdapterMatchError: another number or size of experts; one projection in two formats.
        UnsupportedAdapterError: a method that is not served on experts.
    """
    if not experts.pairs:
        return []
    where = checkpoint.where
    _check_method(spec, experts.pairs[0][1], where)
    each: dict[str, dict[str, dict[int, Pair]]] = {}
    whole: list[Stacked] = []
    factors: list[Factor] = []
    for place, pair in experts.pairs:
        block = table.blocks[place.block]
        if place.expert is None and len(checkpoint.infos[pair.a.name].shape) == 3:
            factors.append(named_factor(block, place.name, pair, checkpoint, spec))
        elif place.expert is None:
            whole.append(Stacked(block, place.name, pair))
        else:
            held = each.setdefault(place.block, {}).setdefault(place.name, {})
            if place.expert in held:
                both = f"{held[place.expert].trained!r} and {pair.trained!r}"
                raise AdapterMatchError(f"{where}: {both} both mean {pair.path!r}.")
            held[place.expert] = pair
    factors += stacked_factors(whole, checkpoint, spec, converted)
    for path, projections in each.items():
        factors += gathered_factors(table.blocks[path], projections, checkpoint, spec, table, converted)
    counts = Counter(factor.path for factor in factors)
    for path, n in counts.items():
        if n > 1:
            raise AdapterMatchError(f"{where}: {path!r} is trained in {n} formats at once.")
        if path not in table.targets:
            raise AdapterMatchError(f"{where}: it trained {path!r}, which target_modules left out when enabling.")
    return factors


def _check_method(spec: AdapterSpec, pair: Pair, where: str) -> None:
    what = TITLES.get(spec.altered)
    what = what or ("DoRA (use_dora)" if spec.use_dora else None)
    what = what or ("a bias of B (lora_bias)" if spec.lora_bias else None)
    what = what or ("BD-LoRA (use_bdlora)" if spec.blocks > 1 else None)
    what = what or ("QALoRA (use_qalora)" if spec.group > 1 else None)
    what = what or ("aLoRA (alora_invocation_tokens)" if spec.invocation else None)
    if what:
        raise UnsupportedAdapterError(f"{where}: {pair.a.name}: {what} on experts is not served.")


def check_experts(
    experts: Experts, factors: Iterable[Factor], spec: AdapterSpec, renaming: Renaming, table: TargetTable, where: str
) -> None:
    """Whether every projection that the config chose is there. A single expert may be missing: it was never trained.

    Raises:
        AdapterFormatError: it is not.
    """
    have = {factor.path for factor in factors}.union(table.left_out)
    each = [pair.trained.split(".") for place, pair in experts.pairs if place.expert is not None]
    style = _MIXTRAL if any(parts[-1] in _MIXTRAL for parts in each) else tuple(dict.fromkeys(EXPERT_NAMES.values()))
    selector = Selector(spec) if each and spec.target_modules else None
    missing: dict[str, None] = {}
    for path, block in table.blocks.items():
        trained = renaming.trained_as(path)
        lack = [name for name in block.projections if f"{path}.{name}" not in have]
        if trained is None or not lack:
            continue
        for name in lack:
            parameter = block.down if name == "down_proj" else block.gate_up
            if spec.chooses_parameter(f"{trained}.{parameter}"):
                missing[f"{path}.{parameter}"] = None
            elif selector is not None and _chosen(selector, trained, name, style, block):
                missing[f"{path}.*.{name}"] = None
    if missing:
        raise AdapterFormatError(
            f"{where}: the config chooses {len(missing)} projections of experts without tensors: {some(missing)}. "
            "The file is incomplete: copy or download it again; or, if it never trained them, name in the config only "
            "what it did."
        )


def _chosen(selector: Selector, trained: str, name: str, style: tuple[str, ...], block: ExpertBlock) -> bool:
    words = [word for word in style if EXPERT_NAMES[word] == name]
    return any(selector.surely_matches(f"{trained}.{i}.{word}") for word in words for i in range(block.experts))
