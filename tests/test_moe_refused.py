"""Mixtures of experts: what cannot be served is refused by name, and what looks like it is served as what it is."""

from __future__ import annotations

import copy
import json
import types
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers as tf
from moe_bed import HIDDEN, ROWS, VOCAB, adapters, bare, enabled, logits, merged, three_d
from safetensors.torch import save_file
from torch import nn
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

from hf_multilora import enable_multilora
from hf_multilora.checks import inspect_adapter
from hf_multilora.errors import MultiLoraError, RoutingError, UnsupportedAdapterError

OPTIONS: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 8, "slot_bytes": 4 << 20}


def load(model: Any, family: str, name: str = "3-D") -> None:
    tensors, config = adapters(family)[name][1]
    model.multilora.load(dict(tensors), "one", config=config)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_offloaded_experts_are_brought_in(implementation):
    base = bare("qwen3_moe", implementation)
    accelerate.cpu_offload(base, execution_device="cpu")
    model = enable_multilora(base, **OPTIONS)
    load(model, "qwen3_moe")
    got = logits(model, 4, adapter_ids=["one", None] * 3 + ["one"])
    want = logits(merged("qwen3_moe", adapters("qwen3_moe")["3-D"][0]), 4)
    torch.testing.assert_close(got[::2], want[::2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1::2], logits(bare("qwen3_moe"), 4)[1::2], rtol=1e-6, atol=2e-6)
    assert all(layer.mlp.experts.down_proj.device.type == "meta" for layer in model.model.layers)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kernel_in_place_of_the_whole_block(when):
    """What transformers' kernels do: the parent gets a forward that reads the weights of what lies in it."""
    model, twin = bare("gpt_oss"), bare("gpt_oss")

    def fuse() -> None:
        for layer, other in zip(model.model.layers, twin.model.layers, strict=True):
            layer.mlp.forward = types.MethodType(lambda self, h, other=other: other.mlp.forward(h), layer.mlp)

    if when == "before":
        fuse()
    enable_multilora(model, **OPTIONS)
    if when == "before":
        with pytest.raises(UnsupportedAdapterError, match="GptOssMLP around it was replaced"):
            load(model, "gpt_oss")
        return
    load(model, "gpt_oss")
    fuse()
    with pytest.raises(MultiLoraError, match="GptOssMLP around it was replaced"):
        logits(model, 4, adapter_ids=["one"] * len(ROWS))


def test_as_many_tokens_as_rows_are_not_taken_for_one_of_each():
    model = enabled("qwen3_moe")
    block = model.model.layers[0].mlp.experts
    block.register_forward_pre_hook(lambda module, args: tuple(arg[: len(ROWS)] for arg in args))
    block.register_forward_hook(lambda module, args, y: torch.cat([y, y.new_zeros(len(ROWS) * 3, HIDDEN)]))
    with pytest.raises(RoutingError, match="an input of 7 tokens is not all of the 7 rows of 4 tokens"):
        logits(model, 4, adapter_ids=ROWS)
    logits(model, 4, adapter_ids="all")


class Other(nn.Linear):
    """As quantised layers are: a linear layer with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        bias = x.new_zeros(()) if self.bias is None else self.bias
        return torch.addmm(bias, flat, self.weight.t()).view(*x.shape[:-1], -1)


def test_what_lies_beside_a_convolution_is_no_router():
    """A convolution has a 3-D weight, too."""
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 44, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    base = tf.Lfm2ForCausalLM(tf.Lfm2Config(**sizes, **heads, layer_types=["conv", "full_attention"])).eval()
    for module in base.modules():
        if type(module) is nn.Linear:
            module.__class__ = Other
    model, path = enable_multilora(copy.deepcopy(base), max_loras=2, max_lora_rank=8), "model.layers.0.conv.out_proj"
    a, b, stem = torch.randn(2, HIDDEN), torch.randn(HIDDEN, 2), f"base_model.model.{path}.lora_"
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [path]}
    model.multilora.load({f"{stem}A.weight": a, f"{stem}B.weight": b}, "one", config=config)
    ids = torch.randint(3, VOCAB, (2, 4))
    with torch.no_grad():
        got = model(input_ids=ids, adapter_ids=["one", None]).logits
        base.get_submodule(path).weight += b @ a
        torch.testing.assert_close(got[0], base(input_ids=ids).logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "wanted",
    [["q_proj", "down_proj"], ["experts.gate_proj"], r".*experts\.(gate|up|down)_proj", ["experts.gate_up_proj"]],
    ids=str,
)
def test_target_modules_may_name_a_part_of_a_block(wanted):
    model = enable_multilora(bare("qwen3_moe"), target_modules=wanted, **OPTIONS)
    load(model, "qwen3_moe")
    want = logits(merged("qwen3_moe", adapters("qwen3_moe")["3-D"][0]), 4)
    torch.testing.assert_close(logits(model, 4, adapter_ids="one"), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "router"), [("qwen3_moe", "gate"), ("gpt_oss", "router")])
@pytest.mark.parametrize("inside", [False, True], ids=["by name", "inside of mlp"])
def test_a_router_saved_whole_is_refused_when_it_is_loaded(family, router, inside):
    model = enable_multilora(bare(family), **OPTIONS)
    tensors, config = adapters(family)["attention"][1]
    saved = {
        f"base_model.model.model.layers.{i}.mlp.{router}.{name}": parameter + 1
        for i, layer in enumerate(model.model.layers)
        for name, parameter in layer.mlp.get_submodule(router).named_parameters(recurse=False)
    }
    if inside:
        saved |= {
            f"base_model.model.model.layers.{i}.mlp.experts.{name}": parameter + 1
            for i, layer in enumerate(model.model.layers)
            for name, parameter in layer.mlp.experts.named_parameters()
        }
    with pytest.raises(UnsupportedAdapterError, match="router .* whole"):
        model.multilora.load(
            {**tensors, **saved}, "one", config={**config, "modules_to_save": ["mlp" if inside else router]}
        )


def test_an_implementation_of_the_user_s_own_is_refused_when_it_is_loaded():
    ALL_EXPERTS_FUNCTIONS.register("mine", batched_mm_experts_forward)
    base = bare("qwen3_moe")
    base.set_experts_implementation("mine")
    model = enable_multilora(base, **OPTIONS)
    with pytest.raises(UnsupportedAdapterError, match="'mine'"):
        load(model, "qwen3_moe")


@pytest.mark.parametrize("name", ["3-D", "all"])
def test_what_inspect_says_of_stacked_experts(name: str, tmp_path: Path):
    adapter = adapters("qwen3_moe")[name][0]
    tensors, config = three_d("qwen3_moe", adapter)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    seen = inspect_adapter(str(tmp_path))
    assert seen.rank == adapter.rank and set(seen.scalings.values()) == {adapter.scaling} and not seen.unmatched


def test_products_that_transformers_has_no_more(monkeypatch: pytest.MonkeyPatch):
    """They are private there: without them experts are refused by name, and all else is served."""
    monkeypatch.delattr(moe, "_grouped_linear")
    model = enable_multilora(bare("qwen3_moe"), **OPTIONS)
    with pytest.raises(UnsupportedAdapterError, match="this version of transformers has no _grouped_linear"):
        load(model, "qwen3_moe")
    load(model, "qwen3_moe", "attention")


def test_blocks_may_be_called_by_keywords():
    model = enabled("qwen3_moe")
    want = logits(model, 4, adapter_ids=ROWS)
    for layer in model.model.layers:
        block = layer.mlp.experts
        layer.mlp._modules["experts"] = ByKeyword(block)
    assert torch.equal(logits(model, 4, adapter_ids=ROWS), want)


class ByKeyword(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.block(x, top_k_weights=weights, top_k_index=index)
