"""AdapterStore in one thread: both levels of cache, pins, generations, reload, unload, mixes, prefetch, counters."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
from memory_bed import LAYOUT, RANK, Files, block, factor, holds, in_host, mixed, resident, store_of

from hf_multilora.config import MultiLoraConfig
from hf_multilora.errors import AdapterExistsError, AdapterNotFoundError, RoutingError, SlotError
from hf_multilora.memory.pack import pack
from hf_multilora.memory.registry import Loaded
from hf_multilora.memory.store import AdapterStore

ABCD = dict(a=1, b=2, c=3, d=4)


def use(store: AdapterStore, *keys) -> None:
    with store.acquire(keys):
        pass


# -- leases


def test_a_lease_holds_what_it_asked_for():
    store = store_of(Files(**ABCD), max_loras=3)
    mix = (("b", 0.5), ("a", -2.0))
    with store.acquire(["a", "c", mix, "a"]) as lease:
        assert list(lease.slots) == list(lease.tags) == ["a", "c", mix]
        assert len(set(lease.slots.values())) == 3
        assert holds(store, lease.slots["a"], block(1)) and holds(store, lease.slots["c"], block(3))
        assert holds(store, lease.slots[mix], mixed([(1, -2.0), (2, 0.5)]))
        assert lease.touched == set(block(1).ranks) | set(block(2).ranks) | set(block(3).ranks)
        a, b = store.entry("a"), store.entry("b")
        assert lease.tags["a"] == (a.uid, a.generation)
        assert lease.tags[mix] == ((a.tag, -2.0), (b.tag, 0.5))
        assert [adapter.in_use for adapter in store.status().adapters] == [1, 1, 1, 0]
    assert [adapter.in_use for adapter in store.status().adapters] == [0, 0, 0, 0]


def test_an_empty_lease_waits_for_nobody():
    store = store_of(Files(a=1), max_loras=1)
    with store.acquire(["a"]), store.acquire([]) as lease:
        assert lease.slots == {} and lease.touched == frozenset()
        lease.wait()


def test_release_twice_and_leases_of_one_slot():
    store = store_of(Files(**ABCD), max_loras=1)
    first, second = store.acquire(["a"]), store.acquire(["a"])
    store.release(first)
    store.release(first)
    with pytest.raises(SlotError, match="No room now for b"):
        store.acquire(["b"], block=False)
    store.release(second)
    use(store, "b")


def test_a_lost_lease_is_released_when_it_is_collected():
    store = store_of(Files(**ABCD), max_loras=1)
    lease = store.acquire(["a"])
    del lease
    gc.collect()
    with store.acquire(["b"], block=False) as lease:
        assert holds(store, lease.slots["b"], block(2))


@pytest.mark.parametrize("mix", [(), (("a", 1.0), ("a", 2.0)), (("a", float("nan")),), (("a", float("inf")),)])
def test_mixes_that_mean_nothing_are_refused(mix):
    store = store_of(Files(a=1))
    with pytest.raises(RoutingError):
        store.acquire([mix])


def test_mix_in_any_order_is_one_slot_and_is_cached():
    store = store_of(Files(**ABCD))
    one, two = (("a", 1.0), ("b", 2.0)), (("b", 2.0), ("a", 1.0))
    with store.acquire([one, two]) as lease:
        assert lease.slots[one] == lease.slots[two]
        slot = lease.slots[one]
    with store.acquire([two], block=False) as lease:
        assert lease.slots[two] == slot
    assert (store.status().resident.hits, store.status().resident.misses) == (1, 1)
    assert store.status().slots[slot] == "a*1+b*2"
    use(store, (("a", 1.0), ("b", 2.5)))
    assert resident(store) == {"a*1+b*2", "a*1+b*2.5"}


def test_mix_of_a_reloaded_adapter_is_composed_again():
    files = Files(a=1, b=2)
    store = store_of(files)
    mix = (("a", 1.0), ("b", 2.0))
    with store.acquire([mix]) as old:
        files.contents["a"] = 5
        store.register("a", files.loader("a"), reload=True)
        with store.acquire([mix]) as new:
            assert new.slots != old.slots and new.tags != old.tags
            assert holds(store, old.slots[mix], mixed([(1, 1.0), (2, 2.0)]))
            assert holds(store, new.slots[mix], mixed([(5, 1.0), (2, 2.0)]))
    assert store.status().slots.count("a*1+b*2") == 1


def test_mix_over_the_rank_or_the_slot_is_refused():
    store = store_of(max_loras=1)
    for name in "ab":
        packed = pack([factor("down", 0, 5)], LAYOUT, torch.float32, pin=False)
        store.register(name, lambda packed=packed: Loaded(packed, "memory"))
    with pytest.raises(SlotError, match=r"add up to 10 in 'down'.*max_lora_rank=8"):
        store.acquire([(("a", 1.0), ("b", 1.0))])
    tight = store_of(max_loras=1, slot_bytes=700)
    for name, site in (("a", ("down", 0)), ("b", ("qkv", 0))):
        packed = pack([factor(*site, 4)], LAYOUT, torch.float32, pin=False)
        tight.register(name, lambda packed=packed: Loaded(packed, "memory"))
    with pytest.raises(SlotError, match=r"Mix a\*1\+b\*1 needs \d+ bytes, a slot holds 768"):
        tight.acquire([(("a", 1.0), ("b", 1.0))])
    use(tight, "a")


def test_unknown_names_are_named_with_the_closest():
    store = store_of(Files(poet=1, sql=2))
    for act in (lambda: store.acquire(["poets"]), lambda: store.pin("poets"), lambda: store.unload("poets"),
                lambda: store.prefetch(["poets"]), lambda: store.entry("poets"), lambda: store.unpin("poets"),
                lambda: store.acquire([(("poets", 1.0),)])):  # fmt: skip
        with pytest.raises(AdapterNotFoundError, match="'poets'.*Closest: 'poet'"):
            act()
    assert "poet" in store and "poets" not in store and store.names() == ["poet", "sql"]


def test_more_keys_than_slots_are_refused_at_once():
    store = store_of(Files(**ABCD))
    with pytest.raises(SlotError, match="max_loras=2.*max_loras=3"):
        store.acquire(["a", "b", "c"])
    store.pin("d")
    with pytest.raises(SlotError, match=r"1 of 2 are pinned \(d\)"):
        store.acquire(["a", "b"])
    use(store, "a", "d")


# -- the two levels


@pytest.mark.parametrize("max_loras", [1, 2, 3])
@pytest.mark.parametrize("length", [5])
def test_every_order_of_use_evicts_the_least_recently_used(max_loras, length):
    files = Files(**ABCD)
    for order in itertools.product("abcd", repeat=length):
        store = store_of(files, max_loras=max_loras)
        lru: list[str] = []
        hits = evictions = 0
        for name in order:
            hits += name in lru
            if name in lru:
                lru.remove(name)
            elif len(lru) == max_loras:
                lru.pop(0)
                evictions += 1
            lru.append(name)
            with store.acquire([name], block=False) as lease:
                assert holds(store, lease.slots[name], block(ABCD[name]))
            assert resident(store) == set(lru), order
        counters = store.status().resident
        assert (counters.hits, counters.misses, counters.evictions) == (hits, length - hits, evictions)


def test_every_order_of_use_drops_the_least_recently_used_from_host_memory():
    for order in itertools.product("abcd", repeat=4):
        files = Files(**ABCD)
        store = store_of(files, max_loras=1, max_cpu_loras=2)
        lru = ["c", "d"]
        files.reads.clear()
        reads = []
        for name in order:
            if name in lru:
                lru.remove(name)
            else:
                lru.pop(0)
                reads.append(name)
            lru.append(name)
            with store.acquire([name]) as lease:
                assert holds(store, lease.slots[name], block(ABCD[name]))
            assert in_host(store) == set(lru) and resident(store) == {name}
        assert files.reads == reads
        assert store.names() == list("abcd")
        assert store.status().registered.misses == len(reads)


def test_what_is_used_in_a_slot_stays_in_host_memory():
    store = store_of(Files(**ABCD), max_loras=2, max_cpu_loras=2)
    with store.acquire(["a", "b"]):
        assert in_host(store) == {"a", "b"}
        store.register("e", Files(e=7).loader("e"))
        assert in_host(store) == {"a", "b"} and "e" in store
    use(store, "e")
    assert in_host(store) == {"b", "e"} and resident(store) == {"b", "e"}


def test_parts_of_a_mix_in_flight_stay_in_host_memory():
    store = store_of(Files(**ABCD), max_loras=1, max_cpu_loras=2)
    with store.acquire([(("a", 1.0), ("b", 1.0))]):
        use_later = Files(e=5)
        store.register("e", use_later.loader("e"))
        assert in_host(store) == {"a", "b"}


def test_a_wide_mix_needs_more_host_memory_only_while_it_is_made():
    store = store_of(Files(a=1, b=2), max_loras=1, max_cpu_loras=1)
    mix = (("a", 1.0), ("b", 1.0))
    with store.acquire([mix]) as lease:
        assert holds(store, lease.slots[mix], mixed([(1, 1.0), (2, 1.0)]))
    assert len(in_host(store)) == 1 and resident(store) == {"a*1+b*1"}


def test_dropped_and_unchanged_keeps_its_generation(caplog):
    files = Files(**ABCD)
    store = store_of(files, max_loras=1, max_cpu_loras=1)
    before = {name: store.entry(name).tag for name in "abcd"}
    for name in "abcdabcd":
        use(store, name)
    assert {name: store.entry(name).tag for name in "abcd"} == before
    assert store.entry("a").report().fingerprint == block(1).digest()
    assert not caplog.records


def test_dropped_and_changed_is_a_new_generation_and_is_said():
    files = Files(**ABCD)
    store = store_of(files, max_loras=1, max_cpu_loras=1)
    tag = store.entry("a").tag
    files.contents["a"] = 9
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("hf_multilora.memory.loading.logger.warning", said.append)
        with store.acquire(["a"]) as lease:
            assert holds(store, lease.slots["a"], block(9))
            assert lease.tags["a"] == store.entry("a").tag == (tag[0], store.entry("a").generation)
    assert store.entry("a").generation > tag[1]
    assert len(said) == 1 and "'a'" in said[0] and "no longer what was loaded before" in said[0]


def test_hub_commits_are_compared_instead_of_contents(monkeypatch):
    monkeypatch.setattr("hf_multilora.memory.pack.PackedAdapter.digest", lambda self: pytest.fail("hashed"))
    commits = {"a": "c0ffee", "b": "beef"}
    store = store_of(max_loras=1, max_cpu_loras=1)
    for name in "ab":
        store.register(name, lambda name=name: Loaded(block(1), "hub", fingerprint=commits[name]))
    tag = store.entry("a").tag
    use(store, "a")
    assert store.entry("a").tag == tag
    use(store, "b")
    commits["a"] = "decaf"
    use(store, "a")
    assert store.entry("a").generation > tag[1] and store.entry("a").report().fingerprint == "decaf"


def test_tensors_in_memory_are_never_dropped():
    files = Files(**ABCD)
    store = store_of(max_loras=1, max_cpu_loras=2)
    store.register("kept", files.loader("a"), evictable=False)
    for name in "bcd":
        store.register(name, files.loader(name))
        use(store, name)
    assert in_host(store) == {"kept", "d"}
    store.register("too", files.loader("a"), evictable=False)
    with pytest.raises(SlotError, match="max_cpu_loras=2.*kept, too"):
        store.register("third", files.loader("a"), evictable=False)
    with pytest.raises(SlotError, match="max_cpu_loras=2"):
        store.pin("b")
    assert "third" not in store and in_host(store) == {"kept", "too"}
    use(store, "b")  # read for this call only
    assert in_host(store) == {"kept", "too"} and resident(store) == set()


# -- register, reload, unload


def test_generations_and_uids_never_come_again():
    files = Files(a=1)
    seen = set()
    for _ in range(3):
        store = store_of(files)
        for _ in range(3):
            store.register("a", files.loader("a"), reload=True)
            assert store.entry("a").generation not in seen
            seen.add(store.entry("a").generation)
        uid = store.entry("a").uid
        store.unload("a")
        store.register("a", files.loader("a"))
        assert store.entry("a").uid != uid and store.entry("a").generation not in seen


def test_an_existing_name_needs_reload():
    files = Files(a=1)
    store = store_of(files)
    with pytest.raises(AdapterExistsError, match="'a'.*files/a.*reload=True"):
        store.register("a", files.loader("a"))
    assert files.reads == ["a"]
    assert store.ensure("a", files.loader("a")) is store.entry("a")
    assert files.reads == ["a"]


def test_a_reload_takes_another_slot_while_the_old_weights_are_in_use():
    files = Files(a=1, b=2)
    store = store_of(files)
    with store.acquire(["a"]) as old:
        files.contents["a"] = 9
        store.register("a", files.loader("a"), reload=True)
        with store.acquire(["a"]) as new:
            assert new.slots["a"] != old.slots["a"] and new.tags["a"] != old.tags["a"]
            assert holds(store, old.slots["a"], block(1)) and holds(store, new.slots["a"], block(9))
            with pytest.raises(SlotError):
                store.acquire(["b"], block=False)
    assert store.status().slots.count("a") == 1
    use(store, "b", "a")


@pytest.mark.parametrize("bad", ["error", "rank", "bytes"])
@pytest.mark.parametrize("reload", [False, True])
def test_a_failed_load_leaves_everything_as_it_was(bad, reload):
    files = Files(**ABCD)
    store = store_of(files, max_loras=2, max_cpu_loras=3, slot_bytes=1536)
    use(store, "b", "c")
    store.pin("b")
    before, host = store.status(), in_host(store)

    def load():
        if bad == "error":
            raise OSError("truncated")
        sites = [("down", 0, 9)] if bad == "rank" else [("embed", 0, 8), ("qkv", 0, 8), ("down", 0, 8)]
        return Loaded(pack([factor(*site) for site in sites], LAYOUT, torch.float32, pin=False), "files")

    match = {"error": "truncated", "rank": "rank 9.*max_lora_rank=8", "bytes": r"slot_bytes=1\d\d\d or more"}[bad]
    with pytest.raises(OSError if bad == "error" else SlotError, match=match):
        store.register("b" if reload else "new", load, reload=reload)
    assert store.status() == before and in_host(store) == host
    with store.acquire(["b"], block=False) as lease:
        assert holds(store, lease.slots["b"], block(2))


def test_a_failed_read_leaves_the_name_and_poisons_nothing():
    files = Files(**ABCD)
    store = store_of(files, max_loras=1, max_cpu_loras=1)
    tag = store.entry("a").tag
    files.contents["a"] = OSError("disk gone")
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            store.acquire(["a"])
        use(store, "d")
    files.contents["a"] = 1
    with store.acquire(["a"]) as lease:
        assert lease.tags["a"] == tag and holds(store, lease.slots["a"], block(1))


def test_unload_frees_slot_and_host_memory():
    store = store_of(Files(**ABCD))
    use(store, "a", "b")
    use(store, (("a", 1.0), ("b", 1.0)))
    entry = store.entry("b")
    store.unload("b")
    assert entry.packed is None and resident(store) == set() and store.names() == ["a", "c", "d"]
    with pytest.raises(AdapterNotFoundError):
        store.acquire(["b"])


def test_unload_within_a_call_that_uses_it_changes_nothing():
    store = store_of(Files(**ABCD))
    for key in ("a", (("a", 1.0), ("b", 1.0))):
        with store.acquire([key]), pytest.raises(SlotError, match="from within a call"):
            store.unload("a")
    assert "a" in store


def test_a_loader_that_asks_for_itself_is_refused():
    store = store_of()
    with pytest.raises(SlotError, match="asks for 'a' itself"):
        store.register("a", lambda: store.register("a", lambda: None))
    assert store.names() == []


# -- pins


def test_pins_hold_on_both_levels():
    store = store_of(Files(**ABCD), max_loras=2, max_cpu_loras=2)
    store.pin("a")
    for name in "bcdbcd":
        use(store, name)
        assert "a" in resident(store) and "a" in in_host(store)
    store.unpin("a")
    use(store, "b", "c")
    assert "a" not in resident(store)


def test_all_slots_may_be_pinned():
    store = store_of(Files(**ABCD))
    store.pin("a")
    store.pin("a")
    store.pin("b")
    for act in (lambda: store.pin("c"), lambda: store.acquire(["c"]), lambda: store.acquire(["a", "c"])):
        with pytest.raises(SlotError, match="are pinned.*Unpin"):
            act()
    use(store, "a", "b")
    assert store.prefetch(["c"]).result(5) == []
    store.unpin("a")
    use(store, "c")
    assert resident(store) == {"b", "c"}


def test_a_pin_follows_a_reload():
    files = Files(**ABCD)
    store = store_of(files)
    store.pin("a")
    files.contents["a"] = 7
    store.register("a", files.loader("a"), reload=True)
    status = store.status().adapters[0]
    assert status.pinned and status.slot is not None and holds(store, status.slot, block(7))
    with store.acquire(["a", "b"]) as lease:
        files.contents["a"] = 8
        store.register("a", files.loader("a"), reload=True)
        assert store.status().adapters[0].slot is None  # no slot is free yet
        assert holds(store, lease.slots["a"], block(7))
    status = store.status().adapters[0]
    assert status.slot is not None and holds(store, status.slot, block(8))
    for name in "bcd":
        use(store, name)
    assert "a" in resident(store)


def test_unload_takes_the_pin_with_it():
    files = Files(**ABCD)
    store = store_of(files, max_loras=1)
    store.pin("a")
    store.unload("a")
    use(store, "b")
    store.register("a", files.loader("a"))
    assert not store.entry("a").pinned


# -- prefetch


def test_prefetch_fills_what_is_free_or_idle():
    store = store_of(Files(**ABCD), max_loras=3)
    with store.acquire(["a"]) as lease:
        assert store.prefetch(["b", "c", "d"]).result(5) == ["b", "c"]
        assert resident(store) == {"a", "b", "c"} and holds(store, lease.slots["a"], block(1))
        assert store.prefetch(["d"]).result(5) == ["d"]
        assert resident(store) == {"a", "c", "d"}
    counters = store.status().resident
    assert (counters.hits, counters.misses) == (0, 1)
    use(store, "c", "d")
    assert store.status().resident.hits == 2


def test_what_was_prefetched_stays_until_it_is_used():
    """The next group is named while one runs: neither it nor what runs has to be copied twice."""
    store = store_of(Files(**dict(ABCD, e=5, f=6)), max_loras=4)
    groups = [["a", "b"], ["c", "d"], ["e", "f"]]
    store.prefetch(groups[0]).result(5)
    for turn in range(6):
        before = store.status().resident.misses
        store.prefetch(groups[(turn + 1) % 3]).result(5)
        use(store, *groups[turn % 3])
        assert store.status().resident.misses == before, f"turn {turn}"
        assert set(resident(store)) == {*groups[turn % 3], *groups[(turn + 1) % 3]}


def test_what_was_prefetched_in_vain_goes_after_a_while():
    store = store_of(Files(**dict(ABCD, e=5)), max_loras=2)
    store.prefetch(["a"]).result(5)
    for _ in range(3):
        use(store, "b")
        use(store, "c")
    assert set(resident(store)) == {"b", "c"}


def test_prefetch_reads_dropped_adapters_in_the_background():
    files = Files(**ABCD)
    store = store_of(files, max_loras=2, max_cpu_loras=2)
    assert store.prefetch(["a", "d"]).result(5) == ["a", "d"]
    assert resident(store) == in_host(store) == {"a", "d"}
    files.contents["b"] = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        store.prefetch(["b"]).result(5)


# -- counters and status


def test_counters_of_both_levels():
    files = Files(**ABCD)
    store = store_of(files, max_loras=2, max_cpu_loras=2)
    size = {name: block(ABCD[name]).nbytes for name in "abcd"}
    status = store.status()
    assert status.registered.nbytes == sum(size.values()) and status.registered.evictions == 2
    assert (status.resident.hits, status.resident.misses, status.resident.nbytes) == (0, 0, 0)
    use(store, "c", "d")  # from host memory
    use(store, "c")
    use(store, "a")  # read again; d goes from both
    status = store.status()
    assert (status.resident.hits, status.resident.misses, status.resident.evictions) == (1, 3, 1)
    assert status.resident.nbytes == size["c"] + size["d"] + size["a"]
    assert (status.registered.hits, status.registered.misses, status.registered.evictions) == (2, 1, 3)
    assert status.registered.nbytes == sum(size.values()) + size["a"]
    assert status.resident.ms > 0 and status.registered.ms > 0
    report = store.entry("a").report()
    assert report.modules and report.nbytes == size["a"] and report.source == "files/a"
    assert report.fingerprint == block(1).digest() and report.generation == store.entry("a").generation


# -- retarget and copies


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_retarget_casts_and_refills(dtype):
    files = Files(**ABCD)
    store = store_of(files, max_loras=2, max_cpu_loras=3)
    store.pin("d")
    use(store, "c")
    use(store, (("c", 1.0), ("d", 1.0)))
    use(store, "c")
    tags = {name: store.entry(name).tag for name in "bcd"}
    arena, slots = store.arena, store.status().slots
    store.retarget("cpu", dtype)
    assert store.arena is arena and arena.dtype == arena.data.dtype == dtype
    assert arena.slot_bytes == LAYOUT.default_slot_bytes(RANK, dtype)
    assert store.status().slots == slots and store.entry("d").pinned
    for name in "bcd":
        with store.acquire([name]) as lease:
            assert lease.tags[name] == tags[name] and holds(store, lease.slots[name], block(ABCD[name], dtype))
    # Dropped before the cast: what is read now cannot be compared, so it counts as new.
    generation = store.entry("a").generation
    with store.acquire(["a"]) as lease:
        assert holds(store, lease.slots["a"], block(1, dtype)) and store.entry("a").generation > generation


def test_retarget_that_does_not_fit_changes_nothing():
    store = store_of(Files(a=1), slot_bytes=block(1).nbytes)
    store.retarget("cpu", torch.bfloat16)
    use(store, "a")
    big = pack([factor("down", 0, 8), factor("qkv", 0, 8), factor("qkv", 1, 8)], LAYOUT, torch.bfloat16, pin=False)
    assert big.nbytes <= store.arena.slot_bytes < big.to(torch.float32, pin=False).nbytes
    store.register("big", lambda: Loaded(big, "memory"))
    before = store.status()
    with pytest.raises(SlotError, match="'big' in torch.float32 needs"):
        store.retarget("cpu", torch.float32)
    assert store.status() == before
    with store.acquire(["big"]) as lease:
        assert holds(store, lease.slots["big"], big)
        with pytest.raises(SlotError, match="from within a call"):
            store.retarget("cpu", torch.float32)


def test_a_deep_copy_is_independent():
    files = Files(**ABCD)
    store = store_of(files, max_loras=2, max_cpu_loras=3)
    store.pin("b")
    with store.acquire(["c"]) as lease:
        twin = copy.deepcopy(store)
        assert twin.names() == store.names() and twin.arena is not store.arena
        assert twin.arena.storage.data_ptr() != store.arena.storage.data_ptr()
        assert resident(twin) == {"b"} and all(a.in_use == 0 for a in twin.status().adapters)
        assert twin.entry("c").packed is store.entry("c").packed  # blocks are shared, nobody writes them
        assert twin.entry("c").tag == store.entry("c").tag
        twin.unload("c")
        files.contents["b"] = 9
        twin.register("b", files.loader("b"), reload=True)
        assert "c" in store and holds(store, lease.slots["c"], block(3))
    with store.acquire(["b"]) as one, twin.acquire(["a", "b"]) as two:
        assert holds(store, one.slots["b"], block(2)) and holds(twin, two.slots["b"], block(9))
        assert holds(twin, two.slots["a"], block(1))


def test_blocks_that_cannot_be_pinned_are_pageable_and_it_is_said(monkeypatch):
    from hf_multilora.memory import pinned

    said = []
    monkeypatch.setattr(pinned.logger, "warning_once", said.append)
    real = torch.empty

    def empty(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("no accelerator")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    packed = pack([factor("down", 0, 2)], LAYOUT, torch.float32, pin=True)
    assert packed.nbytes and "could not be pinned" in said[0] and "no accelerator" in said[0]


def test_config_is_read():
    store = AdapterStore(LAYOUT, MultiLoraConfig(max_loras=5, max_lora_rank=4), "cpu", torch.float16)
    status = store.status()
    assert (status.max_loras, status.max_lora_rank, status.device, status.dtype) == (5, 4, "cpu", "float16")
    assert status.slots == [None] * 5


def test_each_adapter_has_counters_of_its_own():
    store = store_of(Files(**ABCD), max_loras=2)
    for keys in (["a"], ["a", "b"], ["c"], ["a"], [(("a", 0.5), ("b", 0.5))]):
        use(store, *keys)
    counted = {one.name: (one.hits, one.misses, one.evictions) for one in store.status().adapters}
    # a: brought in, found, put out for c, brought in; then a mix takes the place of c and is a's and b's own
    assert counted == {"a": (1, 3, 1), "b": (0, 2, 1), "c": (0, 1, 1), "d": (0, 0, 0)}
    status = store.status().resident
    assert status.evictions == 3 and (status.hits, status.misses) == (1, 5)


def test_how_keys_stand():
    store = store_of(Files(**ABCD), max_loras=1, max_cpu_loras=2)
    mix = (("a", 0.5), ("d", 1.0))
    use(store, "d")
    looks = store.look(["a", "d", "nobody", mix])
    assert looks["nobody"] is None
    assert looks["d"].resident and looks["d"].ready and looks["d"].tag == store.entry("d").tag
    assert not looks["a"].resident and not looks["a"].ready, "dropped from host memory"
    assert not looks[mix].ready and looks[mix].tag == ((store.entry("a").tag, 0.5), (store.entry("d").tag, 1.0))
    hold = store.hold(["a"])
    use(store, "b"), use(store, "c"), use(store, "d")
    assert store.look(["a"])["a"].ready, "held, whatever comes"
    hold.close()
    hold.close()
    use(store, "b"), use(store, "c")
    assert not store.look(["a"])["a"].ready
    with pytest.raises(AdapterNotFoundError):
        store.hold(["a", "nobody"])
