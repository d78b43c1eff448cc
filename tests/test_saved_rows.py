"""Modules that adapters save whole, where they do not see rows of the batch first: one adapter at a time, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from models import IMAGE, llava
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    XLNetConfig,
    XLNetLMHeadModel,
)

from hf_multilora import enable_multilora
from hf_multilora.errors import RoutingError, UnsupportedAdapterError


def save(model: PreTrainedModel, paths: tuple[str, ...], lora: tuple[str, int, int], **options: Any) -> None:
    """Load an adapter "a" that has trained one layer and saves others, each a fixed step away from the base's."""
    draw = torch.Generator().manual_seed(1)
    path, inside, out = lora
    tensors = {
        f"base_model.model.{path}.lora_A.weight": torch.randn(4, inside, generator=draw),
        f"base_model.model.{path}.lora_B.weight": torch.randn(out, 4, generator=draw),
    }
    for name in paths:
        for leaf, value in model.get_submodule(name).named_parameters():
            tensors[f"base_model.model.{name}.{leaf}"] = value + 0.5 * torch.randn(value.shape, generator=draw)
    config: Mapping[str, Any] = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 4,
        "target_modules": [path.rpartition(".")[2]],
        "modules_to_save": list(paths),
        **options,
    }
    model.load_adapter(adapter_state_dict=tensors, peft_config=dict(config), adapter_name="a")


def test_a_projector_that_sees_as_many_images_as_rows() -> None:
    """Both images belong to the first row: which is whose, their number does not say."""
    model = enable_multilora(llava(layers=1), max_lora_rank=4)
    save(model, ("model.multi_modal_projector",), ("model.language_model.layers.0.self_attn.v_proj", 32, 32))
    ids = torch.tensor([[IMAGE] * 8 + [5, 6, 7, 8], [9, 8, 7, 6] * 3])
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))

    def logits(adapter_ids: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, pixel_values=pixels, adapter_ids=adapter_ids).logits

    base, alone = logits(None), logits("a")
    assert not torch.equal(base[0], alone[0])
    assert torch.equal(logits(["a", "a"]), alone)
    with pytest.raises(RoutingError, match=r"projector.*outside of the text model.*one id \(a string\) for all rows"):
        logits(["a", None])
    with torch.no_grad():  # without images nothing of it runs
        text = torch.tensor([[9, 8, 7, 6]] * 2)
        mixed = model(text, adapter_ids=["a", None]).logits
        assert torch.equal(mixed[1], model(text).logits[1]) and not torch.equal(mixed[0], mixed[1])


def test_sequence_first_norms_with_as_many_tokens_as_rows() -> None:
    torch.manual_seed(0)
    model = XLNetLMHeadModel(XLNetConfig(vocab_size=99, d_model=32, n_layer=1, n_head=2, d_inner=48)).eval()
    enable_multilora(model, max_lora_rank=4)
    save(model, ("transformer.layer.0.ff.layer_norm",), ("lm_loss", 32, 99))
    ids = torch.randint(1, 99, (3, 3), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        base, alone = model(ids).logits, model(ids, adapter_ids="a").logits
        assert (base != alone).flatten(1).any(1).all()
        assert torch.equal(model(ids, adapter_ids=["a"] * 3).logits, alone)
        with pytest.raises(RoutingError, match="puts the sequence first"):
            model(ids, adapter_ids=["a", None, None])


def test_an_alora_below_code_that_turns_its_input_around() -> None:
    """Rows begin late one by one, and the layer's first dimension counts tokens."""
    torch.manual_seed(0)
    model = XLNetLMHeadModel(XLNetConfig(vocab_size=99, d_model=32, n_layer=1, n_head=2, d_inner=48)).eval()
    enable_multilora(model, max_lora_rank=4)
    save(model, (), ("transformer.layer.0.ff.layer_1", 32, 48), alora_invocation_tokens=[5, 6])
    ids = torch.tensor([[1, 2, 5, 6, 3], [5, 6, 1, 2, 3]])
    with torch.no_grad():
        for rows in (ids, ids[:1], ids[:1].repeat(5, 1)):
            with pytest.raises(RoutingError, match="layer_1.*puts the sequence first.*aLoRA"):
                model(rows, adapter_ids="a")
        assert not torch.equal(model(ids[1:], adapter_ids="a").logits, model(ids[1:]).logits)


def test_what_is_read_and_never_called_cannot_be_saved() -> None:
    """Mamba's fast path reads x_proj.weight past the layer: the base's would be used without a word."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, state_size=4, time_step_rank=4)
    model = enable_multilora(MambaForCausalLM(config).eval(), max_lora_rank=4)
    with pytest.raises(UnsupportedAdapterError, match="x_proj.*without calling it"):
        save(model, ("backbone.layers.0.mixer.x_proj",), ("backbone.layers.0.mixer.in_proj", 32, 128))
    assert not model.multilora.adapters
