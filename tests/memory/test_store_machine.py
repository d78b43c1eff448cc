"""AdapterStore against a simple model of it: any sequence of operations, and every lease keeps its bytes."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from memory_bed import Files, block, holds, in_host, store_of

from hf_multilora.errors import AdapterExistsError, AdapterNotFoundError, SlotError
from hf_multilora.memory.pack import PackedAdapter, compose

NAMES = ["a", "b", "c", "d"]
NAME = st.sampled_from(NAMES)
CONTENT = st.integers(0, 40)
PAIRS = st.sampled_from([("a", "b"), ("b", "c"), ("a", "d")])
MIX = st.builds(lambda pair, w: tuple((name, w) for name in pair), PAIRS, st.sampled_from([0.5, -1.0]))
KEYS = st.lists(NAME | MIX, min_size=1, max_size=3, unique=True)


class Known:
    """What the model knows of a registered adapter."""

    def __init__(self, content: int, evictable: bool) -> None:
        self.content, self.evictable, self.pinned = content, evictable, False


class StoreMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    @initialize(max_loras=st.integers(1, 3), spare=st.sampled_from([0, 1, None]))
    def start(self, max_loras: int, spare: int | None) -> None:
        self.max_loras = max_loras
        self.limit = None if spare is None else max_loras + spare
        self.files = Files()
        self.dtype = torch.float32
        self.store = store_of(max_loras=max_loras, max_cpu_loras=self.limit)
        self.known: dict[str, Known] = {}
        self.live: dict[int, tuple[object, dict[object, PackedAdapter]]] = {}  # id -> lease, key -> bytes
        self.generations: dict[object, bytes] = {}
        self.asked = 0
        for content, name in enumerate(NAMES):
            self.register(name, content, True, False)

    # -- what the model says

    def block(self, content: int) -> PackedAdapter:
        return block(content, self.dtype)

    def expected(self, key) -> PackedAdapter:
        if isinstance(key, str):
            return self.block(self.known[key].content)
        parts = [(self.block(self.known[name].content), weight) for name, weight in sorted(key)]
        return compose(parts, self.store.layout, self.dtype, pin=False)

    def busy(self) -> set[int]:
        return {slot for lease, _ in self.live.values() for slot in lease.slots.values()}

    def names_in_use(self) -> set[str]:
        keys = [key for lease, _ in self.live.values() for key in lease.slots]
        return {name for key in keys for name in ([key] if isinstance(key, str) else [n for n, _ in key])}

    def tag(self, key) -> object:
        if isinstance(key, str):
            return self.store.entry(key).tag
        return tuple((self.store.entry(name).tag, weight) for name, weight in sorted(key))

    def fits(self, keys) -> bool:
        """Whether slots for all of `keys` can be had now, given who is in use and what is pinned."""
        held = {tag for lease, _ in self.live.values() for tag in lease.tags.values()}
        pins = {name for name, known in self.known.items() if known.pinned}
        slots = {adapter.name: adapter.slot for adapter in self.store.status().adapters}
        idle = self.max_loras - len(self.busy())
        idle_pins = [name for name in pins if slots[name] is not None and slots[name] not in self.busy()]
        homeless = [name for name in pins if slots[name] is None]
        assert not homeless or idle == len(idle_pins), "a pinned adapter has no slot although one is idle"
        wanted = {self.tag(key) for key in keys if key not in pins or key in homeless}
        if len(set(map(self.tag, keys))) > self.max_loras - len(pins - set(keys)):
            return False
        return len(wanted - held) <= idle - len(idle_pins)

    # -- operations

    @rule(name=NAME, content=CONTENT, evictable=st.booleans(), reload=st.booleans())
    def register(self, name, content, evictable, reload) -> None:
        self.files.contents[name] = content
        fixed = {n for n, known in self.known.items() if known.pinned or not known.evictable} | {name}
        load = self.files.loader(name)
        if name in self.known and not reload:
            with pytest.raises(AdapterExistsError):
                self.store.register(name, load, evictable=evictable)
        elif not evictable and self.limit is not None and len(fixed) > self.limit:
            with pytest.raises(SlotError):
                self.store.register(name, load, evictable=False, reload=reload)
        else:
            entry = self.store.register(name, load, evictable=evictable, reload=reload)
            assert entry.tag not in self.generations
            known = Known(content, evictable)
            known.pinned = name in self.known and self.known[name].pinned
            self.known[name] = known

    @precondition(lambda self: self.known)
    @rule(name=NAME)
    def fail_to_reload(self, name) -> None:
        self.files.contents[name], before = OSError("broken"), self.files.contents.get(name, 0)
        status = self.store.status()
        with pytest.raises(OSError, match="broken"):
            self.store.register(name, self.files.loader(name), reload=True)
        assert self.store.status() == status
        self.files.contents[name] = before

    @rule(name=NAME, content=CONTENT)
    def change_the_file(self, name, content) -> None:
        """Matters when the adapter is dropped from host memory and read again."""
        self.files.contents[name] = content

    @rule(target=leases, keys=KEYS)
    def acquire(self, keys):
        names = {name for key in keys for name in ([key] if isinstance(key, str) else [n for n, _ in key])}
        if not names <= set(self.known):
            with pytest.raises(AdapterNotFoundError):
                self.store.acquire(keys, block=False)
            return None
        dropped = names - in_host(self.store)
        before = {name: self.store.entry(name).generation for name in names}
        lease = None
        with contextlib.suppress(SlotError):
            lease = self.store.acquire(keys, block=False)
        for name in dropped:  # read again, unless no slot missed it
            changed = self.store.entry(name).generation != before[name]
            if changed or name in in_host(self.store):
                assert changed == (self.files.contents[name] != self.known[name].content)
                self.known[name].content = self.files.contents[name]
        assert all(self.store.entry(n).generation == before[n] for n in names - dropped)
        if lease is None:
            assert not self.fits(keys)
            return None
        self.asked += len({self.tag(key) for key in keys})
        for key in keys:
            assert lease.tags[key] == self.tag(key)
        self.live[id(lease)] = (lease, {key: self.expected(key) for key in keys})
        return lease

    @precondition(lambda self: self.known)
    @rule(keys=KEYS)
    def acquire_broken_files(self, keys) -> None:
        names = {name for key in keys for name in ([key] if isinstance(key, str) else [n for n, _ in key])}
        if not names <= set(self.known) or not (names - in_host(self.store)):
            return
        contents = dict(self.files.contents)
        self.files.contents = dict.fromkeys(contents, OSError("broken"))
        tags = {name: self.store.entry(name).tag for name in names}
        with contextlib.suppress(OSError, SlotError):
            lease = self.store.acquire(keys, block=False)
            self.asked += len(set(lease.tags.values()))
            self.store.release(lease)
        self.files.contents = contents
        assert {name: self.store.entry(name).tag for name in names} == tags

    @rule(lease=consumes(leases))
    def release(self, lease) -> None:
        if lease is not None:
            self.store.release(lease)
            self.store.release(lease)
            del self.live[id(lease)]

    @rule(name=NAME)
    def pin(self, name) -> None:
        if name not in self.known:
            with pytest.raises(AdapterNotFoundError):
                self.store.pin(name)
            return
        dropped = name not in in_host(self.store)
        fixed = {n for n, known in self.known.items() if known.pinned or not known.evictable} | {name}
        room = self.limit is None or len(fixed) <= self.limit
        fits = self.fits([name])
        if dropped and room:
            self.known[name].content = self.files.contents[name]
        if not room:
            with pytest.raises(SlotError, match="max_cpu_loras"):
                self.store.pin(name)
        elif fits:
            self.store.pin(name)
            self.known[name].pinned = True
            self.asked += 1
        else:
            # In one thread, whatever is in the way is pinned or held by the thread itself: no wait could end.
            with pytest.raises(SlotError):
                self.store.pin(name)
            if dropped and name not in in_host(self.store):  # refused before or after it was read; look which
                self.known[name].content = self.content_of_dropped(name)

    def content_of_dropped(self, name) -> int:
        digest = self.store.entry(name).report().fingerprint
        return next(content for content in range(41) if self.block(content).digest() == digest)

    @rule(name=NAME)
    def unpin(self, name) -> None:
        if name in self.known:
            self.store.unpin(name)
            self.known[name].pinned = False

    @rule(name=NAME)
    def unload(self, name) -> None:
        if name not in self.known:
            with pytest.raises(AdapterNotFoundError):
                self.store.unload(name)
        elif name in self.names_in_use():
            with pytest.raises(SlotError, match="within a call"):
                self.store.unload(name)
        else:
            self.store.unload(name)
            del self.known[name]

    @rule(names=st.lists(NAME, max_size=3, unique=True))
    def prefetch(self, names) -> None:
        names = [name for name in names if name in self.known][: self.max_loras]
        dropped = set(names) - in_host(self.store)
        for name in self.store.prefetch(names).result(10):
            slot = next(a.slot for a in self.store.status().adapters if a.name == name)
            if name in dropped:
                self.known[name].content = self.files.contents[name]
                dropped.discard(name)
            assert slot is None or holds(self.store, slot, self.expected(name))
        for name in dropped:  # read, but no slot was free; perhaps dropped again
            self.known[name].content = self.files.contents[name]

    @precondition(lambda self: not self.live)
    @rule()
    def deep_copy(self) -> None:
        twin = copy.deepcopy(self.store)
        for name in self.known:
            assert twin.entry(name).tag == self.store.entry(name).tag
        self.store, self.asked = twin, 0

    # -- what always holds

    @invariant()
    def leases_keep_their_bytes(self) -> None:
        for lease, contents in getattr(self, "live", {}).values():
            for key, packed in contents.items():
                assert holds(self.store, lease.slots[key], packed)
                seen = self.generations.setdefault(lease.tags[key], packed.block.numpy().tobytes())
                assert seen == packed.block.numpy().tobytes()

    @invariant()
    def different_weights_have_different_slots(self) -> None:
        by_slot: dict[int, object] = {}
        for lease, _ in getattr(self, "live", {}).values():
            for key, slot in lease.slots.items():
                assert by_slot.setdefault(slot, lease.tags[key]) == lease.tags[key]

    @invariant()
    def tables_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        status = self.store.status()
        assert [a.name for a in status.adapters] == self.store.names() and set(self.known) == set(self.store.names())
        host, in_use = in_host(self.store), self.names_in_use()
        for adapter in status.adapters:
            known = self.known[adapter.name]
            assert adapter.pinned == known.pinned
            if adapter.slot is not None:
                assert status.slots[adapter.slot] == adapter.name and adapter.name in host
                assert holds(self.store, adapter.slot, self.expected(adapter.name))
            if known.pinned or not known.evictable:
                assert adapter.name in host
        in_flight = {tag for lease, _ in self.live.values() for tag in lease.tags.values()}
        assert {name for name in self.known if self.store.entry(name).tag in in_flight} <= host
        must_stay = {n for n in host if n in in_use or self.known[n].pinned or not self.known[n].evictable}
        assert self.limit is None or len(host) <= max(self.limit, len(must_stay))
        assert status.resident.hits + status.resident.misses == self.asked
        assert self.store.arena.tail.any().item() is False

    def teardown(self) -> None:
        for lease, _ in getattr(self, "live", {}).values():
            self.store.release(lease)
        if hasattr(self, "store"):
            assert not any(slot.users or slot.stale for slot in self.store._slots)
            assert not any(entry.holders for entry in self.store._registry)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=400, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
