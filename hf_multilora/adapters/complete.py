"""Whether a file holds all that its config says was saved whole: modules, their parameters, biases."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import AdapterFormatError, AdapterMatchError
from .base import Base
from .config import AdapterSpec
from .keys import Key
from .plan import SavedParam
from .targets import is_head


def check_whole(
    saved: Sequence[SavedParam], keys: list[Key], names: dict[str, str], spec: AdapterSpec, base: Base
) -> list[str]:
    """Modules that the config says were saved must be there as a whole, and heads must be of one width.

    Returns:
        Names in modules_to_save that neither the model nor the file knows, which are harmless.

    Raises:
        AdapterFormatError: the model has such a module, and the file lacks it or a parameter of it.
        AdapterMatchError: a weight and a bias of different heads.
    """
    where, table = base.where, base.table
    held = {f"{names[key.path]}.{key.leaf}" for key in keys}
    strange = []
    for name in spec.modules_to_save:
        if not any(within(name, key.path) for key in keys):
            found = next((module for module in table.modules if module == name or module.endswith(f".{name}")), None)
            if found:
                raise AdapterFormatError(
                    f"{where}: modules_to_save names {name!r}, the model has {found!r}, and the file holds no tensor "
                    "of it: it is incomplete. Copy or download it again."
                )
            strange.append(name)
    for root in {root for path in names.values() if (root := saved_root(path, spec))}:
        if not any(parameter.startswith(f"{root}.") for parameter in held):
            continue
        lack = [p for p in table.parameters if p.startswith(f"{root}.") and p not in held]
        if lack:
            raise AdapterFormatError(
                f"{where}: modules_to_save names {root!r}, and the file lacks {', '.join(lack[:4])}: it is "
                "incomplete. Copy or download it again."
            )
    widths: dict[str, tuple[str, int]] = {}
    beside = {f"{item.path}.{item.name}" for item in saved}
    for item in saved:
        full = f"{item.path}.{item.name}"
        module, _, leaf = full.rpartition(".")
        known = base.shape(full)
        if leaf not in ("weight", "bias") or not known:
            continue
        axis = _output_axis(module, leaf, base)
        own = item.ref.shape[axis]
        other, width = widths.setdefault(module, (full, own))
        sibling = f"{module}.{'bias' if leaf == 'weight' else 'weight'}"
        changed = own != known[axis]
        if width != own or (changed and sibling not in beside and base.shape(sibling) is not None):
            raise AdapterMatchError(
                f"{where}: {full} and {other if other != full else sibling} have different widths."
            )
    return strange


def _output_axis(module: str, leaf: str, base: Base) -> int:
    """The dimension of a parameter that counts the module's outputs: the last of a Conv1D's weight, [in, out]."""
    target = base.table.targets.get(module)
    if leaf == "bias" or target is not None:
        return int(leaf == "weight" and target is not None and target.transposed)
    # left out when the model was enabled, so that only its shapes are known
    weight, bias = base.shape(f"{module}.weight") or (), base.shape(f"{module}.bias")
    return int(len(weight) == 2 and weight[:1] != bias and weight[1:] == bias)


def check_biases(keys: list[Key], names: dict[str, str], pairs: list[str], base: Base, said: str) -> list[str]:
    """Biases that the config says were trained must be in the file, all or (older PEFT) none of them.

    Args:
        pairs: modules of the model with factors.
        said: the config's `bias`.

    Returns:
        Warnings.

    Raises:
        AdapterFormatError: some of them are missing.
    """
    if said == "none":
        return []
    held = {f"{names[key.path]}.{key.leaf}" for key in keys}
    parts = {path: base.table.parts[path][0].path for path in pairs}
    wanted = [f"{path}.bias" for path, owner in parts.items() if base.has_bias(owner)]
    if said == "all":
        slices = {part.path for path in pairs for part in base.table.parts[path]}
        owners = [(name, name.removesuffix(".bias")) for name in base.table.parameters if name.endswith(".bias")]
        wanted += [name for name, owner in owners if owner not in slices and not is_head(owner)]
    lack = [name for name in dict.fromkeys(wanted) if name not in held]
    if lack and len(lack) == len(set(wanted)):
        return [f"bias={said!r}, and the file holds no bias: the base's own stay (as in older PEFT)."]
    if lack:
        raise AdapterFormatError(
            f"{base.where}: bias={said!r}, and {len(lack)} biases are not in the file: {', '.join(lack[:4])}. It is "
            "incomplete: copy or download it again."
        )
    return []


def within(name: str, path: str) -> bool:
    """Whether a module called `name` is, or holds, `path`."""
    return f".{name}." in f".{path}."


def saved_root(path: str, spec: AdapterSpec) -> str | None:
    """The outermost module around `path` that modules_to_save names: PEFT takes all that end like one."""
    if not spec.modules_to_save:
        return None
    parts = path.split(".")
    for n in range(1, len(parts) + 1):
        place = ".".join(parts[:n])
        if place.endswith(spec.modules_to_save):
            return place
    return None
