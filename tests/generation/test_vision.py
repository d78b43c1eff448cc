"""A vision-language model: its language part is served; an adapter of the vision tower is refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import FAMILIES, PAD, VOCAB
from oracle import load_peft, make_adapter, relative_error
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from hf_multilora import enable_multilora
from hf_multilora.errors import MultiLoraError

IMAGE = VOCAB - 1
LANGUAGE = r".*language_model.*\.(q_proj|down_proj)"


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=32,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=FAMILIES["llama"].build().config,
        image_token_index=IMAGE,
        image_seq_length=4,
        vision_feature_layer=-1,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = LlavaForConditionalGeneration(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.15)
    model.generation_config.eos_token_id = None
    return model


def inputs() -> dict[str, torch.Tensor]:
    """Three rows, one image each."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, IMAGE, (3, 10), generator=generator)
    ids[:, 1:5] = IMAGE
    pixels = torch.randn(3, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def test_the_language_part(base: PreTrainedModel, tmp_path: Path) -> None:
    folders = {
        name: make_adapter(base, tmp_path / name, seed, r=4, target_modules=LANGUAGE)
        for seed, name in enumerate(("a", "b"))
    }
    references: dict[Any, Any] = {name: load_peft(base, folder) for name, folder in folders.items()}
    references[None] = base
    model = enable_multilora(copy.deepcopy(base), max_lora_rank=8)
    for name, folder in folders.items():
        model.load_adapter(folder, adapter_name=name)
    ids = ["a", None, "b"]
    with torch.no_grad():
        got = model(**inputs(), adapter_ids=ids).logits
        for row, adapter in enumerate(ids):
            want = references[adapter](**inputs()).logits[row]
            assert relative_error(got[row], want) <= 1e-5, adapter
        assert torch.equal(got[1], base(**inputs()).logits[1])
    for options in ({}, {"num_beams": 2}):
        tokens = model.generate(**inputs(), max_new_tokens=4, do_sample=False, **options, adapter_ids=ids)
        for row, adapter in enumerate(ids):
            want = references[adapter].generate(**inputs(), max_new_tokens=4, do_sample=False, **options)[row]
            assert torch.equal(tokens[row], want), adapter


def test_the_vision_tower_is_refused(base: PreTrainedModel, tmp_path: Path) -> None:
    """PEFT's suffix matching trains the tower's q_proj too; its rows are images, so that no row id fits them."""
    folder = make_adapter(base, tmp_path, 4, r=4, target_modules=["q_proj"])
    model = enable_multilora(copy.deepcopy(base), max_lora_rank=8)
    with pytest.raises(MultiLoraError, match="vision_tower"):
        model.load_adapter(folder, adapter_name="both")
    assert torch.equal(model(**inputs()).logits, base(**inputs()).logits)
