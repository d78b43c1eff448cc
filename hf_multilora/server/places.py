"""Where adapters may be loaded from: sub-folders of one folder, and what patterns allow. Names come from clients."""

from __future__ import annotations

import fnmatch
import os
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from .limits import CONFIG, HUB_ID
from .problems import ApiError

_LISTED_S = 1.0


def check_name(name: str, param: str = "model") -> None:
    """Raises: ApiError for a name that can be none: empty, too long, or with characters that are not for reading."""
    if not name.strip() or len(name.encode("utf-8", "replace")) > 512:
        raise ApiError(400, f"{param}: expected a name of 1 to 512 bytes.", "invalid_name", param)
    bad = next((c for c in name if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")), None)
    if bad is not None:
        raise ApiError(400, f"{param} holds the character U+{ord(bad):04X}, which no name may.", "invalid_name", param)


class Places:
    """What a name or a path may mean; nothing is read to find out but the folder itself.

    Args:
        root: folder whose sub-folders are adapters.
        patterns: as of a shell; those that begin with "/" are for absolute paths, others for hub ids.
    """

    def __init__(self, root: Path | None, patterns: Sequence[str]) -> None:
        self.root = None if root is None else Path(root).resolve()
        self._patterns = patterns
        self._listed: tuple[float, list[str]] = (0.0, [])

    def names(self) -> list[str]:
        """Sub-folders of the adapters' folder that hold an adapter, as they were a second ago at most."""
        now = time.monotonic()
        if now > self._listed[0]:
            self._listed = (now + _LISTED_S, self._list())
        return self._listed[1]

    def _list(self) -> list[str]:
        found: list[str] = []
        if self.root is None:
            return found
        for entry in os.scandir(self.root):
            try:
                check_name(entry.name)
                if self.in_folder(entry.name) is not None:
                    found.append(entry.name)
            except (ApiError, OSError):
                continue
        return sorted(found)

    def in_folder(self, name: str) -> Path | None:
        """The sub-folder of this name, where there is one that holds an adapter and leads nowhere else."""
        if self.root is None or name.startswith(".") or any(c in name for c in "/\\:\0"):
            return None
        folder = self.root / name
        try:
            if folder.resolve(strict=True) != folder or not (folder / CONFIG).is_file():
                return None
        except (OSError, RuntimeError, ValueError):
            return None
        return folder

    def matches(self, name: str) -> bool:
        """Whether a pattern allows this hub id, or this absolute path, as it stands."""
        is_path = name.startswith("/")
        if not is_path and not HUB_ID.fullmatch(name):
            return False
        patterns = [pattern for pattern in self._patterns if pattern.startswith("/") == is_path]
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    def allowed(self, source: str, param: str = "lora_path") -> str:
        """A hub id or path that is allowed, as it is to be loaded.

        Raises:
            ApiError: 403 not allowed; what is outside is not told apart from what does not exist.
        """
        check_name(source, param)
        refused = ApiError(
            403,
            f"{source!r} may not be loaded: it is neither in the server's folder of adapters (--adapters) nor matched "
            "by a pattern of --allow-on-demand.",
            "not_allowed",
            param,
        )
        # A folder of that name below the working directory would be taken for the hub's.
        if HUB_ID.fullmatch(source) and self.matches(source) and not Path(source).exists():
            return source
        if source.startswith("~"):
            raise refused
        try:
            path = (self.root / source if self.root is not None else Path(source)).resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise refused from error
        if not path.is_absolute() or (self.root is None and not Path(source).is_absolute()):
            raise refused
        inside = self.root is not None and self.root in path.parents
        if not inside and not (Path(source).is_absolute() and self.matches(str(path))):
            raise refused
        if not path.is_dir():
            raise ApiError(400, f"{source!r} is no folder.", "not_a_folder", param)
        return str(path)
