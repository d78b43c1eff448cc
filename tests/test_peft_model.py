"""A PeftModel is taken over: its transformers model is enabled, its adapters are registered, and it comes back."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from models import FAMILIES, prompts
from oracle import adapters, alone, randomize, relative_error
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_multilora import disable_multilora, enable_multilora, estimate_memory
from hf_multilora.errors import AdapterNotFoundError, MultiLoraError


@torch.no_grad()
def logits(model: PreTrainedModel | PeftModel, **ids: Any) -> torch.Tensor:
    return model(**prompts(3), **ids).logits


def peft_model(family: str, *names: str) -> PeftModel:
    """One PeftModel with several adapters; the first is active."""
    folders = adapters(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(FAMILIES[family].build(), folders[names[0]], adapter_name=names[0])
        for name in names[1:]:
            model.load_adapter(folders[name], adapter_name=name)
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gemma3"])
def test_take_over(family: str) -> None:
    theirs = peft_model(family, "r8", "r16", "r64")
    inner = theirs.get_base_model()
    model = enable_multilora(theirs, max_lora_rank=64)
    assert model is inner
    assert not isinstance(model, PeftModel)
    assert type(model).__name__ == type(FAMILIES[family].build()).__name__
    assert {adapter.name for adapter in model.multilora.status().adapters} == {"r8", "r16", "r64"}
    ids = ["r16", None, "r64"]
    got = logits(model, adapter_ids=ids)
    for row, adapter in enumerate(ids):
        assert relative_error(got[row], logits(alone(family, adapter))[row]) <= 1e-5, adapter
    assert torch.equal(got[1], logits(alone(family, None))[1])
    tokens = model.generate(**prompts(3), max_new_tokens=4, num_beams=2, adapter_ids="r8")
    assert torch.equal(tokens, alone(family, "r8").generate(**prompts(3), max_new_tokens=4, num_beams=2))


def test_estimate_is_that_of_the_model_inside() -> None:
    """PEFT's own layers are no places for adapters; and they are left as they are."""
    theirs = peft_model("llama", "r8", "r3")
    before = logits(theirs)
    estimate = estimate_memory(theirs, max_loras=2)
    assert estimate == estimate_memory(FAMILIES["llama"].build(), max_loras=2)
    assert torch.equal(logits(theirs), before)
    with pytest.raises(MultiLoraError, match="Pass the PeftModel"):
        estimate_memory(theirs.base_model.model)


def test_nothing_is_active_after_the_take_over() -> None:
    """In PEFT one adapter is active without being named; here a call without ids is the base."""
    model = enable_multilora(peft_model("llama", "r8"))
    assert model.active_adapters() == []
    assert torch.equal(logits(model), logits(alone("llama", None)))


def test_more_adapters_can_be_loaded() -> None:
    model = enable_multilora(peft_model("llama", "r8"), max_loras=2)
    model.load_adapter(adapters()["r3"], adapter_name="r3")
    got = logits(model, adapter_ids=["r8", "r3", None])
    for row, adapter in enumerate(["r8", "r3", None]):
        assert relative_error(got[row], logits(alone("llama", adapter))[row]) <= 1e-5


def test_adapters_survive_eviction() -> None:
    """They come from memory, so nothing could bring them back: others are dropped from host memory, not they."""
    model = enable_multilora(peft_model("llama", "r8", "r16"), max_loras=1, max_cpu_loras=3)
    for name in ("r1", "r3", "r33"):
        model.load_adapter(adapters()[name], adapter_name=name)
    for adapter in ("r8", "r16", "r1", "r3", "r8", "r33", "r16"):
        assert relative_error(logits(model, adapter_ids=adapter), logits(alone("llama", adapter))) <= 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_disable_gives_peft_back(family: str) -> None:
    theirs = peft_model(family, "r8", "r64")
    modules = {name: id(module) for name, module in theirs.named_modules()}
    state = {name: (id(tensor), tensor.clone()) for name, tensor in theirs.named_parameters()}
    want = {name: (theirs.set_adapter(name), logits(theirs))[1] for name in ("r64", "r8")}
    model = enable_multilora(theirs, max_lora_rank=64)
    logits(model, adapter_ids="r64")
    disable_multilora(model)
    assert {name: id(module) for name, module in theirs.named_modules()} == modules
    assert all(state[name][0] == id(tensor) for name, tensor in theirs.named_parameters())
    assert all(torch.equal(state[name][1], tensor) for name, tensor in theirs.named_parameters())
    assert theirs.active_adapter == "r8"
    assert torch.equal(logits(theirs), want["r8"])
    theirs.set_adapter("r64")
    assert torch.equal(logits(theirs), want["r64"])


def test_methods_of_the_instance_come_back_too() -> None:
    """accelerate puts a forward on the PeftModel itself, for mixed precision."""
    theirs = peft_model("llama", "r8")
    called = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        called.append(True)
        return type(theirs).forward(theirs, *args, **kwargs)

    theirs.forward = forward
    model = enable_multilora(theirs, max_lora_rank=64)
    with pytest.raises(MultiLoraError, match="moved"):
        theirs(**prompts(1))
    disable_multilora(model)
    assert theirs.forward is forward and "generate" not in theirs.__dict__
    theirs(**prompts(1))
    assert called == [True]


def test_adapters_that_were_never_saved() -> None:
    """An adapter that was never saved: what counts is what its layers hold now."""
    theirs = get_peft_model(FAMILIES["llama"].build(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    randomize(theirs, 60)
    theirs.eval()
    want = logits(theirs)
    theirs.requires_grad_(False)
    model = enable_multilora(theirs)
    assert relative_error(logits(model, adapter_ids="default"), want) <= 1e-5


def refused(theirs: PeftModel, *words: str) -> None:
    """enable refuses by name and leaves the PeftModel as it was."""
    modules = {name: id(module) for name, module in theirs.named_modules()}
    want = logits(theirs)
    with pytest.raises(MultiLoraError) as raised:
        enable_multilora(theirs)
    assert any(word.lower() in str(raised.value).lower() for word in words), str(raised.value)
    assert {name: id(module) for name, module in theirs.named_modules()} == modules
    assert torch.equal(logits(theirs), want)


def test_merged_is_refused() -> None:
    theirs = peft_model("llama", "r8")
    theirs.merge_adapter()
    refused(theirs, "merge")
    theirs.unmerge_adapter()
    enable_multilora(theirs)


def test_training_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(FAMILIES["llama"].build(), adapters()["r8"], is_trainable=True)
    theirs.train()
    with pytest.raises(MultiLoraError, match="train"):
        enable_multilora(theirs)
    assert isinstance(theirs.get_base_model(), LlamaForCausalLM)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"init_lora_weights": "pissa_niter_2"}, "pissa"),
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable"),
    ],
    ids=str,
)
def test_what_changed_the_base_is_refused(options: dict[str, Any], word: str) -> None:
    lora = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options})
    theirs = get_peft_model(FAMILIES["llama"].build(), lora).eval()
    randomize(theirs, 61)
    refused(theirs.requires_grad_(False), word)


def test_the_model_inside_without_its_peft_model() -> None:
    """PEFT's layers would be taken for the base."""
    inner = peft_model("llama", "r8").get_base_model()
    with pytest.raises(MultiLoraError, match="PeftModel"):
        enable_multilora(inner)
    assert type(inner) is LlamaForCausalLM


def test_not_lora_is_refused() -> None:
    from peft import IA3Config

    config = IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
    refused(get_peft_model(FAMILIES["llama"].build(), config).eval().requires_grad_(False), "ia3")


def test_disabled_adapters_of_peft() -> None:
    """Under PEFT's disable_adapter() the model answers as the base; once taken over, ids count again."""
    theirs = peft_model("llama", "r8")
    theirs.base_model.disable_adapter_layers()
    model = enable_multilora(theirs)
    assert relative_error(logits(model, adapter_ids="r8"), logits(alone("llama", "r8"))) <= 1e-5
    disable_multilora(model)
    assert torch.equal(logits(theirs), logits(alone("llama", None)))


def test_more_of_them_than_host_memory_may_hold() -> None:
    """max_cpu_loras bounds what the LRU may drop, not these: an error that names it and changes nothing."""
    theirs = peft_model("llama", "r8", "r16", "r1")
    want = logits(theirs)
    with pytest.raises(MultiLoraError, match="max_cpu_loras"):
        enable_multilora(theirs, max_loras=1, max_cpu_loras=2)
    assert torch.equal(logits(theirs), want)


def test_unknown_names_still_raise() -> None:
    model = enable_multilora(peft_model("llama", "r8"))
    with pytest.raises(AdapterNotFoundError, match="'r8'"):
        logits(model, adapter_ids="r9")
