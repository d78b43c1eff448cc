"""Every kind broken on purpose: a clear error that names the thing, and nothing changed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fidelity.bed import EXTRA, assert_own_columns, batch, enabled, folder_of, kinds, logits, reference
from models import HIDDEN, VOCAB
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hf_multilora import AdapterFormatError, AdapterMatchError, MultiLoraError, SlotError

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], None]


@pytest.fixture(scope="module")
def models() -> Iterator[Callable[[str], PreTrainedModel]]:
    """One enabled model for each family, with one good adapter."""
    made: dict[str, PreTrainedModel] = {}

    def of(family: str) -> PreTrainedModel:
        if family not in made:
            made[family] = enabled(family, ["plain"], max_loras=3)
        return made[family]

    yield of


def broken(family: str, kind: str, to: Path, change: Change | None = None, **config: Any) -> Path:
    """An adapter of this kind with other tensors, or other fields in its config (None: the field is removed)."""
    shutil.copytree(folder_of(family, kind), to, dirs_exist_ok=True)
    if change is not None:
        tensors = load_file(to / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, to / "adapter_model.safetensors")
    fields = {**json.loads((to / "adapter_config.json").read_text()), **config}
    (to / "adapter_config.json").write_text(json.dumps(fields))
    return to


def first(tensors: Tensors, part: str) -> str:
    return next(key for key in sorted(tensors) if part in key)


def drop(part: str) -> Change:
    def change(tensors: Tensors) -> None:
        del tensors[first(tensors, part)]

    return change


def replace(part: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(tensors: Tensors) -> None:
        key = first(tensors, part)
        tensors[key] = make(tensors[key]).contiguous()

    return change


def cut(part: str, by: int = 1, dim: int = 0) -> Change:
    """A tensor that is `by` too short in one dimension."""
    return replace(part, lambda tensor: tensor.narrow(dim, 0, tensor.shape[dim] - by))


def add(key: str) -> Change:
    return lambda tensors: tensors.update({f"base_model.model.model.{key}": torch.ones(3)})


def rename(part: str, old: str, new: str) -> Change:
    def change(tensors: Tensors) -> None:
        key = first(tensors, part)
        tensors[key.replace(old, new)] = tensors.pop(key)

    return change


def assert_refused(model: PreTrainedModel, family: str, folder: Path, match: str) -> None:
    """Loading raises, and the model, its adapters and its slots are as they were."""
    modules = [(name, id(module)) for name, module in model.named_modules()]
    names = set(model.multilora.adapters)
    inputs = batch(family, ["plain", None], side="right")
    before = logits(model, inputs, adapter_ids=["plain", None])
    try:
        with pytest.raises(MultiLoraError, match=match):
            model.load_adapter(folder, adapter_name="broken")
    finally:
        if "broken" in model.multilora.adapters:
            model.delete_adapter("broken")
    assert set(model.multilora.adapters) == names
    assert [(name, id(module)) for name, module in model.named_modules()] == modules
    assert torch.equal(logits(model, inputs, adapter_ids=["plain", None]), before)


def longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[: EXTRA + 1]])


CASES: list[tuple[str, str, str, Change, str]] = [
    # What is broken, family, kind, how, what the message names.
    ("b_of_plain", "llama", "plain", drop("layers.1.self_attn.v_proj.lora_B"), r"layers\.1\.self_attn\.v_proj"),
    ("a_of_dora", "llama", "dora", drop("layers.0.mlp.up_proj.lora_A"), r"layers\.0\.mlp\.up_proj"),
    ("b_of_embedding", "llama", "embedding", drop("lora_embedding_B"), "embed_tokens"),
    ("b_of_alora", "llama", "alora", drop("layers.0.self_attn.k_proj.lora_B"), r"self_attn\.k_proj"),
    ("b_of_conv", "gpt2", "dora", drop("h.1.attn.c_attn.lora_B"), r"h\.1\.attn\.c_attn"),
    ("b_of_pissa", "llama", "pissa", drop("layers.1.self_attn.v_proj.lora_B"), r"layers\.1\.self_attn\.v_proj"),
    ("magnitude", "llama", "dora", drop("layers.1.mlp.down_proj.lora_magnitude"), r"layers\.1\.mlp\.down_proj"),
    ("magnitude_fused", "phi3", "dora", drop("layers.1.self_attn.qkv_proj.lora_magn"), r"1\.self_attn\.qkv_proj"),
    ("magnitude_conv", "gpt2", "dora", drop("h.0.mlp.c_fc.lora_magnitude"), r"h\.0\.mlp\.c_fc"),
    ("magnitude_embedding", "llama", "dora_patterns", drop("embed_tokens.lora_magn"), "embed_tokens"),
    ("magnitude_width", "llama", "dora", cut("layers.0.mlp.up_proj.lora_magnitude"), r"mlp\.up_proj"),
    ("magnitude_without_factors", "llama", "dora", rename("layers.0.self_attn.q_proj.lora_magn", "q_p", "p"), "proj"),
    ("b_bias", "llama", "lora_bias", drop("layers.0.self_attn.q_proj.lora_B.bias"), r"q_proj"),
    ("b_bias_width", "llama", "lora_bias", cut("layers.0.mlp.up_proj.lora_B.bias", 3), r"up_proj"),
    ("bias_width", "qwen2", "bias_all", cut("layers.1.self_attn.k_proj.bias"), r"k_proj"),
    ("head_width", "llama", "saved_head", cut("lm_head.weight", 1, dim=1), r"lm_head"),
    ("head_short", "llama", "saved_head", cut("lm_head.weight"), r"lm_head"),
    ("head_beyond_room", "llama", "saved_head", replace("lm_head.weight", longer), r"lm_head|extra_vocab_size"),
    ("embedding_width", "llama", "saved_embedding", cut("embed_tokens.weight", 2, dim=1), r"embed_tokens"),
    ("embedding_short", "llama", "more_tokens_4", cut("embed_tokens.weight", 2), r"embed_tokens|lm_head"),
    ("norm_width", "llama", "norms", cut("layers.0.input_layernorm.weight"), r"input_layernorm"),
    ("norm_name", "llama", "norms", rename("layers.0.input_layernorm.weight", "input_", "inner_"), r"inner_layernorm"),
    ("norm_parameter", "llama", "norms", rename("layers.0.input_layernorm.weight", ".weight", ".bias"), r"norm\.bias"),
    ("score_width", "llama_cls", "plain", cut("score.weight", 1, dim=1), r"score"),
    ("classifier_bias", "bert_cls", "plain", cut("classifier.bias"), r"classifier"),
    ("classifier_weight_gone", "bert_cls", "plain", drop("classifier.weight"), r"classifier"),
    ("classifier_layer_gone", "roberta_cls", "plain", drop("classifier.out_proj.weight"), r"classifier"),
    ("classifier_inner_width", "roberta_cls", "plain", cut("classifier.dense.weight"), r"classifier\.dense"),
    ("token_rows_fewer", "llama", "tokens", cut("trainable_tokens_delta"), r"embed_tokens"),
    ("token_rows_width", "llama", "tokens", cut("trainable_tokens_delta", 1, dim=1), r"embed_tokens"),
    ("token_rows_gone", "llama", "tokens", drop("trainable_tokens_delta"), r"trainable_token_indices|embed_tokens"),
    ("head_rows_gone", "llama", "tokens_dict", drop("lm_head.token_adapter"), r"lm_head"),
    ("bd_block", "llama", "bdlora", cut("layers.0.self_attn.q_proj.lora_B", 1, dim=1), r"q_proj"),
    ("unknown_extra", "llama", "plain", add("layers.0.self_attn.q_proj.lora_C"), r"lora_C"),
    ("unknown_module", "llama", "norms", add("extra.weight"), r"extra"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "kind", "change", "match"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_broken_tensors(models: Any, family: str, kind: str, change: Change, match: str, tmp_path: Path) -> None:
    assert_refused(models(family), family, broken(family, kind, tmp_path, change), match)


CONFIGS: list[tuple[str, str, dict[str, Any], str]] = [
    # kind, fields, what the message names
    ("plain", {"rank_pattern": {"(q_proj": 3}}, r"rank_pattern.*\(q_proj|\(q_proj"),
    ("plain", {"alpha_pattern": {"*q": 3}}, r"alpha_pattern|\*q"),
    ("plain", {"target_modules": "(unclosed"}, r"target_modules|\(unclosed"),
    ("tokens", {"trainable_token_indices": [3, 17, 10_000]}, r"10000|10_000"),
    ("tokens", {"trainable_token_indices": [3, 17, -2]}, r"-2|trainable_token_indices"),
    ("tokens", {"trainable_token_indices": [3, 17]}, r"embed_tokens|trainable_token_indices"),
    ("tokens", {"trainable_token_indices": None}, r"trainable_token"),
    ("tokens", {"trainable_token_indices": {"nowhere": [3, 17, 40]}}, r"nowhere|embed_tokens"),
    ("tokens", {"trainable_token_indices": [3, 3, 17]}, r"trainable_token_indices|twice|embed_tokens"),
    ("alora", {"alora_invocation_tokens": [7, "x"]}, r"alora_invocation_tokens"),
    ("alora", {"alora_invocation_tokens": [7, VOCAB + 3]}, rf"alora_invocation_tokens|{VOCAB + 3}"),
    ("alora", {"use_dora": True}, r"[Dd][Oo][Rr][Aa]|magnitude"),
    ("plain", {"use_dora": True}, r"magnitude"),
    ("plain", {"target_parameters": ["mlp.experts.gate_up_proj"]}, r"target_parameters"),
    ("plain", {"peft_type": "VERA"}, r"VERA"),
    ("plain", {"a_field_of_the_future": 3}, r"a_field_of_the_future"),
    ("plain", {"bias": "some"}, r"bias"),
    ("plain", {"r": 0}, r"\br\b"),
    ("plain", {"lora_alpha": "much"}, r"lora_alpha"),
    ("plain", {"init_lora_weights": "newest_method"}, r"newest_method"),
    ("bdlora", {"use_bdlora": None}, r"o_proj|q_proj"),
]


@pytest.mark.parametrize(("kind", "fields", "match"), CONFIGS, ids=lambda value: str(value)[:40])
def test_broken_config(models: Any, kind: str, fields: dict[str, Any], match: str, tmp_path: Path) -> None:
    assert_refused(models("llama"), "llama", broken("llama", kind, tmp_path, **fields), match)


AGREE: list[tuple[str, dict[str, Any]]] = [
    # Config and tensors disagree: the tensors decide, and the report says so.
    ("dora", {"use_dora": False}),
    ("lora_bias", {"lora_bias": False}),
    ("plain", {"use_qalora": True, "qalora_group_size": 7}),
    ("plain", {"use_bdlora": {"target_modules_bd_a": ["o_proj"], "target_modules_bd_b": ["q_proj"], "nblocks": 2}}),
    ("norms", {"modules_to_save": []}),
]
REFUSED = [
    ("plain", {"modules_to_save": ["lm_head"]}),
    ("plain", {"lora_bias": True}),
    ("plain", {"r": 4, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3.0}}),
]


@pytest.mark.parametrize(("kind", "fields"), AGREE, ids=lambda value: str(value)[:40])
def test_the_tensors_decide_and_the_report_says_so(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    folder = broken("llama", kind, tmp_path, **fields)
    model = enabled("llama")
    inputs = batch("llama", [kind, None])
    report = model.load_adapter(folder, adapter_name="a")
    said = " ".join([*report.warnings, *report.ignored, *report.converted, str(report)])
    assert any(field in said for field in fields) or "config" in said, said
    got = logits(model, inputs, adapter_ids=["a", None])
    assert_own_columns(got[0], logits(reference("llama", kind), inputs)[0], kind, "")


@pytest.mark.parametrize(("kind", "fields"), REFUSED, ids=lambda value: str(value)[:40])
def test_fields_that_no_tensor_bears_out_are_named(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = enabled("llama")
    with pytest.raises(MultiLoraError) as refused:
        model.load_adapter(broken("llama", kind, tmp_path, **fields), adapter_name="a")
    assert any(field in str(refused.value) for field in fields)
    assert not model.multilora.adapters


def test_too_large_for_a_slot(tmp_path: Path) -> None:
    """The option and the bytes that it needs, and the largest entries by name."""
    model = enabled("llama", ["plain"], slot_bytes=None, max_lora_rank=8)
    small = enabled("llama", ["plain"], slot_bytes=40960, max_lora_rank=8)
    inputs = batch("llama", ["plain", None])
    before = logits(small, inputs, adapter_ids=["plain", None])
    with pytest.raises(SlotError, match="slot_bytes") as caught:
        small.load_adapter(folder_of("llama", "more_tokens_saved"), adapter_name="big")
    needed = max(int(number) for number in re.findall(r"\d{5,}", str(caught.value).replace(",", "")))
    assert "embed_tokens" in str(caught.value) or "lm_head" in str(caught.value)
    assert set(small.multilora.adapters) == {"plain"}
    assert torch.equal(logits(small, inputs, adapter_ids=["plain", None]), before)
    fits = enabled("llama", slot_bytes=-(-needed // 256) * 256, max_lora_rank=8)
    fits.load_adapter(folder_of("llama", "more_tokens_saved"), adapter_name="big")
    assert set(model.multilora.adapters) == {"plain"}


def test_a_failed_reload_keeps_the_old_one(tmp_path: Path) -> None:
    model = enabled("llama", ["dora"])
    inputs = batch("llama", ["dora", None])
    before = logits(model, inputs, adapter_ids=["dora", None])
    folder = broken("llama", "dora", tmp_path, drop("layers.1.mlp.down_proj.lora_magnitude"))
    with pytest.raises(MultiLoraError):
        model.load_adapter(folder, adapter_name="dora", reload=True)
    assert torch.equal(logits(model, inputs, adapter_ids=["dora", None]), before)


def test_a_reload_with_another_kind(tmp_path: Path) -> None:
    """Nothing of the old one stays: not its norms, not its head, not its vocabulary."""
    model = enabled("llama", max_loras=2)
    folder = tmp_path / "changing"
    for kind in ("norms", "more_tokens_saved", "dora", "alora", "tokens", "plain", "lora_bias", "saved_head"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(folder_of("llama", kind), folder)
        model.load_adapter(folder, adapter_name="a", reload=True)
        inputs = batch("llama", [kind, None])
        got = logits(model, inputs, adapter_ids=["a", None])
        assert_own_columns(got[0], logits(reference("llama", kind), inputs)[0], kind, "")
        clean = {**inputs, "input_ids": inputs["input_ids"].clamp(max=VOCAB - 1)}
        assert torch.equal(got[1, :, :VOCAB], logits(reference("llama", None), clean)[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["dora", "norms", "saved_head", "more_tokens_saved", "tokens", "alora", "lora_bias"])
def test_a_poisoned_adapter_reaches_no_other_row(kind: str, value: float, tmp_path: Path) -> None:
    def poison(tensors: Tensors) -> None:
        for tensor in tensors.values():
            tensor.fill_(value)

    model = enabled("llama", ["plain"], max_loras=2)
    names = ["plain", None, kind, None, "plain"]
    inputs = batch("llama", names)
    clean = logits(
        model,
        {**inputs, "input_ids": inputs["input_ids"].clamp(max=VOCAB - 1)},
        adapter_ids=[n if n == "plain" else None for n in names],
    )
    model.load_adapter(broken("llama", kind, tmp_path, poison), adapter_name="poison")
    got = logits(model, inputs, adapter_ids=["plain", None, "poison", None, "plain"])
    for row in (0, 1, 3, 4):
        assert torch.equal(got[row], clean[row])


def test_pickled_code_is_never_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (exec, (f"open({str(tmp_path / 'pwned')!r}, 'w')",))

    shutil.copy(folder_of("llama", "saved_head") / "adapter_config.json", tmp_path)
    torch.save({"base_model.model.lm_head.weight": Evil()}, tmp_path / "adapter_model.bin")
    model = enabled("llama")
    with pytest.raises(AdapterFormatError):
        model.load_adapter(tmp_path, adapter_name="a")
    assert not (tmp_path / "pwned").exists()


def test_the_bin_format_of_whole_modules(tmp_path: Path) -> None:
    source = folder_of("llama", "more_tokens_saved")
    shutil.copy(source / "adapter_config.json", tmp_path)
    torch.save(load_file(source / "adapter_model.safetensors"), tmp_path / "adapter_model.bin")
    model = enabled("llama")
    model.load_adapter(tmp_path, adapter_name="a")
    inputs = batch("llama", ["more_tokens_saved", None])
    got = logits(model, inputs, adapter_ids=["a", None])
    assert_own_columns(got[0], logits(reference("llama", "more_tokens_saved"), inputs)[0], "a", "")


def test_what_is_excluded_by_target_modules() -> None:
    """Refused unless ignore_untargeted, and then the report names it."""
    model = enabled("llama", target_modules=["q_proj", "v_proj"])
    with pytest.raises(AdapterMatchError, match="target_modules"):
        model.load_adapter(folder_of("llama", "dora"), adapter_name="a")
    report = model.multilora.load(folder_of("llama", "dora"), "a", ignore_untargeted=True)
    assert any("down_proj" in name for name in report.left_out)
    assert all("magnitude" not in name or "q_proj" not in name for name in report.left_out)


def test_a_model_without_the_module_that_is_saved() -> None:
    """A classification head for a language model."""
    model = enabled("llama")
    with pytest.raises(MultiLoraError, match="score"):
        model.load_adapter(folder_of("llama_cls", "plain"), adapter_name="a")
    assert not model.multilora.adapters


def test_the_widths_used_here() -> None:
    assert load_file(folder_of("llama", "saved_head") / "adapter_model.safetensors")[
        "base_model.model.lm_head.weight"
    ].shape == (VOCAB, HIDDEN)
    assert {kind for _, family, kind, *_ in CASES if family == "llama"} <= set(kinds("llama"))
