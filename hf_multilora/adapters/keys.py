"""Tensor name -> (module path, role), and the renaming from a checkpoint's module names to the model's.

PEFT writes `base_model.model.<module path>.<role>`, with the adapter's name taken out. Names that other writers leave
behind (training wrappers, the adapter's name, a missing or an older prefix) are understood where they can only mean
one thing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..errors import AdapterFormatError, AdapterMatchError
from .targets import TargetTable

# Wrappers of torch.compile, FSDP and activation checkpointing, which leave their names in keys.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# A component of a key that begins the role; what stands before it is the module path.
ROLES = {
    "lora_A": "A",
    "lora_B": "B",
    "lora_embedding_A": "embedding_A",
    "lora_embedding_B": "embedding_B",
    "lora_magnitude_vector": "dora",
    "lora_diag": "kasa",
    "lora_E": "adalora",
    "lora_velora_embed": "training",
    "lora_monteclora_sampler": "training",
    "trainable_tokens_delta": "tokens",
    "trainable_tokens_original": "training",
    "modules_to_save": "param",
    "original_module": "original",
}
FACTORS = frozenset({"A", "B", "embedding_A", "embedding_B"})

# Marks of other methods and formats: regex -> whose they are.
FOREIGN = (
    (r"\.lora_[ab]$", "MLX"),
    (r"lora_(down|up)\.weight$|^lora_(unet|te)", "kohya"),
    (r"\.lora\.(down|up)\.|lora_linear_layer", "diffusers"),
    (r"\.hada_", "LoHa"),
    (r"\.lokr_", "LoKr"),
    (r"\.b?oft_", "OFT"),
    (r"\.ia3_", "IA3"),
    (r"vera_lambda|\.vera_", "VeRA"),
    (r"prompt_embeddings|prompt_encoder", "prompt tuning"),
)


@dataclass(frozen=True)
class Key:
    """A parsed tensor name.

    Args:
        name: as in the file.
        path: module path, without wrappers and without PEFT's own prefix.
        role: "A", "B", "embedding_A", "embedding_B"; "bias_B"; "dora", "kasa", "adalora", "tokens", "training" (no
            effect at inference); "base" (a weight of the base that was saved along); "original" (one that a saved
            module replaces); "param" (any other tensor).
        leaf: for "base", "original" and "param" the parameter's own name, such as "weight".
        adapter: the adapter's name where it was left in the key.
    """

    name: str
    path: str
    role: str
    leaf: str = ""
    adapter: str | None = None


# Adapters of one fleet have the same names, again and again.
@functools.lru_cache(maxsize=1 << 14)
def parse_key(name: str) -> Key:
    """Split a tensor name into module path and role. Every name has a parse; the last resort is "param"."""
    parts = [part for part in name.split(".") if part not in WRAPPERS and part != "token_adapter"]
    for i, part in enumerate(parts):
        role = ROLES.get(part)
        if role is not None:
            return _parse_role(name, _path(parts[:i]), role, parts[i + 1 :])
    leaf = parts.pop()
    if parts and parts[-1] == "base_layer":
        return Key(name, _path(parts[:-1]), "base", leaf)
    return Key(name, _path(parts), "param", leaf)


def _path(parts: list[str]) -> str:
    """Join the components of a module path; `base_model.model.` goes, also twice, as does the `module.` of DDP."""
    start = 0
    if parts[:2] == ["module", "base_model"]:
        start = 1
    while parts[start : start + 2] == ["base_model", "model"]:
        start += 2
    return ".".join(parts[start:])


def _parse_role(name: str, path: str, role: str, rest: list[str]) -> Key:
    if role in FACTORS:
        leaf = rest[-1] if rest and rest[-1] in ("weight", "bias") else "weight"
        named = rest[:-1] if rest and rest[-1] in ("weight", "bias") else rest
        if len(named) > 1 or (leaf == "bias" and role != "B"):
            return Key(name, name.rpartition(".")[0], "param", name.rpartition(".")[2])
        return Key(name, path, "bias_B" if leaf == "bias" else role, leaf, named[0] if named else None)
    if role in ("param", "original"):
        # a raw state_dict: X.modules_to_save.<adapter>.weight and X.original_module.weight
        adapter = rest[0] if role == "param" and len(rest) > 1 else None
        return Key(name, path, role, ".".join(rest[1:] if adapter else rest), adapter)
    return Key(name, path, role)


def parse_keys(names: Iterable[str], where: str) -> list[Key]:
    """Parse all names of a checkpoint.

    Raises:
        AdapterFormatError: the keys carry the names of several adapters.
    """
    keys = [parse_key(name) for name in names]
    found = sorted({key.adapter for key in keys if key.adapter is not None})
    if len(found) > 1:
        raise AdapterFormatError(
            f"{where}: holds the tensors of several adapters ({', '.join(found)}). Save each alone with "
            "save_pretrained(selected_adapters=[...])."
        )
    return keys


def foreign_format(name: str) -> str | None:
    """The method or library whose tensor names look like this one."""
    return next((owner for pattern, owner in FOREIGN if re.search(pattern, name)), None)


@dataclass
class Renaming:
    """How a checkpoint's module names become the model's.

    Args:
        names: module path in the checkpoint -> in the model; paths that mean nothing there are mapped all the same,
            so that errors can name them.
        prefixes: (prefix in the model, prefix in the checkpoint), both empty or ending with a dot.
        same_model: the checkpoint was trained on this architecture as a whole, if under older names.
    """

    names: dict[str, str]
    prefixes: set[tuple[str, str]] = field(default_factory=set)
    same_model: bool = True

    def trained_as(self, path: str) -> str | None:
        """What the model's `path` was called in training; None where the trained model had no such place."""
        best = max((pair for pair in self.prefixes if path.startswith(pair[0])), key=lambda p: len(p[0]), default=None)
        if best is not None:
            return best[1] + path[len(best[0]) :]
        return path if self.same_model else None


def find_renaming(trained: Iterable[str], others: Iterable[str], table: TargetTable, where: str) -> Renaming:
    """Find the renaming under which most of the trained module paths exist in the model.

    Args:
        trained: module paths that carry factors; they decide.
        others: module paths of further tensors, renamed by the same rule.
        table: of the model.
        where: file name for errors.

    Raises:
        AdapterMatchError: two renamings fit equally well, or two paths become the same one.
    """
    trained = list(dict.fromkeys(trained))
    best: dict[str, str] = {path: path for path in trained}
    score = _score(best, table)
    rule: _Rule = _Rule("", "")
    if score < len(trained):
        rivals = []
        for candidate in _candidates(table):
            names = {path: candidate.apply(path, table) for path in trained}
            found = _score(names, table)
            if found > score:
                best, score, rule, rivals = names, found, candidate, [names]
            elif found == score and rivals and names not in rivals:
                rivals.append(names)
        if len(rivals) > 1:
            path = next(p for p in trained if len({names[p] for names in rivals}) > 1)
            raise AdapterMatchError(
                f"{where}: {path!r} may mean {' or '.join(repr(names[path]) for names in rivals)}. Rename the keys to "
                "the model's own module names."
            )
    _check_collisions(best, where)
    prefixes = {("", "") if old == new else _prefixes(old, new) for old, new in best.items() if table.knows(new)}
    renaming = Renaming(best, prefixes, same_model=isinstance(rule, (_Architecture, _Inner)) or rule == _Rule("", ""))
    renaming.names.update({path: rule.apply(path, table) for path in others if path not in best})
    return renaming


def _score(names: dict[str, str], table: TargetTable) -> int:
    return sum(map(table.knows, names.values()))


def _check_collisions(names: dict[str, str], where: str) -> None:
    if len(set(names.values())) == len(names):
        return
    seen: dict[str, str] = {}
    for old, new in names.items():
        if new in seen:
            raise AdapterMatchError(f"{where}: both {seen[new]!r} and {old!r} mean the model's {new!r}.")
        seen[new] = old


def _prefixes(old: str, new: str) -> tuple[str, str]:
    """What is left of (new, old) once their common ending, whole components, is taken away."""
    a, b = new.split("."), old.split(".")
    while a and b and a[-1] == b[-1]:
        a.pop()
        b.pop()
    return "".join(part + "." for part in a), "".join(part + "." for part in b)


@dataclass(frozen=True)
class _Rule:
    """Names that begin with `old` begin with `new` instead; names that the model knows as they are stay."""

    old: str
    new: str

    def apply(self, path: str, table: TargetTable) -> str:
        if table.knows(path):
            return path
        if path.startswith(self.old):
            return self.new + path[len(self.old) :]
        # heads move with a model that is nested in another one: language_model.lm_head <-> lm_head
        if "language_model." in self.old and path.startswith("language_model."):
            return path.removeprefix("language_model.")
        if "language_model." in self.new and f"language_model.{path}" in table.known:
            return f"language_model.{path}"
        return path


@dataclass(frozen=True)
class _Architecture(_Rule):
    """The architecture's own table of renamings; the first pattern that occurs in a name decides."""

    def apply(self, path: str, table: TargetTable) -> str:
        if table.knows(path):
            return path
        for pattern, new in table.prefixes:
            renamed, n = re.subn(pattern, new, f"{path}.")  # the patterns are made for tensor names
            if n:
                return renamed.removesuffix(".")
        return path


class _Inner(_Rule):
    """A module in the middle of names: `old` in training, `new` in the model."""

    def apply(self, path: str, table: TargetTable) -> str:
        if table.knows(path):
            return path
        renamed = path.replace(self.old, self.new, 1)
        router = f"{renamed.removesuffix('gate')}router"  # PhiMoE renamed its gate besides
        return router if renamed.endswith(".gate") and not table.knows(renamed) and table.knows(router) else renamed


# Where a text model sits in a multimodal one, before and after transformers 4.52, and on its own.
_PLACES = ("model.", "model.language_model.", "language_model.model.", "language_model.")


def _candidates(table: TargetTable) -> Iterator[_Rule]:
    if table.prefixes:
        yield _Architecture("", "")
    for root in table.roots:
        yield _Rule("", f"{root}.")
    if any(".mlp." in path for path in table.blocks) or any(".mlp." in path for path in table.refused):
        # Mixtral and its like before transformers 5
        yield _Inner(".block_sparse_moe.", ".mlp.")
    for old in _PLACES:
        for new in (*_PLACES, ""):
            if old != new:
                yield _Rule(old, new)
    for root in ("base_model.", "transformer.", "gpt_neox."):
        yield _Rule(root, "")
