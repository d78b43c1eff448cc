"""A soak: hundreds of random requests for more adapters than slots, while these are loaded, reloaded and unloaded.

Every finished request must be what generate() gives, from its first token to its last, for one version of its adapter
that was registered at some moment between its arrival and its beginning. On any device and with any configuration.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from continuous.cb_bed import Source, agree, alone, answer, batching, enabled, folder, load, poisoned, prompt
from continuous.cb_run import Results, counted, running
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from hf_multilora import AdapterNotFoundError

HEADS, HEAD = 2, 16  # beginnings of prompts that an adapter's requests share, and their tokens: two pages
FOREVER = float("inf")
NEAR = 1e-4  # logits that differ by no more may swap places with the rounding of another batch shape


@dataclass
class Asked:
    """One request as it was asked for; times are those of `time.perf_counter`, as in the outputs' lifespans."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    new: int
    since: float
    cancelled: bool = False


class History:
    """Which version each name stood for, and when it stood for none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.versions: dict[str, list[list[Any]]] = {}  # [version, from, until]
        self.gone: dict[str, list[list[float]]] = {}  # [from, until]
        self.numbers = itertools.count(1000)

    def begins(self, name: str, number: int) -> None:
        with self.lock:
            self.versions.setdefault(name, []).append([number, time.perf_counter(), FOREVER])

    def ended(self, name: str, number: int) -> None:
        with self.lock:
            next(entry for entry in self.versions[name] if entry[0] == number)[2] = time.perf_counter()

    def current(self, name: str) -> int:
        return self.versions[name][-1][0]

    def between(self, name: str, since: float, until: float) -> list[int]:
        with self.lock:
            return [number for number, start, end in self.versions[name] if start <= until and end >= since]

    def was_gone(self, name: str, since: float, until: float) -> bool:
        with self.lock:
            return any(start <= until and end >= since for start, end in self.gone.get(name, ()))


class Churn(threading.Thread):
    """Reloads and unloads adapters until it is stopped; `error` is what went wrong, if anything did."""

    def __init__(self, model: Any, history: History, folders: dict[str, Path], names: list[str], seed: int) -> None:
        super().__init__(daemon=True)
        self.model, self.history, self.folders, self.names = model, history, folders, names
        self.rng, self.stopped = random.Random(seed), threading.Event()
        self.error: BaseException | None = None
        self.done = {"reload": 0, "unload": 0}

    def run(self) -> None:
        try:
            while not self.stopped.wait(self.rng.uniform(0.0, 0.06)):
                self.change(popular(self.rng, self.names), "unload" if self.rng.random() < 0.2 else "reload")
        except BaseException as error:
            self.error = error

    def change(self, name: str, what: str) -> None:
        handle, history = self.model.multilora, self.history
        known = name in {adapter.name for adapter in handle.status().adapters}
        if not known:  # a folder that no request has named yet
            return
        old, number = history.current(name), next(history.numbers)
        if what == "unload":
            with history.lock:
                gone = [time.perf_counter(), FOREVER]
                history.gone.setdefault(name, []).append(gone)
            handle.unload(name)
        history.begins(name, number)
        if name in self.folders:
            folder(number, self.folders[name])
            handle.load(str(self.folders[name]), name, reload=True)  # a request may have brought it back meanwhile
        else:
            load(self.model, name, number, reload=what == "reload")
        history.ended(name, old)
        if what == "unload":
            with history.lock:
                gone[1] = time.perf_counter()
        self.done[what] += 1


def popular(rng: random.Random, names: list[str]) -> str:
    """One of the names, the first ones more often than the others."""
    return rng.choices(names, [1 / (1 + i) ** 0.8 for i in range(len(names))])[0]


def ask(rng: random.Random, manager: Any, names: list[str]) -> tuple[str, Asked] | None:
    """One random request; None where its adapter was gone at that moment."""
    kind, mixable = rng.random(), [name for name in names[:12] if "/" not in name]
    chosen = (popular(rng, names),) if kind > 0.08 else ()
    weights = (1.0,) * len(chosen)
    if kind > 0.94:
        chosen, weights = tuple(sorted(rng.sample(mixable, 2))), (0.6, -0.4)
    head = prompt(HEAD, seed=len(chosen) and 100 + names.index(chosen[0]) * HEADS + rng.randrange(HEADS))
    tokens = head[: rng.choice([5, HEAD, HEAD])] + prompt(rng.randint(1, 12), seed=rng.randrange(1 << 30))
    new = rng.randint(2, 8)
    if rng.random() < 0.04:
        tokens, new = tokens + prompt(30, seed=rng.randrange(1 << 30)), 24
    adapter: Any = None if not chosen else chosen[0] if len(chosen) == 1 else dict(zip(chosen, weights, strict=True))
    asked = Asked(chosen, weights, new, time.perf_counter())
    try:
        request = manager.add_request(tokens, adapter_id=adapter, max_new_tokens=new)
    except AdapterNotFoundError:
        if not any(manager.history.was_gone(name, asked.since, time.perf_counter()) for name in chosen):
            raise
        return None
    assert request is not None, "the manager takes no requests any more"
    return request, asked


def near_tie(tokens: list[int], got: list[int], source: Source, at: int) -> bool:
    """Whether the token at `at` and the one that generate() took have the same logit, as far as fp32 tells."""
    with torch.no_grad():
        scores = alone(source)(torch.tensor([tokens + got[:at]])).logits[0, -1]
    return len(got) > at and float(scores.max() - scores[got[at]]) < NEAR


def check(output: Any, asked: Asked, history: History, poison: str) -> str:
    """Compare one output with what it may be; returns what it was."""
    begun, ended = output.lifespan
    begun, ended = (begun, ended) if begun >= asked.since else (time.perf_counter(),) * 2
    if output.error is not None and "was unloaded" in output.error:
        gone = any(history.was_gone(name, asked.since, time.perf_counter()) for name in asked.names)
        assert gone and output.status == RequestStatus.FAILED, f"{asked} failed: {output.error}"
        return "unloaded"
    torn = output.error is not None and any("/" in name for name in asked.names) and "adapter_" in output.error
    if torn and any(history.was_gone(name, asked.since, time.perf_counter()) for name in asked.names):
        return "read while it was written"  # a folder that was unloaded, and asked for before its new files were whole
    if poison in asked.names:
        assert output.error and "finite" in output.error, f"a poisoned adapter's request: {output}"
        return "poisoned"
    assert output.error is None, f"{asked} failed: {output.error}"
    versions = [history.between(name, asked.since, begun) for name in asked.names]
    sources: list[Source] = [
        None if not numbers else numbers[0] if len(numbers) == 1 else tuple(zip(numbers, asked.weights, strict=True))
        for numbers in itertools.product(*versions)
    ]
    got, tokens, far = output.generated_tokens, output.prompt_ids, {}
    for source in sources:
        far[source] = agree(answer(tokens, source, asked.new), got)
        if far[source] == asked.new == len(got):
            return "one version" if len(sources) == 1 else "one of several versions"
    if any(near_tie(tokens, got, source, at) for source, at in far.items()):
        return "tie"
    raise AssertionError(f"{output.request_id}, {asked}: {got}. Tokens that agree, by source: {far}")


def soak(seed: int, *, device: str = "cpu", requests: int = 500, adapters: int = 40, slots: int = 4, **config: Any):
    """Run it; returns how many requests ended in which way, and what else happened."""
    rng, history = random.Random(seed), History()
    plain = [f"a{i}" for i in range(adapters * 3 // 4)]
    folders = {str(path): path for i in range(len(plain), adapters) for path in [folder(i, _place(seed, i))]}
    model = enabled({name: i for i, name in enumerate(plain)}, device=device, max_loras=slots)
    tensors, options = poisoned(5)
    model.multilora.load(tensors, "a5", config=options, reload=True)
    for number, name in enumerate([*plain, *folders]):
        history.begins(name, number)
    names = [*plain, *folders]
    rng.shuffle(names)
    churn = Churn(model, history, folders, [name for name in names if name != "a5"], seed)
    asked: dict[str, Asked] = {}
    settings = {"num_blocks": 20, "max_batch_tokens": 24, "max_requests_per_batch": 8, "safety_margin": 0.0, **config}
    with (
        counted(RequestState, "create_equivalent_initial_request") as resets,
        running(model, batching(**settings)) as manager,
    ):
        manager.history, results = history, Results(manager)
        churn.start()
        while len(asked) < requests:
            for _ in range(rng.choice([1, 1, 2, 6])):
                if one := ask(rng, manager, names):
                    asked[one[0]] = one[1]
            results.take(timeout=rng.expovariate(1 / 0.01))
            if rng.random() < 0.15:
                victim = rng.choice([request for request in asked])
                asked[victim].cancelled |= victim not in results
                manager.cancel_request(victim)
        churn.stopped.set()
        results.wait(*(request for request, one in asked.items() if not one.cancelled))
        churn.join(timeout=20)
        assert not churn.is_alive() and churn.error is None, f"loading and unloading: {churn.error!r}"
        traffic = manager.status()
    while not manager.output_router.output_queue.empty():
        results.take(timeout=0)
    ended: dict[str, int] = {"cancelled": sum(request not in results for request in asked)}
    for request, output in results.items():
        how = check(output, asked[request], history, "a5")
        ended[how] = ended.get(how, 0) + 1
    assert all(adapter.in_use == 0 for adapter in model.multilora.status().adapters)
    return ended, {**churn.done, "resets": len(resets), "traffic": traffic, "asked": asked}


def _place(seed: int, number: int) -> Path:
    from oracle import workspace

    return workspace() / "soak" / str(seed) / f"f{number}"
