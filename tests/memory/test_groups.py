"""Sites in groups, as on several devices: blocks in parts, an arena for each, and the same factors as in one."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from memory_bed import LAYOUT, RANK, TARGETS, Ref, factor

from hf_multilora.adapters.plan import SavedParam, TokenRows
from hf_multilora.config import MultiLoraConfig
from hf_multilora.errors import SlotError
from hf_multilora.memory import arena as arena_module
from hf_multilora.memory.estimate import estimate_memory
from hf_multilora.memory.layout import Layout
from hf_multilora.memory.pack import PackedAdapter, compose, pack
from hf_multilora.memory.registry import Loaded
from hf_multilora.memory.store import AdapterStore

GROUPS = {"embed": 0, "qkv": 1, "down": 0, "norm": 1, "head": 2}
TWO = Layout.from_targets(TARGETS, lambda path: min(GROUPS[path], 1))
THREE = Layout([replace(site, group=site.index % 3) for site in LAYOUT.sites], GROUPS.__getitem__)
DTYPES = [torch.float32, torch.bfloat16]


def made(layout: Layout, dtype: torch.dtype = torch.float32, seed: int = 0, extras: bool = True) -> PackedAdapter:
    factors = [factor(s.path, s.slice, 2 + s.index, seed=seed, scaling=0.5) for s in LAYOUT.sites if s.index != 1]
    if extras:
        vector = Ref("gain", torch.arange(1.0, 10.0))
        factors.append(replace(factor("qkv", 0, 3, seed=seed), gain=vector, shift=Ref("shift", -vector.tensor)))
    shared = Ref("table", torch.randn(11, 5, generator=torch.Generator().manual_seed(seed)))
    saved = [SavedParam("norm", "weight", Ref("norm", torch.arange(7.0))), SavedParam("embed", "weight", shared)]
    saved.append(SavedParam("head", "weight", shared))
    tokens = [TokenRows("head", (3, 1), Ref("rows", torch.ones(2, 5)))]
    return pack(factors, layout, dtype, pin=False, **({"saved": saved, "tokens": tokens} if extras else {}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [TWO, THREE], ids=["two", "three"])
def test_a_block_in_parts_says_what_one_block_says(layout: Layout, dtype: torch.dtype) -> None:
    one, several = made(LAYOUT, dtype), made(layout, dtype)
    for packed in (several, several.to(torch.float64, pin=False).to(dtype, pin=False), copy.copy(several)):
        assert packed.ranks == one.ranks and packed.rank == one.rank
        assert torch.equal(packed.header()[:, 2], one.header()[:, 2])
        for site, rank in one.ranks.items():
            if rank:
                assert all(map(torch.equal, packed.factors(site), one.factors(site)))
            for got, want in zip(packed.vectors(site), one.vectors(site), strict=True):
                assert (got is None and want is None) or torch.equal(got, want)
        for (path, name, got), (_, _, want) in zip(packed.extras.parameters(), one.extras.parameters(), strict=True):
            assert torch.equal(packed.view(got), one.view(want)), (path, name)
            assert got.group == layout.group_of(path)


def test_parts_follow_each_other() -> None:
    packed = made(THREE)
    assert [start % 256 for start, _ in packed.parts] == [0, 0, 0]
    assert all(stop <= start for (_, stop), (start, _) in zip(packed.parts, packed.parts[1:], strict=False))
    assert packed.parts[-1][1] == packed.nbytes == packed.block.numel()
    plain = made(THREE, extras=False)
    assert plain.nbytes == THREE.packed_bytes(plain.ranks, torch.float32)
    # What lies between is zero, as the hash of the content covers it.
    for (_, stop), (start, _) in zip(packed.parts, packed.parts[1:], strict=False):
        assert not packed.block[stop:start].any()
    assert packed.digest() == made(THREE).digest() != made(THREE, seed=1).digest()


def test_mixes() -> None:
    one = compose(
        [(made(LAYOUT, extras=False), 0.5), (made(LAYOUT, seed=1, extras=False), -2.0)],
        LAYOUT,
        torch.float32,
        pin=False,
    )
    parts = [(made(THREE, extras=False), 0.5), (made(THREE, seed=1, extras=False), -2.0)]
    several = compose(parts, THREE, torch.float32, pin=False)
    for site in one.ranks:
        assert all(map(torch.equal, several.factors(site), one.factors(site)))


def store_of(layout: Layout, **options) -> AdapterStore:
    config = MultiLoraConfig(max_loras=2, max_lora_rank=RANK, **options)
    return AdapterStore(layout, config, ["cpu"] * layout.n_groups, torch.float32)


def holds(store: AdapterStore, name: str) -> bool:
    packed = store.entry(name).packed
    assert packed is not None
    with store.acquire([name]) as lease:
        slots = [arena.slot(lease.slots[name]) for arena in store.arenas]
        return all(torch.equal(slot[: packed.part(g).numel()], packed.part(g)) for g, slot in enumerate(slots))


def test_slots_hold_their_parts() -> None:
    store = store_of(THREE, slot_bytes=4096)
    assert store.spread and [arena.slot_bytes for arena in store.arenas] == [4096] * 3
    for seed, name in enumerate("abc"):
        store.register(name, lambda seed=seed: Loaded(made(THREE, seed=seed), "memory"))
    for name in "abcab":
        assert holds(store, name)
    status = store.status()
    assert status.resident.evictions == 3 and status.resident.nbytes == 5 * store.entry("a").version.nbytes
    assert status.device == "cpu, cpu, cpu"
    twin = copy.deepcopy(store)
    assert len(twin.arenas) == 3 and holds(twin, "c")
    assert store.retarget(["cpu"] * 3, torch.bfloat16)
    assert holds(store, "a") and {arena.dtype for arena in store.arenas} == {torch.bfloat16}


def test_a_move_that_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(THREE, slot_bytes=4096)
    store.register("a", lambda: Loaded(made(THREE), "memory"))
    assert holds(store, "a")
    allocate, calls = arena_module.Arena._allocate, []

    def fails(self, slot_bytes, device, dtype):
        calls.append(dtype)
        if len(calls) == 3:
            raise SlotError("no room")
        allocate(self, slot_bytes, device, dtype)

    monkeypatch.setattr(arena_module.Arena, "_allocate", fails)
    with pytest.raises(SlotError, match="no room"):
        store.retarget(["cpu"] * 3, torch.bfloat16)
    assert calls == [torch.bfloat16] * 3 + [torch.float32] * 2
    assert {arena.dtype for arena in store.arenas} == {torch.float32} and holds(store, "a")


def test_what_one_part_has_no_room_for() -> None:
    sizes = [stop - start for start, stop in made(THREE).parts]
    store = store_of(THREE, slot_bytes=min(sizes))
    with pytest.raises(SlotError, match=rf"needs {max(sizes)} bytes on cpu, .*slot_bytes={max(sizes)} or more"):
        store.register("a", lambda: Loaded(made(THREE), "memory"))
    store_of(THREE, slot_bytes=max(sizes)).register("a", lambda: Loaded(made(THREE), "memory"))


def test_default_slots_have_room_for_their_own_sites() -> None:
    store = store_of(TWO)
    for group, arena in enumerate(store.arenas):
        assert arena.slot_bytes == store.layout.default_slot_bytes(RANK, torch.float32, group)
    estimate = estimate_memory(store.layout, 2, RANK, torch.float32)
    assert estimate["arena"] == sum(arena.nbytes for arena in store.arenas)
    assert estimate["slot"] == sum(arena.slot_bytes for arena in store.arenas)
    with pytest.raises(ValueError, match="1 devices for 2 groups"):
        AdapterStore(store.layout, store.config, "cpu", torch.float32)
