"""Which modules PEFT wrapped in training, and which of them a checkpoint lacks.

The tensors decide what an adapter does. The config's choice of modules serves one purpose here: PEFT saves the
factors of every module that it wrapped, so a chosen module without tensors means that the file is incomplete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from .config import AdapterSpec
from .keys import Renaming
from .targets import FUSED, TargetTable, is_head

_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(\d+)\.")
_LAST_INDEX = re.compile(r".*\.[^.]*\.(\d+)\.")
# Tasks whose models have another head, so that a head of this model means nothing to them.
_HEADLESS_TASKS = frozenset({"SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"})


class Selector:
    """target_modules, exclude_modules, layers_to_transform, layers_pattern and modules_to_save, as PEFT reads them.

    A string is a regex that must match the whole name; a list holds whole names or their endings, on whole
    components. layers_to_transform narrows endings only (`check_target_module_exists` in PEFT's tuners_utils.py).
    """

    def __init__(self, spec: AdapterSpec) -> None:
        self.spec = spec
        self._targets = _matcher(spec.target_modules or ())
        self._excluded = _matcher(spec.exclude_modules or ())
        saved = "|".join(f"(?:{name})" for name in spec.modules_to_save)
        self._saved = re.compile(rf"(^|.*\.)({saved})($|\..*)") if saved else None

    def matches(self, name: str) -> bool:
        """Whether PEFT would wrap the module of this name."""
        if self._excluded(name) or (self._saved and self._saved.match(name)):
            return False
        found = self._targets(name)
        if not found or found == "whole" or self.spec.layers_to_transform is None:
            return bool(found)
        return self._in_layers(name, _FIRST_INDEX)

    def names_ending(self, name: str) -> bool:
        """Whether target_modules means the module by the end of its name, rather than as a whole."""
        return self._targets(name) == "ending"

    def surely_matches(self, name: str) -> bool:
        """The same, and also for older versions, which took the last number in a name for the layer's."""
        if not self.matches(name):
            return False
        if self.spec.layers_to_transform is None or self._targets(name) == "whole" or self.spec.layers_pattern:
            return True
        return self._in_layers(name, _LAST_INDEX)

    def _in_layers(self, name: str, index: re.Pattern[str]) -> bool:
        if self.spec.layers_pattern:
            tries = (re.match(rf"(?:^|.*?\.){word}\.(\d+)\.", name) for word in self.spec.layers_pattern)
            found = next((match for match in tries if match), None)
        else:
            found = index.match(name)
        return found is not None and int(found[1]) in (self.spec.layers_to_transform or ())


def _matcher(choice: str | tuple[str, ...]) -> Callable[[str], str]:
    """A function name -> "whole" (named or matched as a whole), "ending", or ""."""
    if isinstance(choice, str):
        pattern = re.compile(choice)
        return lambda name: "whole" if pattern.fullmatch(name) else ""
    whole = frozenset(choice)
    endings = tuple(f".{name}" for name in choice)
    return lambda name: "whole" if name in whole else "ending" if name.endswith(endings) else ""


def incomplete(
    spec: AdapterSpec, renaming: Renaming, table: TargetTable, sites: Iterable[tuple[str, int]]
) -> list[str]:
    """Modules of the model that the config chose and that have no factors in the checkpoint.

    Args:
        spec: the config; without target_modules and target_parameters there is nothing to check.
        renaming: gives each module the name that it had in training; a place that the trained model did not have
            (a head, for an adapter of a headless model) is not missed.
        table: of the model.
        sites: (path, slice) of everything that the checkpoint trained, or that was left out on purpose.
    """
    if not spec.target_modules and not spec.target_parameters:
        return []
    have = set(sites)
    layout = {path.rpartition(".")[2] for path in renaming.names.values()}
    everything = isinstance(spec.target_modules, str) and spec.target_modules.lower() == "all-linear"
    selector = Selector(spec)
    missing = []
    for name, parts in table.parts.items():
        if table.targets[parts[0].path].kind == "experts":
            continue  # see check_experts
        if all((part.path, part.slice) in have for part in parts) or not _same_layout(name, table, layout):
            continue
        trained = renaming.trained_as(name)
        if trained is None or (is_head(name) and spec.task_type in _HEADLESS_TASKS):
            continue
        if everything:
            # PEFT writes the choice out in full and leaves the output head out of it
            chosen = not is_head(name) and table.targets[parts[0].path].kind == "linear"
        else:
            chosen = selector.surely_matches(trained) or spec.chooses_parameter(f"{trained}.weight")
        if chosen:
            missing.append(name)
    return missing


def unmatched(spec: AdapterSpec, trained: Iterable[str]) -> list[str]:
    """Names and patterns of the config that mean none of the trained modules: harmless, but perhaps a slip.

    Args:
        trained: modules with factors, as the checkpoint names them.
    """
    trained = list(trained)
    found = []
    if isinstance(spec.target_modules, tuple):
        for name in spec.target_modules:
            if not any(path == name or path.endswith(f".{name}") for path in trained):
                found.append(f"target_modules: {name!r}")
    for field in ("rank_pattern", "alpha_pattern"):
        table = getattr(spec, field)
        used = {table.key(name) for name in trained} if table.values else set()
        found += [f"{field}: {key!r}" for key in table.values if key not in used]
    return found


def _same_layout(name: str, table: TargetTable, layout: set[str]) -> bool:
    """Whether the checkpoint knows this name as a layer, rather than fused with others or split into several."""
    last = name.rpartition(".")[2]
    if last in layout:
        return True
    if name in table.targets:
        other = {fused for fused, parts in FUSED.items() if last in parts}
        other.update(part for part, _ in table.targets[name].slices)
        return not other & layout
    return any(last in parts and not layout.isdisjoint(parts) for parts in FUSED.values())
