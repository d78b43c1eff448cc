"""Models that compute on several devices: the same answers, and what is refused by name.

torch knows one CPU. So layers are put into groups by their paths here, as if these were devices: each group has slots,
routing and copies of its own, in the same memory.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import FAMILIES, prompts
from moe_bed import ROWS as MOE_ROWS
from moe_bed import enabled as enabled_moe
from moe_bed import logits as moe_logits
from test_offload import IDS, OPTIONS, folders, saved_and_moved
from transformers import PreTrainedModel

from hf_multilora import enable_multilora, estimate_memory
from hf_multilora.errors import ModelError, RoutingError, SlotError
from hf_multilora.layers.siblings import Group


def halves(path: str, device: torch.device) -> Any:
    return ".1." in path or "norm" in path.split(".")[-1] or "head" in path


def thirds(path: str, device: torch.device) -> Any:
    """Siblings are on two of them: what no device_map does, and still has to be right."""
    return 2 if "head" in path else int(path.rpartition(".")[2] in ("k_proj", "o_proj", "up_proj", "experts", "dense"))


def everywhere(path: str, device: torch.device) -> Any:
    return path.rpartition(".experts")[0] or path


@pytest.fixture(params=[halves, thirds], ids=["two", "three"])
def split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("hf_multilora.placement.group_key", request.param)
    return request.param


@pytest.fixture
def in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_multilora.placement.group_key", halves)


def on_one(family: str = "llama", names: list[str] | None = None, **options: Any) -> PreTrainedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_multilora.placement.group_key", lambda path, device: device)
        return loaded(family, names, **options)


def loaded(family: str = "llama", names: list[str] | None = None, **options: Any) -> PreTrainedModel:
    model = enable_multilora(FAMILIES[family].build(), **{**OPTIONS, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, folder in folders(family).items():
            if names is None or name in names:
                model.load_adapter(folder, adapter_name=name)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Any, **options: Any) -> torch.Tensor:
    return model(**prompts(len(ids), **options), adapter_ids=ids).logits


@pytest.mark.parametrize("family", ["llama", "llama_tied", "neox", "gemma3"])
def test_every_kind(family: str, split: Any) -> None:
    one, several = on_one(family), loaded(family)
    assert len(several.multilora.store.arenas) == len(several.multilora._routings) > 1
    ids = [name for name in IDS if name is None or name in folders(family)]
    got, want = logits(several, ids), logits(one, ids)
    for row, name in enumerate(ids):
        assert torch.equal(got[row], want[row]), f"{name}: {(got[row] - want[row]).abs().max()}"
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "adapter_ids": ids}
    for mode in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        tokens = [model.generate(**prompts(len(ids)), **options, **mode) for model in (several, one)]
        assert torch.equal(*tokens), mode


def test_each_block_of_experts_on_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("qwen3_moe", "gpt_oss", "llama4"):
        want = moe_logits(enabled_moe(family), 6, adapter_ids=MOE_ROWS)
        with monkeypatch.context() as patch:
            patch.setattr("hf_multilora.placement.group_key", everywhere)
            model = enabled_moe(family)
        assert len(model.multilora.store.arenas) > 4
        assert torch.equal(moe_logits(model, 6, adapter_ids=MOE_ROWS), want), family


def test_parts_lie_where_their_layers_are(in_two: None) -> None:
    """Each arena holds what its own sites have, under the same offsets as its part of the block, and nothing else."""
    model = loaded("llama")
    store = model.multilora.store
    layout = store.layout
    assert layout.n_groups == 2 and {site.path for site in layout.sites if site.group} >= {"lm_head"}
    for name in ("lora", "dora", "head", "tables"):
        with store.acquire([name]) as lease:
            packed = store.entry(name).packed
            assert packed is not None and packed.nbytes == packed.block.numel() == packed.parts[-1][1]
            whole = packed.header()
            for group, arena in enumerate(store.arenas):
                part, slot = packed.part(group), lease.slots[name]
                assert part.data_ptr() % 64 == packed.block.data_ptr() % 64
                assert torch.equal(arena.slot(slot)[: part.numel()], part)
                for site in layout.sites:
                    row = arena.header(slot)[site.index].tolist()
                    if site.group != group:
                        assert row == [0] * 5
                    elif row[2]:
                        assert packed.ranks[site.index] == row[2] == whole[site.index, 2]
                        a, _ = packed.factors(site.index)
                        start = slot * arena.slot_elems + row[0]
                        assert torch.equal(arena.data[start : start + a.numel()], a.reshape(-1))
            for path, tensors in packed.extras.saved.items():
                assert all(tensor.group == layout.group_of(path) for tensor in tensors.values())


def test_recasting_mixing_and_copying(in_two: None) -> None:
    one, several = on_one("llama"), loaded("llama")
    ids: list[Any] = [{"lora": 0.5, "tables": -0.3}, "dora", None, {"lora": 1.5}]
    assert torch.equal(logits(several, ids), logits(one, ids))
    twin = copy.deepcopy(several)
    assert len(twin.multilora.store.arenas) == 2
    assert torch.equal(logits(twin, ids), logits(one, ids))
    for model in (one, several):
        model.to(torch.bfloat16)
    ids = ["head", "norms", None, "dora"]
    assert torch.equal(logits(several, ids), logits(one, ids))
    assert {arena.dtype for arena in several.multilora.store.arenas} == {torch.bfloat16}
    for model in (one, several):
        model.to(torch.float32)
    assert torch.equal(logits(several, ids), logits(one, ids))


def test_evictions_reloads_and_waves(in_two: None, tmp_path: Path) -> None:
    one, several = (make("llama", max_loras=2, max_cpu_loras=3) for make in (on_one, loaded))
    ids = [name for name in IDS if name is None or name in folders("llama")]
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "adapter_ids": ids}
    want = one.generate(**prompts(len(ids)), **options)
    for _ in range(2):
        assert torch.equal(several.generate(**prompts(len(ids)), **options), want)
    assert several.multilora.status().resident.evictions > 4
    before = logits(several, ["lora", "lora"])
    other = saved_and_moved(FAMILIES["llama"].build(), tmp_path / "other", 99, {"r": 7, "target_modules": ["o_proj"]})
    for model in (one, several):
        model.multilora.load(other, "lora", reload=True)
    assert torch.equal(logits(several, ["lora", "lora"]), logits(one, ["lora", "lora"]))
    assert not torch.equal(logits(several, ["lora", "lora"]), before)
    several.multilora.unload("lora")
    assert torch.equal(logits(several, ["head", None]), logits(one, ["head", None]))


def test_rows_are_copied_once(in_two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all layers and all forwards of a batch, rather than for each."""
    from hf_multilora.rows import RowState

    model, made = loaded("llama", ["lora"]), []
    init = RowState.__init__

    def counted(self: RowState, *args: Any, **kwargs: Any) -> None:
        made.append(args)
        init(self, *args, **kwargs)

    monkeypatch.setattr(RowState, "__init__", counted)
    model.generate(**prompts(3), adapter_ids=["lora", None, "lora"], max_new_tokens=5, do_sample=False)
    assert len(made) == 2


def test_siblings_are_those_of_one_device(split: Any) -> None:
    model = loaded("llama", ["lora"])
    groups = {module._group for module in model.modules() if isinstance(getattr(module, "_group", None), Group)}
    for group in groups:
        assert len({member._routing for member in group.members}) == 1
    names = {tuple(member._path.rpartition(".")[2] for member in group.members) for group in groups}
    assert names == ({("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")} if split is halves else set())


@pytest.mark.parametrize("offload", [False, True])
def test_siblings_with_hooks(offload: bool) -> None:
    """Those of a dispatched model only move x, which passes as it is; those that bring weights in part the layers."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    def align(model: PreTrainedModel) -> PreTrainedModel:
        for module in list(model.modules()):
            if next(module.children(), None) is None and next(module.parameters(), None) is not None:
                add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", offload=offload))
        return model

    ids = ["lora", None, "dora"]
    want = logits(loaded("llama"), ids)
    model = enable_multilora(align(FAMILIES["llama"].build()), **OPTIONS)
    for name in ("lora", "dora"):
        model.load_adapter(folders("llama")[name], adapter_name=name)
    groups = {module._group for module in model.modules() if isinstance(getattr(module, "_group", None), Group)}
    assert len(groups) == (0 if offload else 4)
    for inference in (False, True):
        with torch.inference_mode(inference):
            assert torch.equal(logits(model, ids), want)
    assert all(group.proven for group in groups)
    if not offload:  # what comes later may do anything
        add_hook_to_module(
            model.model.layers[0].self_attn.k_proj, AlignDevicesHook(execution_device="cpu", offload=True)
        )
        for _ in range(2):
            assert torch.equal(logits(model, ids), want)


def test_an_alora(in_two: None) -> None:
    base = FAMILIES["llama"].build()
    folder = saved_and_moved(
        base,
        folders("llama")["lora"].parent / "alora",
        7,
        {"r": 4, "target_modules": ["q_proj", "o_proj"], "alora_invocation_tokens": [7, 8]},
    )
    outputs = []
    batch = prompts(3, side=None)
    batch["input_ids"][:2, 5:7] = torch.tensor([7, 8])
    for model in (on_one("llama", ["lora"]), loaded("llama", ["lora"])):
        model.load_adapter(folder, adapter_name="alora")
        outputs.append(
            model.generate(
                **batch,
                adapter_ids=["alora", "lora", None],
                max_new_tokens=4,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        )
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    for one, other in zip(outputs[0].logits, outputs[1].logits, strict=True):
        assert torch.equal(one, other)


def test_an_adapter_that_is_too_large_for_one_device(in_two: None) -> None:
    model = loaded("llama", ["lora"], slot_bytes=24_576)
    with pytest.raises(SlotError, match=r"needs (\d+) bytes on cpu, a slot holds 24576 there.*slot_bytes=\1.*lm_head"):
        model.load_adapter(folders("llama")["head"], adapter_name="head")
    model = loaded("llama", ["lora"], slot_bytes=None)
    plain = [arena.slot_bytes for arena in model.multilora.store.arenas]
    layout = model.multilora.store.layout
    assert plain == [layout.default_slot_bytes(16, torch.float32, group) for group in range(2)]
    assert model.multilora.status().slot_bytes == sum(plain) == model.multilora.estimate_memory()["slot"]
    estimated = estimate_memory(FAMILIES["llama"].build(), max_loras=8, max_lora_rank=16)
    assert estimated["arena"] == sum(arena.nbytes for arena in model.multilora.store.arenas)


def test_what_is_refused(in_two: None) -> None:
    model = loaded("llama", ["lora"])
    with pytest.raises(ModelError, match="Continuous batching runs on one device"):
        model.generate_batch([[5, 6, 7]], adapter_ids=["lora"])
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(**prompts(2)).logits, model(**prompts(2)).logits)
    with pytest.raises(RoutingError, match="several devices"), model.multilora.use(["lora", None]):
        compiled(**prompts(2))
    graphs = loaded("llama", ["lora"], decode_graphs=True)
    ids = {"adapter_ids": ["lora", None], "max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    assert torch.equal(graphs.generate(**prompts(2), **ids), model.generate(**prompts(2), **ids))


def test_layers_that_are_moved_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots on one device, and a dispatch afterwards onto two: what would be read on the wrong device is refused."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = loaded("llama", ["lora"])
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    assert logits(model, ["lora", None]).isfinite().all()  # nothing else has changed
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    hook = AlignDevicesHook(execution_device="meta")
    model.lm_head.__dict__["_hf_hook"] = hook
    with pytest.raises(ModelError, match=r"lm_head computes on meta now.*disable_multilora"):
        logits(model, ["lora", None])
    del model.lm_head.__dict__["_hf_hook"]
    assert logits(model, ["lora", None]).isfinite().all()


def test_a_module_that_has_no_slot_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(path: str, device: torch.device) -> Any:
        return path if path == "model.norm" else ".1." in path

    monkeypatch.setattr("hf_multilora.placement.group_key", key)
    model = loaded("llama", ["lora"])
    with pytest.raises(Exception, match=r"'model.norm' computes on cpu, where no layer carries adapters"):
        model.load_adapter(folders("llama")["norms"], adapter_name="norms")
    assert logits(model, ["lora", None]).isfinite().all()
