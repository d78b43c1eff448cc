"""Which adapters Serve counts as residing in a replica, and when one that it evicts may be unloaded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress


class Residents:
    """Used from one event loop.

    Serve evicts the adapter that was asked for longest ago, also while requests use it or wait for a slot with it; a
    request whose adapter is unloaded would fail. So it is unloaded when the last of them has ended.

    Args:
        unload: forgets an adapter.
    """

    def __init__(self, unload: Callable[[str], Awaitable[None]]) -> None:
        self._unload = unload
        self._here: set[str] = set()
        self._users: Counter[str] = Counter()
        self._leaving: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._here

    def enter(self, name: str) -> Resident:
        """Count an adapter as residing here, until the object that stands for it is deleted."""
        self._here.add(name)
        loop = asyncio.get_running_loop()
        return Resident(lambda: loop.call_soon_threadsafe(self._evict, name))

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        """A block in which an adapter is not unloaded."""
        while (task := self._leaving.get(name)) is not None:
            await asyncio.wait({task})
        self._users[name] += 1
        try:
            yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                if name not in self._here:
                    self._leave(name)

    def _evict(self, name: str) -> None:
        self._here.discard(name)
        if name not in self._users:
            self._leave(name)

    def _leave(self, name: str) -> None:
        async def leave() -> None:
            try:
                await self._unload(name)
            finally:
                del self._leaving[name]

        if name not in self._leaving:
            self._leaving[name] = asyncio.create_task(leave())


class Resident:
    """Stands for an adapter in Serve's cache of multiplexed models.

    Serve calls `__del__` when it evicts one, and Python does so again afterwards.
    """

    def __init__(self, evict: Callable[[], object]) -> None:
        self._evict: Callable[[], object] | None = evict

    def __del__(self) -> None:
        evict, self._evict = self._evict, None
        if evict is not None:
            with suppress(RuntimeError):  # the loop has ended
                evict()
