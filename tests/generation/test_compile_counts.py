"""How often generate()'s decode step is compiled: for the two kinds of batches, and never again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from enabled import enabled
from models import FAMILIES, prompts
from oracle import adapters
from test_compile import Backend
from transformers import CompileConfig

NAMES = ["r8", "r3", "r64", "r16", "r1"]
SETTINGS = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def counting() -> tuple[Backend, CompileConfig]:
    backend = Backend()
    config = CompileConfig(backend=backend, fullgraph=True, mode=None)
    config._compile_all_devices = True  # on a CPU, for the test
    return backend, config


def test_no_mix_load_or_eviction_compiles_after_warmup() -> None:
    """A hundred random mixes over three slots, with reloads and unloads, after one warm-up."""
    model = enabled("llama", NAMES, max_loras=3)
    backend, config = counting()
    model.multilora.warmup(3, max_length=32, compile_config=config)
    made, rng = backend.graphs, random.Random(0)
    assert 1 <= made <= 4, "with adapters and without, with padding and without"
    for turn in range(100):
        name = rng.choice(NAMES)
        if turn % 7 == 3:
            model.multilora.load(adapters()[rng.choice(["r33", "r16"])], name, reload=True)
        elif turn % 7 == 5:
            model.multilora.unload(name)
            model.load_adapter(adapters()[name], adapter_name=name)
        chosen = [*rng.sample(NAMES, 3), None]
        ids: Any = [rng.choice(chosen) for _ in range(3)] if turn % 6 else rng.choice(chosen)
        inputs = prompts(3, side=rng.choice(["left", None]), seed=turn, length=rng.choice([5, 9, 12]))
        got = model.generate(**inputs, **SETTINGS, compile_config=config, adapter_ids=ids)
        assert backend.graphs == made, (turn, ids)
        if turn % 10 == 0:
            assert torch.equal(got, model.generate(**inputs, **SETTINGS, disable_compile=True, adapter_ids=ids)), turn


def test_batch_sizes_that_were_warmed_up() -> None:
    model = enabled("llama", ["r8", "r3"])
    backend, config = counting()
    model.multilora.warmup([1, 2, 5], max_length=32, compile_config=config)
    made = backend.graphs
    for rows in (5, 1, 2, 5, 1):
        for ids in (["r8", *[None] * (rows - 1)], None, "r3"):
            for side in ("left", None):
                inputs = prompts(rows, side=side)
                got = model.generate(**inputs, **SETTINGS, compile_config=config, adapter_ids=ids)
                assert backend.graphs == made, (rows, ids, side)
                want = model.generate(**inputs, **SETTINGS, disable_compile=True, adapter_ids=ids)
                assert torch.equal(got, want), (rows, ids, side)


def test_an_enabled_model_compiles_as_often_as_a_bare_one() -> None:
    backend, config = counting()
    bare = FAMILIES["llama"].build()
    for side in ("left", None):
        bare.generate(**prompts(3, side=side), **SETTINGS, compile_config=config)
    of_bare = backend.graphs
    torch.compiler.reset()
    model = enabled("llama", ["r8", "r3"])
    backend, config = counting()
    for ids in (["r8", None, "r3"], None):
        for side in ("left", None):
            model.generate(**prompts(3, side=side), **SETTINGS, compile_config=config, adapter_ids=ids)
    assert backend.graphs <= 2 * of_bare
