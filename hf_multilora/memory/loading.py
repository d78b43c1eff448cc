"""How adapters come into host memory and leave it: register, reload, unload, and reading again what was dropped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from ..errors import AdapterExistsError, AdapterNotFoundError, SlotError
from ..report import megabytes
from .contents import entries_of
from .core import StoreCore
from .lease import Grant, Ticket
from .pack import PackedAdapter, pack
from .registry import Entry, Loaded, Version, next_generation

if TYPE_CHECKING:
    from ..adapters.match import Factor

logger = logging.get_logger(__name__)

_LARGEST = 3  # entries that a refusal names


class LoadingStore(StoreCore):
    """The part of AdapterStore that knows names and loaders."""

    def pack(self, factors: Iterable[Factor], **extras: Any) -> PackedAdapter:
        """`pack` for this store's layout, dtype and device."""
        # Page-locking needs a CUDA context; threads begin with the first device, which may be another one's.
        cuda = next((arena.device for arena in self.arenas if arena.device.type == "cuda"), None)
        with torch.cuda.device(cuda) if cuda is not None else nullcontext():
            return pack(factors, self.layout, self.arena.dtype, pin=self.pin_memory, **extras)

    def names(self) -> list[str]:
        """Registered names, in the order of registration."""
        with self._lock:
            return list(self._registry.entries)

    def pinned(self) -> list[str]:
        """Names of pinned adapters."""
        with self._cond:
            return [name for name, entry in self._registry.entries.items() if entry.pinned]

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._registry.entries

    def entry(self, name: str) -> Entry:
        """Raises: AdapterNotFoundError, with the closest names."""
        with self._lock:
            return self._registry.get(name)

    def register(
        self,
        name: str,
        load: Callable[[], Loaded],
        *,
        reload: bool = False,
        evictable: bool = True,
        again: Callable[[], Loaded] | None = None,
    ) -> Entry:
        """Load an adapter into host memory under `name`.

        `again`, or `load` itself, is kept, and called when the block was dropped from host memory. `evictable=False`
        (tensors in memory, which cannot be read again) never drops it. With `reload=True` an adapter of that name is
        replaced under a new generation: calls in flight end on the old weights. On any error everything stays as it
        was.

        Raises:
            AdapterExistsError: the name is taken and `reload` is False.
            SlotError: it does not fit a slot or max_lora_rank, or host memory is full of what must stay.
            Whatever `load` raises.
        """
        with self._turn(name):
            return self._load(name, load, reload, evictable, again or load)

    def ensure(self, name: str, load: Callable[[], Loaded], *, evictable: bool = True) -> Entry:
        """The adapter of that name, loaded now if there is none. Threads that ask at once load it once."""
        with self._turn(name):
            with self._lock:
                entry = self._registry.entries.get(name)
            return entry or self._load(name, load, False, evictable, load)

    def _load(
        self, name: str, load: Callable[[], Loaded], reload: bool, evictable: bool, again: Callable[[], Loaded]
    ) -> Entry:
        with self._lock:
            old = self._registry.entries.get(name)
            if old is not None and not reload:
                raise AdapterExistsError(
                    f"An adapter {name!r} is loaded already, from {old.version.loaded.source}. Pass reload=True to "
                    "replace it, or choose another name."
                )
            if not evictable:
                self._registry.check_room(name)
        loaded, packed, ms = self._read(name, load)
        with self._changing():
            if self._registry.entries.get(name) is not old:
                raise AdapterNotFoundError(f"Adapter {name!r} was unloaded while it was being loaded again.")
            if not evictable:
                self._registry.check_room(name)
            block = self._check_bytes(f"Adapter {name!r}", self._in_dtype(packed))
            version = Version.of(loaded, block, next_generation(), again, evictable=evictable, load_ms=ms)
            version = replace(version, cast=block is not packed)
            entry = old or Entry(name, version)
            if old is not None:
                old.version = version
                self._slots.retire(name)
            self._touch(entry)
            self._account(block, ms)
            self._registry.entries[name] = entry
        return entry

    def _read(self, name: str, load: Callable[[], Loaded]) -> tuple[Loaded, PackedAdapter, float]:
        """Call a loader and check that what it gives fits. The lock is not held."""
        began = time.perf_counter()
        loaded = load()
        packed = loaded.packed
        assert packed is not None, "a loader returns a block"
        if packed.rank > self.config.max_lora_rank:
            raise SlotError(
                f"Adapter {name!r} has rank {packed.rank}, more than max_lora_rank={self.config.max_lora_rank}. "
                f"Enable the model with max_lora_rank={packed.rank} or more."
            )
        ms = (time.perf_counter() - began) * 1e3 if loaded.read_ms is None else loaded.read_ms
        return loaded, self._check_bytes(f"Adapter {name!r}", packed), ms

    def _check_bytes(self, what: str, packed: PackedAdapter, slot_bytes: Sequence[int] | None = None) -> PackedAdapter:
        """Raises: SlotError where a part of the block is larger than its slot (`slot_bytes` says how large these
        are to be, by group)."""
        needed = [stop - start for start, stop in packed.parts]
        most = max(needed)
        for nbytes, arena, room in zip(
            needed, self.arenas, slot_bytes or [a.slot_bytes for a in self.arenas], strict=True
        ):
            if nbytes > room:
                largest = sorted(entries_of(packed).items(), key=lambda item: -item[1])[:_LARGEST]
                listed = ", ".join(f"{name} {megabytes(nbytes)}" for name, nbytes in largest)
                where = f" on {arena.device}" if self.spread else ""
                raise SlotError(
                    f"{what} needs {nbytes} bytes{where}, a slot holds {room}{' there' if where else ''}. Enable the "
                    f"model with slot_bytes={most} or more. Its largest entries: {listed}."
                )
        return packed

    def _account(self, packed: PackedAdapter, ms: float) -> None:
        self._registry.counters.nbytes += packed.nbytes
        self._registry.counters.ms += ms

    def _read_again(self, entry: Entry) -> None:
        """Bring a dropped block back; its holders keep it from being dropped at once. The lock is not held.

        Content that is not what was dropped makes a new generation, and is reported.
        """
        name = entry.name
        with self._turn(name):
            with self._lock:
                before = entry.version
                if before.packed is not None or self._registry.entries.get(name) is not entry:
                    return
            loaded, packed, ms = self._read(name, before.load)
            before.hashed().same_content(loaded, packed)  # hashes outside the lock; the digests are kept
            with self._changing():
                if self._registry.entries.get(name) is not entry:
                    return
                now = entry.version.hashed()
                same = now.same_content(loaded, packed)
                generation = now.generation if same else next_generation()
                block = self._check_bytes(f"Adapter {name!r}", self._in_dtype(packed))
                version = Version.of(loaded, block, generation, now.load, evictable=now.evictable, load_ms=ms)
                entry.version = replace(version, cast=block is not packed)
                if not same:
                    self._slots.retire(name)
                self._account(block, ms)
        if not same:
            why = "can no longer be compared with" if same is None else "is no longer"
            logger.warning(
                f"Adapter {name!r} was read again from {loaded.source} and {why} what was loaded before: it counts as "
                f"reloaded (generation {generation}); KV caches written with the old weights are refused."
            )

    def unload(self, name: str, timeout: float | None = None) -> None:
        """Forget an adapter: new calls do not see the name from now on. Returns when calls in flight have left it.

        Its pin, if any, goes with it.

        Raises:
            AdapterNotFoundError: there is none.
            SlotError: this thread's own call uses it (nothing was changed); or calls in flight still do after
                `timeout` seconds, or wait for this one (it is unloaded, and its slot is freed when they end).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changing():
            entry = self._registry.get(name)
            users = self._slots.users_of(name)
            if any(user.thread == threading.get_ident() for user in users):
                raise SlotError(f"Adapter {name!r} cannot be unloaded from within a call that uses it.")
            del self._registry.entries[name]
            entry.pinned = False
            entry.version = entry.version.forgotten()
            self._slots.retire(name)
            self._transfer.collect()

            def left() -> set[Grant]:
                return {user for slot in self._slots for user in slot.users} & users

            ticket = Ticket(lambda stuck: not any(user.thread in stuck for user in left()), in_line=False)
            later = "It is unloaded, and its slot is freed when they end."
            with self._waiting(ticket):
                while left():
                    if self._line.hopeless(ticket):
                        raise SlotError(f"Adapter {name!r} is used by calls that wait for this one. {later}")
                    if deadline is not None and time.monotonic() >= deadline:
                        raise SlotError(
                            f"Adapter {name!r} is still used by {len(left())} calls after {timeout} s. {later}"
                        )
                    self._sleep(deadline)
