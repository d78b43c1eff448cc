"""Kinds at once in one adapter: DoRA with biases, PiSSA with DoRA, token rows over LoRA, and so on, against PEFT."""

from __future__ import annotations

from typing import Any

import pytest
from fidelity import bed
from fidelity.bed import NAMES, Kind, assert_own_columns, batch, enabled, logits, quietly, save, train, vocabulary
from models import VOCAB
from oracle import relative_error, workspace
from peft import BdLoraConfig, PeftModel
from peft.utils import save_and_load

from hf_multilora import AdapterFormatError, UnsupportedAdapterError

FAMILIES = ["llama_tied", "llama", "gpt2", "qwen2", "phi3"]


# PEFT has no OLoRA and no BD-LoRA for Conv1D.
REFUSED_BY_PEFT = {("gpt2", "olora_dora"), ("gpt2", "olora_patterns"), ("gpt2", "bdlora_rslora")}
# The file has one of two tables that are not tied: the other one's new rows are nowhere.
HALF_A_VOCABULARY = {
    (family, name) for family in ("llama", "qwen2", "phi3") for name in ("resized_embedding", "resized_head")
}


def combinations(family: str) -> dict[str, Kind]:
    n = NAMES[family]
    attention, mlp = list(n.attention), list(n.mlp)
    all_of = [*attention, *mlp]
    small: dict[str, Any] = {"r": 4, "lora_alpha": 6}
    invoked = {"alora_invocation_tokens": bed.INVOCATION}
    second = rf".*{n.layer}\..*{attention[0]}".replace("attn.c_attn", r"attn\.c_attn")
    found = {
        "dora_bias_all": Kind({**small, "use_dora": True, "bias": "all", "target_modules": all_of}),
        "dora_bias_lora_only": Kind({**small, "use_dora": True, "bias": "lora_only", "target_modules": attention}),
        "lora_bias_bias_all": Kind({**small, "lora_bias": True, "bias": "all", "target_modules": attention}),
        "lora_bias_rslora_patterns": Kind(
            {**small, "lora_bias": True, "use_rslora": True, "target_modules": all_of, "rank_pattern": {second: 2}}
        ),
        "lora_bias_head": Kind({**small, "lora_bias": True, "target_modules": [*attention, n.head]}),
        "alora_lora_bias": Kind({**small, **invoked, "lora_bias": True, "target_modules": all_of}),
        "alora_patterns": Kind(
            {**small, **invoked, "use_rslora": True, "target_modules": all_of, "rank_pattern": {second: 2}}
        ),
        "alora_head": Kind({**small, **invoked, "target_modules": [*attention, n.head]}),
        "pissa_rslora": Kind({**small, "init_lora_weights": "pissa", "use_rslora": True, "target_modules": all_of}),
        "pissa_patterns": Kind(
            {
                **small,
                "init_lora_weights": "pissa",
                "target_modules": all_of,
                "rank_pattern": {second: 2},
                "alpha_pattern": {mlp[-1]: 9},
            }
        ),
        "pissa_dora": Kind({**small, "init_lora_weights": "pissa", "use_dora": True, "target_modules": all_of}),
        "pissa_bias": Kind({**small, "init_lora_weights": "pissa", "bias": "all", "target_modules": attention}),
        "pissa_saved_head": Kind(
            {**small, "init_lora_weights": "pissa", "modules_to_save": [n.head], "target_modules": attention}
        ),
        "pissa_head": Kind({**small, "init_lora_weights": "pissa", "target_modules": [n.head, *attention]}),
        "olora_dora": Kind({**small, "init_lora_weights": "olora", "use_dora": True, "target_modules": all_of}),
        "olora_patterns": Kind(
            {**small, "init_lora_weights": "olora", "target_modules": all_of, "rank_pattern": {second: 2}}
        ),
        "bdlora_rslora": Kind(
            {
                **small,
                "use_rslora": True,
                "target_modules": attention,
                "use_bdlora": BdLoraConfig(target_modules_bd_b=attention[:1], nblocks=4, match_strict=False),
            }
        ),
        "dora_tokens_norms": Kind(
            {
                **small,
                "use_dora": True,
                "target_modules": all_of,
                "trainable_token_indices": [3, 17, 40],
                "modules_to_save": list(n.norms),
            }
        ),
        "tokens_and_head": Kind(
            {**small, "target_modules": [*attention, n.head], "trainable_token_indices": {n.embedding: [3, 17]}}
        ),
        "saved_head_and_embedding": Kind(
            {**small, "target_modules": [*attention, n.embedding], "modules_to_save": [n.head]}
        ),
        "dora_resized": Kind(
            {**small, "use_dora": True, "target_modules": all_of},
            more_tokens=4,
            save={"save_embedding_layers": True},
        ),
        "resized_embedding": Kind(
            {**small, "target_modules": [*attention, n.embedding]}, more_tokens=4, save={"save_embedding_layers": True}
        ),
        "resized_head": Kind(
            {**small, "target_modules": [*attention, n.head]}, more_tokens=4, save={"save_embedding_layers": True}
        ),
        "resized_both_dora": Kind(
            {**small, "use_dora": True, "target_modules": [*attention, n.embedding, n.head]},
            more_tokens=7,
            save={"save_embedding_layers": True},
        ),
        "resized_bias_norms": Kind(
            {**small, "bias": "all", "target_modules": mlp, "modules_to_save": list(n.norms)},
            more_tokens=7,
            save={"save_embedding_layers": True},
        ),
        "both_saved": Kind({**small, "target_modules": attention, "modules_to_save": [n.embedding, n.head]}),
        "last_layer_only": Kind({**small, "use_dora": True, "target_modules": attention, "layers_to_transform": [1]}),
        "regex": Kind(
            {**small, "use_dora": True, "target_modules": rf".*\.({'|'.join(attention)})".replace("attn.", "")}
        ),
        "all_linear": Kind({**small, "lora_bias": True, "target_modules": "all-linear"}),
        "attention_saved": Kind({**small, "target_modules": mlp, "modules_to_save": [attention[0]]}),
    }
    return {name: kind for name, kind in found.items() if (family, name) not in REFUSED_BY_PEFT | HALF_A_VOCABULARY}


CASES = [(family, name) for family in FAMILIES for name in combinations(family)]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_combination(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = combinations(family)[name]
    monkeypatch.setattr(save_and_load, "check_file_exists_on_hf_hub", lambda *a, **k: None)
    seed = 500 + CASES.index((family, name))
    folder = save(train(family, kind, seed), workspace() / "combinations" / family / name, kind)
    own = quietly(PeftModel.from_pretrained, kind.base(family), folder).eval()
    plain = bed.kinds(family)["plain"]
    rows = [kind, None, plain, kind]
    inputs = bed.prompts_of(rows)
    model = enabled(family, ["plain"], max_loras=2)
    model.load_adapter(folder, adapter_name="a")
    got = logits(model, inputs, adapter_ids=["a", None, "plain", "a"])
    size = VOCAB + kind.more_tokens
    want = logits(own, bed.known(inputs, size))
    base = logits(bed.reference(family, None), bed.known(inputs, VOCAB))
    for row in (0, 3):
        assert relative_error(want[row][..., :VOCAB], base[row]) > 0.03
        assert_own_columns(got[row], want[row], name, f"{family} row {row}")
    assert_own_columns(got[1], base[1], None, family)
    assert vocabulary(family, "plain") == VOCAB
    there = logits(bed.reference(family, "plain"), bed.known(inputs, VOCAB))[2]
    assert_own_columns(got[2], there, "plain", family)


@pytest.mark.parametrize("trained", ["embed_tokens", "lm_head"])
def test_half_of_a_resized_vocabulary(trained: str) -> None:
    """Refused, naming the table that is missing: PEFT takes it from whatever base it is given."""
    options = {"r": 4, "target_modules": ["q_proj", trained]}
    kind = Kind(options, more_tokens=4, save={"save_embedding_layers": True})
    folder = save(train("llama", kind, 1), workspace() / "combinations" / f"half_{trained}", kind)
    other = {"embed_tokens": "lm_head", "lm_head": "embed_tokens"}[trained]
    with pytest.raises(AdapterFormatError, match=other):
        enabled("llama").load_adapter(folder, adapter_name="a")


def test_pissa_under_an_alora_is_refused_by_name() -> None:
    options = {"r": 4, "target_modules": ["q_proj"], "alora_invocation_tokens": [5], "init_lora_weights": "pissa"}
    kind = Kind(options)
    folder = save(train("llama", kind, 1), workspace() / "combinations" / "pissa_alora", kind)
    with pytest.raises(UnsupportedAdapterError, match="aLoRA"):
        enabled("llama").load_adapter(folder, adapter_name="a")


def test_alora_that_saves_modules_is_refused_by_name() -> None:
    """What is saved has no start."""
    options = {"r": 4, "target_modules": ["q_proj"], "alora_invocation_tokens": [5], "modules_to_save": ["lm_head"]}
    kind = Kind(options)
    folder = save(train("llama", kind, 1), workspace() / "combinations" / "alora_saved", kind)
    with pytest.raises(UnsupportedAdapterError, match="aLoRA"):
        enabled("llama").load_adapter(folder, adapter_name="a")


def test_alora_with_biases() -> None:
    """PEFT replaces the base's biases for every token, also before the invocation: refused by name."""
    options = {"r": 4, "target_modules": ["q_proj"], "alora_invocation_tokens": [5], "bias": "all"}
    kind = Kind(options)
    folder = save(train("qwen2", kind, 1), workspace() / "combinations" / "alora_bias", kind)
    with pytest.raises(UnsupportedAdapterError, match="aLoRA"):
        enabled("qwen2").load_adapter(folder, adapter_name="a")


def test_batches_hold_what_they_should() -> None:
    inputs = batch("llama", ["alora", "more_tokens_4"])
    assert inputs["input_ids"].max() >= VOCAB
