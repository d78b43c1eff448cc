"""Tensor names: roles, leftovers of training wrappers, prefixes of other layouts, round trips."""

from __future__ import annotations

import pytest
from adapter_bed import LLAMA_LINEARS, H, adapter, config, deltas, factors, gpt2, llama, load, phi3, table
from hypothesis import given
from hypothesis import strategies as st

from hf_multilora.adapters.keys import parse_key
from hf_multilora.errors import AdapterFormatError, AdapterMatchError, UnsupportedAdapterError

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "path", "role", "leaf", "owner"),
    [
        (f"base_model.model.{Q}.lora_A.weight", Q, "A", "weight", None),
        (f"base_model.model.{Q}.lora_B.default.weight", Q, "B", "weight", "default"),
        (f"{Q}.lora_A.weight", Q, "A", "weight", None),
        (f"_orig_mod.base_model.model.{Q}.lora_A.weight", Q, "A", "weight", None),
        (f"base_model.model._orig_mod.{Q}.lora_A.weight", Q, "A", "weight", None),
        (
            "base_model.model.model.layers.0._fsdp_wrapped_module.self_attn.q_proj.lora_A.weight",
            Q,
            "A",
            "weight",
            None,
        ),
        (f"module.base_model.model.{Q}.lora_A.weight", Q, "A", "weight", None),
        (f"base_model.model.base_model.model.{Q}.lora_A.weight", Q, "A", "weight", None),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "model.embed_tokens", "embedding_A", "weight", None),
        ("base_model.model.wte.lora_embedding_B.default", "wte", "embedding_B", "weight", "default"),
        (f"base_model.model.{Q}.lora_B.bias", Q, "bias_B", "bias", None),
        (f"base_model.model.{Q}.lora_magnitude_vector", Q, "dora", "", None),
        (f"base_model.model.{Q}.lora_magnitude_vector.default.weight", Q, "dora", "", None),
        ("base_model.model.lm_head.base_layer.weight", "lm_head", "base", "weight", None),
        (f"base_model.model.{Q}.base_layer.bias", Q, "base", "bias", None),
        ("base_model.model.lm_head.weight", "lm_head", "param", "weight", None),
        ("base_model.model.score.modules_to_save.default.weight", "score", "param", "weight", "default"),
        ("base_model.model.score.modules_to_save.weight", "score", "param", "weight", None),
        ("base_model.model.score.original_module.weight", "score", "original", "weight", None),
        ("m.embed_tokens.token_adapter.trainable_tokens_delta", "m.embed_tokens", "tokens", "", None),
        ("m.experts.base_layer.lora_A.weight", "m.experts.base_layer", "A", "weight", None),
        ("m.q_proj.lora_velora_embed", "m.q_proj", "training", "", None),
        ("m.q_proj.lora_monteclora_sampler.std_prior", "m.q_proj", "training", "", None),
        ("weight", "", "param", "weight", None),
    ],
)
def test_grammar(name: str, path: str, role: str, leaf: str, owner: str | None) -> None:
    key = parse_key(name)
    assert (key.path, key.role, key.leaf, key.adapter) == (path, role, leaf, owner)


COMPONENT = st.sampled_from(
    ["layers", "0", "17", "self_attn", "q_proj", "h", "wo", "attn", "o", "block", "mlp", "out.0"]
)


@given(
    path=st.lists(COMPONENT, min_size=1, max_size=6).map(".".join),
    role=st.sampled_from(["A", "B", "embedding_A", "embedding_B"]),
    owner=st.sampled_from([None, "default", "sql"]),
    prefix=st.sampled_from(["", "base_model.model.", "module.base_model.model.", "_orig_mod.base_model.model."]),
    weight=st.booleans(),
)
def test_round_trip(path: str, role: str, owner: str | None, prefix: str, weight: bool) -> None:
    """Whatever is put around a module path is taken off again, and nothing of the path is lost."""
    parts = [path, f"lora_{role}", *([owner] if owner else []), *(["weight"] if weight else [])]
    key = parse_key(prefix + ".".join(parts))
    assert (key.path, key.role, key.adapter) == (path, role, owner)


VLM = {"layers": "model.language_model.layers", "embeddings": ("model.language_model.embed_tokens",)}
OLD_VLM = {
    "layers": "language_model.model.layers",
    "embeddings": ("language_model.model.embed_tokens",),
    "heads": ("language_model.lm_head",),
}
NAMES = [*(name.rpartition(".")[2] for name in LLAMA_LINEARS), "lm_head", "embed_tokens"]


@pytest.mark.parametrize(
    ("written", "read"),
    [(a, b) for a in ({}, VLM, OLD_VLM) for b in ({}, VLM, OLD_VLM)],
    ids=lambda options: options.get("layers", "model.layers"),
)
def test_language_model_moves(written: dict, read: dict) -> None:
    """The text model's place in a multimodal one changed between versions of transformers; and it lives on its own."""
    source, targets = table(LLAMA_LINEARS, **written), table(LLAMA_LINEARS, **read)
    plan = load(adapter(source, NAMES), targets, config(target_modules=NAMES))
    assert [factor.path for factor in plan.factors] == list(targets.targets)
    expected = deltas(load(adapter(source, NAMES), source, config()))
    for old, new in zip(source.targets, targets.targets, strict=True):
        assert deltas(plan)[new, 0].equal(expected[old, 0])


def test_architecture_renaming() -> None:
    """The model's own table of old names, such as Mixtral's block_sparse_moe -> mlp."""
    targets = table(
        {"mlp.gate": (H, 8)}, prefixes=((r"\.block_sparse_moe\.", ".mlp."), (r"^old_head(?=\.)", "lm_head"))
    )
    tensors = adapter(table({"block_sparse_moe.gate": (H, 8)}, heads=("old_head",)), ["gate", "old_head"])
    plan = load(tensors, targets, config(target_modules=["gate", "old_head"]))
    assert [factor.path for factor in plan.factors] == [
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.gate",
        "lm_head",
    ]
    with pytest.raises(AdapterFormatError, match="1 modules of this model that have no tensors: 'lm_head'"):
        load(
            {k: v for k, v in tensors.items() if "head" not in k}, targets, config(target_modules=["gate", "lm_head"])
        )


@pytest.mark.parametrize("make", [llama, gpt2])
def test_headless(make) -> None:
    """An adapter of LlamaModel or GPT2Model lacks the first component; the head that it never had is not missed."""
    targets = make()
    root = next(iter(targets.targets)).partition(".")[0]
    tensors = {
        key.replace(f"model.{root}.", "model.", 1): value
        for key, value in adapter(targets, ["c_attn", "q_proj"]).items()
    }
    assert not any(f".{root}.{root}" in key or f"model.{root}." in key for key in tensors if root != "model")
    plan = load(tensors, targets, config(target_modules=["c_attn", "q_proj", "lm_head"]))
    assert {factor.path for factor in plan.factors} == {p for p in targets.targets if p.endswith(("c_attn", "q_proj"))}


def test_several_adapters_in_one_file() -> None:
    tensors = {f"{Q}.lora_A.one.weight": factors(Q, H, H)[f"base_model.model.{Q}.lora_A.weight"]}
    tensors[f"{Q}.lora_B.two.weight"] = factors(Q, H, H)[f"base_model.model.{Q}.lora_B.weight"]
    with pytest.raises(AdapterFormatError, match="several adapters.*one, two"):
        load(tensors, llama(), config())


def test_adapter_name_left_in_keys() -> None:
    tensors = {key.replace(".weight", ".default.weight"): value for key, value in adapter(llama(), ["q_proj"]).items()}
    assert len(load(tensors, llama(), config(target_modules=["q_proj"])).factors) == 2


def test_same_factor_twice() -> None:
    tensors = adapter(llama(), ["q_proj"])
    tensors |= {key.replace("base_model.model.", ""): value for key, value in tensors.items()}
    with pytest.raises(AdapterFormatError, match="mean the same factor"):
        load(tensors, llama(), config())


def test_two_names_for_one_module() -> None:
    tensors = factors(Q, H, H) | factors(Q.replace("model.", "language_model.model.", 1), H, H)
    with pytest.raises(AdapterMatchError, match="mean the model's"):
        load(tensors, llama(), config())


def test_ambiguous_root() -> None:
    """A headless adapter on a model with two places that it could mean."""
    targets = table({"q": (H, H)}, layers="one.layers", embeddings=(), heads=())
    both = table({"q": (H, H)}, layers="two.layers", embeddings=(), heads=())
    targets = table({}, embeddings=(), heads=(), n_layers=0)
    targets.targets.update(
        {**table({"q": (H, H)}, layers="one.layers", embeddings=(), heads=()).targets, **both.targets}
    )
    with pytest.raises(AdapterMatchError, match="may mean 'one.layers.0.q' or 'two.layers.0.q'"):
        load(factors("layers.0.q", H, H), targets, config())


def test_vision_tower_never_lands_on_the_text_model() -> None:
    """Prefixes are only taken off where they can mean one thing, however well the rest of the name would fit."""
    path = "vision_tower.encoder.layers.0.self_attn.q_proj"
    with pytest.raises(AdapterMatchError, match="vision_tower"):
        load(factors(path, H, H), llama(), config())
    reason = "it is outside of the text model."
    with pytest.raises(UnsupportedAdapterError, match="outside of the text model"):
        load(factors(path, H, H), llama(refused={path: reason}), config())


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("model.layers.0.self_attn.q_proj.lora_a", "MLX"),
        ("lora_unet_down_blocks_0.lora_down.weight", "kohya"),
        ("unet.x.to_q.lora.down.weight", "diffusers"),
        ("base_model.model.x.ia3_l", "IA3"),
    ],
)
def test_foreign_names(name: str, owner: str) -> None:
    with pytest.raises(AdapterFormatError, match=owner):
        load({name: factors(Q, H, H)[f"base_model.model.{Q}.lora_A.weight"]}, llama(), config())


def test_fused_and_split_of_one_layer() -> None:
    tensors = factors(Q, H, H) | factors("model.layers.0.self_attn.qkv_proj", H, 64)
    for targets in (llama(), phi3()):
        with pytest.raises(AdapterMatchError, match="one fused, one split"):
            load(tensors, targets, config())
