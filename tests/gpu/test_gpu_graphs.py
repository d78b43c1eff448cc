"""decode_graphs=True: captured steps give eager's bits, are captured once, and never stand in the way of an answer."""

from __future__ import annotations

import contextlib
import gc
import inspect
import random
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_bed import ADAPTERS, CUDA, DEVICE, MARKS, MIXED, ROWS, adapter, bare, enabled, fresh, inputs, load, needs_cuda
from recorded import Recorder, emulated
from transformers import CompileConfig, DynamicCache, MistralConfig, MistralForCausalLM, StaticCache

from hf_multilora import disable_multilora, enable_multilora
from hf_multilora.generation import capture

pytestmark = MARKS

NEW = 6
ROOM = 40  # tokens of the longest prompt and answer in this file
READY_S = 3.0
MIXES: list[Any] = [list(MIXED), ["r33"] * ROWS, [None] * (ROWS - 1) + ["r1"], list(reversed(MIXED)), "r8", None]


@pytest.fixture(autouse=True)
def _graphs_on_this_device() -> Iterator[None]:
    with contextlib.nullcontext() if CUDA else emulated():
        yield


def captured(model: Any) -> Any:
    """The model's graphs, ready to be captured on a CPU too."""
    graphs = model.multilora.graphs
    if not CUDA:
        graphs.make_recorder = Recorder
    return graphs


def with_graphs(dtype: torch.dtype, **options: Any) -> Any:
    model = enabled(dtype, decode_graphs=True, **options)
    captured(model)
    return model


def _compile_options() -> dict[str, Any]:
    if CUDA:
        return {}
    config = CompileConfig()
    config._compile_all_devices = True  # generate() compiles by itself on a GPU only
    return {"compile_config": config}


def decode(model: Any, batch: dict[str, Any], *, graphs: bool = True, new: int = NEW, **options: Any) -> Any:
    """Greedy generate() with a static cache; `graphs` False: the same without capture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(
            **batch,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=options.pop("do_sample", False),
            cache_implementation="static",
            disable_compile=not graphs,
            **_compile_options(),
            **options,
        )


def every_logit(output: Any) -> torch.Tensor:
    return torch.stack(output.logits, 1).cpu()


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_eager_s(dtype, padded):
    model = with_graphs(dtype)
    graphs, batch = captured(model), inputs(11, padded=padded)
    wanted = {"output_logits": True, "return_dict_in_generate": True}
    for mix in MIXES:
        got = every_logit(decode(model, batch, adapter_ids=mix, **wanted))
        want = every_logit(decode(model, batch, graphs=False, adapter_ids=mix, **wanted))
        for step in range(NEW):
            assert torch.equal(got[:, step], want[:, step]), (
                f"{mix}, step {step}: rows {[row for row in range(ROWS) if not torch.equal(got[row], want[row])]}, "
                f"largest difference {(got[:, step] - want[:, step]).abs().max():.2e}; {graphs.refusals}"
            )
    assert graphs.captures == 2 and not graphs.refusals, f"{graphs.captures} captures; {graphs.refusals}"
    assert graphs.replays == len(MIXES) * (NEW - 1)


def test_base_rows_are_the_bare_model():
    model, base = with_graphs(torch.float32), bare(torch.float32)
    for mix in (None, list(MIXED)):
        got = decode(model, inputs(11, padded=True), adapter_ids=mix)
        want = decode(base, inputs(11, padded=True), graphs=False)
        for row in range(ROWS):
            if mix is None or mix[row] is None:
                assert torch.equal(got[row], want[row]), row


def test_nothing_is_captured_after_warmup():
    """A hundred mixes, orders, loads, evictions and unloads over three slots; answers as without graphs."""
    model = with_graphs(torch.float32, max_loras=3)
    graphs, before = captured(model), model.multilora.status()
    model.multilora.warmup([2, 4], max_length=ROOM, **_compile_options())
    assert repr(model.multilora.status()) == repr(before), "warm-up touched an adapter"
    made, rng = graphs.captures, random.Random(0)
    assert 4 <= made <= 8 and not graphs.refusals, (made, graphs.refusals)
    names = list(ADAPTERS)
    for turn in range(100):
        if turn % 10 == 5:
            name = rng.choice(names)
            load(model, name, adapter(name, torch.float32), reload=True)
        if turn % 25 == 20:
            model.multilora.unload("r16")
            load(model, "r16", adapter("r16", torch.float32))
        rows, tokens = rng.choice([2, 4]), rng.choice([3, 7, 11])
        chosen: list[str | None] = [*rng.sample(names, rng.randint(1, 3)), None]
        ids = [rng.choice(chosen) for _ in range(rows)]
        batch = inputs(tokens, rows=rows, seed=turn, padded=rng.random() < 0.5)
        got = decode(model, batch, new=3, adapter_ids=ids)
        if turn % 5 == 0:
            assert torch.equal(got, decode(model, batch, graphs=False, new=3, adapter_ids=ids)), (turn, ids)
        assert graphs.captures == made, f"turn {turn}: {ids}, {rows} rows of {tokens} tokens was captured again"
    assert model.multilora.status().slots != before.slots


@needs_cuda
def test_ready_in_seconds():
    model = with_graphs(torch.bfloat16)
    for rows in (1, 8, 32):
        # The first time compiles Triton kernels, which a cache on disk keeps.
        model.multilora.warmup(rows, max_length=ROOM)
        captured(model).clear()
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.multilora.warmup(rows, max_length=ROOM)
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        assert took <= READY_S, f"{rows} rows: {took:.2f} s"


def test_a_returned_cache_is_its_owner_s():
    model = with_graphs(torch.float32)
    first = decode(model, inputs(9), adapter_ids=list(MIXED), return_dict_in_generate=True)
    cache = next(value for value in (first.get("cache"), first.get("past_key_values")) if value is not None)
    before = [layer.keys.clone() for layer in cache.layers]
    decode(model, inputs(9, seed=1), adapter_ids=list(MIXED))
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
    made = captured(model).captures
    keys = cache.layers[0].keys
    del first, cache
    gc.collect()
    decode(model, inputs(9, seed=2), adapter_ids=list(MIXED))
    if CUDA:
        assert torch.equal(keys, before[0]), "a tensor that was taken out of a cache was given to the next one"
    del keys
    for seed in range(3):
        decode(model, inputs(9, seed=seed), adapter_ids=list(MIXED))
    assert captured(model).captures == made


@pytest.mark.parametrize("window", [8, 64], ids=["window is full", "window is not"])
def test_sliding_windows(window):
    config = MistralConfig(
        vocab_size=515, hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=window, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        base = MistralForCausalLM(config).eval().to(DEVICE)
    model = enable_multilora(base, decode_graphs=True)
    graphs = captured(model)
    for padded in (True, False):
        for tokens in (5, 12, 5):
            batch = inputs(tokens, rows=3, padded=padded)
            got = decode(model, batch, new=8)
            assert torch.equal(got, decode(model, batch, graphs=False, new=8)), (tokens, padded)
    assert graphs.captures and not graphs.refusals, (graphs.captures, graphs.refusals)
    made = graphs.captures
    decode(model, inputs(5, rows=3, padded=True), new=8)
    assert graphs.captures == made


def test_a_step_that_waits_for_the_device_is_not_captured():
    model = with_graphs(torch.float32)
    graphs, layer = captured(model), model.model.layers[0].mlp
    old = type(layer).forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return old(self, x) * (1.0 if x[0, 0, 0].item() > -1e9 else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer), "forward", forward)
        got = decode(model, inputs(9), adapter_ids=list(MIXED))
    assert torch.equal(got, decode(model, inputs(9), graphs=False, adapter_ids=list(MIXED)))
    assert graphs.captures == 0 and any("on the host" in reason for reason in graphs.refusals), graphs.refusals


@needs_cuda
def test_a_graph_after_the_last_one_is_gone():
    """With it goes its memory pool, which torch lets nobody capture into again."""
    recorder, x = capture.CudaRecorder(torch.device(DEVICE, 0)), torch.zeros(8, device=DEVICE)
    for turn in range(3):
        replay, y = recorder.record(lambda: x + 1)
        x.fill_(turn)
        replay()
        assert y.tolist() == [turn + 1.0] * 8
        del replay, y


@needs_cuda
def test_a_capture_that_fails_leaves_nothing_behind():
    """Past the audit, so that CUDA itself refuses in the middle of a capture."""
    model = with_graphs(torch.float32)
    graphs, layer = captured(model), model.model.layers[1].mlp
    old = type(layer).forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return old(self, x) * (1.0 if x[0, 0, 0].item() > -1e9 else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer), "forward", forward)
        patch.setattr(capture, "_READS_ON_HOST", ())
        got = decode(model, inputs(9), adapter_ids=list(MIXED))
    assert graphs.captures == 0 and graphs.refusals, graphs.refusals
    assert torch.equal(got, decode(model, inputs(9), graphs=False, adapter_ids=list(MIXED)))
    torch.rand(8, device=DEVICE)  # the generator is not left in the middle of a capture
    decode(model, inputs(9), do_sample=True, adapter_ids=list(MIXED))
    model.multilora.graphs.clear()
    made = graphs.captures
    got = decode(model, inputs(9), adapter_ids=list(MIXED))
    assert graphs.captures == made + 1, graphs.refusals
    assert torch.equal(got, decode(model, inputs(9), graphs=False, adapter_ids=list(MIXED)))
    torch.empty(8 << 20, dtype=torch.uint8, device=DEVICE)
    before = torch.cuda.memory_reserved()
    for _ in range(20):  # allocations go to the ordinary pool again, where the first one's memory is free
        torch.empty(8 << 20, dtype=torch.uint8, device=DEVICE)
    assert torch.cuda.memory_reserved() == before


def steps(model: Any, forward: Any, cache: Any, names: tuple[str, ...]) -> Iterator[None]:
    """A prefill, then single decode steps by hand, each when the generator is asked for it."""
    name = "cache" if "cache" in names else "past_key_values"
    batch = inputs(5, rows=4)["input_ids"]
    at = torch.arange(64, device=DEVICE)[None].expand(4, -1)
    model(input_ids=batch, position_ids=at[:, :5], use_cache=True, **{name: cache})
    ids = [batch[:, i : i + 1].contiguous() for i in range(5)]
    for step in range(5):
        yield
        place = at[:, 5 + step : 6 + step].contiguous()
        forward(input_ids=ids[step], position_ids=place, use_cache=True, return_dict=True, **{name: cache})


@needs_cuda
@pytest.mark.parametrize("ids", [["r1", None, "r3", "r8"], [None] * 4, "r33"], ids=["mixed", "none", "one"])
@pytest.mark.parametrize("path", ["eager", "eager static", "graphs"])
def test_a_step_does_not_wait_for_the_device(path, ids):
    model = with_graphs(torch.bfloat16, max_loras=5)
    names = tuple(inspect.signature(model.forward).parameters)
    cache = DynamicCache() if path == "eager" else StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad(), model.multilora.use(ids):
        forward = model.get_compiled_call(None) if path == "graphs" else model
        run = steps(model, forward, cache, names)
        for _ in range(3):
            next(run)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            next(run)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    if path == "graphs":
        assert model.multilora.graphs.captures == 1, model.multilora.graphs.refusals


@needs_cuda
def test_threads_on_streams_of_their_own():
    """Two generate while a third loads and unloads: captures and replays of one model stay apart."""
    model = with_graphs(torch.float32, max_loras=4)
    names = ["r1", "r3", "r8"]
    batch = inputs(9, rows=4, padded=True)
    expected = {name: decode(model, batch, graphs=False, adapter_ids=name) for name in [*names, None]}
    problems: list[str] = []

    def generating(seed: int) -> None:
        rng = random.Random(seed)
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            for turn in range(8):
                first, second = rng.sample(names, 2)
                ids = [first, None, second, first] if turn % 4 else [None] * 4
                got = decode(model, batch, adapter_ids=ids)
                problems.extend(
                    f"thread {seed}, turn {turn}, row {row} ({name})"
                    for row, name in enumerate(ids)
                    if not torch.equal(got[row], expected[name][row])
                )

    def loading() -> None:
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            for turn in range(8):
                load(model, f"more{turn}", adapter("r16", torch.float32, seed=turn))
                decode(model, batch, adapter_ids=f"more{turn}")
                model.multilora.unload(f"more{turn}")

    def guarded(fn: Any, *args: Any) -> None:
        try:
            fn(*args)
        except BaseException as problem:
            problems.append(f"{fn.__name__}: {problem!r}")

    work = [(generating, 0), (generating, 1), (loading,)]
    threads = [threading.Thread(target=guarded, args=item, daemon=True) for item in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert not problems, problems
    assert not model.multilora.graphs.refusals, model.multilora.graphs.refusals


@needs_cuda
def test_beside_the_compiler():
    """torch.compile's own graphs clear cuBLAS's scratch memory, which ours must not share."""
    ours, theirs = with_graphs(torch.bfloat16), enabled(torch.bfloat16)
    batch = inputs(9, padded=True)
    want = decode(ours, batch, graphs=False, adapter_ids=list(MIXED))
    for _ in range(3):
        assert torch.equal(decode(ours, batch, adapter_ids=list(MIXED)), want)
        decode(theirs, batch, adapter_ids=list(MIXED))
        junk = [torch.full((1 << 20,), float("nan"), device=DEVICE) for _ in range(64)]
        del junk
    assert ours.multilora.graphs.captures == 1, ours.multilora.graphs.refusals


def test_inference_mode_and_no_grad():
    model, batch = with_graphs(torch.float32), inputs(9, padded=True)
    want = decode(model, batch, graphs=False, adapter_ids=list(MIXED))
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(decode(model, batch, adapter_ids=list(MIXED)), want), mode
    assert captured(model).captures == 1, captured(model).refusals


@needs_cuda
def test_memory_comes_back():
    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    bare(torch.float32)
    base = fresh(torch.float32)
    decode(base, inputs(9), graphs=False)
    before = allocated()
    enable_multilora(base, max_loras=4, decode_graphs=True)
    for rows in (2, 4, 8):
        decode(base, inputs(9, rows=rows))
    assert base.multilora.graphs.captures == 3, base.multilora.graphs.refusals
    disable_multilora(base)
    assert allocated() <= before + (1 << 20), (before, allocated())
