"""aLoRA where a layer sees its rows flattened: PEFT's mask does not fit there, the mathematics does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fidelity.bed import INVOCATION, logits, perturb, quietly
from models import FAMILIES, LENGTH, VOCAB, prompts
from oracle import relative_error
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from hf_multilora import enable_multilora


def test_opt(tmp_path: Path) -> None:
    """OPT's fc1 sees [rows * tokens, hidden]."""
    base = FAMILIES["opt"].build()
    options: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "fc1", "fc2"], "task_type": "CAUSAL_LM"}
    trained = quietly(
        get_peft_model, FAMILIES["opt"].build(), LoraConfig(**options, alora_invocation_tokens=INVOCATION)
    )
    perturb(trained, 1)
    quietly(trained.save_pretrained, tmp_path)
    inputs = prompts(3)
    ids = torch.randint(20, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(3))
    starts = torch.tensor([7, 9, 10**6])
    for row in range(2):
        ids[row, starts[row] : starts[row] + 3] = torch.tensor(INVOCATION)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with pytest.raises(IndexError, match="mask"):
        logits(trained.eval(), inputs)

    model = enable_multilora(FAMILIES["opt"].build(), max_loras=1, max_lora_rank=8)
    model.load_adapter(tmp_path, adapter_name="a")
    got = logits(model, inputs, adapter_ids=["a", "a", "a"])
    bare = logits(base, inputs)
    assert torch.equal(got[2], bare[2])
    assert torch.equal(got[0, :7], bare[0, :7])

    active = torch.arange(LENGTH)[None] >= starts[:, None]
    for path, module in trained.named_modules():
        if isinstance(module, LoraLayer):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight * module.scaling["default"]

            def hook(_: Any, args: Any, output: torch.Tensor, a: Any = a, b: Any = b) -> torch.Tensor:
                return output + (args[0] @ a.T @ b.T) * active.reshape(*output.shape[:-1], 1)

            base.get_submodule(path.removeprefix("base_model.model.")).register_forward_hook(hook)
    want = logits(base, inputs)
    for row in range(3):
        assert relative_error(got[row], want[row]) <= 1e-5
