"""rank_pattern and alpha_pattern, found as PEFT finds them (get_pattern_key in its utils/other.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import AdapterFormatError

_PLAIN = re.compile(r"[A-Za-z0-9_.]*")


class PatternTable:
    """rank_pattern or alpha_pattern: the first key k, in the file's order, with `re.match(r"(.*\\.)?(k)$", name)`.

    Keys without regex syntax other than "." (a wildcard, as in any regex) are compared without the regex engine: EVA
    writes one full module path per layer, and compiling hundreds of patterns would cost more than reading the weights.
    """

    def __init__(self, patterns: Mapping[str, float], where: str = "") -> None:
        self.values = dict(patterns)
        self._rows: list[tuple[str, str, re.Pattern[str] | None]] = []
        for key in self.values:
            if _PLAIN.fullmatch(key):
                self._rows.append((key, key.rpartition(".")[2], None))
                continue
            try:
                self._rows.append((key, "", re.compile(rf"(.*\.)?({key})$")))
            except re.error as error:
                raise AdapterFormatError(f"{where}: the pattern {key!r} is not a valid regex ({error}).") from error

    def key(self, name: str) -> str | None:
        """The key that decides for the module `name`, or None where none does."""
        for key, tail, pattern in self._rows:
            if pattern.match(name) if pattern else name.endswith(tail) and _plain_match(key, name):
                return key
        return None

    def get(self, name: str, default: float) -> float:
        key = self.key(name)
        return default if key is None else self.values[key]


def _plain_match(key: str, name: str) -> bool:
    start = len(name) - len(key)
    if start < 0 or (start > 0 and name[start - 1] != "."):
        return False
    end = name[start:]
    return end == key or all(k in (".", c) for k, c in zip(key, end, strict=True))
