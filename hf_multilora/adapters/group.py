"""Tensors of one module, together: its two factors, and what may stand beside them."""

from __future__ import annotations

from ..errors import AdapterFormatError, UnsupportedAdapterError
from .config import AdapterSpec
from .keys import FACTORS, Key

# What a module may have beside its two factors: role -> what it is.
_COMPANIONS = {"dora": "the magnitude of DoRA", "bias_B": "the bias of B", "kasa": "KaSA's singular values"}


def group(keys: list[Key], spec: AdapterSpec, where: str) -> tuple[dict[str, dict[str, Key]], list[str]]:
    """Trained module path -> its factors, and what goes with them, by role; and warnings."""
    modules: dict[str, dict[str, Key]] = {}
    for key in keys:
        if key.role not in FACTORS and key.role not in _COMPANIONS:
            continue
        roles = modules.setdefault(key.path, {})
        if key.role in roles:
            raise AdapterFormatError(f"{where}: {roles[key.role].name} and {key.name} mean the same factor.")
        roles[key.role] = key
    for path, roles in modules.items():
        factors = sorted(FACTORS.intersection(roles))
        wanted = ("embedding_A", "embedding_B") if factors and "embedding" in factors[0] else ("A", "B")
        if len(factors) > 2 or (len(factors) == 2 and tuple(factors) != wanted):
            raise AdapterFormatError(f"{where}: {path!r} has the factors {factors}, which do not go together.")
        for role in wanted:
            if role not in roles:
                raise AdapterFormatError(
                    f"{where}: {next(iter(roles.values())).name} has no lora_{role} beside it. A missing factor is "
                    "never taken as zero: the file is incomplete, copy or download it again."
                )
    warnings = [
        *_check_companions("dora", spec.use_dora, "use_dora", modules, where),
        *_check_companions("bias_B", spec.lora_bias, "lora_bias", modules, where),
        *_check_companions("kasa", spec.altered == "kasa", "kasa_config", modules, where),
    ]
    for path, roles in modules.items():
        both = [text for role, text in _COMPANIONS.items() if role in roles]
        if len(both) > 1:
            raise UnsupportedAdapterError(
                f"{where}: {path!r} has {' and '.join(both)}: PEFT trains no such adapter, and does not say what it "
                "would compute."
            )
    return modules, warnings


def _check_companions(role: str, said: bool, name: str, modules: dict[str, dict[str, Key]], where: str) -> list[str]:
    """Compare what the config says with the tensors, which decide; a tensor that is missing is an error."""
    have = [path for path, roles in modules.items() if role in roles]
    lack = {path: None for path, roles in modules.items() if role not in roles}
    if have and not said:
        what = _COMPANIONS[role]
        return [f"the config does not say {name}; {what} is in the file for {len(have)} modules, and counts."]
    if lack and (said or have):
        raise AdapterFormatError(
            f"{where}: {name}=true, and {len(lack)} of {len(modules)} trained modules have no tensor of "
            f"{_COMPANIONS[role]}: {some(lack)}. The file is incomplete, copy or download it again."
        )
    return []


def some(names: dict[str, str] | dict[str, None], n: int = 4) -> str:
    shown = ", ".join(map(repr, list(names)[:n]))
    return shown if len(names) <= n else f"{shown} and {len(names) - n} more"
