"""Tiny models of several families, adapters that PEFT made of them, and a plan put into a copy of the base.

The last is the loader's own oracle: a plan is right if the base, with the plan worked into its weights, computes what
PEFT's model computes.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from adapter_bed import SLICES
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.pytorch_utils import Conv1D

from hf_multilora.adapters.plan import AdapterPlan
from hf_multilora.adapters.targets import Target, TargetTable

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0}
LLAMA = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
BERT = SMALL | {"num_attention_heads": 4, "num_labels": 3, "max_position_embeddings": 40}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "biased": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA)),
    "gemma": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**LLAMA, head_dim=8)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=40)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**LLAMA)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5)),
    "llama-cls": lambda: LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=3)),
    "bert-cls": lambda: BertForSequenceClassification(BertConfig(**BERT)),
    "roberta-cls": lambda: RobertaForSequenceClassification(RobertaConfig(**BERT)),
}


def make(family: str) -> PreTrainedModel:
    """A model of the family with random numbers everywhere, also in biases and norms."""
    torch.manual_seed(len(family))
    model = MODELS[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed" not in name:
                parameter.mul_(2)
    return model


def table_of(model: PreTrainedModel) -> TargetTable:
    """What enabling would make of the model."""
    targets = {}
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            slices = SLICES.get(last, ())
            bias = module.bias is not None
            targets[path] = Target(path, "linear", module.in_features, module.out_features, slices, has_bias=bias)
        elif isinstance(module, Conv1D):
            targets[path] = Target(path, "linear", module.nx, module.nf, transposed=True, has_bias=True)
        elif isinstance(module, nn.Embedding):
            scale = float(getattr(module, "embed_scale", 1.0))
            targets[path] = Target(path, "embedding", module.num_embeddings, module.embedding_dim, scale=scale)
    names = tuple(path for path, _ in model.named_modules() if path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    places = [id(parameter) for parameter in parameters.values()]
    return TargetTable(
        targets,
        {},
        frozenset(),
        names,
        None,
        model.state_dict().get,
        parameters={name: tuple(parameter.shape) for name, parameter in parameters.items()},
        tied=frozenset(name for name, parameter in parameters.items() if places.count(id(parameter)) > 1),
    )


def saved(
    base: PreTrainedModel,
    folder: Path,
    change: Callable[[PeftModel], Any] | None = None,
    save_embedding_layers: bool | str = "auto",
    **options: Any,
) -> PreTrainedModel:
    """Randomise everything that is trained, save with PEFT, and give the model that was saved.

    Args:
        change: called with the PeftModel before it is saved.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**{"r": 4, "lora_alpha": 6, **options})).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    noise = torch.randn_like(parameter) * 0.3
                    parameter.mul_(1 + noise).add_(noise) if parameter.ndim == 1 else parameter.add_(noise)
        if change is not None:
            change(model)
        model.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    return model


@torch.no_grad()
def applied(base: PreTrainedModel, plan: AdapterPlan, table: TargetTable) -> PreTrainedModel:
    """A copy of the base with a plan worked into its weights (fp32)."""
    model = copy.deepcopy(base)
    model.config.tie_word_embeddings = False
    for path, module in model.named_modules():  # what one place replaces, another one must not see
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
        assert path is not None
    for saved_param in plan.saved:
        module = model.get_submodule(saved_param.path)
        inner, _, name = saved_param.name.rpartition(".")
        setattr(module.get_submodule(inner), name, nn.Parameter(saved_param.ref.read().float().clone()))
    for factor in plan.factors:
        target = table.targets[factor.path]
        module = model.get_submodule(factor.path)
        matrix = module.weight.t() if target.transposed or target.kind == "embedding" else module.weight
        start = sum(target.widths[: factor.slice])
        piece = slice(start, start + target.widths[factor.slice])
        gain = torch.ones(target.widths[factor.slice]) if factor.gain is None else factor.gain.read()
        if factor.rank:
            assert factor.a is not None and factor.b is not None
            b = factor.b.read().float() * (factor.scaling / target.scale)
            matrix[piece] += b @ factor.a.read().float()
        matrix[piece] *= gain[:, None]
        if target.kind == "linear" and (target.has_bias or factor.shift is not None):
            if module.bias is None:
                module.bias = nn.Parameter(torch.zeros(target.out_features))
            module.bias[piece] *= gain
            if factor.shift is not None:
                module.bias[piece] += factor.shift.read()
    for rows in plan.tokens:
        weight = model.get_submodule(rows.path).weight
        more = max(rows.ids) + 1 - weight.shape[0]
        if more > 0:
            weight = nn.Parameter(torch.cat([weight, torch.full((more, weight.shape[1]), torch.nan)]))
            model.get_submodule(rows.path).weight = weight
        weight[list(rows.ids)] = rows.ref.read().float()
    return model


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits


def some_ids(n: int = 64) -> torch.Tensor:
    return torch.randint(1, n, (3, 7), generator=torch.Generator().manual_seed(5))


def assert_same(
    theirs: nn.Module, base: PreTrainedModel, plan: AdapterPlan, table: TargetTable, ids: torch.Tensor | None = None
) -> None:
    """The plan on the base is PEFT's model, and is not the base."""
    ids = some_ids() if ids is None else ids
    expected = logits(theirs, ids)
    found = logits(applied(base, plan, table), ids)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * max(1, float(expected.abs().max())))
    if int(ids.max()) < base.config.vocab_size:
        plain = logits(base, ids)
        assert plain.shape != expected.shape or (plain - expected).abs().max() > 1e-2
