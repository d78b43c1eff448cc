"""Which names may be named: what is registered, what lies in the adapters' folder, and what the operator has allowed.

Names come from clients. Nothing is read before a name has been found to be allowed, and no weight before its size and
rank have been.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import time
import unicodedata
from collections import OrderedDict
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ..errors import AdapterExistsError, ConfigError, MultiLoraError, closest
from .engine import Engine
from .limits import CONFIG, HUB_ID, Limits
from .problems import ApiError, of_adapter
from .settings import Settings

GROUP = "hf_multilora.resolvers"
_LISTED_S = 1.0


def check_name(name: str, param: str = "model") -> None:
    """Raises: ApiError for a name that can be none: empty, too long, or with characters that are not for reading."""
    if not name.strip() or len(name.encode("utf-8", "replace")) > 512:
        raise ApiError(400, f"{param}: expected a name of 1 to 512 bytes.", "invalid_name", param)
    bad = next((c for c in name if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")), None)
    if bad is not None:
        raise ApiError(400, f"{param} holds the character U+{ord(bad):04X}, which no name may.", "invalid_name", param)


class Resolver:
    """Finds and loads adapters by name; one load at a time for each name, however many requests wait for it.

    Args:
        base: the base model's name.

    Raises:
        ConfigError: a plug-in that is not installed, or no function.
    """

    def __init__(self, engine: Engine, settings: Settings, base: str) -> None:
        self.engine, self.settings, self.base = engine, settings, base
        self.root = None if settings.adapters is None else Path(settings.adapters).resolve()
        self._plugins = [(name, _plugin(name)) for name in settings.resolvers]
        self._limits = Limits(settings.max_adapter_bytes, engine.multilora.config.max_lora_rank, settings.offline)
        self._loading: dict[str, asyncio.Task[Any]] = {}
        self._listed: tuple[float, list[str]] = (0.0, [])
        self._unloading: set[asyncio.Task[Any]] = set()
        self._asked: OrderedDict[str, None] = OrderedDict()  # loaded because somebody asked, longest ago first

    # -- names

    def names(self) -> list[str]:
        """Every name that can be named without a load being refused for its name: registered, or in the folder."""
        return sorted({*self.engine.multilora.adapters, *self.folder_names()} - {self.base})

    def folder_names(self) -> list[str]:
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
                if self._in_folder(entry.name) is not None:
                    found.append(entry.name)
            except (ApiError, OSError):
                continue
        return sorted(found)

    async def ensure(self, name: str) -> str | None:
        """The adapter that a request's `model` names, registered now; None: the base.

        Raises:
            ApiError: 404 no such name, 400 an adapter that cannot be served, 504 a load that took too long.
        """
        check_name(name)
        if name == self.base:
            return None
        if name in self._asked:
            self._asked.move_to_end(name)
        if not self.engine.registered(name):
            await self._patiently(name)
            self._keep(name)
        return name

    async def load(self, name: str, path: str | None, replace: bool) -> Any:
        """Load an adapter that an operator names; returns its LoadReport.

        Args:
            path: what is allowed: in the adapters' folder, or matched by a pattern. None: where it came from before.
            replace: an adapter of this name that exists.

        Raises:
            ApiError
        """
        check_name(name, "lora_name")
        if name in (self.base, "__base__"):
            raise ApiError(400, f"lora_name={name!r} is the base model's name.", "invalid_name", "lora_name")
        if replace and path is None and not self.engine.registered(name):
            raise self.not_found(name, "lora_name")

        def work() -> Any:
            handle = self.engine.multilora
            if path is None:
                source = handle.adapters[name].source
                if Path(source).is_dir():
                    self._limits.check(source)
                return handle.reload(name)
            return handle.load(self._limits.check(self._allowed(path)), name, reload=replace, **self._options())

        try:
            return await asyncio.wait_for(asyncio.to_thread(work), self.settings.load_timeout_s)
        except (asyncio.TimeoutError, MultiLoraError, ApiError, OSError) as error:
            raise self._clean(error, "lora_path" if path else "lora_name") from error

    async def load_folder(self) -> list[str]:
        """Load every adapter of the folder; returns messages of those that cannot be served."""
        failed = []
        for name in self.folder_names():
            try:
                await self._patiently(name)
            except ApiError as error:
                failed.append(f"{name}: {error.message}")
        return failed

    # -- loading

    async def _patiently(self, name: str) -> None:
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(asyncio.to_thread(self._load, name))
            task.add_done_callback(lambda done: (self._loading.pop(name, None), done.cancelled() or done.exception()))
        try:
            # A client that goes away does not take the load with it: others may wait for the same.
            await asyncio.wait_for(asyncio.shield(task), self.settings.load_timeout_s)
        except AdapterExistsError:
            pass  # loaded by somebody else meanwhile
        except (asyncio.TimeoutError, MultiLoraError, ApiError, OSError) as error:
            raise self._clean(error, "model") from error

    def _load(self, name: str) -> None:
        self.engine.multilora.load(self._limits.check(self._find(name)), name, **self._options())

    def _keep(self, name: str) -> None:
        """Count an adapter that was asked for; beyond the limit, the one asked for longest ago goes."""
        self._asked[name] = None
        self._asked.move_to_end(name)
        while len(self._asked) > self.settings.max_on_demand:
            old, _ = self._asked.popitem(last=False)
            if self.engine.registered(old):
                # It waits for requests that use it; nobody waits for that.
                task = asyncio.create_task(asyncio.to_thread(self._unload, old))
                self._unloading.add(task)
                task.add_done_callback(self._unloading.discard)

    def _unload(self, name: str) -> None:
        with suppress(MultiLoraError):
            self.engine.multilora.unload(name)

    def _options(self) -> dict[str, Any]:
        return {"local_files_only": self.settings.offline}

    def _find(self, name: str) -> str:
        """Where an unregistered name is to be loaded from. Raises: ApiError 404 where it may not be."""
        found = self._in_folder(name)
        if found is not None:
            return str(found)
        if self._matches(name):
            return self._allowed(name, "model")
        for plugin, resolve in self._plugins:
            try:
                source = resolve(name)
            except Exception as error:
                raise ApiError(502, f"The resolver {plugin!r} failed: {type(error).__name__}.", "resolver") from error
            if source is not None:
                return os.fspath(source)
        raise self.not_found(name)

    def not_found(self, name: str, param: str = "model") -> ApiError:
        known = [self.base, *self.names()]
        shown = ", ".join(map(repr, known[:8])) + (" …" if len(known) > 8 else "")
        text = f"No model {name!r}.{closest(name, known)} There are: {shown}. GET /v1/models lists all."
        return ApiError(404, text, "model_not_found", param)

    def _in_folder(self, name: str) -> Path | None:
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

    def _matches(self, name: str) -> bool:
        """Whether a pattern allows this hub id, or this absolute path, as it stands."""
        is_path = name.startswith("/")
        if not is_path and not HUB_ID.fullmatch(name):
            return False
        patterns = [pattern for pattern in self.settings.allow_on_demand if pattern.startswith("/") == is_path]
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    def _allowed(self, source: str, param: str = "lora_path") -> str:
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
        if HUB_ID.fullmatch(source) and self._matches(source) and not Path(source).exists():
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
        if not inside and not (Path(source).is_absolute() and self._matches(str(path))):
            raise refused
        if not path.is_dir():
            raise ApiError(400, f"{source!r} is no folder.", "not_a_folder", param)
        return str(path)

    def _clean(self, error: BaseException, param: str) -> ApiError:
        """An error for a client: without the paths of this machine."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
            limit = self.settings.load_timeout_s
            return ApiError(
                504, f"Loading the adapter took longer than {limit:g} s; it goes on.", "load_timeout", param
            )
        if isinstance(error, OSError):
            return ApiError(400, f"The adapter cannot be read ({type(error).__name__}).", "adapter_refused", param)
        found = of_adapter(error, param)  # type: ignore[arg-type]
        if self.root is not None:
            found.message = found.message.replace(f"{self.root}{os.sep}", "")
        return found


def _plugin(name: str) -> Any:
    known = {point.name: point for point in entry_points(group=GROUP)}
    if name not in known:
        raise ConfigError(f"No entry point {name!r} in the group {GROUP}.{closest(name, known)}")
    found = known[name].load()
    if not callable(found):
        raise ConfigError(f"The entry point {name!r} of {GROUP} is no function: expected name -> source or None.")
    return found
