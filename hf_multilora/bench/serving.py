"""One side of a continuous batching benchmark: a model, its manager, and the requests that it serves.

A side keeps its manager for as long as it is open, so that sides can take turns. Works with the bare model's own
manager and with an enabled model's, of every transformers release that has one.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from ..generation.continuous.options import batching_config
from .measure import synchronize

SPARE_BLOCKS = 1.2
"""transformers takes no new request while less than 15 % of the blocks are free."""
STUCK_S, STOP_S, SETTLE_S = 120.0, 30.0, 2.0
COUNTERS = ("requests", "finished", "failed", "cancelled", "prompt_tokens", "new_tokens", "prefix_tokens", "wait_s")
PEAKS = ("longest_wait_s", "passed_over")
Names = Sequence[str | None] | None


@dataclass(frozen=True)
class Shape:
    """What a manager is made for, and what its requests are like; the same for all sides that are compared."""

    requests: int
    prompt: tuple[int, int]
    new: int
    rows: int
    """requests that may be in one batch"""
    batch_tokens: int
    block: int
    graphs: bool = False

    @property
    def blocks(self) -> int:
        return math.ceil(SPARE_BLOCKS * self.rows * math.ceil((self.prompt[1] + self.new) / self.block))

    @property
    def mask_elements(self) -> int:
        """Of the mask that eager and sdpa attention read: transformers allocates it once, at its largest."""
        return self.batch_tokens * (self.blocks * self.block + self.batch_tokens)

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        """Random prompts of a repetition.

        Lengths are its own, too: cuDNN keeps a plan of its attention for each length of the cache that it has met, and
        requests that come never meet the same ones again.
        """
        lengths, tokens = random.Random(~seed), random.Random(seed)
        counts = [lengths.randint(*self.prompt) for _ in range(self.requests)]
        return [tokens.choices(range(3, vocabulary), k=count) for count in counts]


def config_of(shape: Shape) -> ContinuousBatchingConfig:
    """Nothing of it is left to be inferred from free memory, which differs between the sides of one process."""
    return batching_config(
        page_size=shape.block,
        num_blocks=shape.blocks,
        max_batch_tokens=shape.batch_tokens,
        max_requests_per_batch=shape.rows,
        use_cuda_graph=True if shape.graphs else None,
        auto_switch_to_flash=False
        if "auto_switch_to_flash" in ContinuousBatchingConfig.__dataclass_fields__
        else None,
    )


def set_attention(model: Any, attention: str) -> None:
    """Let continuous batching run this attention and none in its place: what else is there differs by machine."""
    prefix = "" if "auto_switch_to_flash" in ContinuousBatchingConfig.__dataclass_fields__ else "paged|"
    model.set_attn_implementation(prefix + attention)


def greedy(new: int) -> GenerationConfig:
    """Greedy, without an end token (-1 is transformers' own word for none here)."""
    return GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)


@dataclass
class Served:
    """What came of some requests."""

    seconds: float
    outputs: list[list[int]]
    steps: int
    split: dict[str, float] = field(default_factory=dict)
    """seconds of the generation thread in each of its parts"""
    status: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))


class Meter:
    """Counts a batch processor's steps and times their parts; in synchronous batching a forward includes its sync."""

    PARTS = {"prepare": "prepare_next_batch", "forward": "_generation_step", "update": "update_batch"}

    def __init__(self, processor: Any) -> None:
        self.steps = 0
        self.seconds = dict.fromkeys(self.PARTS, 0.0)
        for part, method in self.PARTS.items():
            setattr(processor, method, self._timed(part, getattr(processor, method)))

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start
                self.steps += part == "forward"

        return timed


class StuckError(RuntimeError):
    """A manager that stopped, or no longer hands out results."""


class Side:
    """A model under continuous batching.

    Args:
        options: what an enabled model's manager takes beyond transformers' own arguments.
    """

    def __init__(self, model: Any, shape: Shape, **options: Any) -> None:
        self.model, self.shape, self.options = model, shape, options
        self.manager: Any = None
        self._stack = ExitStack()
        self._meter: Meter | None = None

    def __enter__(self) -> Side:
        self.manager = self._stack.enter_context(
            self.model.continuous_batching_context_manager(
                generation_config=greedy(self.shape.new),
                continuous_batching_config=config_of(self.shape),
                timeout=STOP_S,
                **self.options,
            )
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        self.manager = self._meter = None

    def serve(self, prompts: Sequence[Sequence[int]], names: Names = None, new: int | None = None) -> Served:
        """Add all requests, wait for all results: the time is that from the first `add_request` to the last result."""
        new = self.shape.new if new is None else new
        meter = self._metered()
        steps, split = meter.steps, dict(meter.seconds)
        known = self.counted()
        synchronize(str(self.model.device))
        start = time.perf_counter()
        ids = []
        for number, prompt in enumerate(prompts):
            options = {} if names is None else {"adapter_id": names[number]}
            ids.append(self.manager.add_request(prompt, max_new_tokens=new, **options))
        outputs = dict(self.results(ids))
        seconds = time.perf_counter() - start
        counted = self.settled(known.get("finished", 0) + len(ids))
        wrong = [request for request, tokens in outputs.items() if len(tokens) != new]
        if wrong:
            raise StuckError(f"{len(wrong)} of {len(ids)} requests have other than {new} new tokens")
        return Served(
            seconds,
            [outputs[request] for request in ids],
            meter.steps - steps,
            {part: meter.seconds[part] - split[part] for part in split},
            {name: value - known[name] for name, value in counted.items()},
        )

    def results(self, ids: Sequence[str]) -> list[tuple[str, list[int]]]:
        """Wait for these requests; (id, new tokens) of each, in the order in which they were done."""
        left, done = set(ids), []
        while left:
            done.append(self.next_result(left))
            left.discard(done[-1][0])
        return done

    def next_result(self, wanted: set[str]) -> tuple[str, list[int]]:
        """The next of `wanted` that is done. Results of other requests are dropped."""
        deadline = time.monotonic() + STUCK_S
        while True:
            result = self.manager.get_result(timeout=1)
            if result is not None and result.request_id in wanted and result.error is not None:
                raise StuckError(f"request {result.request_id}: {result.error}")
            if result is not None and result.is_finished() and result.request_id in wanted:
                return result.request_id, list(result.generated_tokens)
            if result is None and not self.manager.is_running():
                raise StuckError("the generation thread ended")
            if time.monotonic() > deadline:
                self.manager.stop(hard_stop=True, timeout=10)
                raise StuckError(f"no result for {STUCK_S:.0f} s, {len(wanted)} requests are missing")

    def _metered(self) -> Meter:
        if self._meter is None:
            deadline = time.monotonic() + STUCK_S
            while self.manager.batch_processor is None or not hasattr(self.manager, "current_batch"):
                if time.monotonic() > deadline or not self.manager.is_running():
                    raise StuckError("the generation thread did not begin")
                time.sleep(0.01)
            self._meter = Meter(self.manager.batch_processor)
        return self._meter

    def counted(self) -> dict[str, float]:
        """What an enabled model's manager counts, over all adapters; {} for the bare model's."""
        status = getattr(self.manager, "status", None)
        if status is None:
            return {}
        rows = list(status().adapters.values())
        counted = {name: float(sum(getattr(row, name) for row in rows)) for name in COUNTERS}
        return counted | {"brought_in": float(self.model.multilora.status().resident.misses)}

    def settled(self, finished: float) -> dict[str, float]:
        """The counters once so many requests are finished: the thread counts a request after its result is out."""
        deadline = time.monotonic() + SETTLE_S
        while (counted := self.counted()) and counted["finished"] < finished and time.monotonic() < deadline:
            time.sleep(0.02)
        return counted

    def longest_wait(self) -> dict[str, float]:
        """Of an enabled model's manager since it began: the longest wait for a first step, the most passed over."""
        status = getattr(self.manager, "status", None)
        rows = list(status().adapters.values()) if status is not None else []
        return {name: max((float(getattr(row, name)) for row in rows), default=0.0) for name in PEAKS} if rows else {}


def alike(outputs: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Share of requests with the same first token, and of those with all tokens the same."""
    pairs = list(zip(outputs, others, strict=True))
    first = sum(a[0] == b[0] for a, b in pairs) / len(pairs)
    return first, sum(list(a) == list(b) for a, b in pairs) / len(pairs)


def free_device(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
