"""Models that are no causal LMs: encoders, pooled heads, a bare decoder. Found by type, mapped by row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from models import HIDDEN, INNER, PAD, VOCAB, prompts
from oracle import load_peft, make_adapter, relative_error
from transformers import PreTrainedModel

from hf_multilora import disable_multilora, enable_multilora

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
}


def bert_classifier() -> PreTrainedModel:
    return tf.BertForSequenceClassification(tf.BertConfig(**SMALL, num_labels=3))


def bert_masked() -> PreTrainedModel:
    return tf.BertForMaskedLM(tf.BertConfig(**SMALL))


def llama_classifier() -> PreTrainedModel:
    return tf.LlamaForSequenceClassification(tf.LlamaConfig(**SMALL, num_key_value_heads=2, num_labels=3))


def llama_bare() -> PreTrainedModel:
    return tf.LlamaModel(tf.LlamaConfig(**SMALL, num_key_value_heads=2))


CASES = [
    # pooler.dense and classifier see one vector per row
    (bert_classifier, ["query", "value", "dense", "word_embeddings", "classifier"], "logits"),
    (bert_masked, ["query", "key", "intermediate.dense", "word_embeddings", "position_embeddings"], "logits"),
    (llama_classifier, ["q_proj", "down_proj", "score"], "logits"),
    (llama_bare, ["q_proj", "down_proj", "embed_tokens"], "last_hidden_state"),
]


@pytest.mark.parametrize(("make", "targets", "field"), CASES, ids=[case[0].__name__ for case in CASES])
def test_rows(make: Callable[[], PreTrainedModel], targets: list[str], field: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        base = make().eval()
        with torch.no_grad():
            for parameter in base.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.15)
    folders = {
        name: make_adapter(base, tmp_path / name, seed, r=rank, task_type=None, target_modules=targets)
        for seed, (name, rank) in enumerate((("a", 4), ("b", 9)))
    }
    model = enable_multilora(copy.deepcopy(base), max_lora_rank=16)
    for name, folder in folders.items():
        model.load_adapter(folder, adapter_name=name)
    inputs = prompts(4, side="right")
    ids = ["a", None, "b", "a"]
    with torch.no_grad():
        got = getattr(model(**inputs, adapter_ids=ids), field)
        bare = getattr(base(**inputs), field)
        assert torch.equal(got[1], bare[1])
        assert torch.equal(getattr(model(**inputs), field), bare)
        for row, name in enumerate(ids):
            if name is not None:
                want = getattr(load_peft(base, folders[name])(**inputs), field)
                assert relative_error(got[row], want[row]) <= 1e-5, name
                assert relative_error(want[row], bare[row]) > 0.01, name
    disable_multilora(model)
    assert torch.equal(getattr(model(**inputs), field), bare)
