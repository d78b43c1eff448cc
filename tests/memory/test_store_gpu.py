"""Copies on a CUDA device: page-locked blocks, one copy per activation at bus speed, order across streams."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from memory_bed import LAYOUT, RANK, Files, Part, Ref, Shape, block, holds, store_of

from hf_multilora.config import MultiLoraConfig
from hf_multilora.memory import pinned
from hf_multilora.memory.estimate import estimate_memory
from hf_multilora.memory.layout import Layout
from hf_multilora.memory.pack import PackedAdapter, pack
from hf_multilora.memory.registry import Loaded
from hf_multilora.memory.store import AdapterStore

pytestmark = pytest.mark.gpu

WIDTHS = {"q": (4096, 4096), "k": (4096, 1024), "v": (4096, 1024), "o": (4096, 4096)}
WIDTHS |= {"gate": (4096, 14336), "up": (4096, 14336), "down": (14336, 4096)}
SLEEP = 200_000_000  # cycles, about 0.1 s


def gpu_store(max_loras: int = 2, **contents: int) -> AdapterStore:
    store = AdapterStore(LAYOUT, MultiLoraConfig(max_loras=max_loras, max_lora_rank=RANK), "cuda", torch.float32)
    for name, content in contents.items():
        packed = block(content).to(torch.float32, pin=True)
        store.register(name, lambda packed=packed: Loaded(packed, "memory"))
    return store


@pytest.fixture(scope="module")
def wide() -> tuple[Layout, PackedAdapter]:
    """An r=16 adapter on all linears of an 8B Llama, 84 MB in bf16."""
    paths = [(f"{i}.{name}", *shape) for i in range(32) for name, shape in WIDTHS.items()]
    layout = Layout.from_targets({path: Shape(path, "linear", n_in, n_out, (n_out,)) for path, n_in, n_out in paths})
    factors = {(n, 16): torch.randn(n, 16, dtype=torch.bfloat16) for n in (1024, 4096, 14336)}
    parts = [
        Part(path, 0, "linear", 16, 0.5, Ref((path, "a"), factors[n_in, 16].t()), Ref((path, "b"), factors[n_out, 16]))
        for path, n_in, n_out in paths
    ]
    return layout, pack(parts, layout, torch.bfloat16, pin=True)


def test_blocks_are_pinned_and_the_arena_is_on_the_device():
    store = gpu_store(a=1)
    assert store.entry("a").packed.block.is_pinned() and store.pin_memory
    assert store.arena.storage.is_cuda and not store.arena.storage.any()
    with store.acquire(["a"]) as lease:
        lease.wait()
        assert holds(store, lease.slots["a"], block(1))


def test_a_copy_of_84_mb_runs_at_the_speed_of_the_bus(wide):
    layout, packed = wide
    assert packed.nbytes == pytest.approx(84e6, rel=0.01) and packed.block.is_pinned()
    store = AdapterStore(layout, MultiLoraConfig(max_loras=1, max_lora_rank=16), "cuda", torch.bfloat16)
    for name in "ab":
        store.register(name, lambda: Loaded(packed, "memory"))
    for name in "ab" * 5:
        with store.acquire([name]) as lease:
            lease.wait()
        torch.cuda.synchronize()
    begin = store.status().resident
    for name in "ab" * 5:
        with store.acquire([name]) as lease:
            lease.wait()
        torch.cuda.synchronize()
    end = store.status().resident
    assert end.misses - begin.misses == 10
    ms = (end.ms - begin.ms) / 10
    print(f"{packed.nbytes / 1e6:.1f} MB in {ms:.2f} ms, {packed.nbytes / ms / 1e6:.1f} GB/s")
    assert ms <= 1.7
    # One copy moves the header and all factors.
    copies = store._transfer.copies
    with store.acquire(["a"]):
        assert store._transfer.copies == copies + 1
    assert torch.equal(store.arena.slot(0)[: packed.nbytes].cpu(), packed.block)


def test_acquire_does_not_wait_for_the_device():
    store = gpu_store(max_loras=1, a=1, b=2)
    with store.acquire(["a"]) as lease:
        lease.wait()
        torch.cuda._sleep(SLEEP)
        done = torch.cuda.current_stream().record_event()
    with store.acquire(["b"]) as lease:
        lease.wait()
        assert not done.query(), "acquire or wait blocked the host"
    torch.cuda.synchronize()


@pytest.mark.parametrize("waited", [False, True])
def test_a_slot_is_written_only_after_its_last_forward(waited):
    """The forward runs on a stream of its own; the lease is released on that stream, or on another that waited."""
    store = gpu_store(max_loras=1, a=1, b=2)
    want = block(1)
    stream = torch.cuda.Stream()
    lease = store.acquire(["a"])
    lease.wait(stream)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        seen = store.arena.slot(0)[: want.nbytes].clone()
        if not waited:
            store.release(lease)
    store.release(lease)
    with store.acquire(["b"]) as lease:
        lease.wait()
        after = store.arena.slot(0)[: block(2).nbytes].clone()
    torch.cuda.synchronize()
    assert torch.equal(seen.cpu(), want.block) and torch.equal(after.cpu(), block(2).block)


def test_a_lost_lease_is_not_overwritten_early():
    store = gpu_store(max_loras=1, a=1, b=2)
    stream = torch.cuda.Stream()
    lease = store.acquire(["a"])
    lease.wait(stream)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        seen = store.arena.slot(0)[: block(1).nbytes].clone()
    del lease
    gc.collect()
    with store.acquire(["b"]) as lease:
        lease.wait()
    torch.cuda.synchronize()
    assert torch.equal(seen.cpu(), block(1).block)


def test_users_wait_for_the_copy(wide):
    layout, packed = wide
    store = AdapterStore(layout, MultiLoraConfig(max_loras=2, max_lora_rank=16), "cuda", torch.bfloat16)
    store.register("a", lambda: Loaded(packed, "memory"))
    store.prefetch(["a"]).result(5)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with store.acquire(["a"]) as lease, torch.cuda.stream(stream):
            lease.wait()
            seen = store.arena.slot(lease.slots["a"])[: packed.nbytes].clone()
            torch.cuda.synchronize()
            assert torch.equal(seen.cpu(), packed.block)


def test_an_unloaded_block_outlives_its_copy(wide):
    layout, packed = wide
    store = AdapterStore(layout, MultiLoraConfig(max_loras=1, max_lora_rank=16), "cuda", torch.bfloat16)
    want = packed.block.clone()
    for i in range(4):
        name = f"n{i}"
        store.register(name, lambda: Loaded(packed.to(torch.float16, pin=True).to(torch.bfloat16, pin=True), "memory"))
        store.prefetch([name]).result(5)
        store.unload(name)
        gc.collect()
        junk = torch.full((packed.nbytes,), 7, dtype=torch.uint8, pin_memory=True)  # would take the block's place
        torch.cuda.synchronize()
        casted = want.view(torch.bfloat16).half().bfloat16()
        got = store.arena.slot(0)[layout.header_bytes : packed.nbytes].view(torch.bfloat16).cpu()
        assert torch.equal(got, casted[layout.header_bytes // 2 :])
        del junk


def test_the_model_moves_between_devices_and_dtypes():
    store = store_of(Files(a=1, b=2))
    store.pin("a")
    for device, dtype in (("cuda", torch.float32), ("cuda", torch.bfloat16), ("cpu", torch.bfloat16)):
        store.retarget(device, dtype)
        assert store.arena.device.type == device and store.arena.dtype == dtype
        for name, content in (("a", 1), ("b", 2)):
            with store.acquire([name]) as lease:
                lease.wait()
                assert holds(store, lease.slots[name], block(content, dtype))
            assert device == "cpu" or store.entry(name).packed.block.is_pinned()


def test_a_copied_store_has_an_arena_of_its_own():
    store = gpu_store(a=1, b=2)
    store.pin("a")
    twin = copy.deepcopy(store)
    with twin.acquire(["a", "b"]) as lease:
        lease.wait()
        assert holds(twin, lease.slots["a"], block(1)) and holds(twin, lease.slots["b"], block(2))
    assert twin.arena.storage.data_ptr() != store.arena.storage.data_ptr()


def test_estimate_is_what_the_device_allocates():
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    config = MultiLoraConfig(max_loras=3, max_lora_rank=RANK, slot_bytes=1 << 20)
    store = AdapterStore(LAYOUT, config, "cuda", torch.bfloat16)
    grown = torch.cuda.memory_allocated() - before
    estimate = estimate_memory(LAYOUT, 3, RANK, torch.bfloat16, slot_bytes=1 << 20)
    assert estimate["arena"] == store.arena.nbytes <= grown < store.arena.nbytes + 512


def test_page_locked_memory_is_handed_on_and_never_under_a_copy(monkeypatch):
    """Blocks of one size, given up as soon as their copies are started, behind a device that is busy."""
    monkeypatch.setattr(pinned, "_LARGE", 1 << 12)
    gc.collect()
    pinned._spare.clear()
    registered: list[int] = []
    register = pinned._registered
    monkeypatch.setattr(pinned, "_registered", lambda mapping: registered.append(1) or register(mapping))
    layout = Layout.from_targets({"x": Shape("x", "linear", 4096, 4096, (4096,))})
    store = AdapterStore(layout, MultiLoraConfig(max_loras=6, max_lora_rank=16), "cuda", torch.bfloat16)

    def made(number: int) -> PackedAdapter:
        a = torch.full((16, 4096), number, dtype=torch.bfloat16)
        part = Part("x", 0, "linear", 16, 1.0, Ref((number, "a"), a), Ref((number, "b"), a.t()))
        return store.pack([part])

    blocker = torch.cuda.Stream()
    for number in range(1, 7):
        packed = made(number)
        assert packed.block.is_pinned()
        with torch.cuda.stream(blocker):
            torch.cuda._sleep(SLEEP // 10)
        store._transfer.start(number - 1, packed, [blocker.record_event()])
        del packed  # the copy is still to come
        gc.collect()
    torch.cuda.synchronize()
    for number in range(1, 7):
        assert (store.arena.slot(number - 1)[layout.header_bytes :][:1024].view(torch.bfloat16) == number).all()
    store._transfer.collect()
    gc.collect()
    before = len(registered)
    assert before == 6 and len(pinned._spare) == 6
    for number in range(7, 12):
        packed = made(number)
        assert packed.block.is_pinned()
        del packed
        gc.collect()
    assert len(registered) == before, "locked once, used again"


def test_waves_are_prepared_behind_a_busy_device():
    """Reading ahead starts copies into free slots, and blocks neither the host nor what runs."""
    store = gpu_store(max_loras=3, a=1, b=2, c=3)
    with store.acquire(["a"]) as lease:
        lease.wait()
        torch.cuda._sleep(SLEEP)
        done = torch.cuda.current_stream().record_event()
        ahead = store.ahead(["b", "c"])
        assert not done.query(), "reading ahead waited for the device"
        assert store.status().resident.misses == 1
    with store.acquire(["b", "c"]) as lease:
        ahead.close()
        lease.wait()
        assert holds(store, lease.slots["b"], block(2)) and holds(store, lease.slots["c"], block(3))


def test_a_failed_registration_leaves_no_error() -> None:
    """Memory that is locked already cannot be locked again; the next launch is not to tell of it."""
    locked = pinned._registered(pinned._mapped(1 << 20))
    assert locked.registered
    assert not pinned._registered(locked._replace(registered=False)).registered
    assert float(torch.ones(1, device="cuda") + 1) == 2
    torch.cuda.cudart().cudaHostUnregister(locked.address)
