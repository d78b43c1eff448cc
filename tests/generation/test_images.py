"""A model that sees images: more images than rows, and the text model's rows still each have their own adapter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import IMAGE, llava
from transformers import LlavaForConditionalGeneration

from hf_multilora import enable_multilora


@pytest.fixture(scope="module")
def model() -> LlavaForConditionalGeneration:
    model = llava()
    enable_multilora(model, max_lora_rank=8)
    tensors = {}
    for layer in range(2):
        path = f"base_model.model.model.language_model.layers.{layer}.self_attn.v_proj"
        tensors |= {f"{path}.lora_A.weight": torch.randn(8, 32), f"{path}.lora_B.weight": torch.randn(32, 8)}
    lora = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj"]}
    model.load_adapter(adapter_state_dict=tensors, peft_config=lora, adapter_name="a")
    return model


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_rows_with_one_and_with_two_images(model: LlavaForConditionalGeneration, options: dict[str, Any]) -> None:
    ids = torch.tensor([[0] * 4 + [IMAGE] * 4 + [5, 6, 7, 8], [IMAGE] * 8 + [9, 8, 7, 6]])
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    def generate(adapter_ids: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return model.generate(
            input_ids=ids, pixel_values=pixels, attention_mask=(ids != 0).long(), pad_token_id=0,
            adapter_ids=adapter_ids,
            **{"max_new_tokens": 5, "do_sample": False, **options},
        )  # fmt: skip

    mixed, alone, base = generate(["a", None]), generate("a"), generate(None)
    half = len(mixed) // 2
    assert not torch.equal(alone, base)
    assert torch.equal(mixed[:half], alone[:half]) and torch.equal(mixed[half:], base[half:])
