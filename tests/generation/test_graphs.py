"""decode_graphs on a CPU, with recordings in the place of CUDA graphs: what is captured, when, and what is not."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from enabled import in_use, seeded
from models import FAMILIES, VOCAB, cache_argument, prompts
from oracle import MIX, Id, adapters, rows_of
from recorded import Recorder, emulated
from transformers import CompileConfig, PreTrainedModel, StaticCache

from hf_multilora import ConfigError, ModelError, disable_multilora, enable_multilora
from hf_multilora.generation import graphs as graphs_module
from hf_multilora.generation import kept_caches

NEW = 6
BATCHES: list[Any] = [["r8", None, "r3"], ["r3", "r3", MIX], [None, "r64", None], "r8", None, ["r64", "r8", None]]
DECODER_ONLY = [name for name, family in FAMILIES.items() if not family.encoder_decoder]


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with emulated():
        yield


def build(family: str = "llama", names: tuple[str, ...] = ("r8", "r3", "r64"), **options: Any) -> PreTrainedModel:
    options = {"max_loras": 8, "max_lora_rank": 128, "decode_graphs": True, **options}
    model = enable_multilora(FAMILIES[family].build(), **options)
    model.multilora.graphs.make_recorder = Recorder
    for name in names:
        model.load_adapter(adapters(family)[name], adapter_name=name)
    return model


def everywhere() -> CompileConfig:
    """Lets generate() ask for a compiled forward on a CPU."""
    config = CompileConfig()
    config._compile_all_devices = True
    return config


def decode(model: Any, batch: dict[str, torch.Tensor], **options: Any) -> Any:
    settings = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": "static", **options}
    return model.generate(**batch, compile_config=everywhere(), **settings)


def uncaptured(model: Any, batch: dict[str, torch.Tensor], **options: Any) -> Any:
    return decode(model, batch, disable_compile=True, **options)


@pytest.mark.parametrize("family", DECODER_ONLY)
def test_tokens_and_captures(family: str) -> None:
    model = build(family)
    graphs = model.multilora.graphs
    for batch in BATCHES:
        ids: list[Id] = batch if isinstance(batch, list) else [batch] * 3
        for side in ("left", None):
            inputs = prompts(3, side=side)
            got = decode(model, inputs, adapter_ids=batch)
            want = rows_of(family, ids, lambda ref, inputs=inputs: decode(ref, inputs, disable_compile=True))
            assert torch.equal(got, want), (batch, side)
    assert not graphs.refusals
    # For batches with adapters and without, and for models that see padding as a mask more, with and without padding.
    # A window fills up during the first answer: another graph each.
    assert graphs.captures in (2, 4)
    assert graphs.replays == 2 * len(BATCHES) * (NEW - 1)
    assert in_use(model) == 0


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_that_fill_up(family: str) -> None:
    """The window is 8 tokens: prompts of 12 and 4, answers of 9."""
    model = build(family)
    for _ in range(2):
        for length in (12, 4):
            inputs = prompts(3, side=None, length=length)
            got = decode(model, inputs, adapter_ids=["r8", None, "r3"], max_new_tokens=9)
            assert torch.equal(got, uncaptured(model, inputs, adapter_ids=["r8", None, "r3"], max_new_tokens=9))
    assert model.multilora.graphs.captures == 2, "one while the window fills, one when it is full"
    assert not model.multilora.graphs.refusals


def test_a_count_in_python_that_a_graph_would_keep() -> None:
    """A layer that adds the number of tokens as Python knows it: captured, and found out at the next step."""
    model = build("gemma3")
    layer, counts = model.model.layers[0].mlp, []
    old = type(layer).forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = old(self, x)
        if x.shape[1] == 1 and counts:
            y = y + 0.1 * counts[-1].layers[0].cumulative_length_int
        return y

    def remember(cache: Any, *args: Any) -> Any:
        counts.append(cache)
        return before(cache, *args)

    before = StaticCache.update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer), "forward", forward)
        patch.setattr(StaticCache, "update", lambda cache, *args, **kwargs: remember(cache, *args))
        for length in (4, 12):
            inputs = prompts(3, side=None, length=length)
            got = decode(model, inputs, adapter_ids=["r8", None, "r3"], max_new_tokens=3)
            assert torch.equal(got, uncaptured(model, inputs, adapter_ids=["r8", None, "r3"], max_new_tokens=3))
    assert any("counts" in reason for reason in model.multilora.graphs.refusals), model.multilora.graphs.refusals


def test_nothing_is_captured_after_warmup() -> None:
    model = build(names=("r8", "r3", "r64", "r16", "r1"), max_loras=3)
    graphs = model.multilora.graphs
    decode(model, prompts(2), adapter_ids=["r3", "r8"])
    before, order = repr(model.multilora.status()), repr(model.multilora.store.status())
    model.multilora.warmup([2, 3], max_length=32, compile_config=everywhere())
    assert repr(model.multilora.status()) == before and repr(model.multilora.store.status()) == order
    made, rng = graphs.captures, random.Random(0)
    for turn in range(100):
        name = rng.choice(["r8", "r3", "r64", "r16", "r1"])
        if turn % 7 == 3:
            model.multilora.load(adapters()[rng.choice(["r33", "r16"])], name, reload=True)
        elif turn % 7 == 5:
            model.multilora.unload(name)
            model.load_adapter(adapters()[name], adapter_name=name)
        rows = rng.choice([2, 3])
        chosen = [*rng.sample(["r8", "r3", "r64", "r16", "r1"], 3), None]
        ids = [rng.choice(chosen) for _ in range(rows)]
        inputs = prompts(rows, side=rng.choice(["left", None]), seed=turn, length=rng.choice([5, 9, 12]))
        got = decode(model, inputs, adapter_ids=ids, max_new_tokens=3)
        assert graphs.captures == made, (turn, ids)
        if turn % 4 == 0:
            assert torch.equal(got, uncaptured(model, inputs, adapter_ids=ids, max_new_tokens=3)), (turn, ids)
    assert not graphs.refusals


def test_warmup_says_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        build().multilora.warmup(0, max_length=32)
    with pytest.raises(ConfigError, match="max_length"):
        build().multilora.warmup(1, max_length=2)
    with pytest.raises(ModelError, match="input_ids"):
        build("t5").multilora.warmup(1, max_length=32)
    bare = enable_multilora(FAMILIES["llama"].build())
    bare.multilora.warmup(2, max_length=32)  # nothing to compile on a CPU, and nothing wrong
    assert bare.multilora.graphs is None


def test_other_modes_of_generate() -> None:
    model, inputs, ids = build(), prompts(2), ["r8", None]
    for options in (
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2},
        {"guidance_scale": 1.5},
        {"prefill_chunk_size": 5},
        {"output_hidden_states": True, "output_attentions": True, "return_dict_in_generate": True},
    ):
        outputs = []
        for run in (decode, uncaptured):
            with seeded():
                output = run(model, inputs, adapter_ids=ids, **options)
            outputs.append(output if isinstance(output, torch.Tensor) else output.sequences)
        assert torch.equal(*outputs), options
    assert model.multilora.graphs.captures


def test_hidden_states_are_those_of_their_step() -> None:
    model, inputs = build(), prompts(3)
    options = {"output_hidden_states": True, "return_dict_in_generate": True, "output_logits": True}
    got = decode(model, inputs, adapter_ids=["r8", None, "r3"], **options)
    want = uncaptured(model, inputs, adapter_ids=["r8", None, "r3"], **options)
    assert model.multilora.graphs.replays
    for mine, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert all(map(torch.equal, got.logits, want.logits))


def test_waves() -> None:
    model, inputs = build(max_loras=1), prompts(3)
    assert torch.equal(
        decode(model, inputs, adapter_ids=["r8", "r3", None]),
        uncaptured(model, inputs, adapter_ids=["r8", "r3", None]),
    )
    assert model.multilora.graphs.replays


def test_a_cache_of_the_user() -> None:
    """The same cache, reset and used again: its tensors are where they were, and so is the graph."""
    model, inputs = build(), prompts(3, side=None)
    cache = StaticCache(config=model.config, max_cache_len=24)
    key = cache_argument(model)
    options = {"max_new_tokens": NEW, "do_sample": False, "compile_config": everywhere()}
    for ids in (["r8", None, "r3"], ["r3", "r64", None]):
        got = model.generate(**inputs, **options, **{key: cache}, adapter_ids=ids)
        assert torch.equal(got, uncaptured(model, inputs, adapter_ids=ids)), ids
        cache.reset()
    assert model.multilora.graphs.captures == 1
    del cache
    gc.collect()
    decode(model, prompts(2))
    assert len(model.multilora.graphs) == 1, "its graph went with it"


def test_a_returned_cache_is_not_written_again() -> None:
    model = build()
    first = decode(model, prompts(3), adapter_ids="r8", return_dict_in_generate=True)
    key = next(name for name in ("cache", "past_key_values") if name in first)
    kept = [layer.keys.clone() for layer in first[key].layers]
    decode(model, prompts(3, seed=1), adapter_ids="r8")
    decode(model, prompts(3, seed=2), adapter_ids="r3")
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(first[key].layers, kept, strict=True))
    assert model.multilora.graphs.captures == 2
    del first
    decode(model, prompts(3, seed=3), adapter_ids="r8")
    assert model.multilora.graphs.captures == 2


def refused(model: Any) -> str:
    return " | ".join(model.multilora.graphs.refusals)


def test_hooks_run() -> None:
    """A hook would run once, when it is captured; so nothing is captured while there is one."""
    model, seen = build(), []
    handle = model.model.layers[1].register_forward_hook(lambda *args: seen.append(1))
    decode(model, prompts(3), adapter_ids="r8")
    assert len(seen) == NEW and model.multilora.graphs.captures == 0
    assert "forward hook" in refused(model)
    handle.remove()
    decode(model, prompts(3), adapter_ids="r8")
    assert model.multilora.graphs.captures == 1


def test_a_patched_layer() -> None:
    model = build()
    model.model.layers[1].mlp.forward = lambda x: torch.zeros_like(x)
    got = decode(model, prompts(3))
    assert torch.equal(got, uncaptured(model, prompts(3)))
    assert model.multilora.graphs.captures == 0 and "of its own" in refused(model)


def test_a_weight_that_is_replaced() -> None:
    model = build()
    decode(model, prompts(3), adapter_ids="r8")
    layer = model.model.layers[0].input_layernorm
    layer.weight = torch.nn.Parameter(3 * layer.weight.detach(), requires_grad=False)
    assert torch.equal(decode(model, prompts(3)), uncaptured(model, prompts(3)))
    assert torch.equal(decode(model, prompts(3), adapter_ids="r8"), uncaptured(model, prompts(3), adapter_ids="r8"))


def _other_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    kind = type(model.model.layers[0].mlp)
    old = kind.forward
    patch.setattr(kind, "forward", lambda self, x: 3 * old(self, x))


def _other_base_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.nn.Linear, "forward", lambda self, x: 2 * torch.nn.functional.linear(x, self.weight))


def _config_that_is_read(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.config.rope_parameters["factor"] = 7.0


@pytest.mark.parametrize(
    "change",
    [
        lambda model, patch: vars(model.model.layers[1].self_attn).update(scaling=1.5),
        lambda model, patch: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.Tanh()),
        lambda model, patch: setattr(model.model.norm, "variance_epsilon", 5.0),
        lambda model, patch: setattr(model.model.rotary_emb, "attention_scaling", 2.5),
        lambda model, patch: setattr(model.model.layers[0].mlp.up_proj.base_layer, "gain", 2.5),
        _other_forward,
        _other_base_forward,
        _config_that_is_read,
    ],
    ids=["number", "module", "norm", "rope", "base layer", "forward", "forward of a base layer", "config"],
)
def test_a_model_that_is_changed(change: Any) -> None:
    """Numbers, modules and forwards of the model are part of what was captured, as its weights are."""
    model, inputs = build(), prompts(3, side=None)
    with pytest.MonkeyPatch.context() as patch:
        for ids in ("r8", "r8"):
            decode(model, inputs, adapter_ids=ids)
        assert model.multilora.graphs.captures == 1
        change(model, patch)
        got = decode(model, inputs, adapter_ids="r8")
        assert model.multilora.graphs.captures == 2
        assert torch.equal(got, uncaptured(model, inputs, adapter_ids="r8"))
        decode(model, inputs, adapter_ids="r8")
        assert model.multilora.graphs.captures == 2 and not model.multilora.graphs.refusals


def test_a_layer_that_reads_on_the_host() -> None:
    model = build()
    kind = type(model.model.layers[0].mlp)
    old = kind.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", lambda self, x: old(self, x) if x.sum().item() < 1e9 else x)
        got = decode(model, prompts(3), adapter_ids="r8")
        assert torch.equal(got, uncaptured(model, prompts(3), adapter_ids="r8"))
    assert "on the host" in refused(model) and model.multilora.graphs.captures == 0


def test_a_layer_that_reads_a_tensor_from_elsewhere() -> None:
    """Models keep tensors beside their weights, and put others there for each prompt: a graph would read the old."""
    model = build()
    kind = type(model.model.layers[0].mlp)
    old = kind.forward
    place = {"offset": torch.zeros(1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", lambda self, x: old(self, x) + place["offset"])
        for value in (0.0, 5.0):
            place["offset"] = torch.full((1,), value)
            got = decode(model, prompts(3), adapter_ids="r8")
            assert torch.equal(got, uncaptured(model, prompts(3), adapter_ids="r8")), value
    assert "neither a weight nor an input" in refused(model)


def test_a_failure_while_capturing_leaves_the_cache_as_it_was() -> None:
    model = build("gemma3")

    class Failing(Recorder):
        def record(self, fn: Any) -> Any:
            super().record(fn)
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    model.multilora.graphs.make_recorder = Failing
    for ids in ("r8", None, "r3"):
        got = decode(model, prompts(3), adapter_ids=ids)
        assert torch.equal(got, uncaptured(model, prompts(3), adapter_ids=ids))
    assert "not permitted" in refused(model) and "more" not in refused(model)
    assert sum(model.multilora.graphs.refusals.values()) <= graphs_module.MAX_FAILURES


@pytest.fixture
def fp32_precision() -> Iterator[Any]:
    """Sets torch's newer switch of products in fp32."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision

    def switch(value: str) -> None:
        matmul.fp32_precision = value

    yield switch
    matmul.fp32_precision = before


def test_the_newer_switch_of_fp32(fp32_precision: Any) -> None:
    """Once it was set, the older ones cannot be read."""
    model = build()
    for number, value in enumerate(("tf32", "ieee", "tf32"), start=1):
        fp32_precision(value)
        with pytest.raises(RuntimeError, match="mix") if value == "tf32" else nullcontext():
            torch.get_float32_matmul_precision()
        got = decode(model, prompts(3), adapter_ids="r8")
        assert torch.equal(got, uncaptured(model, prompts(3), adapter_ids="r8"))
        assert model.multilora.graphs.captures == min(number, 2), "it is part of what a graph is for"


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", 2)
    model = build()
    for rows in (1, 2, 3, 1):
        got = decode(model, prompts(rows), adapter_ids="r8")
        assert torch.equal(got, uncaptured(model, prompts(rows), adapter_ids="r8"))
    assert len(model.multilora.graphs) == 2 and model.multilora.graphs.captures == 4


def test_graphs_go_with_their_caches_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next cache is made, that is."""
    model = build()
    graphs = model.multilora.graphs
    decode(model, prompts(3), adapter_ids="r8")
    decode(model, prompts(2), adapter_ids="r8")
    assert len(graphs) == len(graphs.kept._kept) == 2
    monkeypatch.setattr(kept_caches, "available_bytes", lambda device, enough: 0)
    seen: list[int] = []
    begin = graphs.begin
    monkeypatch.setattr(graphs, "begin", lambda model: (seen.append(len(graphs)), begin(model))[1])
    for rows in (1, 3):
        got = decode(model, prompts(rows), adapter_ids="r8")
        assert torch.equal(got, uncaptured(model, prompts(rows), adapter_ids="r8"))
    assert seen == [0, 0] and len(graphs) == len(graphs.kept._kept) == 1


def test_casting_and_disabling_let_go() -> None:
    model = build()
    decode(model, prompts(3), adapter_ids="r8")
    graphs = model.multilora.graphs
    model.to(torch.float64)
    assert len(graphs) == 0
    assert torch.equal(decode(model, prompts(3), adapter_ids="r8"), uncaptured(model, prompts(3), adapter_ids="r8"))
    assert len(graphs) == 1
    disable_multilora(model)
    assert len(graphs) == 0 and not graphs.kept._kept


def test_a_copy_has_graphs_of_its_own() -> None:
    model = build()
    decode(model, prompts(3), adapter_ids="r8")
    twin = copy.deepcopy(model)
    twin.multilora.graphs.make_recorder = Recorder
    assert twin.multilora.graphs is not model.multilora.graphs and len(twin.multilora.graphs) == 0
    assert torch.equal(decode(twin, prompts(3), adapter_ids="r3"), decode(model, prompts(3), adapter_ids="r3"))


def test_inference_mode_and_no_grad() -> None:
    model = build("gemma3")
    want = uncaptured(model, prompts(3), adapter_ids="r8")
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(decode(model, prompts(3), adapter_ids="r8"), want)
    assert model.multilora.graphs.captures == 1


def test_two_threads() -> None:
    model, inputs = build(), prompts(3)
    want = {ids: uncaptured(model, inputs, adapter_ids=ids) for ids in ("r8", "r3", None)}
    wrong: list[Any] = []

    def run(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(6):
            ids = rng.choice(["r8", "r3", None])
            try:
                if not torch.equal(decode(model, inputs, adapter_ids=ids), want[ids]):
                    wrong.append(ids)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not model.multilora.graphs.refusals
    assert model.multilora.graphs.captures <= 4, "two caches at a time, with adapters and without"


def test_on_a_cpu_nothing_is_captured_or_compiled() -> None:
    model = build()
    model.multilora.graphs.make_recorder = graphs_module._recorder
    assert torch.equal(decode(model, prompts(3), adapter_ids="r8"), uncaptured(model, prompts(3), adapter_ids="r8"))
    assert model.multilora.graphs.captures == 0 and not hasattr(model, "_compiled_call")


def test_the_vocabulary_is_masked_after_a_replay() -> None:
    model = build(extra_vocab_size=8)
    got = decode(model, prompts(3), adapter_ids=["r8", None, "r3"], output_logits=True, return_dict_in_generate=True)
    assert model.multilora.graphs.replays == NEW - 1
    assert all((step[:, VOCAB:] == -float("inf")).all() for step in got.logits)
    want = uncaptured(model, prompts(3), adapter_ids=["r8", None, "r3"])
    assert torch.equal(got.sequences, want)
