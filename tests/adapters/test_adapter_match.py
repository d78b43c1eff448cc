"""Tensors meet the model: every one placed, or named in an error; fused and split layouts; shapes, ranks, gaps."""

from __future__ import annotations

import pytest
import torch
from adapter_bed import (
    INNER,
    KV,
    H,
    V,
    adapter,
    config,
    deltas,
    factors,
    gpt2,
    llama,
    load,
    phi3,
    table,
)
from hypothesis import given
from hypothesis import strategies as st

from hf_multilora.adapters.targets import Target
from hf_multilora.errors import (
    AdapterFormatError,
    AdapterMatchError,
    SlotError,
    UnsupportedAdapterError,
)

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = "model.layers.0.self_attn"


def test_plain() -> None:
    targets = llama()
    plan = load(adapter(targets, ALL), targets, config(target_modules=ALL))
    assert [factor.path for factor in plan.factors] == [path for path in targets.targets if "layers" in path]
    assert (plan.rank, plan.source, plan.fingerprint_of_source) == (4, "memory", None)
    assert plan.ignored == plan.left_out == plan.warnings == []
    first = plan.factors[0]
    assert (first.rank, first.scaling, first.slice, first.kind) == (4, 2.0, 0, "linear")
    assert first.a.read().shape == (4, H) and first.b.shape == (H, 4) and first.b.dtype == torch.float32


def test_ranks_and_scalings_by_pattern() -> None:
    targets = llama()
    tensors = adapter(targets, ["q_proj"], r=8) | adapter(targets, ["mlp.up_proj"], r=2)
    fields = config(
        r=8,
        use_rslora=True,
        target_modules=["q_proj", "up_proj"],
        rank_pattern={"up_proj": 2},
        alpha_pattern={"up_proj": 3},
    )
    plan = load(tensors, targets, fields)
    assert {(f.rank, round(f.scaling, 6)) for f in plan.factors} == {
        (8, round(8 / 8**0.5, 6)),
        (2, round(3 / 2**0.5, 6)),
    }
    assert plan.rank == 8


def test_embedding_scale_is_folded_in() -> None:
    targets = table({}, n_layers=0)
    targets.targets["model.embed_tokens"] = Target("model.embed_tokens", "embedding", V, H, scale=H**0.5)
    plan = load(adapter(targets, ["embed_tokens"]), targets, config())
    (factor,) = plan.factors
    assert factor.kind == "embedding" and factor.scaling == 2 * H**0.5
    assert factor.a.read().shape == (4, V) and factor.b.read().shape == (H, 4)


def test_fused_adapter_on_separate_layers() -> None:
    tensors = adapter(phi3(), ["qkv_proj", "gate_up_proj"])
    plan = load(tensors, llama(), config(target_modules=["qkv_proj", "gate_up_proj"]))
    fused = deltas(load(tensors, phi3(), config()))
    split = deltas(plan)
    path = f"{ATTENTION}.qkv_proj"
    b = tensors[f"base_model.model.{path}.lora_B.weight"].double()
    whole = 2 * b @ tensors[f"base_model.model.{path}.lora_A.weight"].double()
    parts = [split[f"{ATTENTION}.{name}", 0] for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.cat(parts).equal(whole)
    assert torch.cat([fused[path, i] for i in range(3)]).equal(whole)
    refs = {factor.a for factor in plan.factors if factor.path.startswith(ATTENTION)}
    assert len(refs) == 1, "the one A is shared, so that it is stored once"
    assert [f.b.rows for f in plan.factors if f.path.startswith(ATTENTION)] == [
        (0, H),
        (H, H + KV),
        (H + KV, H + 2 * KV),
    ]


def test_split_adapter_on_a_fused_layer() -> None:
    tensors = adapter(llama(), ["q_proj", "v_proj", "up_proj", "down_proj"])
    plan = load(tensors, phi3(), config(target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))
    trained = [(factor.path.rpartition(".")[2], factor.slice) for factor in plan.factors if "layers.0" in factor.path]
    assert trained == [("qkv_proj", 0), ("qkv_proj", 2), ("gate_up_proj", 1), ("down_proj", 0)]
    alone = deltas(load(tensors, llama(), config()))
    assert deltas(plan)["model.layers.1.self_attn.qkv_proj", 2].equal(alone["model.layers.1.self_attn.v_proj", 0])


@given(data=st.data())
def test_fused_to_split_and_back(data: st.DataObject) -> None:
    """Whatever the widths: the rows of a fused B are dealt out once each, in order."""
    widths = data.draw(st.tuples(*[st.integers(1, 9)] * 3))
    names = ("q_proj", "k_proj", "v_proj")
    split = table({name: (5, width) for name, width in zip(names, widths, strict=True)}, n_layers=1, heads=())
    tensors = factors("model.layers.0.qkv_proj", 5, sum(widths), r=3)
    plan = load(tensors, split, config(r=3))
    assert torch.cat([factor.b.read() for factor in plan.factors]).equal(
        tensors["base_model.model.model.layers.0.qkv_proj.lora_B.weight"]
    )
    assert [factor.b.shape[0] for factor in plan.factors] == list(widths)


def test_unsliced_fused_layer_takes_no_split_adapter() -> None:
    """Where the order of a fused layer's rows is not known, nothing is guessed."""
    targets = table({}, n_layers=0)
    targets.targets[f"{ATTENTION}.qkv_proj"] = Target(f"{ATTENTION}.qkv_proj", "linear", H, 2 * H)
    with pytest.raises(AdapterMatchError, match="q_proj"):
        load(factors(f"{ATTENTION}.q_proj", H, H), targets, config())


def test_nothing_matches() -> None:
    with pytest.raises(
        AdapterMatchError, match="none of its 2 trained modules exist in the model .org/tiny.: .*Wqkv.* Closest: "
    ):
        load(adapter(table({"mixer.Wqkv": (H, 3 * H)}), ["Wqkv"]), llama(), config())


def test_something_left_over() -> None:
    tensors = adapter(llama(), ALL) | factors("model.layers.7.self_attn.q_proj", H, H)
    with pytest.raises(AdapterMatchError, match="1 of 15 .* do not exist .*layers.7.self_attn.q_proj"):
        load(tensors, llama(), config())


@pytest.mark.parametrize("key", ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.strange.thing"])
def test_other_tensors_left_over(key: str) -> None:
    tensors = adapter(llama(), ALL) | {f"base_model.model.{key}": torch.ones(3)}
    with pytest.raises((AdapterMatchError, UnsupportedAdapterError), match=key):
        load(tensors, llama(), config())


@pytest.mark.parametrize(("role", "missing"), [("lora_A", "lora_A"), ("lora_B", "lora_B")])
def test_a_missing_factor_is_never_zero(role: str, missing: str) -> None:
    tensors = adapter(llama(), ["q_proj"])
    del tensors[f"base_model.model.model.layers.1.self_attn.q_proj.{role}.weight"]
    with pytest.raises(AdapterFormatError, match=f"has no {missing} beside it.*never taken as zero"):
        load(tensors, llama(), config(init_lora_weights=False))


@pytest.mark.parametrize(
    ("a", "b", "error", "words"),
    [
        ((4, 40), (H, 4), AdapterMatchError, "40 inputs and 32 outputs; the model's .* has 32 and 32"),
        ((4, H), (48, 4), AdapterMatchError, "another base"),
        ((4, H), (H, 5), AdapterFormatError, "no common rank"),
        ((H, 4), (4, H), AdapterFormatError, "are transposed"),
        ((8, H), (H, 8), AdapterFormatError, "has rank 8, but the config says r=4"),
        ((0,), (0,), AdapterFormatError, "ZeRO-3"),
        ((128,), (128,), AdapterFormatError, "ZeRO-3"),
        ((4, H), (H, 4, 1), UnsupportedAdapterError, "MergedLinear"),
        ((4, H, 1, 1), (H, 4, 1, 1), UnsupportedAdapterError, "convolution"),
    ],
)
def test_wrong_shapes(a: tuple, b: tuple, error: type[Exception], words: str) -> None:
    path = f"base_model.model.{ATTENTION}.q_proj"
    with pytest.raises(error, match=words) as raised:
        load({f"{path}.lora_A.weight": torch.ones(a), f"{path}.lora_B.weight": torch.ones(b)}, llama(), config())
    assert "q_proj" in str(raised.value)


def test_integer_factors() -> None:
    tensors = {key: value.to(torch.int8) for key, value in adapter(llama(), ["q_proj"]).items()}
    with pytest.raises(AdapterFormatError, match="int8"):
        load(tensors, llama(), config())


def test_any_float_dtype_and_poison_pass() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        tensors = {key: value.to(dtype) for key, value in adapter(llama(), ["q_proj"]).items()}
        assert load(tensors, llama(), config()).factors[0].a.read().dtype == dtype
    poisoned = {key: torch.full_like(value, torch.nan) for key, value in adapter(llama(), ["q_proj"]).items()}
    assert load(poisoned, llama(), config()).factors


def test_config_says_another_rank() -> None:
    with pytest.raises(AdapterFormatError, match=r"rank 4, but the config says rank_pattern\['q_proj'\]=2"):
        load(adapter(llama(), ["q_proj"]), llama(), config(rank_pattern={"q_proj": 2}))


def test_rank_over_the_maximum() -> None:
    with pytest.raises(SlotError, match="has rank 4, over max_lora_rank=3. Enable the model with max_lora_rank=4"):
        load(adapter(llama(), ["q_proj"]), llama(), config(), max_lora_rank=3)


def test_wrong_kind() -> None:
    with pytest.raises(AdapterMatchError, match="trained on an embedding.* the model's 'lm_head' is linear"):
        load(factors("lm_head", H, V, embedding=True), llama(), config())
    with pytest.raises(AdapterMatchError, match="trained on a linear layer"):
        load(factors("model.embed_tokens", V, H), llama(), config())


@pytest.mark.parametrize(
    "tensors",
    [factors("lm_head", H, V + 6), factors("model.embed_tokens", V + 6, H, embedding=True)],
    ids=["head", "rows"],
)
def test_resized_vocabulary(tensors: dict) -> None:
    with pytest.raises(UnsupportedAdapterError, match="vocabulary has another size.*save_embedding_layers=True"):
        load(tensors, llama(), config())


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        ("lora_E", "AdaLoRA"),
    ],
)
def test_tensors_decide_not_the_config(suffix: str, words: str) -> None:
    tensors = adapter(llama(), ["q_proj"]) | {f"base_model.model.{ATTENTION}.q_proj.{suffix}": torch.ones(H)}
    with pytest.raises(UnsupportedAdapterError, match=f"{suffix}.*{words}"):
        load(tensors, llama(), config())


def test_training_only_tensors_are_ignored() -> None:
    name = f"base_model.model.{ATTENTION}.q_proj.lora_velora_embed"
    plan = load(adapter(llama(), ["q_proj"]) | {name: torch.ones(2)}, llama(), config())
    assert plan.ignored == [f"{name}: used in training only"]


def test_refused_modules() -> None:
    reason = "its weight is read without its forward."
    targets = llama(refused={f"{ATTENTION}.kv_b_proj": reason})
    assert load(adapter(targets, ["q_proj"]), targets, config(target_modules=["q_proj", "kv_b_proj"])).factors
    with pytest.raises(UnsupportedAdapterError, match=f"kv_b_proj.*{reason}"):
        load(adapter(targets, ["q_proj"]) | factors(f"{ATTENTION}.kv_b_proj", H, H), targets, config())


@pytest.mark.parametrize(
    "path", ["mlp.experts.3.gate_proj", "mlp.experts", "mlp.experts.base_layer", "block_sparse_moe.experts.0.w1"]
)
def test_experts_are_refused_by_name(path: str) -> None:
    tensors = adapter(llama(), ["q_proj"]) | factors(f"model.layers.0.{path}", H, INNER)
    with pytest.raises(UnsupportedAdapterError, match="experts"):
        load(tensors, llama(), config())


def test_left_out_by_target_modules() -> None:
    targets = llama()
    narrow = {path: target for path, target in targets.targets.items() if path.endswith(("q_proj", "v_proj"))}
    outside = frozenset(targets.targets) - set(narrow)
    small = type(targets)(narrow, {}, outside, targets.modules, None, lambda name: None)
    tensors = adapter(targets, ["q_proj", "down_proj"])
    with pytest.raises(AdapterMatchError, match="ignore_untargeted"):
        load(tensors, small, config())
    plan = load(tensors, small, config(target_modules=["q_proj", "down_proj"]), ignore_untargeted=True)
    assert {factor.path.rpartition(".")[2] for factor in plan.factors} == {"q_proj"}
    assert len(plan.left_out) == 4 and all("down_proj.lora_" in name for name in plan.left_out)
    with pytest.raises(AdapterMatchError, match="every trained module was left out"):
        load(adapter(targets, ["down_proj"]), small, config(), ignore_untargeted=True)
    fused = adapter(phi3(), ["qkv_proj"])
    with pytest.raises(AdapterMatchError, match="ignore_untargeted"):
        load(fused, small, config())


@pytest.mark.parametrize(
    "choice",
    [
        ["q_proj", "v_proj"],
        r".*\.(q|v)_proj",
        ["q_proj", "v_proj", "W_pack", "nosuch"],
        r"model\.layers\..*(q|v)_proj",
    ],
    ids=str,
)
def test_missing_layers(choice: list[str] | str) -> None:
    """A checkpoint that lost a layer's tensors, or all of one projection, is incomplete; unknown names are fine."""
    tensors = adapter(llama(), ["q_proj", "v_proj"])
    fields = config(target_modules=choice)
    assert len(load(tensors, llama(), fields).factors) == 4
    for lost in ("layers.1.self_attn.v_proj", "layers.1", "v_proj"):
        with pytest.raises(AdapterFormatError, match="target_modules choose .* that have no tensors"):
            load({key: value for key, value in tensors.items() if lost not in key}, llama(), fields)


def test_missing_head() -> None:
    """PEFT saves a head that it trained; an adapter for classification never had this one."""
    tensors = adapter(llama(), ["q_proj"])
    with pytest.raises(AdapterFormatError, match="'lm_head'"):
        load(tensors, llama(), config(target_modules=["q_proj", "lm_head"]))
    assert load(tensors, llama(), config(target_modules=["q_proj", "lm_head"], task_type="SEQ_CLS"))


def test_all_linear() -> None:
    tensors = adapter(llama(), ALL)
    assert load(tensors, llama(), config(target_modules="all-linear"))
    del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"]
    del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]
    with pytest.raises(AdapterFormatError, match="layers.1.mlp.up_proj"):
        load(tensors, llama(), config(target_modules="all-linear"))


def test_layers_to_transform_and_exclude() -> None:
    tensors = {key: value for key, value in adapter(gpt2(), ["c_attn"]).items() if ".h.0." in key}
    fields = config(target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(AdapterFormatError, match="h.1.attn.c_attn"):
        load(tensors, gpt2(), fields)
    assert load(tensors, gpt2(), fields | {"layers_to_transform": [0], "layers_pattern": "h"})
    assert load(tensors, gpt2(), fields | {"exclude_modules": r".*\.h\.1\..*"})


def test_missing_parts_across_layouts() -> None:
    """A list may name both layouts; what counts is the one that the file has."""
    both = config(target_modules=["q_proj", "k_proj", "v_proj", "qkv_proj"])
    assert load(adapter(phi3(), ["qkv_proj"]), llama(), both)
    assert load(adapter(llama(), ["q_proj", "k_proj", "v_proj"]), phi3(), both)
    assert load(
        adapter(llama(), ["q_proj", "v_proj"]), phi3(), config(target_modules=["q_proj", "v_proj", "qkv_proj"])
    )
    with pytest.raises(AdapterFormatError, match="k_proj"):
        load(adapter(llama(), ["q_proj", "v_proj"]), phi3(), both)
    with pytest.raises(AdapterFormatError, match="qkv_proj"):
        load(
            {k: v for k, v in adapter(phi3(), ["qkv_proj"]).items() if "layers.0" in k},
            llama(),
            config(target_modules=["qkv_proj"]),
        )


def test_no_factors_at_all() -> None:
    with pytest.raises(AdapterFormatError, match="no tensor at all"):
        load({}, llama(), config())
    with pytest.raises(AdapterFormatError, match="no LoRA factors .* full model"):
        load({"model.norm.weight": torch.ones(3)}, llama(), config())


def test_tensors_need_a_config() -> None:
    from hf_multilora.adapters.load import load_plan

    with pytest.raises(AdapterFormatError, match="config="):
        load_plan(adapter(llama(), ["q_proj"]), llama(), max_lora_rank=8)
    with pytest.raises(AdapterFormatError, match="not a tensor"):
        load({"a.lora_A.weight": [1.0]}, llama(), config())
