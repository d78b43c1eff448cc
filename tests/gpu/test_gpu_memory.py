"""Slots on the device: copies, evictions under threads and streams, synchronisation, and what disable gives back."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import warnings

import pytest
import torch
from gpu_bed import (
    ADAPTERS,
    CUDA,
    DEVICE,
    MARKS,
    MIXED,
    adapter,
    bare,
    enabled,
    fresh,
    greedy,
    inputs,
    load,
    needs_cuda,
    prefill_and_step,
)

from hf_multilora import disable_multilora, enable_multilora

pytestmark = MARKS


def device_events(fn) -> list[str]:
    """Names of what ran on the device: kernels, copies, fills."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        fn()
        torch.cuda.synchronize()
    return [event.name for event in prof.events() if event.device_type == DeviceType.CUDA]


@needs_cuda
def test_an_activation_is_one_copy():
    model = enabled(torch.bfloat16, max_loras=2)
    model.multilora.prefetch(["r1", "r3"])
    torch.cuda.synchronize()
    events = device_events(lambda: model.multilora.prefetch(["r33"]))
    copies = [name for name in events if "memcpy" in name.lower()]
    assert len(copies) == 1 and "HtoD" in copies[0] and "Pinned" in copies[0], events
    assert "r33" in model.multilora.status().slots


@needs_cuda
def test_no_launch_without_adapters():
    model, batch = enabled(torch.bfloat16), inputs(24)
    prefill_and_step(model, batch, adapter_ids=list(MIXED))
    for _ in range(2):  # what a first forward sets up is not counted
        prefill_and_step(model, batch)
        prefill_and_step(bare(torch.bfloat16), batch)
    bare_events = device_events(lambda: prefill_and_step(bare(torch.bfloat16), batch))
    assert sorted(device_events(lambda: prefill_and_step(model, batch))) == sorted(bare_events)


@needs_cuda
def test_a_decode_step_does_not_synchronise_more_than_the_bare_model():
    def syncs(model, **ids) -> int:
        with torch.no_grad():
            cache = model(**inputs(11), use_cache=True, **ids).past_key_values
            token = inputs(11)["input_ids"][:, -1:]
            model(input_ids=token, past_key_values=cache, **ids)
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    model(input_ids=token, past_key_values=cache, **ids)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in caught)

    model = enabled(torch.bfloat16)
    expected = syncs(bare(torch.bfloat16))
    assert syncs(model, adapter_ids=list(MIXED)) <= expected
    assert syncs(model) <= expected


@needs_cuda
def test_disable_gives_the_memory_back():
    model = fresh(torch.bfloat16)
    prefill_and_step(model, inputs(24))
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    enable_multilora(model, max_loras=8, max_lora_rank=64)
    for name in ADAPTERS:
        load(model, name, adapter(name, torch.bfloat16))
    slots = model.multilora.status().slot_bytes * 8
    prefill_and_step(model, inputs(24), adapter_ids=list(MIXED))
    assert torch.cuda.memory_allocated() >= before + slots
    disable_multilora(model)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 4096


def test_disable_gives_the_model_back():
    model = fresh(torch.bfloat16)
    kinds = {path: type(module) for path, module in model.named_modules()}
    enable_multilora(model, max_loras=4, max_lora_rank=64)
    load(model, "r8", adapter("r8", torch.bfloat16))
    prefill_and_step(model, inputs(24), adapter_ids="r8")
    disable_multilora(model)
    assert {path: type(module) for path, module in model.named_modules()} == kinds
    for ours, expected in zip(
        prefill_and_step(model, inputs(24)), prefill_and_step(bare(torch.bfloat16), inputs(24)), strict=True
    ):
        assert torch.equal(ours, expected)


def test_more_adapters_than_slots_run_in_waves():
    model = enabled(torch.float32, max_loras=2)
    ids = list(MIXED)
    expected = greedy(enabled(torch.float32), inputs(11, padded=True), 8, adapter_ids=ids)
    for _ in range(2):
        assert torch.equal(greedy(model, inputs(11, padded=True), 8, adapter_ids=ids), expected)
    assert model.multilora.status().resident.evictions > 0


def test_threads_on_streams_of_their_own():
    """Two threads generate on their streams over four slots, while a third reloads, unloads and evicts."""
    names, turns, new = list(ADAPTERS), 10, 6
    model = enabled(torch.float32, max_loras=4)
    batch = inputs(11, rows=4)
    hot = [adapter("r16", torch.float32, seed=seed) for seed in (1, 2)]
    expected = {name: greedy(model, batch, new, adapter_ids=name) for name in [None, *names]}
    expected_hot = []
    for weights in hot:
        load(model, "hot", weights, reload="hot" in model.multilora.adapters)
        expected_hot.append(greedy(model, batch, new, adapter_ids="hot"))
    assert not torch.equal(*expected_hot)
    problems: list[str] = []
    started = threading.Barrier(3)
    if CUDA:
        torch.cuda.synchronize()

    def own_stream():
        return torch.cuda.stream(torch.cuda.Stream(DEVICE)) if CUDA else contextlib.nullcontext()

    def generating(seed: int) -> None:
        rng = random.Random(seed)
        with own_stream():
            started.wait(60)
            for turn in range(turns):
                first, second = rng.sample(names, 2)
                ids = [first, None, second, first]
                output = greedy(model, batch, new, adapter_ids=ids)
                problems.extend(
                    f"thread {seed}, turn {turn}, row {row} ({name})"
                    for row, name in enumerate(ids)
                    if not torch.equal(output[row], expected[name][row])
                )

    def changing() -> None:
        with own_stream():
            started.wait(60)
            for turn in range(turns):
                if turn % 3 == 2:
                    model.multilora.unload("hot")
                load(model, "hot", hot[turn % 2], reload="hot" in model.multilora.adapters)
                output = greedy(model, batch, new, adapter_ids=["hot", None, "hot", "hot"])
                want = expected_hot[turn % 2].clone()
                want[1] = expected[None][1]
                if not torch.equal(output, want):
                    problems.append(f"changing, turn {turn}")

    def guarded(fn, *args) -> None:
        try:
            fn(*args)
        except BaseException as problem:
            problems.append(f"{fn.__name__}: {problem!r}")
            started.abort()

    threads = [threading.Thread(target=guarded, args=(generating, seed), daemon=True) for seed in (0, 1)]
    threads.append(threading.Thread(target=guarded, args=(changing,), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert not problems, problems
    assert all(entry.in_use == 0 for entry in model.multilora.status().adapters)


@pytest.mark.parametrize("order", [["r1", "r3", "r8"], ["r8", "r33", "r8", "r1", "r33", "r3"]])
def test_evicted_adapters_come_back_the_same(order):
    model = enabled(torch.float32, max_loras=1)
    expected = {name: prefill_and_step(enabled(torch.float32), inputs(24), adapter_ids=name)[0] for name in set(order)}
    for name in order:
        assert torch.equal(prefill_and_step(model, inputs(24), adapter_ids=name)[0], expected[name]), name
