"""Scenes of continuous batching: two ranks batch together, and each request is answered as one process would alone.

Both ranks run the same lines, as a user's script does; rank 0's requests are those that count.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from continuous.cb_bed import batching, greedy, poisoned, prompt
from continuous.cb_run import Results, running, wait_until
from scenes import MODE, device, families, main, saved, scene, split

from hf_multilora import disable_multilora, enable_multilora

NEW = 5
LONG, LONGER = 40, 64  # tokens of answers that are still on their way when something else happens
HEAD = 16  # tokens that prompts begin with in common: two pages
KINDS = ("r8", "r3", "r64", "dora", "head")


@functools.cache
def aside() -> Any:
    """A group for what the main threads have to say; the model's own belongs to the generation threads."""
    return dist.new_group(backend="gloo")


def together() -> None:
    """Both ranks have come to this line."""
    dist.barrier(group=aside())


_answers: dict[Any, list[int]] = {}  # of the whole model, which stays as it is


@functools.cache
def models(folder: str, **options: Any) -> tuple[Any, Any, dict[str, Path]]:
    """The model over both ranks, with two slots, and a whole one, each with all adapters."""
    place, folders = saved("llama", folder)
    folders = {name: folders[name] for name in KINDS}
    whole = enable_multilora(families("llama").to(device()), max_loras=4)
    shared = enable_multilora(split(place), max_loras=2, **MODE, **options)
    for name, adapter in folders.items():
        whole.multilora.load(adapter, name)
        shared.multilora.load(adapter, name)
    return shared, whole, folders


def alone(model: Any, tokens: list[int], adapter: Any, new: int = NEW) -> list[int]:
    """What generate() gives for one prompt under one adapter."""
    key = (id(model), tuple(tokens), repr(adapter), new)
    if key not in _answers or model.multilora.calls.agreement is not None:
        _answers[key] = _generate(model, tokens, adapter, new)
    return _answers[key]


def _generate(model: Any, tokens: list[int], adapter: Any, new: int) -> list[int]:
    ids = torch.tensor([tokens], device=device())
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, adapter_ids=[adapter], **options)[0, len(tokens) :].tolist()


def said(act: Callable[[], Any]) -> str:
    """The error of an act, or nothing."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def hashes(manager: Any) -> set[int]:
    """Of all blocks that are whole."""
    cache = manager.batch_processor.cache
    if hasattr(cache, "_block_manager"):  # transformers 5.17
        return set(cache._block_manager._hash_to_id)
    return {one for allocator in cache.cache_allocators.values() for one in allocator.ledger.hash_to_block}


@contextmanager
def batched(model: Any, **config: Any) -> Iterator[tuple[Any, Results]]:
    """A manager that runs on both ranks until both have come to the end."""
    with running(model, batching(**config)) as manager:
        yield manager, Results(manager)
        together()


def ask(manager: Any, name: str, tokens: list[int], adapter: Any, new: int = NEW, **options: Any) -> str:
    manager.add_request(tokens, name, max_new_tokens=new, adapter_id=adapter, **options)
    return name


@scene
def batches(folder: str) -> dict[str, Any]:
    """Mixed batches and more adapters than slots, through generate_batch; then prefixes, round by round."""
    shared, whole, folders = models(folder)
    mix = {"r8": 0.5, "r3": -1.0}
    ids: list[Any] = [None, *folders, mix, *folders]
    prompts = [prompt(3 + 5 * (i % 6), seed=i % 4) for i in range(len(ids))]
    outputs = shared.generate_batch(
        prompts, greedy(NEW), batching(max_batch_tokens=13, max_requests_per_batch=5), adapter_ids=ids
    )
    got = [output.generated_tokens for output in outputs.values()]
    want = [alone(whole, tokens, adapter) for tokens, adapter in zip(prompts, ids, strict=True)]

    head = prompt(HEAD, seed=90)
    keys: list[Any] = [None, *folders, mix]
    told = {tuple(alone(whole, head, key)) for key in keys}
    blocks = []
    with batched(shared) as (manager, results):
        for number, key in enumerate(keys):  # one after the other: whose blocks are whose
            before = hashes(manager) if manager.batch_processor else set()
            results.wait(ask(manager, f"first.{number}", head + prompt(3, seed=0), key))
            blocks.append(sorted(map(str, hashes(manager) - before)))
        tokens = head + prompt(3, seed=1)
        results.wait(*(ask(manager, f"second.{number}", tokens, key) for number, key in enumerate(keys)))
        found = {key: traffic.prefix_tokens for key, traffic in manager.status().adapters.items()}
        whole_blocks = sorted(map(str, hashes(manager)))
    answers = {key: alone(whole, output.prompt_ids, keys[int(key.split(".")[1])]) for key, output in results.items()}
    wrong = [(key, results[key].error) for key, answer in answers.items() if results[key].generated_tokens != answer]
    return {
        "right": got == want and len(want) == 2 * len(folders) + 2, "told": len(told), "wrong": wrong,
        "keys": len(keys), "blocks": blocks, "all": whole_blocks, "prefixes": found,
    }  # fmt: skip


@scene
def changes(folder: str) -> dict[str, Any]:
    """Loads, reloads and unloads between managers, and in the pause of one; what is refused outside of it."""
    shared, whole, folders = models(folder)
    handle, tokens, found = shared.multilora, prompt(HEAD + 3, seed=50), {}
    paths = {"on demand": Path(folder, "later")}
    paths["on demand"].symlink_to(folders["r8"]) if dist.get_rank() == 0 else None
    together()
    later = str(paths["on demand"])
    [output] = shared.generate_batch([tokens], greedy(NEW), batching(), adapter_ids=later).values()
    found["on demand"] = output.generated_tokens == alone(whole, tokens, "r8")

    handle.load(folders["r8"], "a")
    with batched(shared, allow_block_sharing=True) as (manager, results):
        [first] = results.wait(ask(manager, "first", tokens, "a"))
        blocks = hashes(manager)
        found["outside"] = {
            what: said(act)
            for what, act in {
                "load": lambda: handle.load(folders["r3"], "b"),
                "reload": lambda: handle.load(folders["r3"], "a", reload=True),
                "unload": lambda: handle.unload("a"),
                "pin": lambda: handle.pin("a"),
                "generate": lambda: alone(shared, tokens, "a"),
                "base": lambda: shared(torch.tensor([tokens], device=device())),
                "batch": lambda: shared.generate_batch([tokens], greedy(NEW), batching(), adapter_ids="a"),
                "manager": lambda: shared.init_continuous_batching(greedy(NEW), batching()).start(),
            }.items()
        }
        found["unknown"] = said(lambda: ask(manager, "unknown", tokens, str(folders["r3"])))
        if hasattr(type(manager).__mro__[2], "pause"):
            found |= _paused(manager, results, shared, whole, folders, tokens, blocks)
    handle.load(folders["r3"], "a", reload=True)
    [output] = shared.generate_batch([tokens], greedy(NEW), batching(), adapter_ids="a").values()
    found["between"] = first.generated_tokens == alone(whole, tokens, "r8") and (
        output.generated_tokens == alone(whole, tokens, "r3") == alone(shared, tokens, "a")
    )
    handle.unload("a")
    handle.unload(later)
    found["option"] = said(lambda: shared.init_continuous_batching(greedy(NEW), batching(use_async_batching=True)))
    return found


def _paused(
    manager: Any, results: Results, shared: Any, whole: Any, folders: dict[str, Path], tokens: list[int], blocks: set
) -> dict[str, Any]:
    """A reload, a load and an unload in the pause of a manager with running requests."""
    handle, found = shared.multilora, {}
    long = ask(manager, "long", tokens, "a", LONGER, streaming=True)
    results.started(long)
    with manager.pause():
        found["runs"] = handle.status().adapters and handle.adapters["a"].in_use
        handle.load(folders["r3"], "a", reload=True)
        handle.load(folders["r64"], "b")
        inside = alone(shared, tokens, "b")  # the model is this thread's
    asked = [ask(manager, "new", tokens, "a"), ask(manager, "b", tokens, "b")]
    old, new, other = results.wait(long, *asked)
    found["paused"] = (
        old.generated_tokens == alone(whole, tokens, "r8", LONGER)
        and new.generated_tokens == alone(whole, tokens, "r3")
        and inside == other.generated_tokens == alone(whole, tokens, "r64")
    )
    found["fresh"] = sorted(map(str, hashes(manager) - blocks))
    long = ask(manager, "longer", tokens, "b", LONGER, streaming=True)
    results.started(long)
    with manager.pause():
        found["unloaded"] = said(lambda: handle.unload("b"))
    found["gone"] = said(lambda: ask(manager, "gone", tokens, "b"))
    [output] = results.wait(long)
    found["ended"] = output.generated_tokens == alone(whole, tokens, "r64", LONGER)
    return found


@scene
def pressure(folder: str) -> dict[str, Any]:
    """Cancellations of several at once, a small cache, adapters that host memory has dropped, a poisoned one."""
    shared, whole, folders = models(folder)
    kinds = ["r8", "r3", "r64", "head"]
    disable_multilora(shared)
    enable_multilora(shared, max_loras=2, max_cpu_loras=2)
    for name in kinds:
        shared.multilora.load(folders[name], name)
    prompts = [prompt(HEAD, seed=60 + i % 2) + prompt(2 + i % 5, seed=i) for i in range(12)]
    with batched(shared, num_blocks=20, max_batch_tokens=12, max_requests_per_batch=6) as (manager, results):
        names = [ask(manager, f"p{i}", one, kinds[i % 4], 12 if i % 4 else LONG) for i, one in enumerate(prompts)]
        results.wait(names[1])
        for name in (names[0], names[4]):  # in one step, as far as they come together
            manager.cancel_request(name)
        kept = [i for i in range(12) if i % 4 or i == 8]
        outputs = results.wait(*(names[i] for i in kept))
        wrong = [
            i
            for i, output in zip(kept, outputs, strict=True)
            if output.generated_tokens != alone(whole, prompts[i], kinds[i % 4], 12 if i % 4 else LONG)
        ]
        status = {name: [one.finished, one.cancelled] for name, one in manager.status().adapters.items()}
    dropped = shared.multilora.status().registered.evictions
    disable_multilora(shared)
    enable_multilora(shared, max_loras=2, on_demand=False)
    shared.multilora.load(folders["r8"], "r8")
    tensors, config = poisoned(1, where="layers.1.self_attn.k_proj")
    bad = next(name for name in tensors if name.endswith("layers.1.self_attn.k_proj.lora_B.weight"))
    tensors[bad][:] = torch.where(torch.isfinite(tensors[bad]), tensors[bad], 0)
    tensors[bad][-1, 0] = float("nan")  # of the last rank's heads alone
    shared.multilora.load(tensors, "bad", config=config)
    with batched(shared) as (manager, results):
        pair = [ask(manager, "bad", prompts[0], "bad"), ask(manager, "good", prompts[0], "r8")]
        bad_one, good = results.wait(*pair)
    poison = [str(bad_one.error), good.generated_tokens == alone(whole, prompts[0], "r8")]
    return {"wrong": wrong, "status": status, "dropped": dropped, "poison": poison}


@scene
def mismatches(folder: str) -> dict[str, Any]:
    """Ranks that have, or do, different things: an error on each of them, and they go on."""
    shared, whole, folders = models(folder)
    handle, rank, tokens, found = shared.multilora, dist.get_rank(), prompt(9, seed=3), {}
    for name in ("r8", "r3", "gone"):
        handle.load(folders["r8" if name == "gone" else name], name, reload=name == "r8")

    def batch(ids: Any) -> Any:
        return shared.generate_batch([tokens] * 2, greedy(NEW), batching(), adapter_ids=ids)

    found["ids"] = said(lambda: batch(["r8", "r3"] if rank else ["r3", "r8"]))
    found["unknown"] = said(lambda: batch("nobody" if rank else "r8"))
    found["order"] = said(lambda: handle.load(folders["r3"], "x" if rank else "y"))

    def running_behind() -> None:
        """Rank 1 forgets an adapter while requests of it run, where nothing watches."""
        with batched(shared) as (manager, results):
            results.started(ask(manager, "r8", tokens, "r8", 100, streaming=True))
            if rank:
                handle.store.unload("gone")
            together()
            if not rank:
                ask(manager, "gone", tokens, "gone")
            wait_until(lambda: not manager.is_running(), "the loop has ended")

    found["running"] = said(running_behind)
    found["registry"] = said(lambda: batch(None))
    if not rank:
        handle.store.unload("gone")

    def failing() -> None:
        with batched(shared) as (manager, results):
            [output] = results.wait(ask(manager, "good", tokens, "r3"))
            found["good"] = output.generated_tokens == alone(whole, tokens, "r3")
            together()
            if rank:
                manager.batch_processor.scheduler.schedule_batch = None
            ask(manager, "lost", tokens, "r8")
            wait_until(lambda: not manager.is_running(), "the loop has ended")

    found["failed"] = said(failing)
    found["after"] = [one.generated_tokens for one in batch(["r8", "r3"]).values()] == [
        alone(whole, tokens, name) for name in ("r8", "r3")
    ]
    return found


@scene
def killed_batch(folder: str) -> dict[str, Any]:
    """Rank 1 goes away in the middle; rank 0 has an error, and no endless wait."""
    shared, _, _ = models(folder)
    with running(shared) as manager:
        Results(manager).started(ask(manager, "long", prompt(5), "r8", 100, streaming=True))
        if dist.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: not manager.is_running(), "the loop has ended")
    return {}


if __name__ == "__main__":
    main()
