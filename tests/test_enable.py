"""enable_multilora and disable_multilora: an enabled model is still itself, and a disabled one is what it was."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from enabled import enabled, in_use
from models import FAMILIES, HIDDEN, VOCAB, prompts
from oracle import MIX, Id, adapters, alone, load_peft, make_adapter, relative_error, rows_of
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LogitsProcessor, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import hf_multilora
from hf_multilora import MultiLoraConfig, disable_multilora, enable_multilora
from hf_multilora.errors import AdapterMatchError, ConfigError, ModelError, MultiLoraError, SlotError

IDS: list[Id] = ["r8", None, "r3"]


@torch.no_grad()
def logits(model: PreTrainedModel, **ids: Any) -> torch.Tensor:
    inputs = prompts(3)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :4]
    return model(**inputs, **ids).logits


def assert_right(model: PreTrainedModel, family: str = "llama") -> None:
    """The model answers as PEFT does in a mixed batch, and without ids as the bare model, bit for bit."""
    got = logits(model, adapter_ids=IDS)
    want = rows_of(family, IDS, logits)
    for row in range(3):
        assert relative_error(got[row], want[row]) <= 1e-5, IDS[row]
    assert torch.equal(got[1], want[1])
    assert torch.equal(logits(model), logits(alone(family, None)))


def snapshot(model: torch.nn.Module) -> dict[str, Any]:
    """All that could tell a disabled model from one that was never enabled: objects by identity, tensors by bits."""
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_state_dict_hooks",
        "_forward_hooks_with_kwargs",
    )
    return {
        "class": type(model),
        "modules": {name: (id(module), type(module)) for name, module in model.named_modules(remove_duplicate=False)},
        "attributes": {
            name: sorted(key for key in module.__dict__ if key != "_compiled_call")
            for name, module in model.named_modules()
        },
        "hooks": {name: [len(getattr(module, hook)) for hook in hooks] for name, module in model.named_modules()},
        "parameters": {
            name: (id(tensor), tensor.data_ptr(), tensor.requires_grad) for name, tensor in model.named_parameters()
        },
        "buffers": {name: (id(tensor), tensor.data_ptr()) for name, tensor in model.named_buffers()},
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "training": model.training,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_enable_and_disable(family: str) -> None:
    model = FAMILIES[family].build()
    before = snapshot(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    assert enable_multilora(model, max_lora_rank=128) is model
    assert isinstance(model, before["class"])
    assert (type(model).__name__, type(model).__qualname__, type(model).__module__) == (
        before["class"].__name__,
        before["class"].__qualname__,
        before["class"].__module__,
    )
    assert type(model).__name__ in repr(model)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == {
        name: item[0] for name, item in before["parameters"].items()
    }
    assert [name for name, _ in model.named_modules()] == list(dict(FAMILIES[family].build().named_modules()))

    for name in ("r8", "r3"):
        model.load_adapter(adapters(family)[name], adapter_name=name)
    assert_right(model, family)
    assert list(model.state_dict()) == list(state)

    disable_multilora(model)
    assert snapshot(model) == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logits(model), logits(alone(family, None)))
    assert not hasattr(model, "multilora")
    with pytest.raises(ValueError, match="adapter_ids"):
        model.generate(**prompts(3), max_new_tokens=1, adapter_ids=IDS)


def test_leaves_are_what_they_were() -> None:
    model, gpt2 = enabled("llama", ["r8"]), enabled("gpt2", ["r8"])
    q_proj = model.model.layers[0].self_attn.q_proj
    assert isinstance(q_proj, torch.nn.Linear)
    assert (q_proj.in_features, q_proj.out_features, q_proj.bias) == (HIDDEN, HIDDEN, None)
    assert q_proj.weight.shape == (HIDDEN, HIDDEN)
    assert isinstance(model.get_input_embeddings(), torch.nn.Embedding)
    assert model.get_output_embeddings() is model.lm_head
    assert isinstance(gpt2.transformer.h[0].attn.c_attn, Conv1D)
    assert gpt2.transformer.h[0].attn.c_attn.nf == 3 * HIDDEN
    assert q_proj.base_layer.weight is q_proj.weight


def test_enable_disable_enable() -> None:
    model = enabled("llama", IDS[::2])
    disable_multilora(model)
    enable_multilora(model, max_lora_rank=16, max_loras=2)
    assert not model.multilora.status().adapters
    for name in ("r3", "r8"):
        model.load_adapter(adapters()[name], adapter_name=name)
    assert_right(model)


def test_disable_frees() -> None:
    model = enabled("llama", ["r8"])
    handle = weakref.ref(model.multilora)
    disable_multilora(model)
    gc.collect()
    assert handle() is None


def test_disable_a_model_that_is_not_enabled() -> None:
    with pytest.raises(MultiLoraError):
        disable_multilora(FAMILIES["llama"].build())


def test_enable_twice() -> None:
    """An error, or the same object with its adapters; never wrappers around wrappers."""
    model = enabled("llama", ["r8", "r3"])
    modules = [type(module).__name__ for module in model.modules()]
    with contextlib.suppress(ModelError):
        assert enable_multilora(model) is model
    assert [type(module).__name__ for module in model.modules()] == modules
    assert_right(model)


def test_not_a_model() -> None:
    for thing in (torch.nn.Linear(4, 4), None, "llama"):
        with pytest.raises((MultiLoraError, TypeError)):
            enable_multilora(thing)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "t5"])
def test_save_pretrained(family: str, tmp_path: Path) -> None:
    model = enabled(family, ["r8", "r3"])
    model.save_pretrained(tmp_path)
    fresh = type(FAMILIES[family].build()).from_pretrained(tmp_path)
    assert type(fresh) is type(FAMILIES[family].build())
    assert fresh.config.architectures == [type(fresh).__name__]
    assert torch.equal(logits(fresh), logits(alone(family, None)))
    assert_right(model, family)
    loaded = enable_multilora(fresh, max_lora_rank=8)
    for name in ("r8", "r3"):
        loaded.load_adapter(adapters(family)[name], adapter_name=name)
    assert_right(loaded, family)


def test_load_state_dict_reaches_the_base() -> None:
    model, other = enabled("llama", ["r8", "r3"]), FAMILIES["llama"].build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    missing = model.load_state_dict(other.state_dict())
    assert not missing.missing_keys and not missing.unexpected_keys
    assert torch.equal(logits(model), logits(other))
    got = logits(model, adapter_ids="r8")
    assert relative_error(got, logits(load_peft(other, adapters()["r8"]))) <= 1e-5


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "t5"])
def test_tied_weights_stay_tied(family: str) -> None:
    model = enabled(family)
    model.tie_weights()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert_right(model, family)
    got = logits(model, adapter_ids=["r64", None, "r33"])
    want = rows_of(family, ["r64", None, "r33"], logits)
    for row in range(3):
        assert relative_error(got[row], want[row]) <= 1e-5


def test_deepcopy_is_independent() -> None:
    model = enabled("llama", ["r8", "r3"])
    logits(model, adapter_ids=IDS)
    other = copy.deepcopy(model)
    assert other.multilora is not model.multilora
    assert_right(other)
    model.delete_adapter("r8")
    model.load_adapter(adapters()["r16"], adapter_name="r3", reload=True)
    assert_right(other)
    other.delete_adapter("r3")
    other.load_adapter(adapters()["r33"], adapter_name="mine")
    assert torch.equal(logits(model, adapter_ids="r3"), logits(enabled("llama", ["r16"]), adapter_ids="r16"))
    with pytest.raises(MultiLoraError):
        logits(model, adapter_ids="mine")
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert torch.equal(logits(model), logits(alone("llama", None)))
    disable_multilora(other)
    assert type(other) is LlamaForCausalLM
    assert relative_error(logits(model, adapter_ids="r3"), logits(alone("llama", "r16"))) <= 1e-5


def test_a_copy_reads_for_itself(tmp_path: Path) -> None:
    """What was dropped from host memory is read again for the copy's own base; the first model may go."""
    model = enable_multilora(FAMILIES["llama"].build(), max_lora_rank=16, max_loras=1, max_cpu_loras=1)
    config = {"r": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}
    make_adapter(FAMILIES["llama"].build(), tmp_path, 3, **config)
    for name, folder in (("dora", tmp_path), ("other", adapters("llama")["r8"])):
        model.load_adapter(folder, adapter_name=name)
    twin, first = copy.deepcopy(model), weakref.ref(model)
    del model
    gc.collect()
    assert first() is None
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
        got = twin(**prompts(2), adapter_ids="dora").logits
        twin.load_adapter(tmp_path, adapter_name="dora", reload=True)
        assert torch.equal(got, twin(**prompts(2), adapter_ids="dora").logits)


@pytest.mark.parametrize("cast", [lambda model: model.to(torch.bfloat16), lambda model: model.bfloat16()])
def test_dtype_afterwards(cast: Callable[[PreTrainedModel], PreTrainedModel]) -> None:
    model = cast(enabled("llama", ["r8", "r3"]))
    base = FAMILIES["llama"].build().to(torch.bfloat16)
    got = logits(model, adapter_ids=IDS)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got[1], logits(base)[1])
    assert torch.equal(logits(model), logits(base))
    for row, adapter in ((0, "r8"), (2, "r3")):
        want = logits(load_peft(base.float(), adapters()[adapter]))[row]
        assert relative_error(got[row], want) < 3e-2
    model.float()
    got = logits(model, adapter_ids=IDS)
    assert torch.equal(got[1], logits(base.float())[1])
    for row, adapter in ((0, "r8"), (2, "r3")):
        assert relative_error(got[row], logits(load_peft(base.float(), adapters()[adapter]))[row]) < 1e-2


def test_half_from_the_start() -> None:
    base = FAMILIES["llama"].build().to(torch.bfloat16)
    model = enable_multilora(copy.deepcopy(base), max_lora_rank=16)
    assert "bfloat16" in model.multilora.status().dtype
    for name in ("r8", "r3"):
        model.load_adapter(adapters()[name], adapter_name=name)
    got = logits(model, adapter_ids=IDS)
    assert torch.equal(got[1], logits(base)[1])
    for row, adapter in ((0, "r8"), (2, "r3")):
        assert relative_error(got[row], logits(load_peft(base.float(), adapters()[adapter]))[row]) < 3e-2


def test_own_dtype_of_the_slots() -> None:
    base = FAMILIES["llama"].build().to(torch.bfloat16)
    model = enable_multilora(copy.deepcopy(base), max_lora_rank=16, lora_dtype="float32")
    assert "float32" in model.multilora.status().dtype
    model.load_adapter(adapters()["r8"], adapter_name="r8")
    got = logits(model, adapter_ids="r8")
    assert got.dtype == torch.bfloat16
    assert relative_error(got, logits(load_peft(base.float(), adapters()["r8"]))) < 3e-2


def offload(model: PreTrainedModel) -> None:
    """accelerate keeps every weight elsewhere and brings it in for its layer's forward; meta tensors stay behind."""
    cpu_offload(model, execution_device=torch.device("cpu"))


def align(model: PreTrainedModel) -> None:
    """The hooks of a dispatched model, on every leaf that holds weights."""
    for module in list(model.modules()):
        if next(module.children(), None) is None:
            add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))


# Adapters without the base's own embedding beside them: nothing of the base can be read while it is offloaded.
@pytest.mark.parametrize("hooks", [offload, align])
@pytest.mark.parametrize("order", ["hooks first", "hooks last"])
def test_accelerate(hooks: Callable[[PreTrainedModel], None], order: str) -> None:
    model = FAMILIES["llama"].build()
    if order == "hooks first":
        hooks(model)
    enable_multilora(model, max_lora_rank=16)
    if order == "hooks last":
        hooks(model)
    for name in ("r8", "r16"):
        model.load_adapter(adapters()[name], adapter_name=name)
    ids: list[Id] = ["r8", None, "r16"]
    got, want = logits(model, adapter_ids=ids), rows_of("llama", ids, logits)
    for row in range(3):
        assert relative_error(got[row], want[row]) <= 1e-5, ids[row]
    assert torch.equal(got[1], want[1])
    options = {"max_new_tokens": 3, "do_sample": False}
    got = model.generate(**prompts(3), **options, adapter_ids=ids)
    assert torch.equal(got, rows_of("llama", ids, lambda reference: reference.generate(**prompts(3), **options)))
    disable_multilora(model)
    assert type(model) is LlamaForCausalLM
    assert torch.equal(logits(model), logits(alone("llama", None)))


@pytest.mark.parametrize("order", ["hooks first", "hooks last"])
def test_shipped_weights_of_an_offloaded_model(order: str) -> None:
    """PEFT saves the base's embedding and head beside their adapters; the base's own lie where accelerate put them."""
    model = FAMILIES["llama"].build()
    if order == "hooks first":
        offload(model)
    enable_multilora(model, max_lora_rank=64)
    if order == "hooks last":
        offload(model)
    for name in ("r3", "r33", "r64"):
        model.load_adapter(adapters()[name], adapter_name=name)
        assert relative_error(logits(model, adapter_ids=name), logits(alone("llama", name))) <= 1e-5


def test_training_mode() -> None:
    """With dropout and gradients on there is no serving: an error that says what to do instead."""
    model = FAMILIES["llama"].build().train()
    with pytest.raises(ModelError, match="eval"):
        enable_multilora(model)
    assert not hasattr(model, "multilora")
    enable_multilora(model.eval()).load_adapter(adapters()["r8"], adapter_name="r8")
    assert relative_error(logits(model, adapter_ids="r8"), logits(alone("llama", "r8"))) <= 1e-5


def test_training_mode_afterwards() -> None:
    """Dropout and gradients with other people's adapters in the batch: an error."""
    model = enabled("llama", ["r8", "r3"])
    model.train()
    with pytest.raises(ModelError, match="eval"):
        model(**prompts(3), adapter_ids=IDS)
    model.eval()
    assert_right(model)


def test_resizing_the_vocabulary_afterwards() -> None:
    model = enabled("llama", ["r8", "r3"])
    with pytest.raises(ModelError, match="disable_multilora"):
        model.resize_token_embeddings(VOCAB + 3)
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == VOCAB
    assert_right(model)
    disable_multilora(model)
    model.resize_token_embeddings(VOCAB + 3)
    assert model.get_input_embeddings().weight.shape[0] == VOCAB + 3


def test_peft_layers_added_afterwards() -> None:
    """PEFT puts layers of its own around the wrappers: both work, and come off again."""
    model = enabled("llama", ["r8", "r3"])
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=True)  # B is zero: PEFT's layer adds nothing
    peft_model = get_peft_model(model, config).eval()
    assert relative_error(logits(peft_model, adapter_ids=IDS), rows_of("llama", IDS, logits)) <= 1e-5
    with pytest.raises(ModelError, match="PEFT"):
        disable_multilora(model)
    peft_model.unload()
    assert_right(model)
    disable_multilora(model)
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert torch.equal(logits(model), logits(alone("llama", None)))


def replace_head(model: PreTrainedModel) -> None:
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    head.load_state_dict(model.lm_head.state_dict())
    model.lm_head = head


def replace_embedding(model: PreTrainedModel) -> None:
    table = torch.nn.Embedding(VOCAB, HIDDEN)
    table.load_state_dict(model.get_input_embeddings().state_dict())
    model.set_input_embeddings(table)


@pytest.mark.parametrize(("replace", "adapter"), [(replace_head, "r33"), (replace_embedding, "r3")])
def test_a_layer_replaced_afterwards(replace: Callable[[PreTrainedModel], None], adapter: str) -> None:
    """The new layer knows no adapters: an error when an adapter that trained it is named; not the base."""
    model = enabled("llama", ["r8", adapter])
    replace(model)
    with pytest.raises(ModelError, match="has been replaced by a .* since enable_multilora"):
        logits(model, adapter_ids=adapter)


class Failing(LogitsProcessor):
    """Fails at the third step."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 3:
            raise KeyboardInterrupt
        return scores


@pytest.mark.parametrize("slots", [8, 1])
@pytest.mark.parametrize("beams", [1, 2])
def test_exceptions_inside_generate(slots: int, beams: int) -> None:
    """PEFT leaves its hooks behind here, and the next plain call answers with the adapter."""
    model = enabled("llama", ["r8", "r3"], max_loras=slots)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**prompts(3), max_new_tokens=6, num_beams=beams, logits_processor=[Failing()], adapter_ids=IDS)
    assert in_use(model) == 0
    assert torch.equal(logits(model), logits(alone("llama", None)))
    got = model.generate(**prompts(3), max_new_tokens=3)
    assert torch.equal(got, alone("llama", None).generate(**prompts(3), max_new_tokens=3))
    if slots > 1:
        assert_right(model)


def test_exceptions_inside_forward() -> None:
    model = enabled("llama", ["r8", "r3"])

    def fail(module: torch.nn.Module, args: Any, output: Any) -> None:
        raise ZeroDivisionError

    hook = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        logits(model, adapter_ids=IDS)
    hook.remove()
    assert in_use(model) == 0
    assert_right(model)


@pytest.mark.parametrize(
    "options",
    [
        {"max_loras": 0},
        {"max_lora_rank": 0},
        {"max_lora_rank": 8.5},
        {"max_loras": 4, "max_cpu_loras": 3},
        {"slot_bytes": 0},
        {"lora_dtype": "int8"},
        {"decode_graphs": "static"},
        {"max_loras": "8"},
        {"max_cpu_loras": "8"},
        {"max_cpu_loras": 0},
        {"slot_bytes": "1GB"},
        {"slot_bytes": 1.5},
        {"extra_vocab_size": "2"},
        {"extra_vocab_size": 1.5},
        {"extra_vocab_size": None},
        {"on_demand": "no"},
        {"decode_graphs": 1},
        {"lora_dtype": 16},
        {"target_modules": []},
        {"target_modules": "["},
        {"target_modules": 7},
        {"target_modules": ["q_proj", 7]},
        {"target_modules": ["q_porj"]},
        {"target_modules": r"model\.decoder\..*"},
    ],
    ids=str,
)
def test_options_that_cannot_be_honoured(options: dict[str, Any]) -> None:
    model = FAMILIES["llama"].build()
    before = snapshot(model)
    with pytest.raises(ConfigError, match=next(reversed(options))):
        enable_multilora(model, **options)
    assert snapshot(model) == before


def test_unknown_option() -> None:
    with pytest.raises((TypeError, ConfigError), match="max_lora"):
        enable_multilora(FAMILIES["llama"].build(), max_lora=4)


def test_config_object() -> None:
    model = enable_multilora(FAMILIES["llama"].build(), config=MultiLoraConfig(max_loras=3, max_lora_rank=24))
    status = model.multilora.status()
    assert (status.max_loras, status.max_lora_rank, len(status.slots)) == (3, 24, 3)
    positional = enable_multilora(FAMILIES["llama"].build(), MultiLoraConfig(max_loras=3))
    assert positional.multilora.status().max_loras == 3


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], r".*\.(q|v)_proj"], ids=["list", "regex"])
def test_target_modules(targets: list[str] | str, tmp_path: Path) -> None:
    """Fewer wrapped layers, less memory; an adapter that trained more is refused unless asked for."""
    model = enable_multilora(FAMILIES["llama"].build(), max_lora_rank=64, target_modules=targets)
    full = enable_multilora(FAMILIES["llama"].build(), max_lora_rank=64)
    assert model.multilora.status().slot_bytes < full.multilora.status().slot_bytes / 4
    base = FAMILIES["llama"].build()
    narrow = make_adapter(base, tmp_path / "narrow", 50, r=8, target_modules=["q_proj", "v_proj"])
    model.load_adapter(narrow, adapter_name="narrow")
    assert relative_error(logits(model, adapter_ids="narrow"), logits(load_peft(base, narrow))) <= 1e-5
    with pytest.raises(AdapterMatchError, match="ignore_untargeted"):
        model.load_adapter(adapters()["r8"], adapter_name="r8")
    report = model.multilora.load(adapters()["r8"], name="r8", ignore_untargeted=True)
    assert any("down_proj" in name for name in report.left_out)
    assert {path.rsplit(".", 1)[1] for path in report.modules} == {"q_proj", "v_proj"}


def test_rank_over_the_maximum() -> None:
    model = enabled("llama", ["r8"], max_lora_rank=32)
    with pytest.raises(MultiLoraError, match="max_lora_rank") as raised:
        model.load_adapter(adapters()["r33"], adapter_name="r33")
    assert "33" in str(raised.value)


def test_slot_bytes() -> None:
    """A slot is a budget: a small one holds small adapters only, and says what a large one needs."""
    model = enable_multilora(FAMILIES["llama"].build(), max_lora_rank=64, slot_bytes=64 * 1024)
    model.load_adapter(adapters()["r1"], adapter_name="r1")
    with pytest.raises(SlotError, match="slot_bytes"):
        model.load_adapter(adapters()["r64"], adapter_name="r64")
    assert relative_error(logits(model, adapter_ids="r1"), logits(alone("llama", "r1"))) <= 1e-5


def test_estimate_before_and_after() -> None:
    model = FAMILIES["llama"].build()
    before = hf_multilora.estimate_memory(model, max_loras=4, max_lora_rank=16)
    assert type(model) is LlamaForCausalLM
    enable_multilora(model, max_loras=4, max_lora_rank=16)
    slot_bytes = model.multilora.status().slot_bytes
    assert before["slot"] == slot_bytes
    assert before["arena"] >= 4 * slot_bytes
    assert model.multilora.estimate_memory()["slot"] == slot_bytes


def test_estimate_of_an_enabled_model() -> None:
    model = enable_multilora(FAMILIES["llama"].build(), max_loras=2, max_lora_rank=16)
    bare = FAMILIES["llama"].build()
    wider = hf_multilora.estimate_memory(model, max_loras=3, max_lora_rank=8)
    assert wider == hf_multilora.estimate_memory(bare, max_loras=3, max_lora_rank=8)
    for estimate in (
        hf_multilora.estimate_memory,
        lambda model, **options: model.multilora.estimate_memory(**options),
    ):
        with pytest.raises(ConfigError, match="target_modules cannot change"):
            estimate(model, target_modules=["q_proj"])
        with pytest.raises(ConfigError, match="no option 'max_lora'"):
            estimate(model, max_lora=3)
    with pytest.raises(ConfigError, match="config="):
        hf_multilora.estimate_memory(model, MultiLoraConfig(max_loras=3))


def test_positional_embeddings(tmp_path: Path) -> None:
    """A table of positions is read once for all rows where nothing is padded; adapters on it are served by row."""
    base = FAMILIES["gpt2"].build()
    folder = make_adapter(base, tmp_path, 51, r=4, target_modules=["wpe", "attn.c_attn"])
    model = enabled("gpt2", ["r8", "r3"])
    model.load_adapter(folder, adapter_name="positions")
    reference = load_peft(base, folder)
    ids = ["positions", None, "r8"]
    for inputs in (prompts(3), {"input_ids": prompts(3, side=None)["input_ids"]}):
        with torch.no_grad():
            got, want = model(**inputs, adapter_ids=ids).logits, reference(**inputs).logits
            assert relative_error(got[0], want[0]) <= 1e-5
            assert torch.equal(got[1], base(**inputs).logits[1])
            assert relative_error(got[2], alone("gpt2", "r8")(**inputs).logits[2]) <= 1e-5
        options = {"max_new_tokens": 3, "do_sample": False, "num_beams": 2}
        got = model.generate(**inputs, **options, adapter_ids=ids)
        assert torch.equal(got[0], reference.generate(**inputs, **options)[0])
    assert_right(model, "gpt2")


def test_relative_positions_are_refused(tmp_path: Path) -> None:
    """T5 looks its biases up by pairs of positions: no row of the batch is in sight, however the shapes fall."""
    folder = make_adapter(FAMILIES["t5"].build(), tmp_path, 52, r=4, target_modules=["relative_attention_bias", "q"])
    model = enabled("t5", ["r8", "r3"])
    with pytest.raises(MultiLoraError, match="relative_attention_bias"):
        model.load_adapter(folder, adapter_name="positions")
    assert_right(model, "t5")


def test_ready_hooks_of_users_stay() -> None:
    """Forward hooks that were on leaves before still run once per forward, enabled and after."""
    model = FAMILIES["llama"].build()
    seen: list[torch.Size] = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    enable_multilora(model, max_lora_rank=16)
    for name in ("r8", "r3"):
        model.load_adapter(adapters()[name], adapter_name=name)
    logits(model, adapter_ids=IDS)
    assert len(seen) == 1
    logits(model)
    assert len(seen) == 2
    disable_multilora(model)
    logits(model)
    assert len(seen) == 3


def test_forward_that_was_replaced() -> None:
    """An instance's own forward (accelerate, tensor parallel, users) is called, not bypassed, and given back."""
    model = FAMILIES["llama"].build()
    layer = model.model.layers[0].mlp.down_proj
    original = layer.forward
    layer.forward = lambda x: original(x) * 0.5
    want = logits(model)
    enable_multilora(model, max_lora_rank=16)
    assert torch.equal(logits(model), want)
    model.load_adapter(adapters()["r8"], adapter_name="r8")
    assert relative_error(logits(model, adapter_ids="r8"), want) > 0.05
    disable_multilora(model)
    assert torch.equal(logits(model), want)
    assert "forward" in layer.__dict__


def test_forward_called_by_name() -> None:
    """model.forward(...) in place of model(...), and everything under inference_mode."""
    model = enabled("llama", ["r8", "r3"])
    with torch.inference_mode():
        got = model.forward(**prompts(3), adapter_ids=IDS).logits
        model.generate(**prompts(3), max_new_tokens=2, adapter_ids=IDS)
    assert torch.equal(got, logits(model, adapter_ids=IDS))
    assert_right(model)


class Doubled(torch.nn.Linear):
    """A layer class of a user's own, whose output is not what a plain linear layer would give."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_subclass_of_linear() -> None:
    """Found by type; the base's own forward runs, and as in PEFT the delta is added to what it returns."""
    base = FAMILIES["llama"].build()
    for layer in base.model.layers:
        old = layer.mlp.down_proj
        layer.mlp.down_proj = Doubled(old.in_features, old.out_features, bias=False)
        layer.mlp.down_proj.load_state_dict(old.state_dict())
    base.eval()
    model = enable_multilora(copy.deepcopy(base), max_lora_rank=8)
    model.load_adapter(adapters()["r8"], adapter_name="r8")
    got = logits(model, adapter_ids=["r8", None, "r8"])
    assert torch.equal(got[1], logits(base)[1])
    assert relative_error(got[0], logits(load_peft(base, adapters()["r8"]))[0]) <= 1e-5
    disable_multilora(model)
    assert type(model.model.layers[0].mlp.down_proj) is Doubled


def test_two_models_of_one_class() -> None:
    """Only this instance is changed: neither its class nor another model of it."""
    model, other = enabled("llama", ["r8", "r3"]), FAMILIES["llama"].build()
    assert not hasattr(other, "multilora")
    assert type(other) is LlamaForCausalLM
    with pytest.raises(ValueError, match="adapter_ids"):
        other.generate(**prompts(3), max_new_tokens=1, adapter_ids="r8")
    assert_right(model)


def test_a_freshly_loaded_model(tmp_path: Path) -> None:
    FAMILIES["llama"].build().save_pretrained(tmp_path)
    model = enable_multilora(AutoModelForCausalLM.from_pretrained(tmp_path), max_lora_rank=128)
    for name in ("r8", "r3"):
        model.load_adapter(adapters()[name], adapter_name=name)
    assert_right(model)
    assert relative_error(logits(model, adapter_ids=MIX), logits(alone("llama", MIX))) <= 1e-5
