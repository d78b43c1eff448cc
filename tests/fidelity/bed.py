"""Every kind of checkpoint that PEFT writes, on tiny models of several families, and PEFT's own answer for each.

A *kind* is a way to train: LoraConfig's options, perhaps a vocabulary or a head of another size, and whether PEFT
rewrites the base for it. Adapters are made, randomised and saved by PEFT. The reference of a kind is PEFT with that
adapter alone, on a fresh copy of the base.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from models import FAMILIES, HIDDEN, INNER, PAD, VOCAB, Family, _draw, prompts
from oracle import assert_row, workspace
from peft import (
    BdLoraConfig,
    LoraConfig,
    MontecloraConfig,
    PeftModel,
    VeloraConfig,
    get_peft_model,
)
from transformers import PreTrainedModel

from hf_multilora import enable_multilora

EXTRA = 8  # columns beyond the base's vocabulary: `extra_vocab_size` of the enabled models here
INVOCATION = [7, 8, 9]  # of the aLoRA kinds
LABELS = 3
LONG = 1 << 22  # bytes of a slot that holds every kind of these models

_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "num_labels": LABELS,
}
_LLAMA = {**_ENCODER, "num_key_value_heads": 2}


def _qwen2() -> PreTrainedModel:
    none: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**{**_LLAMA, **none, "tie_word_embeddings": False}))


# Families that the other tests do not have, in the same shape.
_MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": _qwen2,
    "llama_cls": lambda: tf.LlamaForSequenceClassification(tf.LlamaConfig(**_LLAMA)),
    "llama_tokens": lambda: tf.LlamaForTokenClassification(tf.LlamaConfig(**_LLAMA)),
    "bert_cls": lambda: tf.BertForSequenceClassification(tf.BertConfig(**_ENCODER)),
    "bert_tokens": lambda: tf.BertForTokenClassification(tf.BertConfig(**_ENCODER)),
    "roberta_cls": lambda: tf.RobertaForSequenceClassification(tf.RobertaConfig(**_ENCODER)),
}


@cache
def _built(name: str) -> PreTrainedModel:
    if name in FAMILIES:
        return FAMILIES[name].build()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _MAKERS[name]()
    generator = torch.Generator().manual_seed(1)
    for path, parameter in model.named_parameters():
        _draw(path, parameter, generator)
    model.tie_weights()
    return model.eval()


def build(family: str) -> PreTrainedModel:
    """A fresh copy of the family's base, always with the same weights."""
    return copy.deepcopy(_built(family))


@dataclass(frozen=True)
class Names:
    """What the modules of one family are called, and which kinds it has."""

    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    embedding: str = "embed_tokens"
    head: str = "lm_head"
    norms: tuple[str, ...] = ("norm",)  # "norm" stands for every module whose path ends in it: PEFT's rule
    row_parallel: str = "o_proj"  # input blocks, for BD-LoRA
    layer: str = r"layers\.1"
    tied: bool = False
    biased: bool = False
    task: str = "CAUSAL_LM"
    without: tuple[str, ...] = ()  # kinds that PEFT itself cannot do here


def _names(name: str, **more: Any) -> Names:
    family: Family = FAMILIES[name]
    return Names(family.attention, family.mlp, family.embedding[0], family.head, layer=family.layer, **more)


_BERT: dict[str, Any] = {
    "attention": ("query", "key", "value", "attention.output.dense"),
    "mlp": ("intermediate.dense",),
    "embedding": "word_embeddings",
    "head": "classifier",
    "norms": ("LayerNorm",),
    "row_parallel": "attention.output.dense",
    "layer": r"layer\.1",
    "biased": True,
}
_QKVO, _GATED = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")

NAMES: dict[str, Names] = {
    "llama": _names("llama"),
    "llama_tied": _names("llama_tied", tied=True),
    "qwen2": Names(_QKVO, _GATED, biased=True),
    "gemma3": _names("gemma3", tied=True),
    "gpt2": _names(
        "gpt2", tied=True, biased=True, norms=("ln_1", "ln_f"), row_parallel="attn.c_proj", without=("olora", "bdlora")
    ),
    "phi3": _names("phi3"),
    "t5": _names("t5", tied=False, norms=("layer_norm",), task="SEQ_2_SEQ_LM", without=("bdlora",)),
    "llama_cls": Names(_QKVO, _GATED, head="score", task="SEQ_CLS"),
    "llama_tokens": Names(_QKVO, _GATED, head="score", task="TOKEN_CLS"),
    "bert_cls": Names(**_BERT, task="SEQ_CLS"),
    "bert_tokens": Names(**_BERT, task="TOKEN_CLS"),
    "roberta_cls": Names(**_BERT, task="SEQ_CLS"),
}
CAUSAL = [name for name, names in NAMES.items() if names.task == "CAUSAL_LM"]
CLASSIFIERS = [name for name, names in NAMES.items() if names.task.endswith("CLS")]


@dataclass(frozen=True)
class Kind:
    """One way to train.

    Attributes:
        options: of LoraConfig.
        more_tokens: by how many the vocabulary was resized before training.
        labels: of the classification head.
        save: options of save_pretrained.
        altered: PEFT rewrites the base when it makes or loads this adapter.
    """

    options: Mapping[str, Any]
    more_tokens: int = 0
    labels: int | None = None
    save: Mapping[str, Any] = field(default_factory=dict)
    altered: bool = False

    def base(self, family: str) -> PreTrainedModel:
        """The base that this was trained on: resized, or with a head of another width."""
        model = build(family)
        if self.labels is not None:
            _replace_head(model, self.labels)
        if self.more_tokens:
            _resize(model, self.more_tokens)
        return model


def _resize(model: PreTrainedModel, more: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.resize_token_embeddings(VOCAB + more, mean_resizing=False)
    generator = torch.Generator().manual_seed(more)
    tables = {id(m.weight): m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m}
    with torch.no_grad():
        for weight in tables.values():
            weight[VOCAB:] = 0.3 * torch.randn(weight[VOCAB:].shape, generator=generator)


def _replace_head(model: PreTrainedModel, labels: int) -> None:
    path, head = next(
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.out_features == LABELS
    )
    wider = torch.nn.Linear(head.in_features, labels, bias=head.bias is not None)
    generator = torch.Generator().manual_seed(labels)
    with torch.no_grad():
        for parameter in wider.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(HIDDEN))
    model.set_submodule(path, wider)
    model.num_labels = model.config.num_labels = labels


def kinds(family: str) -> dict[str, Kind]:
    """All kinds of one family, by name."""
    n = NAMES[family]
    attention, mlp = list(n.attention), list(n.mlp)
    all_of = [*attention, *mlp]
    second = rf".*{n.layer}\..*{attention[0]}".replace("attn.c_attn", r"attn\.c_attn")
    small = {"r": 4, "lora_alpha": 6}
    found: dict[str, Kind] = {
        "plain": Kind({**small, "target_modules": attention}),
        "patterns": Kind(
            {
                "r": 8,
                "lora_alpha": 4,
                "use_rslora": True,
                "target_modules": all_of,
                "rank_pattern": {second: 5, mlp[-1]: 2},
                "alpha_pattern": {mlp[-1]: 7},
            }
        ),
        "dora": Kind({**small, "use_dora": True, "target_modules": all_of}),
        "dora_patterns": Kind(
            {
                **small,
                "use_dora": True,
                "use_rslora": True,
                "target_modules": [*all_of, n.embedding],
                "rank_pattern": {second: 2},
                "alpha_pattern": {mlp[-1]: 9},
            }
        ),
        "lora_bias": Kind({**small, "lora_bias": True, "target_modules": all_of}),
        "bias_lora_only": Kind({**small, "bias": "lora_only", "target_modules": attention[:1]}),
        "bias_all": Kind({**small, "bias": "all", "target_modules": attention[:1]}),
        "norms": Kind({**small, "target_modules": attention, "modules_to_save": list(n.norms)}),
        "saved_embedding": Kind({**small, "target_modules": attention, "modules_to_save": [n.embedding]}),
        "embedding": Kind({**small, "target_modules": [*attention, n.embedding]}),
        "gaussian": Kind({**small, "init_lora_weights": "gaussian", "target_modules": attention}),
        "orthogonal": Kind({**small, "init_lora_weights": "orthogonal", "target_modules": attention}),
        "eva": Kind({**small, "init_lora_weights": "eva", "target_modules": attention}),
        "pissa": Kind({**small, "init_lora_weights": "pissa", "target_modules": all_of}, altered=True),
        "olora": Kind({**small, "init_lora_weights": "olora", "target_modules": all_of}, altered=True),
        "bdlora": Kind(
            {
                **small,
                "target_modules": attention,
                "use_bdlora": BdLoraConfig(
                    target_modules_bd_a=[n.row_parallel],
                    target_modules_bd_b=attention[:1],
                    nblocks=2,
                    match_strict=False,
                ),
            }
        ),
        "monteclora": Kind(
            {
                "r": 4,
                "lora_alpha": 6,
                "target_modules": attention,
                "monteclora_config": MontecloraConfig(num_samples=2),
            }
        ),
        "velora": Kind({**small, "target_modules": attention, "velora_config": VeloraConfig(num_groups=4, scale=1.0)}),
    }
    if n.task == "CAUSAL_LM":
        found["alora"] = Kind({**small, "alora_invocation_tokens": INVOCATION, "target_modules": all_of})
        found["alora_single"] = Kind({**small, "alora_invocation_tokens": [5], "target_modules": attention})
    if n.task.endswith("CLS"):
        found["five_labels"] = Kind({**small, "target_modules": attention}, labels=5)
        found["two_labels"] = Kind({**small, "use_dora": True, "target_modules": all_of}, labels=2)
    else:
        whole = {"save": {"save_embedding_layers": True}}
        found |= {
            "head": Kind({**small, "target_modules": [*mlp, n.head]}),
            "dora_head": Kind({**small, "use_dora": True, "target_modules": [n.head, mlp[-1]]}),
            "saved_head": Kind({**small, "target_modules": attention, "modules_to_save": [n.head]}),
            "tokens": Kind({**small, "target_modules": attention, "trainable_token_indices": [3, 17, 40]}),
            "more_tokens_4": Kind({**small, "target_modules": attention}, more_tokens=4, **whole),
            "more_tokens_7": Kind({**small, "target_modules": mlp}, more_tokens=7, **whole),
            "more_tokens_saved": Kind(
                {**small, "target_modules": attention, "modules_to_save": [n.embedding, n.head]}, more_tokens=4
            ),
            "more_tokens_rows": Kind(
                {**small, "target_modules": mlp, "trainable_token_indices": [3, VOCAB, VOCAB + 2]},
                more_tokens=4,
                **whole,
            ),
        }
        if n.tied:
            found["tying"] = Kind({**small, "target_modules": [n.embedding, *attention], "ensure_weight_tying": True})
            found["tying_saved"] = Kind(
                {**small, "target_modules": attention, "modules_to_save": [n.embedding], "ensure_weight_tying": True}
            )
        else:
            found["tokens_dict"] = Kind(
                {
                    **small,
                    "target_modules": attention,
                    "trainable_token_indices": {n.embedding: [3, 17], n.head: [17, 50, 51]},
                }
            )
    return {name: kind for name, kind in found.items() if name not in n.without}


@torch.no_grad()
def perturb(model: torch.nn.Module, seed: int) -> None:
    """Random values for all that PEFT trains: factors, magnitudes, biases, saved modules, token rows."""
    generator = torch.Generator().manual_seed(seed)
    altered = next(iter(model.peft_config.values())).init_lora_weights in ("pissa", "olora")
    for path, parameter in model.named_parameters():
        if not parameter.requires_grad or "monteclora" in path or "velora" in path:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if "magnitude" in path:
            parameter.mul_(1 + 0.2 * noise)
        elif "lora_" in path and parameter.dim() == 2:
            fan = math.sqrt(parameter.shape[1])
            if altered:
                parameter.add_(0.1 * noise * parameter.std())
            elif "lora_embedding_A" in path:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / fan if "lora_A" in path else 0.3 * noise / fan)
        else:
            parameter.add_(noise * (0.2 if parameter.dim() == 1 else 0.5 * parameter.std().nan_to_num(0.2)))


def quietly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*args, **kwargs)


def train(family: str, kind: Kind, seed: int = 0) -> PeftModel:
    """A PeftModel of this kind with random values, in eval mode."""
    options = {"lora_dropout": 0.0, "task_type": NAMES[family].task, **kind.options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = quietly(get_peft_model, kind.base(family), quietly(LoraConfig, **options))
    perturb(model, seed)
    return model.eval()


def save(model: PeftModel, folder: Path, kind: Kind) -> Path:
    quietly(model.save_pretrained, folder, **kind.save)
    return folder


def seed_of(family: str, name: str) -> int:
    return 100 + list(kinds(family)).index(name)


@cache
def folder_of(family: str, name: str) -> Path:
    """The adapter of this kind, as PEFT saved it."""
    kind = kinds(family)[name]
    return save(train(family, kind, seed_of(family, name)), workspace() / "fidelity" / family / name, kind)


@cache
def reference(family: str, name: str | None) -> Any:
    """PEFT with this adapter alone on a fresh copy of its base, or the bare model for None. Do not change it."""
    if name is None:
        return build(family)
    kind = kinds(family)[name]
    return quietly(PeftModel.from_pretrained, kind.base(family), folder_of(family, name)).eval()


def vocabulary(family: str, name: str | None) -> int:
    return VOCAB + (kinds(family)[name].more_tokens if name is not None else 0)


def enabled(family: str, names: Iterable[str] = (), **options: Any) -> PreTrainedModel:
    """A fresh model with room for every kind, and these adapters registered."""
    names = list(names)
    room = {} if NAMES[family].task.endswith("CLS") else {"extra_vocab_size": EXTRA}
    defaults = {"max_loras": max(len(names), 1), "max_lora_rank": 16, "slot_bytes": LONG, **room}
    model = enable_multilora(build(family), **{**defaults, **options})
    for name in names:
        model.load_adapter(folder_of(family, name), adapter_name=name)
    return model


def prompts_of(rows: Sequence[Kind | None], *, side: str | None = "left", seed: int = 0) -> dict[str, Any]:
    """Prompts for rows of these kinds: rows with added tokens hold some, aLoRA rows their invocation."""
    inputs = prompts(len(rows), side=side, seed=seed)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for row, kind in enumerate(rows):
        there = mask[row].nonzero().flatten()
        if kind is None:
            continue
        if kind.more_tokens and len(there) > 2:
            ids[row, there[1]] = VOCAB + kind.more_tokens - 1
            ids[row, there[0]] = VOCAB
        tokens = kind.options.get("alora_invocation_tokens")
        if tokens is not None and len(there) > len(tokens):
            start = there[-1] - len(tokens)  # one more token comes after it
            ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        chosen = kind.options.get("trainable_token_indices")
        if chosen is not None and len(there) > 4:
            ids[row, there[3]] = 17 if isinstance(chosen, dict) else chosen[0]
    return inputs


def batch(family: str, names: Sequence[str | None], *, side: str | None = "left", seed: int = 0) -> dict[str, Any]:
    """`prompts_of` for the kinds of a family by name, and the decoder's tokens where there is one."""
    own = kinds(family)
    inputs = prompts_of([None if name is None else own[name] for name in names], side=side, seed=seed)
    if FAMILIES.get(family) is not None and FAMILIES[family].encoder_decoder:
        generator = torch.Generator().manual_seed(seed + 1)
        inputs["decoder_input_ids"] = torch.randint(1, VOCAB, (len(names), 5), generator=generator)
    return inputs


def known(inputs: Mapping[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """The same batch with the tokens that a vocabulary of `size` does not have replaced: they are in other rows."""
    return {**inputs, "input_ids": torch.where(inputs["input_ids"] < size, inputs["input_ids"], 1)}


def wanted(
    family: str, names: Sequence[str | None], inputs: Mapping[str, torch.Tensor], call: Callable[[Any, Any], Any]
) -> list[torch.Tensor]:
    """Each row's reference: `call(model, inputs)` once for each distinct name, on the whole batch."""
    results: dict[str | None, torch.Tensor] = {}
    rows = []
    for row, name in enumerate(names):
        if name not in results:
            results[name] = call(reference(family, name), known(inputs, vocabulary(family, name)))
        rows.append(results[name][row])
    return rows


def logits(model: Any, inputs: Mapping[str, Any], **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, **more).logits


def assert_own_columns(got: torch.Tensor, want: torch.Tensor, name: str | None, where: str) -> None:
    """A row against its reference over its own columns; the others are -inf."""
    width = want.shape[-1]
    assert got.shape[-1] >= width, f"{where} {name}: {got.shape[-1]} columns of {width}"
    assert (got[..., width:] == -math.inf).all(), f"{where} {name}: foreign columns are not -inf"
    assert_row(got[..., :width], want, name, where)
