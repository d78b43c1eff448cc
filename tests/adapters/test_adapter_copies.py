"""Weights shipped beside the factors: copies of the base's own are accepted, everything else is refused by name."""

from __future__ import annotations

import pytest
import torch
from adapter_bed import H, V, adapter, config, llama, load, table

from hf_multilora.adapters import shipped
from hf_multilora.adapters.shipped import same_numbers
from hf_multilora.errors import AdapterFormatError, UnsupportedAdapterError

torch.manual_seed(0)
BASE = {
    "lm_head.weight": torch.randn(V, H),
    "model.embed_tokens.weight": torch.randn(V, H),
    "model.layers.0.self_attn.q_proj.bias": torch.randn(H),
    "model.norm.weight": torch.ones(H),
}
TARGETS = llama(base=BASE, modules=("model.norm",))
TENSORS = adapter(TARGETS, ["q_proj", "embed_tokens", "lm_head"])


def read(extra: dict[str, torch.Tensor], targets=TARGETS, **fields):
    return load(TENSORS | extra, targets, config(**fields))


KEYS = [
    ("lm_head.base_layer.weight", "lm_head.weight"),
    ("model.embed_tokens.base_layer.weight", "model.embed_tokens.weight"),
    ("lm_head.weight", "lm_head.weight"),
    ("model.embed_tokens.original_module.weight", "model.embed_tokens.weight"),
    ("model.embed_tokens.modules_to_save.default.weight", "model.embed_tokens.weight"),
    ("model.layers.0.self_attn.q_proj.base_layer.bias", "model.layers.0.self_attn.q_proj.bias"),
    ("model.norm.weight", "model.norm.weight"),
]


@pytest.mark.parametrize(("key", "name"), KEYS)
def test_equal_copies_are_accepted(key: str, name: str) -> None:
    key = f"base_model.model.{key}"
    plan = read({key: BASE[name].clone()})
    assert plan.ignored == [f"{key}: a copy of the base's own weight"] and plan.warnings == []
    assert len(plan.factors) == 4


@pytest.mark.parametrize(("key", "name"), KEYS)
def test_changed_copies_are_refused(key: str, name: str) -> None:
    changed = BASE[name].clone()
    changed.view(-1)[-1] += 1e-3
    words = "trained bias" if "bias" in key else "modules_to_save"
    with pytest.raises(UnsupportedAdapterError, match=f"{key} differs from the base.*{words}"):
        read({f"base_model.model.{key}": changed})


def test_precision() -> None:
    """A copy of higher precision that rounds to the base is the base; one of lower precision gets a warning."""
    key = "base_model.model.lm_head.base_layer.weight"
    half = {name: value.bfloat16() for name, value in BASE.items()}
    upcast = read({key: half["lm_head.weight"].float()}, llama(base=half))
    assert upcast.warnings == [] and len(upcast.ignored) == 1
    rounded = read({key: half["lm_head.weight"]})
    assert "rounded to torch.bfloat16" in rounded.warnings[0]


def test_comparison_is_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "_CHUNK", 7)
    assert same_numbers(BASE["lm_head.weight"].clone(), BASE["lm_head.weight"]) is torch.float32
    assert same_numbers(BASE["lm_head.weight"] + 1, BASE["lm_head.weight"]) is None


@pytest.mark.parametrize("key", ["lm_head.weight", "model.embed_tokens.base_layer.weight"])
def test_resized_vocabulary(key: str) -> None:
    with pytest.raises(
        UnsupportedAdapterError, match=f"{key} has the shape .70, 32., the base has .64, 32.: a resized"
    ):
        read({f"base_model.model.{key}": torch.zeros(70, H)})


def test_saved_modules_that_the_file_lacks() -> None:
    with pytest.raises(AdapterFormatError, match="modules_to_save names 'norm', the model has 'model.norm'"):
        read({}, modules_to_save=["norm"])
    assert read({}, modules_to_save=["scores"]).ignored == [
        "modules_to_save='scores': neither the model nor the file has it"
    ]


def test_heads_of_other_tasks() -> None:
    with pytest.raises(UnsupportedAdapterError, match="score.weight is a saved module.*SEQ_CLS, not for generate"):
        read({"base_model.model.score.weight": torch.zeros(1, H)}, modules_to_save=["score"], task_type="SEQ_CLS")
    with pytest.raises(UnsupportedAdapterError, match="v_head"):
        read({"v_head.summary.weight": torch.zeros(1, H)})


def test_base_that_cannot_be_read() -> None:
    for unreadable in (None, torch.zeros(V, H, dtype=torch.uint8), torch.empty(V, H, device="meta")):
        base = {} if unreadable is None else {"lm_head.weight": unreadable}
        with pytest.raises(UnsupportedAdapterError, match="cannot be compared"):
            read({"base_model.model.lm_head.base_layer.weight": BASE["lm_head.weight"]}, llama(base=base))


def test_copies_move_with_the_renaming() -> None:
    nested = {"layers": "model.language_model.layers", "embeddings": ("model.language_model.embed_tokens",)}
    base = {
        "model.language_model.embed_tokens.weight": BASE["model.embed_tokens.weight"],
        "lm_head.weight": BASE["lm_head.weight"],
    }
    targets = table({"self_attn.q_proj": (H, H)}, base=base, **nested)
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    assert load(TENSORS | {key: BASE["model.embed_tokens.weight"]}, targets, config()).ignored
