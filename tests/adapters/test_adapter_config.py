"""adapter_config.json: fields honoured, ignored, refused; ranks, scalings and module choices as PEFT has them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from adapter_bed import config
from hypothesis import given
from hypothesis import strategies as st
from peft import EvaConfig, LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from hf_multilora.adapters.config import AdapterSpec, parse_config, read_config
from hf_multilora.adapters.fields import HONOURED, METADATA, NO_EFFECT, REFUSED
from hf_multilora.adapters.patterns import PatternTable
from hf_multilora.adapters.select import Selector
from hf_multilora.errors import AdapterFormatError, UnsupportedAdapterError


def parse(**fields) -> AdapterSpec:
    return parse_config(config(**fields), "x.json")


def test_every_field_of_peft_is_known() -> None:
    """A field that PEFT adds must be looked at before it is served."""
    known = {*HONOURED, *METADATA, *NO_EFFECT, *REFUSED}
    assert set(LoraConfig(target_modules=["q"]).to_dict()) - known == set()


def test_a_live_config() -> None:
    """PeftConfig.to_dict() holds enums and sets."""
    live = LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q", "k"],
        task_type="CAUSAL_LM",
        init_lora_weights="eva",
        eva_config=EvaConfig(),
    )
    spec = parse_config(live.to_dict(), "x")
    assert (spec.r, spec.alpha, spec.target_modules, spec.task_type) == (3, 6, ("k", "q"), "CAUSAL_LM")


@pytest.mark.parametrize("name", sorted({*HONOURED, *METADATA, *NO_EFFECT, *REFUSED} - {"peft_type"}))
def test_null_reads_as_unset(name: str) -> None:
    assert parse(**{name: None}) is not None


def test_defaults() -> None:
    spec = parse_config({"peft_type": "LORA"}, "x")
    live = LoraConfig()
    assert (spec.r, spec.alpha, spec.use_rslora) == (live.r, live.lora_alpha, live.use_rslora)
    assert spec.ignored == ()


REFUSALS = [
    ("lora_B_layout", "sideways", "rank_major"),
    ("layer_replication", [[0, 2], [1, 3]], "repeats layers"),
    ("arrow_config", {"top_k": 2}, "Arrow"),
    ("enable_lora", [True, False, True], "MergedLinear"),
    ("init_lora_weights", "pissa_niter_16", "PiSSA.*path_initial_model_for_weight_conversion"),
    ("init_lora_weights", "pissa_niter_4", "PiSSA"),
    ("init_lora_weights", "corda", "CorDA"),
    ("init_lora_weights", "loftq", "LoftQ.*merge_and_unload"),
    ("init_lora_weights", "pisa", "unknown.*Closest: 'pissa'"),
    ("use_dorra", True, "Closest: 'use_dora'"),
    ("something_new", {"a": 1}, "may change what"),
    ("peft_type", "ADALORA", "only LORA is served"),
]


@pytest.mark.parametrize(("name", "value", "words"), REFUSALS, ids=lambda x: str(x)[:30])
def test_refused_by_name(name: str, value: object, words: str) -> None:
    with pytest.raises(UnsupportedAdapterError, match=f"x.json: .*{name}=.*{words}"):
        parse(**{name: value})


HARMLESS = [
    ("use_dora", False), ("bias", None), ("bias", "none"), ("fan_in_fan_out", None), ("enable_lora", None),
    ("merge_weights", False), ("megatron_core", "megatron.core"), ("loftq_config", {}), ("layer_replication", []),
    ("something_new", None), ("something_new", False), ("something_new", {}), ("something_new", ""),
    ("init_lora_weights", None), ("init_lora_weights", False), ("init_lora_weights", "gaussian"),
    ("init_lora_weights", "eva"), ("init_lora_weights", "mica"), ("init_lora_weights", "orthogonal"),
    ("peft_type", "PeftType.LORA"), ("revision", "unsloth"), ("lora_dropout", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), HARMLESS, ids=str)
def test_harmless(name: str, value: object) -> None:
    spec = parse(**{name: value})
    assert (spec.r, spec.alpha) == (4, 8)


def test_what_is_ignored_is_said() -> None:
    spec = parse(lora_dropout=0.1, enable_lora=None, some_day=None, lorap_emb_lr=1e-6)
    assert [text.partition("=")[0] for text in spec.ignored] == [
        "lora_dropout",
        "enable_lora",
        "some_day",
        "lorap_emb_lr",
    ]
    assert parse(init_lora_weights="lora_ga").warnings


WRONG_TYPES = [
    ("r", "8"), ("r", True), ("r", 0), ("r", -1), ("r", 2.5), ("lora_alpha", "16"), ("lora_alpha", math.nan),
    ("use_rslora", "yes"), ("rank_pattern", [1]), ("rank_pattern", {"a": "b"}), ("rank_pattern", {"a": 0}),
    ("rank_pattern", {"a": None}), ("alpha_pattern", {"a": None}),
    ("alpha_pattern", {"(": 1}), ("target_modules", "("), ("target_modules", [1]), ("target_modules", 7),
    ("layers_to_transform", ["0"]), ("modules_to_save", [None]), ("layers_pattern", "("),
    ("modules_to_save", ["a", "*b"]), ("bias", "some"),
    ("use_bdlora", {"nblocks": 0}), ("use_bdlora", True), ("use_qalora", 1), ("use_dora", 1), ("lora_bias", "x"),
    ("alora_invocation_tokens", "5"), ("alora_invocation_tokens", [1.0]), ("trainable_token_indices", [1, 1]),
    ("trainable_token_indices", [-1]), ("trainable_token_indices", {"embed_tokens": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES, ids=str)
def test_wrong_types(name: str, value: object) -> None:
    with pytest.raises(AdapterFormatError, match=f"x.json: {name}"):
        parse(**{name: value})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"  \n", "blanks or zeros"),
        (b"\0" * 100, "blanks or zeros"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "HTML page"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
        ('{"r": 8}'.encode("utf-16"), "byte-order mark"),
        (b'{"r": 8,', "cut off"),
        (b'{"r": 8, "peft_ty', "cut off"),
        (b'{"r": 8,, "a": 1}', "not valid JSON"),
        (b'{"r": "\xff"}', "UTF-8"),
        (b"[1]", "expected a JSON object"),
    ],
)
def test_damaged_files(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_bytes(content)
    with pytest.raises(AdapterFormatError, match=words) as raised:
        read_config(path)
    assert str(path) in str(raised.value)


def test_no_truncation_reads(tmp_path: Path) -> None:
    whole = json.dumps(config(target_modules=["q_proj"], base_model_name_or_path="ä/b")).encode()
    path = tmp_path / "adapter_config.json"
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(AdapterFormatError):
            read_config(path)


NAMES = [f"model.layers.{i}.{n}" for i in (0, 1, 11) for n in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")]
NAMES += ["lm_head", "model.embed_tokens", "decoder.block.1.layer.0.SelfAttention.o", "decoder.block.1.layer.2.wo"]
KEYS = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(["q_proj", "o", "1.self_attn.q_proj", "layers.1", "self_attn_q_proj", "self.attn.q_proj", ""]),
    st.sampled_from([r".*\.1\..*", r"layers\.(0|11)\..*", r"^model(?=\.).*up_proj", r"(?!lm).*head", "q_proj|o_proj"]),
    st.text(alphabet="layers.01qop_", max_size=8),
)


@given(keys=st.lists(KEYS, unique=True, max_size=6), name=st.sampled_from(NAMES))
def test_pattern_order_is_pefts(keys: list[str], name: str) -> None:
    expected = get_pattern_key(keys, name)
    found = PatternTable({key: i + 1 for i, key in enumerate(keys)}).key(name)
    assert found == (expected if expected in keys else None)


def test_scaling() -> None:
    spec = parse(
        r=16,
        lora_alpha=32,
        use_rslora=True,
        rank_pattern={"q_proj": 4, r".*\.1\..*": 2},
        alpha_pattern={r"layers\.1\.self_attn\.q_proj": 5},
    )
    assert [spec.rank(name) for name in ("a.1.q_proj", "a.1.k_proj", "a.0.k_proj")] == [4, 2, 16]
    assert spec.scaling("model.layers.1.self_attn.q_proj", 4) == 5 / 2
    assert spec.scaling("model.layers.0.self_attn.q_proj", 4) == 32 / 2
    assert parse(r=11, lora_alpha=6).scaling("x", 11) == 6 / 11


CHOICES = [
    {"target_modules": ["q_proj", "o"]},
    {"target_modules": ["o"], "exclude_modules": ["SelfAttention.o"]},
    {"target_modules": r".*\.(q|o)_proj", "exclude_modules": r".*layers\.1\..*"},
    {"target_modules": r".*_proj"},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 11]},
    {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": 1},
    {"target_modules": ["o", "wo", "q_proj"], "layers_to_transform": [1], "layers_pattern": "block"},
    {"target_modules": ["o", "q_proj"], "layers_to_transform": [1], "layers_pattern": ["block", "layers"]},
    {"target_modules": ["lm_head", "embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["self_attn"]},
    {"target_modules": ["model.layers.0.self_attn.q_proj"], "layers_to_transform": [11]},
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_module_choice_is_pefts(choice: dict) -> None:
    selector = Selector(parse(**choice))
    fields = {"exclude_modules": None, "modules_to_save": None, "layers_to_transform": None, "layers_pattern": None}
    theirs = SimpleNamespace(target_parameters=None, **{**fields, **choice})
    for name in NAMES:
        assert selector.matches(name) == bool(check_target_module_exists(theirs, name)), name
