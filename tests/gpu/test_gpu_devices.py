"""A base over two GPUs (and the CPU): the answers of one GPU, whatever is loaded, evicted and reloaded meanwhile.

Run on a machine with two: `pytest tests/gpu/test_gpu_devices.py`. `HF_MULTILORA_GPU_TESTS_ON=cpu` runs the same tests
on a CPU whose layers are put into groups as if these were devices, to debug the tests themselves.
"""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import moe_bed
import pytest
import torch
from accelerate import dispatch_model
from gpu_bed import (
    ADAPTERS,
    CUDA,
    FP32_TOLERANCE,
    LAYERS,
    MAX_RANK,
    MIXED,
    OF_BARE,
    Adapter,
    adapter,
    bare,
    error,
    exact_logits,
    inputs,
)
from gpu_bed import greedy as greedy_tokens
from models import FAMILIES, prompts
from test_gpu_moe import ROWS as MOE_ROWS
from test_gpu_moe import adapters as moe_adapters
from test_gpu_moe import logits as moe_logits
from transformers import AutoModelForCausalLM

from hf_multilora import disable_multilora, enable_multilora
from hf_multilora.errors import ModelError, RoutingError
from hf_multilora.layers.siblings import Group

MARKS = [pytest.mark.gpu] if CUDA else []
TWO = torch.cuda.device_count() >= 2 or not CUDA
pytestmark = [*MARKS, pytest.mark.skipif(not TWO, reason="needs two CUDA devices")]

FIRST = "cuda:0" if CUDA else "cpu"
# Where each part of a Llama of two layers is; 0 and 1 are devices.
PARTS = ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "norm", "lm_head")
MAPS: dict[str, dict[str, Any]] = {
    name: dict(zip(PARTS, where, strict=True))
    for name, where in (
        ("in order", (0, 0, 0, 1, 1, 1)),
        ("head beside the embedding", (0, 0, 0, 1, 1, 0)),
        ("back and forth", (1, 0, 0, 1, 0, 1)),
        ("offloaded to the CPU", (0, 0, "cpu", 1, 1, 1)),
        ("offloaded to the disk", (0, 0, 0, "disk", 1, 1)),
    )
}


def full(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {path if path == "lm_head" else f"model.{path}": where for path, where in parts.items()}


def dispatched(model: Any, parts: Mapping[str, Any], folder: Path) -> Any:
    """As from_pretrained(device_map=) leaves a model."""
    where = full(parts) if "lm_head" in parts and "embed_tokens" in parts else dict(parts)
    if not CUDA:
        where = {path: "disk" if at == "disk" else "cpu" for path, at in where.items()}
    skip = model._skip_keys_device_placement
    main: Any = 0 if CUDA else "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"main_device": main, "offload_dir": str(folder), "skip_keys": skip, "force_hooks": True}
        return dispatch_model(model, device_map=where, **options)


@contextmanager
def grouped(parts: Mapping[str, Any]) -> Iterator[None]:
    """On a CPU: layers in groups as if these were devices. Offloaded ones compute on the first."""

    def key(path: str, device: torch.device) -> Any:
        found = next((at for part, at in parts.items() if f".{part}." in f".{path}."), 0)
        return found if isinstance(found, int) else 0

    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setattr("hf_multilora.placement.group_key", key)
        yield


def spread(model: Any, parts: Mapping[str, Any], folder: Path, **options: Any) -> Any:
    """Dispatched and enabled."""
    dispatched(model, parts, folder)
    with grouped(parts):
        enable_multilora(model, **options)
    arenas = [str(arena.device) for arena in model.multilora.store.arenas]
    assert len(arenas) == 2, f"slots on {arenas}, the model is at {getattr(model, 'hf_device_map', None)}"
    if CUDA:
        assert sorted(arenas) == ["cuda:0", "cuda:1"]
    return model


def llama(dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(bare(dtype, "cpu"))


def fill(model: Any, names: Any = ADAPTERS, dtype: torch.dtype = torch.float32) -> Any:
    for name in names:
        tensors, config = adapter(name, dtype)
        model.multilora.load(dict(tensors), name, config=config)
    return model


OPTIONS: dict[str, Any] = {"max_loras": 6, "max_lora_rank": MAX_RANK}


@pytest.fixture(scope="module")
def one() -> Any:
    """On one device, in fp32, with all adapters."""
    return fill(enable_multilora(llama().to(FIRST), **OPTIONS))


@pytest.fixture(autouse=True)
def first_device() -> Iterator[None]:
    if CUDA:
        torch.cuda.set_device(0)
    yield
    if CUDA:
        for device in (0, 1):
            torch.cuda.synchronize(device)  # what fails on the device fails in its own test


@torch.no_grad()
def logits(model: Any, batch: dict[str, Any], **ids: Any) -> torch.Tensor:
    return model(**batch, **ids).logits.cpu()


def same(got: torch.Tensor, want: torch.Tensor, ids: Any, where: str, tolerance: float = 1e-6) -> None:
    """Row by row, as closely as two devices agree in fp32."""
    errors = [(row, name, error(got[row], want[row])) for row, name in enumerate(ids)]
    wrong = [f"row {row} ({name}): {off:.1e}" for row, name, off in errors if not off <= tolerance]
    assert not wrong, f"{where}: {'; '.join(wrong)}"


@pytest.mark.parametrize("parts", MAPS, ids=lambda name: name.replace(" ", "_"))
def test_mixed_batches_are_those_of_one_device(parts: str, one: Any, tmp_path: Path) -> None:
    model = fill(spread(llama(), MAPS[parts], tmp_path, **OPTIONS))
    for tokens, padded in ((7, True), (40, False)):
        batch = inputs(tokens, padded=padded, device=FIRST)
        got = logits(model, batch, adapter_ids=list(MIXED))
        same(got, logits(one, batch, adapter_ids=list(MIXED)), MIXED, f"{parts}, {tokens} tokens")
        for row, name in enumerate(MIXED):
            kept = batch["attention_mask"][row].bool().cpu()
            off = error(got[row][kept], exact_logits(name, torch.float32, tokens, padded)[0][row][kept])
            assert off <= FP32_TOLERANCE, f"{parts}: row {row} ({name}) against merged weights: {off:.1e}"
    batch = inputs(9, padded=True, device=FIRST)
    for mode in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        got, want = (greedy_tokens(m, batch, 6, adapter_ids=list(MIXED), **mode) for m in (model, one))
        rows = [f"row {row} ({MIXED[row]})" for row in range(len(MIXED)) if not torch.equal(got[row], want[row])]
        assert not rows, f"{parts}, {mode}: other tokens in {rows}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """Errors against fp32 are about the bare model's own, as on one device."""
    model = fill(spread(llama(dtype), MAPS["in order"], tmp_path, **OPTIONS), dtype=dtype)
    batch = inputs(12, device=FIRST)
    got, plain = logits(model, batch, adapter_ids=list(MIXED)), logits(model, batch)
    noise = error(plain, exact_logits(None, dtype, 12, False)[0])
    for row, name in enumerate(MIXED):
        off = error(got[row], exact_logits(name, dtype, 12, False)[0][row])
        assert off <= OF_BARE * noise + 1e-3, f"row {row} ({name}): {off:.1e}, the bare model's {noise:.1e}"
        if name is None:
            assert torch.equal(got[row], plain[row]), f"base row {row} is not the bare model's"


def special(name: str, dtype: torch.dtype = torch.float32) -> Adapter:
    """Adapters that are more than factors: DoRA, a head and norms saved whole, rows of tokens."""
    base = bare(dtype, "cpu").state_dict()
    tensors, config = copy.copy(adapter("r3" if name == "dora" else "r1", dtype)[0]), dict(adapter("r1", dtype)[1])
    generator = torch.Generator().manual_seed(len(name))

    def moved(weight: torch.Tensor, by: float) -> torch.Tensor:
        return weight + by * torch.randn(weight.shape, generator=generator).to(weight.dtype)

    if name == "dora":
        config = {**adapter("r3", dtype)[1], "use_dora": True}
        for path in [key.split(".lora_A")[0] for key in tensors if "lora_A" in key]:
            norms = base[path.removeprefix("base_model.model.") + ".weight"].norm(dim=1)
            tensors[f"{path}.lora_magnitude_vector"] = moved(norms, 0.1)
    elif name == "head":
        config["modules_to_save"] = ["lm_head"]
        tensors["base_model.model.lm_head.weight"] = moved(base["lm_head.weight"], 0.02)
    elif name == "norms":
        config["modules_to_save"] = ["input_layernorm", "norm"]
        for path in ("norm", *(f"layers.{layer}.input_layernorm" for layer in range(LAYERS))):
            tensors[f"base_model.model.model.{path}.weight"] = moved(base[f"model.{path}.weight"], 0.2)
    else:
        config["trainable_token_indices"] = {"embed_tokens": [3, 9]}
        rows = moved(base["model.embed_tokens.weight"][[3, 9]], 0.5)
        tensors["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"] = rows
    return tensors, config


@pytest.mark.parametrize("parts", ["in order", "back and forth", "offloaded to the CPU"])
def test_more_than_factors(parts: str, tmp_path: Path) -> None:
    """What is saved whole lies with its module, on either device."""
    options = {**OPTIONS, "max_loras": 8, "slot_bytes": 6 << 20}
    model, want_model = (
        spread(llama(), MAPS[parts], tmp_path, **options),
        enable_multilora(llama().to(FIRST), **options),
    )
    for each in (model, want_model):
        fill(each, ["r3", "r8"])
        for name in ("dora", "head", "norms", "tokens"):
            tensors, config = special(name)
            each.multilora.load(tensors, name, config=config)
    ids = ["dora", None, "head", "norms", "tokens", "r8", "r3", None]
    batch = inputs(11, device=FIRST)
    batch = {**batch, "input_ids": batch["input_ids"].clone()}
    batch["input_ids"][:, 4:6] = torch.tensor([3, 9], device=FIRST)
    got, want = (logits(each, batch, adapter_ids=ids) for each in (model, want_model))
    same(got, want, ids, parts)
    plain = logits(want_model, batch)
    alike = [name for row, name in enumerate(ids) if name is not None and error(want[row], plain[row]) < 1e-3]
    assert not alike, f"adapters that change nothing would prove nothing: {alike}"
    got, want = (greedy_tokens(each, batch, 4, adapter_ids=ids) for each in (model, want_model))
    assert torch.equal(got, want), f"{parts}: tokens {got.tolist()}, on one device {want.tolist()}"


@pytest.mark.parametrize("family", ["llama", "llama_tied", "neox", "gemma3"])
def test_every_kind_that_peft_saves(family: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from test_offload import IDS, folders

    base = FAMILIES[family].build()
    body = base.base_model_prefix
    options: dict[str, Any] = {"max_loras": 8, "max_lora_rank": 16, "slot_bytes": 1 << 21}
    # A tied head lies where the embedding is, as accelerate would have it.
    head = 0 if family in ("llama_tied", "gemma3") else 1
    second = ("layers.1", "norm", "final_layer_norm")
    parts = {f"{body}.{name}": int(name in second) for name in _children(base.base_model)}
    parts |= {name: head for name in _children(base) if name != body}
    want_model = enable_multilora(copy.deepcopy(base).to(FIRST), **options)
    model = spread(base, parts, tmp_path, **options)
    found = folders(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, folder in found.items():
            for each in (model, want_model):
                each.load_adapter(folder, adapter_name=name)
    ids = [name for name in IDS if name is None or name in found]
    batch = {name: tensor.to(FIRST) for name, tensor in prompts(len(ids)).items()}
    got, want = (logits(each, batch, adapter_ids=ids) for each in (model, want_model))
    same(got, want, ids, f"{family} at {parts}")
    got, want = (greedy_tokens(each, batch, 4, adapter_ids=ids) for each in (model, want_model))
    assert torch.equal(got, want), f"{family}: tokens {got.tolist()}, on one device {want.tolist()}"


def _children(owner: Any) -> list[str]:
    """Names of direct children, those in lists of layers one by one."""
    found: list[str] = []
    for name, child in owner.named_children():
        inside = len(child) if isinstance(child, torch.nn.ModuleList) else 0
        found += [f"{name}.{number}" for number in range(inside)] if inside else [name]
    return found


@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [("batched_mm", torch.float32, 1e-5), ("grouped_mm", torch.bfloat16, 2e-2)],
    ids=["batched_mm", "grouped_mm"],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts(family: str, implementation: str, dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_loras": 4, "max_lora_rank": 32, "slot_bytes": 8 << 20}
    model = spread(moe_bed.bare(family, implementation).to(dtype), MAPS["in order"], tmp_path, **options)
    want_model = enable_multilora(moe_bed.bare(family, implementation).to(FIRST, dtype), **options)
    for name, made in moe_adapters(family).items():
        tensors, config = moe_bed.three_d(family, made)
        for each in (model, want_model):
            each.multilora.load(dict(tensors), name, config=config)
    got, want = (moe_logits(each, 6, adapter_ids=MOE_ROWS).cpu() for each in (model, want_model))
    same(got, want, MOE_ROWS, f"{family}, {implementation}", tolerance)


def test_evictions_and_reloads_while_generating(one: Any, tmp_path: Path) -> None:
    """Two threads generate with more adapters than slots, a third reloads one and loads and unloads another."""
    model = spread(llama(), MAPS["in order"], tmp_path, **{**OPTIONS, "max_loras": 4, "max_cpu_loras": None})
    fill(model)
    batch = inputs(6, rows=3, device=FIRST)
    names: list[str | None] = [*ADAPTERS, None]
    want = {name: greedy_tokens(one, batch, 5, adapter_ids=[name] * 3) for name in names}
    wrong: list[str] = []
    over = threading.Event()

    def generate(seed: int) -> None:
        chosen = random.Random(seed)
        try:
            if CUDA:
                torch.cuda.set_device(0)
            for turn in range(12):
                ids = [chosen.choice(names) for _ in range(3)]
                got = greedy_tokens(model, batch, 5, adapter_ids=ids)
                bad = [name for row, name in enumerate(ids) if not torch.equal(got[row], want[name][row])]
                if bad:
                    wrong.append(f"thread {seed}, turn {turn}, {ids}: rows of {bad}")
        except BaseException as error:
            wrong.append(f"thread {seed}: {error!r}")

    def change() -> None:
        try:
            while not over.is_set():
                for name in ("r3", "r16"):
                    tensors, config = adapter(name, torch.float32)
                    model.multilora.load(dict(tensors), name, config=config, reload=True)
                tensors, config = adapter("r8", torch.float32, seed=1)
                model.multilora.load(dict(tensors), "guest", config=config)
                model.multilora.unload("guest")
                over.wait(0.01)
        except BaseException as error:
            wrong.append(f"loading: {error!r}")

    threads = [threading.Thread(target=generate, args=(seed,)) for seed in (1, 2)]
    changing = threading.Thread(target=change)
    for thread in (*threads, changing):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    changing.join()
    assert not wrong, "\n".join(wrong)
    status = model.multilora.status()
    assert status.resident.evictions > 4, status
    assert all(adapter.in_use == 0 for adapter in status.adapters), status


@pytest.mark.skipif(not CUDA, reason="needs streams")
def test_streams_of_both_devices(one: Any, tmp_path: Path) -> None:
    """Forwards on streams that come and go, of either current device, while slots are filled again and again."""
    model = fill(spread(llama(), MAPS["in order"], tmp_path, **{**OPTIONS, "max_loras": 2}))
    batch = inputs(24, rows=2, device=FIRST)
    names = list(ADAPTERS)
    want = {name: logits(one, batch, adapter_ids=[name, None]) for name in names}
    for turn in range(30):
        name = names[turn % len(names)]
        with ExitStack() as stack:
            if turn % 3:
                for device in (0, 1):
                    stream = torch.cuda.Stream(device)
                    stream.wait_stream(torch.cuda.default_stream(device))
                    stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.cuda.device(turn % 2))
            got = model(**batch, adapter_ids=[name, None]).logits.detach()
            got = got.cpu()
        same(got, want[name], [name, None], f"turn {turn}, {name}")
    assert model.multilora.status().resident.evictions > 20


@pytest.mark.skipif(not CUDA, reason="what computes on the CPU counts as offloaded")
def test_siblings_are_served_together(tmp_path: Path) -> None:
    """Hooks of a dispatched model pass x on as it is."""
    model = fill(spread(llama(), MAPS["in order"], tmp_path, **OPTIONS), ["r3"])
    groups = {m._group for m in model.modules() if isinstance(getattr(m, "_group", None), Group)}
    assert len(groups) == 4, [[member._path for member in group.members] for group in groups]
    for group in groups:
        assert len({member._op.data.device for member in group.members}) == 1
    logits(model, inputs(5, device=FIRST), adapter_ids="r3")
    assert all(group.proven for group in groups)


def test_the_base_is_given_back(tmp_path: Path) -> None:
    model, plain = llama(), dispatched(llama(), MAPS["back and forth"], tmp_path)
    batch = inputs(8, device=FIRST)
    want = logits(plain, batch)
    fill(spread(model, MAPS["back and forth"], tmp_path, **OPTIONS))
    same(logits(model, batch), want, [None] * 8, "without ids", 0.0)
    mixed = logits(model, batch, adapter_ids=list(MIXED))
    rows = [row for row, name in enumerate(MIXED) if name is None]
    same(mixed[rows], want[rows], [None] * len(rows), "base rows of a mixed batch", 0.0)
    hooked = {path for path, module in plain.named_modules() if "_hf_hook" in module.__dict__}
    disable_multilora(model)
    same(logits(model, batch), want, [None] * 8, "after disable_multilora", 0.0)
    assert {path for path, module in model.named_modules() if "_hf_hook" in module.__dict__} == hooked


def test_what_is_refused_and_what_falls_back(one: Any, tmp_path: Path) -> None:
    model = fill(spread(llama(), MAPS["in order"], tmp_path, decode_graphs=True, **OPTIONS))
    with pytest.raises(ModelError, match="Continuous batching runs on one device"):
        model.generate_batch([[5, 6, 7]], adapter_ids=["r3"])
    batch = inputs(6, device=FIRST)
    static = {"cache_implementation": "static", "adapter_ids": list(MIXED)}
    got, want = greedy_tokens(model, batch, 5, **static), greedy_tokens(one, batch, 5, adapter_ids=list(MIXED))
    assert torch.equal(got, want), "decode_graphs falls back to plain steps"
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(RoutingError, match="several devices"), model.multilora.use(list(MIXED)):
        compiled(**batch)


@pytest.mark.skipif(not CUDA, reason="one CPU is not two devices")
def test_from_pretrained(one: Any, tmp_path: Path) -> None:
    """As users load a model: `device_map=` at from_pretrained, then enable, load, generate."""
    llama().save_pretrained(tmp_path / "base")
    batch = inputs(9, padded=True, device=FIRST)
    want = greedy_tokens(one, batch, 6, adapter_ids=list(MIXED))
    for where in (full(MAPS["in order"]), "balanced", full(MAPS["offloaded to the CPU"])):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map=where, dtype=torch.float32)
        fill(enable_multilora(model.eval(), **OPTIONS))
        got = greedy_tokens(model, batch, 6, adapter_ids=list(MIXED))
        assert torch.equal(got, want), f"{where}: {model.hf_device_map}"


@pytest.mark.skipif(not CUDA, reason="one CPU is not two devices")
def test_dispatched_after_enabling(tmp_path: Path) -> None:
    """Slots on one device and layers on two afterwards: refused, and right again once it is enabled anew."""
    model = fill(enable_multilora(llama().to(FIRST), **OPTIONS), ["r8"])
    dispatched(model, MAPS["in order"], tmp_path)
    with pytest.raises(ModelError, match="disable_multilora"):
        logits(model, inputs(5, device=FIRST), adapter_ids="r8")
    disable_multilora(model)
    fill(enable_multilora(model, **OPTIONS), ["r8"])
    got = logits(model, inputs(5, device=FIRST), adapter_ids="r8")
    off = error(got, exact_logits("r8", torch.float32, 5, False)[0])
    assert off <= FP32_TOLERANCE, f"{off:.1e}"
