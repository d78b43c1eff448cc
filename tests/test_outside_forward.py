"""Whatever is called outside of the model's own forward runs under the ids of its caller, or says why it cannot."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import threading
from typing import Any

import pytest
import torch
from enabled import enabled
from models import FAMILIES, prompts
from oracle import adapters, load_peft, relative_error
from peft import PeftModel
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RwkvConfig,
    RwkvForCausalLM,
    XLNetConfig,
    XLNetLMHeadModel,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_multilora import (
    CacheMismatchError,
    ModelError,
    MultiLoraError,
    RoutingError,
    SlotError,
    disable_multilora,
    enable_multilora,
)

X = prompts(2, side=None)["input_ids"]


@torch.no_grad()
def right(adapter: str | None, ids: torch.Tensor = X) -> torch.Tensor:
    base = FAMILIES["llama"].build()
    return (base if adapter is None else load_peft(base, adapters()[adapter]))(input_ids=ids).logits


def close(got: torch.Tensor, adapter: str | None) -> None:
    assert relative_error(got, right(adapter)) <= 1e-5


def test_a_loop_of_parts() -> None:
    """The decoder and the head called one after another, as custom loops do."""
    model, seen = enabled("llama", ["r33", "r3"]), []

    def loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.append(model.lm_head(model.model(input_ids).last_hidden_state))
        return input_ids

    model.generate(X, custom_generate=loop, adapter_ids=["r33", "r3"], do_sample=False, max_new_tokens=1)
    for row, adapter in enumerate(["r33", "r3"]):
        assert relative_error(seen[0][row], right(adapter)[row]) <= 1e-5


def test_ids_for_a_part() -> None:
    model = enabled("llama", ["r8"])
    whole = model(X, adapter_ids="r8", output_hidden_states=True).hidden_states[-1]
    assert torch.equal(model.model(X, adapter_ids="r8").last_hidden_state, whole)
    with pytest.raises(MultiLoraError, match="nonsense"):
        model.model(X, adapter_ids="nonsense")
    with pytest.raises(RoutingError, match="2 prompt rows"):
        model.model(X, adapter_ids=["r8"])


def test_a_default_reaches_parts_and_layers() -> None:
    model = enabled("llama", ["r33"])
    model.set_adapter("r33")
    close(model.lm_head(model.model(X).last_hidden_state), "r33")
    model.disable_adapters()
    assert torch.equal(model.lm_head(model.model(X).last_hidden_state), model(X).logits)


def test_a_task_that_outlives_its_call() -> None:
    model = enabled("llama", ["r8", "r3"], max_loras=1)

    async def later() -> torch.Tensor:
        await asyncio.sleep(0.05)
        return model(X).logits

    async def main() -> torch.Tensor:
        with model.multilora.use("r8"):
            task = asyncio.create_task(later())
        model(X, adapter_ids="r3")
        return await task

    with pytest.raises(RoutingError, match="has ended"):
        asyncio.run(main())


def test_tasks_beside_each_other() -> None:
    model = enabled("llama", ["r33", "r3"])
    got = {}

    async def task(name: str, before: float, inside: float) -> None:
        await asyncio.sleep(before)
        with model.multilora.use(name):
            await asyncio.sleep(inside)
            got[name] = model.lm_head(model.model(X).last_hidden_state)

    async def main() -> None:
        await asyncio.gather(task("r33", 0, 0.1), task("r3", 0.05, 0.2))

    asyncio.run(main())
    close(got["r33"], "r33")
    close(got["r3"], "r3")
    assert torch.equal(model(X).logits, right(None))


def test_a_generator_that_is_closed_elsewhere() -> None:
    model = enabled("llama", ["r8"])

    def stream() -> Any:
        with model.multilora.use("r8"):
            yield model(X).logits
            yield None

    generator = stream()
    first = contextvars.copy_context().run(next, generator)
    close(first, "r8")
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert model.multilora.adapters["r8"].in_use == 0
    assert torch.equal(model(X).logits, right(None))


def test_threads_are_not_held_up_by_a_block() -> None:
    model, done = enabled("llama", ["r8", "r3"]), []

    def other() -> None:
        done.append(model(X, adapter_ids="r3").logits)

    with model.multilora.use("r8"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
        assert done, "the other thread waits for the block"
        close(model(X).logits, "r8")
    close(done[0], "r3")


def test_the_default_may_change_inside_of_a_block() -> None:
    model = enabled("llama", ["r8", "r3"])
    model.set_adapter("r3")
    with model.multilora.use("r8"):
        model.disable_adapters()
        close(model(X).logits, "r8")
    assert torch.equal(model(X).logits, right(None))
    with model.multilora.use("r8"):
        model.set_adapter("r3")
    close(model(X).logits, "r3")


def test_a_compiled_model_after_a_nested_call() -> None:
    torch.compiler.reset()
    model = enabled("llama", ["r8", "r3"])
    compiled = torch.compile(model, backend="eager")
    with model.multilora.use("r8"), torch.no_grad():
        compiled(X, use_cache=False)
        model(X, adapter_ids="r3")
        close(compiled(X, use_cache=False).logits, "r8")
    with pytest.raises(RoutingError, match="2"), model.multilora.use(["r8", "r3"]), torch.no_grad():
        compiled(X[:1], use_cache=False)


def test_a_taken_over_peft_model_does_not_answer_as_the_base() -> None:
    theirs = PeftModel.from_pretrained(FAMILIES["llama"].build(), adapters()["r8"], adapter_name="r8").eval()
    want = theirs(input_ids=X).logits
    model = enable_multilora(theirs)
    for call in (lambda: theirs(input_ids=X), lambda: theirs.generate(input_ids=X)):
        with pytest.raises(ModelError, match="enable_multilora returned"):
            call()
    disable_multilora(model)
    assert torch.equal(theirs(input_ids=X).logits, want)


def test_waiting_inside_of_a_forward_raises() -> None:
    model = enabled("llama", ["r8", "r3", "r16"], max_loras=2)
    seen = []

    def hook(*_: Any) -> None:
        for act in (lambda: model.multilora.unload("r3"), lambda: model.multilora.pin("r16")):
            with pytest.raises(SlotError):
                act()
            seen.append(1)

    handle = model.model.layers[0].register_forward_hook(hook)
    model(X, adapter_ids="r8")
    handle.remove()
    assert len(seen) == 2 and "r3" in model.multilora.adapters


def test_a_cache_whose_rows_changed_places() -> None:
    model = enabled("llama", ["r8", "r3"])
    with torch.no_grad(), model.multilora.use(["r8", "r3"]):
        out = model(X[:, :-1], use_cache=True)
        cache = getattr(out, "cache", None) or out.past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(CacheMismatchError):
            model(X[:, -1:], **{"cache" if hasattr(out, "cache") else "past_key_values": cache})


@pytest.mark.parametrize("path", ["model", "model.layers.0"])
def test_a_replaced_block_is_noticed(path: str) -> None:
    model = enabled("llama", ["r8"])
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent)
    kept = owner._modules[name]
    owner._modules[name] = copy.deepcopy(kept)
    with pytest.raises(ModelError, match="replaced"):
        model(X, adapter_ids="r8")
    owner._modules[name] = kept
    close(model(X, adapter_ids="r8").logits, "r8")


def test_a_double_model_has_float_slots() -> None:
    model = enable_multilora(FAMILIES["llama"].build().double(), max_lora_rank=16)
    model.load_adapter(adapters()["r8"], adapter_name="r8")
    assert model.multilora.status().dtype == "float32"
    close(model(X, adapter_ids="r8").logits.float(), "r8")


def test_enabled_under_inference_mode() -> None:
    with torch.inference_mode():
        model = enable_multilora(FAMILIES["llama"].build(), max_lora_rank=16)
    model.load_adapter(adapters()["r8"], adapter_name="r8")
    close(model(X, adapter_ids="r8").logits, "r8")


def test_parts_and_wholes_are_enabled_once() -> None:
    model = enabled("llama", ["r8"])
    with pytest.raises(ModelError, match="part of one"):
        enable_multilora(model.model)
    inner = FAMILIES["llama"].build()
    enable_multilora(inner.model)
    with pytest.raises(ModelError, match="inside of this one"):
        enable_multilora(inner)


def test_what_was_kept_beyond_disable() -> None:
    model = enabled("llama", ["r8"])
    call, generate, forward = model.__call__, model.generate, model.forward
    disable_multilora(model)
    for got in (call(X), forward(X)):
        assert torch.equal(got.logits, right(None))
    assert generate(X, max_new_tokens=1, do_sample=False).shape == (2, X.shape[1] + 1)


def test_models_that_generate_through_a_part() -> None:
    """BLIP-2's generate() never calls its own forward."""
    config = Blip2Config(
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 16, "patch_size": 8},
        qformer_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                        "encoder_hidden_size": 32, "vocab_size": 99},
        text_config={"model_type": "opt", "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 32,
                     "num_attention_heads": 2, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
                     "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0},
        num_query_tokens=2, image_token_index=98,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "input_ids": torch.tensor([[98, 98, 5, 6], [98, 98, 7, 8]])}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    base = model.generate(**inputs, **options)
    enable_multilora(model, max_lora_rank=8)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(2):
        path = f"base_model.model.language_model.model.decoder.layers.{layer}.self_attn.v_proj"
        tensors[f"{path}.lora_A.weight"] = torch.randn(8, 32, generator=generator)
        tensors[f"{path}.lora_B.weight"] = torch.randn(32, 8, generator=generator)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj"]}
    model.load_adapter(adapter_state_dict=tensors, peft_config=config, adapter_name="a")
    alone = model.generate(**inputs, **options, adapter_ids="a")
    assert not torch.equal(alone, base)
    mixed = model.generate(**inputs, **options, adapter_ids=["a", None])
    assert torch.equal(mixed[0], alone[0]) and torch.equal(mixed[1], base[1])
    beams = model.generate(**inputs, **options, num_beams=2, adapter_ids=["a", None])
    assert torch.equal(beams[0], model.generate(**inputs, **options, num_beams=2, adapter_ids="a")[0])


def test_sequence_first_models_take_one_adapter_at_a_time() -> None:
    """XLNet turns [rows, tokens] around: with as many tokens as rows a shape would prove nothing."""
    torch.manual_seed(0)
    model = XLNetLMHeadModel(XLNetConfig(vocab_size=99, d_model=32, n_layer=1, n_head=2, d_inner=48)).eval()
    enable_multilora(model, max_lora_rank=4)
    tensors = {
        "base_model.model.transformer.layer.0.ff.layer_1.lora_A.weight": torch.randn(4, 32),
        "base_model.model.transformer.layer.0.ff.layer_1.lora_B.weight": torch.randn(48, 4),
    }
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["layer_1"]}
    model.load_adapter(adapter_state_dict=tensors, peft_config=config, adapter_name="a")
    ids = torch.randint(1, 99, (3, 3))
    with pytest.raises(RoutingError, match="one adapter at a time"):
        model(ids, adapter_ids=["a", None, "a"])
    assert not torch.equal(model(ids, adapter_ids="a").logits, model(ids).logits)
    assert torch.equal(model(ids, adapter_ids=["a", "a", "a"]).logits, model(ids, adapter_ids="a").logits)


def test_generate_that_was_kept_before_enabling() -> None:
    """The default adapter reaches the encoder too, which generate() calls on its own."""
    family = FAMILIES["t5"]
    model = family.build()
    kept = model.generate
    enable_multilora(model, max_lora_rank=16)
    model.load_adapter(adapters("t5")["r8"], adapter_name="r8")
    model.set_adapter("r8")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    want = load_peft(family.build(), adapters("t5")["r8"]).generate(**prompts(2, side="right"), **options)
    assert torch.equal(kept(**prompts(2, side="right"), **options), want)


def test_a_selection_of_tokens_is_not_taken_for_rows() -> None:
    """ModernBERT may run its head on the labelled tokens alone: six of them are not three rows of two."""
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        sparse_prediction=True, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    model = ModernBertForMaskedLM(config).eval()
    enable_multilora(model, max_lora_rank=4)
    tensors = {
        "base_model.model.head.dense.lora_A.weight": torch.randn(4, 32),
        "base_model.model.head.dense.lora_B.weight": torch.randn(32, 4),
    }
    lora = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["dense"]}
    model.load_adapter(adapter_state_dict=tensors, peft_config=lora, adapter_name="a")
    ids = torch.randint(3, 99, (3, 5))
    labels = torch.full_like(ids, -100)
    labels[0, :3] = labels[1, 0] = labels[2, 3:] = 7
    with pytest.raises(RoutingError, match="one adapter at a time"):
        model(input_ids=ids, labels=labels, adapter_ids=["a", None, "a"])
    assert torch.isfinite(model(input_ids=ids, labels=labels, adapter_ids="a").loss)


def test_states_that_are_no_cache_are_tagged_too() -> None:
    """RWKV returns a list of tensors, XLNet its memories."""
    torch.manual_seed(0)
    rwkv = RwkvForCausalLM(RwkvConfig(vocab_size=99, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2))
    xlnet = XLNetLMHeadModel(XLNetConfig(vocab_size=99, d_model=32, n_layer=1, n_head=2, d_inner=48, mem_len=8))
    cases = (
        (rwkv, "rwkv.blocks.0.attention.key", (32, 32), "0.attention.key", "state", {"use_cache": True}),
        (xlnet, "transformer.layer.0.ff.layer_1", (32, 48), "layer_1", "mems", {"use_mems": True}),
    )
    for model, path, (width_in, width_out), target, name, options in cases:
        enable_multilora(model.eval(), max_lora_rank=4)
        tensors = {
            f"base_model.model.{path}.lora_A.weight": torch.randn(4, width_in),
            f"base_model.model.{path}.lora_B.weight": torch.randn(width_out, 4),
        }
        lora = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": [target]}
        model.load_adapter(adapter_state_dict=tensors, peft_config=lora, adapter_name="a")
        state = getattr(model(X % 99, adapter_ids="a", **options), name)
        model(X[:, :1] % 99, **{name: state}, adapter_ids="a", **options)
        state = getattr(model(X % 99, adapter_ids="a", **options), name)
        with pytest.raises(CacheMismatchError, match=name):
            model(X[:, :1] % 99, **{name: state}, **options)


@pytest.mark.parametrize("path", ["model.norm", "model.layers.0"])
def test_a_replaced_module_that_an_adapter_saved_is_noticed(path: str) -> None:
    """Norms get their wrapper when the first adapter saves them; without it the base's would serve its rows."""
    base = FAMILIES["llama"].build()
    attention = "model.layers.1.self_attn.q_proj"
    tensors = {
        f"base_model.model.{attention}.lora_A.weight": torch.randn(4, base.config.hidden_size),
        f"base_model.model.{attention}.lora_B.weight": torch.randn(base.get_submodule(attention).out_features, 4),
        "base_model.model.model.norm.weight": base.model.norm.weight.detach() + 1,
    }
    lora = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["1.self_attn.q_proj"]}
    model = enable_multilora(base, max_lora_rank=8)
    model.load_adapter(
        adapter_state_dict=tensors, peft_config={**lora, "modules_to_save": ["norm"]}, adapter_name="norms"
    )
    want = model(X, adapter_ids="norms").logits
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent)
    kept = owner._modules[name]
    owner._modules[name] = LlamaRMSNorm(kept.weight.shape[0]) if path == "model.norm" else copy.deepcopy(kept)
    with pytest.raises(ModelError, match="replaced"):
        model(X, adapter_ids="norms")
    owner._modules[name] = kept
    assert torch.equal(model(X, adapter_ids="norms").logits, want)
