"""Every kind of adapter, broken in every tensor: lost, cut short, doubled, of integers. Never served as if whole."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import BdLoraConfig, KasaConfig
from peft_bed import make, saved, table_of
from safetensors.torch import load_file, save_file

from hf_multilora.adapters.load import load_plan
from hf_multilora.errors import AdapterFormatError, UnsupportedAdapterError

Q = {"target_modules": ["q_proj", "down_proj"]}
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "dora": ("biased", {"use_dora": True, **Q}, 0),
    "dora embedding": ("llama", {"use_dora": True, "target_modules": ["embed_tokens"]}, 0),
    "lora_bias": ("llama", {"lora_bias": True, **Q}, 0),
    "lora_only": ("biased", {"bias": "lora_only", **Q}, 0),
    "all": ("biased", {"bias": "all", **Q}, 0),
    "head": ("bert-cls", {"task_type": "SEQ_CLS", "target_modules": ["query"]}, 0),
    "nested head": ("roberta-cls", {"task_type": "SEQ_CLS", "target_modules": ["query"]}, 0),
    "norms": ("llama", {"modules_to_save": ["model.norm", "mlp"], "target_modules": ["q_proj"]}, 0),
    "vocabulary": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"], **Q}, 5),
    "tokens": ("llama", {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [3]}, **Q}, 0),
    "alora": ("llama", {"alora_invocation_tokens": [1, 2], **Q}, 0),
    "pissa": ("llama", {"init_lora_weights": "pissa", **Q}, 0),
    "kasa": ("llama", {"kasa_config": KasaConfig(), **Q}, 0),
    "bdlora": ("llama", {"use_bdlora": BdLoraConfig(nblocks=2, target_modules_bd_b=["q_proj", "down_proj"]), **Q}, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor(kind: str, tmp_path: Path) -> None:
    family, options, more = KINDS[kind]
    base = make(family)
    trained = copy.deepcopy(base)
    if more:
        trained.resize_token_embeddings(64 + more, mean_resizing=False)
    saved(trained, tmp_path, **options)
    table = table_of(base)
    file = tmp_path / "adapter_model.safetensors"
    whole = load_file(file)

    def refused(tensors: dict[str, torch.Tensor]) -> str:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        with pytest.raises((AdapterFormatError, UnsupportedAdapterError)) as raised:
            load_plan(tmp_path, table, max_lora_rank=16).close()
        assert str(file) in str(raised.value)
        return str(raised.value)

    load_plan(tmp_path, table, max_lora_rank=16).close()
    for name, tensor in whole.items():
        module = re.split(r"\.(lora_|token_adapter|base_layer|weight|bias)", name.removeprefix("base_model.model."))[0]
        if not name.endswith("base_layer.weight"):  # a copy of the base's own
            refused({key: value for key, value in whole.items() if key != name})
        assert module in refused(whole | {name: tensor[..., :-1]})
        assert module in refused(whole | {name: torch.cat([tensor, tensor])})
        assert name in refused(whole | {name: tensor.to(torch.int32)})
