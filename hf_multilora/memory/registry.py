"""Registered adapters: names, generations, and the host blocks that are kept, the least recently used going first.

Nothing here locks: the store calls it with its own lock held.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ..errors import AdapterNotFoundError, SlotError, closest
from ..report import CacheCounters, LoadReport
from .extras import Extras
from .pack import PackedAdapter

if TYPE_CHECKING:
    from .lease import Grant

# One counter for the whole process: a KV cache written under one generation never meets an equal number again, also
# not after an unload and a load, or in a copy of the model.
_generations = itertools.count(1)
_uids = itertools.count(1)


def next_generation() -> int:
    """A generation that no adapter of this process has had."""
    return next(_generations)


@dataclass(frozen=True)
class Loaded:
    """What a loader gives back: the block, and what a report says about it.

    `fingerprint` is the hub commit where there is one; None: the content of the block is hashed when it matters.
    `facts` are further fields of the report. `read_ms`: how long it took, where it was read before it was asked for.
    """

    packed: PackedAdapter | None
    source: str  # folder, hub id (with revision), or "memory"
    fingerprint: str | None = None
    base_model: str | None = None
    ignored: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)
    read_ms: float | None = None


@dataclass(frozen=True)
class Version:
    """One generation of an adapter. Frozen, so that an entry goes from one state to the next in one assignment."""

    generation: int
    loaded: Loaded  # its block is None where it was dropped from host memory
    modules: dict[str, int]  # path -> the largest rank of its sites
    rank: int
    nbytes: int
    load: Callable[[], Loaded]
    evictable: bool
    load_ms: float
    cast: bool = False  # the block came from another dtype by retarget, not from the files
    dropped: PackedAdapter | None = None  # the block that was dropped, until its content is hashed
    digest: str | None = None  # of the block that was dropped
    extras: Extras = Extras()  # of the block, also when that was dropped

    @classmethod
    def of(
        cls, loaded: Loaded, packed: PackedAdapter, generation: int, load: Callable[[], Loaded], *,
        evictable: bool, load_ms: float,
    ) -> Version:  # fmt: skip
        modules: dict[str, int] = {}
        for site, rank in packed.ranks.items():
            path = packed.layout.sites[site].path
            modules[path] = max(rank, modules.get(path, 0))
        return cls(
            generation, replace(loaded, packed=packed), modules, packed.rank, packed.nbytes, load, evictable, load_ms,
            extras=packed.extras,
        )  # fmt: skip

    @property
    def packed(self) -> PackedAdapter | None:
        return self.loaded.packed

    def without_block(self) -> Version:
        pending = None if self.cast or self.loaded.fingerprint else self.packed
        return replace(self, loaded=replace(self.loaded, packed=None), dropped=pending, digest=None)

    def hashed(self) -> Version:
        """The same, with the content of a dropped block hashed and the block let go."""
        return self if self.dropped is None else replace(self, digest=self.dropped.digest(), dropped=None)

    def forgotten(self) -> Version:
        """The same without any block, and without what it would be compared with."""
        return replace(self, loaded=replace(self.loaded, packed=None), dropped=None, digest=None, extras=Extras())

    def recast(self, packed: PackedAdapter) -> Version:
        """The same with the block in other dtypes, or pinned."""
        same = self.packed is not None and (self.packed.dtype, self.extras) == (packed.dtype, packed.extras)
        loaded = replace(self.loaded, packed=packed)
        return replace(self, loaded=loaded, nbytes=packed.nbytes, extras=packed.extras, cast=self.cast or not same)

    def same_content(self, loaded: Loaded, packed: PackedAdapter) -> bool | None:
        """Whether what was read again is what was dropped; None where that cannot be known."""
        if self.loaded.fingerprint or loaded.fingerprint:
            return self.loaded.fingerprint == loaded.fingerprint
        return None if self.digest is None else self.digest == packed.digest()

    @property
    def fingerprint(self) -> str:
        """Hub commit, or content hash; empty where a block was cast and then dropped."""
        if self.loaded.fingerprint:
            return self.loaded.fingerprint
        block = self.packed or self.dropped
        return block.digest() if block is not None else self.digest or ""


@dataclass(eq=False)
class Entry:
    """A registered adapter.

    Attributes:
        uid: stays the same over reloads; unloading and loading again gives another one.
        pinned: neither its slot nor its host block is ever evicted.
        holders: calls that need the host block and have no slot yet.
        used: moment of the last use, in the store's ticks.
        hits, misses, evictions: how often calls have found it in a slot, or not, and it was put out of one; mixes
            count for each of their parts.
    """

    name: str
    version: Version
    uid: int = field(default_factory=lambda: next(_uids))
    pinned: bool = False
    holders: WeakSet[Grant] = field(default_factory=WeakSet)
    used: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0

    @property
    def tag(self) -> tuple[int, int]:
        """(uid, generation): what a KV cache remembers."""
        return (self.uid, self.version.generation)

    @property
    def generation(self) -> int:
        return self.version.generation

    @property
    def packed(self) -> PackedAdapter | None:
        return self.version.packed

    @property
    def fixed(self) -> bool:
        """Whether the host block must stay."""
        return self.pinned or not self.version.evictable

    def report(self, *, hashed: bool = True) -> LoadReport:
        """What was loaded. `hashed=False` leaves the fingerprint empty where the content would have to be hashed."""
        version = self.version
        about = version.loaded
        return LoadReport(
            name=self.name,
            source=about.source,
            generation=version.generation,
            rank=version.rank,
            modules=dict(version.modules),
            nbytes=version.nbytes,
            load_ms=version.load_ms,
            fingerprint=version.fingerprint if hashed else about.fingerprint or "",
            base_model=about.base_model,
            ignored=list(about.ignored),
            left_out=list(about.left_out),
            warnings=list(about.warnings),
            **copy.deepcopy(dict(about.facts)),
        )

    def copy(self) -> Entry:
        """The same adapter for another store; the block is shared, since nobody writes it."""
        return Entry(self.name, self.version, self.uid, self.pinned, WeakSet(), self.used)


class Registry:
    """Entries by name, in the order of registration.

    Args:
        limit: blocks kept in host memory, None for no limit. More are held only while calls in flight use them.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.entries: dict[str, Entry] = {}
        self.counters = CacheCounters()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def get(self, name: Hashable) -> Entry:
        """Raises: AdapterNotFoundError, with the closest names."""
        entry = self.entries.get(name) if isinstance(name, str) else None
        if entry is None:
            known = closest(str(name), self.entries)
            known += f" Registered: {', '.join(map(repr, list(self.entries)[:8]))}." if self.entries else " None is."
            raise AdapterNotFoundError(
                f"No adapter {name!r} is registered.{known} Correct the name, or load it first with load_adapter."
            )
        return entry

    def check_room(self, name: str) -> None:
        """Raises: SlotError if `name` must stay in host memory and nothing of what is there may go."""
        fixed = {entry.name for entry in self if entry.fixed} | {name}
        if self.limit is not None and len(fixed) > self.limit:
            raise SlotError(
                f"Adapter {name!r} has no place in host memory: max_cpu_loras={self.limit}, and pinned adapters and "
                f"adapters given as tensors, which are never dropped, fill it: {', '.join(sorted(fixed - {name}))}. "
                "Unload or unpin one of them, or raise max_cpu_loras."
            )

    def overfull(self) -> bool:
        return self.limit is not None and sum(entry.packed is not None for entry in self) > self.limit

    def victim(self, in_use: Callable[[str], bool]) -> Entry | None:
        """The least recently used entry whose block may be dropped."""
        can_go = [
            entry
            for entry in self
            if entry.packed is not None and not entry.fixed and not entry.holders and not in_use(entry.name)
        ]
        return min(can_go, key=lambda entry: entry.used, default=None)
