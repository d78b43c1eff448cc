"""Which names may be named: what is registered, what lies in the adapters' folder, and what the operator has allowed.

Names come from clients. Nothing is read before a name has been found to be allowed, and no weight before its size and
rank have been.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from ..errors import AdapterExistsError, ConfigError, MultiLoraError, closest
from .engine import Engine
from .limits import Limits
from .places import Places, check_name
from .problems import ApiError, of_adapter
from .settings import Settings

GROUP = "hf_multilora.resolvers"
T = TypeVar("T")


class Resolver:
    """Finds and loads adapters by name; one load at a time for each name, however many requests wait for it.

    Args:
        base: the base model's name.

    Raises:
        ConfigError: a plug-in that is not installed, or no function.
    """

    def __init__(self, engine: Engine, settings: Settings, base: str) -> None:
        self.engine, self.settings, self.base = engine, settings, base
        self.places = Places(settings.adapters, settings.allow_on_demand)
        self._plugins = [(name, _plugin(name)) for name in settings.resolvers]
        self._limits = Limits(settings.max_adapter_bytes, engine.multilora.config.max_lora_rank, settings.offline)
        self._slow = ThreadPoolExecutor(8, thread_name_prefix="hf_multilora_adapters")
        # Of its own: what waits for running requests must not keep adapters from being loaded.
        self._patient = ThreadPoolExecutor(8, thread_name_prefix="hf_multilora_waiting")
        self._loading: dict[str, asyncio.Future[None]] = {}
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self._users: Counter[str] = Counter()  # requests, from before their adapter is registered to their end
        self._asked: OrderedDict[str, None] = OrderedDict()  # loaded because somebody asked, longest ago first

    # -- names

    def names(self) -> list[str]:
        """Every name that can be named without a load being refused for its name: registered, or in the folder."""
        return sorted({*self.engine.multilora.adapters, *self.places.names()} - {self.base})

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[str | None]:
        """The adapter that a request's `model` names, registered in the block; None: the base.

        Raises:
            ApiError: 404 no such name, 400 an adapter that cannot be served, 504 a load that took too long.
        """
        check_name(name)
        if name == self.base:
            yield None
            return
        while (leaving := self._leaving.get(name)) is not None:
            await asyncio.wait({leaving})
        self._users[name] += 1
        try:
            if name in self._asked:
                self._asked.move_to_end(name)
            if not self.engine.registered(name):
                await self._once(name)
                self._asked[name] = None
                self._make_room()
            yield name
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self._make_room()

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
            raise await asyncio.to_thread(self.not_found, name, "lora_name")

        def work() -> Any:
            handle = self.engine.multilora
            if path is None:
                source = handle.store.entry(name).version.loaded.source
                if Path(source).is_dir():
                    self._limits.check(source)
                return handle.reload(name)
            return handle.load(self._limits.check(self.places.allowed(path)), name, reload=replace, **self._options())

        try:
            report = await asyncio.wait_for(self.slowly(work), self.settings.load_timeout_s)
        except (asyncio.TimeoutError, MultiLoraError, ApiError, OSError) as error:
            raise self._clean(error, "lora_path" if path else "lora_name") from error
        self._asked.pop(name, None)  # the operator's from now on
        return report

    async def unload(self, name: str) -> None:
        """Forget an adapter, once the requests that use it have ended. Raises: MultiLoraError."""
        await self.patiently(self.engine.multilora.unload, name)
        self._asked.pop(name, None)

    async def load_folder(self) -> list[str]:
        """Load every adapter of the folder; returns messages of those that cannot be served."""
        failed = []
        for name in self.places.names():
            try:
                await self._once(name)
            except ApiError as error:
                failed.append(f"{name}: {error.message}")
        return failed

    # -- loading

    def slowly(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run what may take long in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._slow, work, *args)

    def patiently(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run what may wait for running requests in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._patient, work, *args)

    async def _once(self, name: str) -> None:
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = self.slowly(self._load, name)
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

    def _make_room(self) -> None:
        """Beyond the limit of adapters that were asked for, those asked for longest ago go; not such as requests run
        or wait with. Pinned ones do not count."""
        if len(self._asked) <= self.settings.max_on_demand:
            return
        pinned = set(self.engine.multilora.store.pinned())
        counted = [name for name in self._asked if name not in pinned]
        spare = max(0, len(counted) - self.settings.max_on_demand)
        for name in [name for name in counted if name not in self._users][:spare]:
            del self._asked[name]
            task = self._leaving[name] = self.patiently(self._unload, name)
            task.add_done_callback(functools.partial(self._left, name))

    def _left(self, name: str, task: asyncio.Future[None]) -> None:
        del self._leaving[name]

    def _unload(self, name: str) -> None:
        with suppress(MultiLoraError):
            self.engine.multilora.unload(name)

    def _options(self) -> dict[str, Any]:
        return {"local_files_only": self.settings.offline}

    def _find(self, name: str) -> str:
        """Where an unregistered name is to be loaded from. Raises: ApiError 404 where it may not be."""
        found = self.places.in_folder(name)
        if found is not None:
            return str(found)
        if self.places.matches(name):
            return self.places.allowed(name, "model")
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
        if self.places.root is not None:
            found.message = found.message.replace(f"{self.places.root}{os.sep}", "")
        return found


def _plugin(name: str) -> Any:
    known = {point.name: point for point in entry_points(group=GROUP)}
    if name not in known:
        raise ConfigError(f"No entry point {name!r} in the group {GROUP}.{closest(name, known)}")
    found = known[name].load()
    if not callable(found):
        raise ConfigError(f"The entry point {name!r} of {GROUP} is no function: expected name -> source or None.")
    return found
