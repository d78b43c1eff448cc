"""Weights beside the factors: copies of the base's own are dropped, others kept as whole parameters; bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from adapter_bed import KV, H, V, adapter, config, factors, llama, load, phi3, table

from hf_multilora.adapters import saved
from hf_multilora.adapters.saved import same_numbers
from hf_multilora.errors import AdapterFormatError, AdapterMatchError, UnsupportedAdapterError

torch.manual_seed(0)
BASE = {
    "lm_head.weight": torch.randn(V, H),
    "model.embed_tokens.weight": torch.randn(V, H),
    "model.layers.0.self_attn.q_proj.bias": torch.randn(H),
    "model.norm.weight": torch.ones(H),
}
TARGETS = llama(base=BASE, modules=("model.norm",))
TENSORS = adapter(TARGETS, ["q_proj", "embed_tokens", "lm_head"])
# what the factors come to, in the layout of the weight: they are worked into a weight that the file has of its own
_AB = {key.removeprefix("base_model.model."): value for key, value in TENSORS.items()}
UPDATES = {
    "lm_head.weight": 2 * _AB["lm_head.lora_B.weight"] @ _AB["lm_head.lora_A.weight"],
    "model.embed_tokens.weight": 2
    * (_AB["model.embed_tokens.lora_embedding_B"] @ _AB["model.embed_tokens.lora_embedding_A"]).t(),
}


def read(extra: dict[str, torch.Tensor], targets=TARGETS, **fields):
    return load(TENSORS | extra, targets, config(**fields))


KEYS = [
    ("lm_head.base_layer.weight", "lm_head.weight"),
    ("model.embed_tokens.base_layer.weight", "model.embed_tokens.weight"),
    ("lm_head.weight", "lm_head.weight"),
    ("model.embed_tokens.modules_to_save.default.weight", "model.embed_tokens.weight"),
    ("model.layers.0.self_attn.q_proj.base_layer.bias", "model.layers.0.self_attn.q_proj.bias"),
    ("model.norm.weight", "model.norm.weight"),
]


@pytest.mark.parametrize(("key", "name"), KEYS)
def test_equal_copies_are_accepted(key: str, name: str) -> None:
    key = f"base_model.model.{key}"
    plan = read({key: BASE[name].clone()})
    leaf = name.rpartition(".")[2]
    assert plan.ignored == [f"{key}: a copy of the base's own {leaf}"] and plan.warnings == []
    assert len(plan.factors) == 4


@pytest.mark.parametrize(("key", "name"), KEYS)
def test_changed_copies_replace_the_base(key: str, name: str) -> None:
    changed = BASE[name].clone()
    changed.view(-1)[-1] += 1e-3
    plan = read({f"base_model.model.{key}": changed})
    if "bias" in key:
        assert plan.saved == () and plan.factors[1].shift.read()[-1] == pytest.approx(1e-3, rel=1e-3)
    else:
        (item,) = plan.saved
        assert f"{item.path}.{item.name}" == name
        torch.testing.assert_close(item.ref.read(), changed + UPDATES.get(name, 0))
        assert len(plan.factors) == 4 - (name in UPDATES)
    announced = "lm_head" in key or "embed_tokens" in key
    assert len(plan.warnings) == (not announced) and plan.ignored == []
    if plan.warnings:
        assert key in plan.warnings[0] and "for this adapter alone" in plan.warnings[0]


def test_original_modules_are_ignored() -> None:
    """A raw state dict holds the base's module beside the saved one, which decides."""
    own = {f"base_model.model.lm_head.{part}.weight": BASE["lm_head.weight"] + i for i, part in enumerate(
        ("original_module", "modules_to_save.default"), 1)}  # fmt: skip
    plan = read(own, modules_to_save=["lm_head"])
    torch.testing.assert_close(plan.saved[0].ref.read(), BASE["lm_head.weight"] + 2 + UPDATES["lm_head.weight"])
    assert plan.ignored == [
        "base_model.model.lm_head.original_module.weight: the base's own, which the saved module replaces"
    ]


def test_precision() -> None:
    """A copy of higher precision that rounds to the base is the base; one of lower precision gets a warning."""
    key = "base_model.model.lm_head.base_layer.weight"
    half = {name: value.bfloat16() for name, value in BASE.items()}
    upcast = read({key: half["lm_head.weight"].float()}, llama(base=half))
    assert upcast.warnings == [] and len(upcast.ignored) == 1
    rounded = read({key: half["lm_head.weight"]})
    assert "rounded to torch.bfloat16" in rounded.warnings[0]


def test_comparison_is_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "_CHUNK", 7)
    assert same_numbers(BASE["lm_head.weight"].clone(), BASE["lm_head.weight"]) is torch.float32
    assert same_numbers(BASE["lm_head.weight"] + 1, BASE["lm_head.weight"]) is None


def test_vocabularies_that_do_not_fit() -> None:
    """Every table of the vocabulary has to come at the new size."""
    more = {f"base_model.model.{path}.weight": torch.zeros(70, H) for path in ("lm_head", "model.embed_tokens")}
    plain = adapter(TARGETS, ["q_proj"])
    plan = load(plain | more, TARGETS, config())
    assert plan.vocab_size == 70 and {item.ref.shape for item in plan.saved} == {(70, H)}
    for key in more:
        with pytest.raises(AdapterFormatError, match="70 tokens.*the base's has 64.*save_embedding_layers=True"):
            load(plain | {name: t for name, t in more.items() if name != key}, TARGETS, config())
        with pytest.raises(AdapterMatchError, match="different sizes"):
            load(plain | more | {key: torch.zeros(71, H)}, TARGETS, config())
        with pytest.raises(AdapterMatchError, match=f"{key} has the shape .70, {H + 1}., the model's"):
            load(plain | more | {key: torch.zeros(70, H + 1)}, TARGETS, config())
    with pytest.raises(AdapterMatchError, match="do not fit the 70 rows"):
        load(TENSORS | more, TARGETS, config())


def test_bias_of_a_resized_head() -> None:
    """A head's bias is resized with it, and then no shift of the base's columns can stand for it."""
    targets = llama(base=BASE | {"lm_head.bias": torch.zeros(V)})
    more = {f"base_model.model.{path}": torch.ones(70, H) for path in ("lm_head.weight", "model.embed_tokens.weight")}
    bias = {"base_model.model.lm_head.bias": torch.ones(70)}
    plain = adapter(targets, ["q_proj"])
    plan = load(plain | more | bias, targets, config())
    assert ("lm_head", "bias") in {(item.path, item.name) for item in plan.saved} and plan.vocab_size == 70
    with pytest.raises(AdapterMatchError, match="different widths"):
        load(plain | more, targets, config())


HEADED = table(
    {"self_attn.q_proj": (H, H)},
    heads=(),
    modules=("score", "model.norm", "classifier", "classifier.dense", "classifier.out_proj"),
    base={
        "score.weight": torch.zeros(3, H),
        "score.bias": torch.zeros(3),
        "model.norm.weight": torch.ones(H),
        "classifier.dense.weight": torch.zeros(H, H),
        "classifier.out_proj.weight": torch.zeros(3, H),
    },
)


def headed(extra: dict[str, torch.Tensor], **fields):
    tensors = {f"base_model.model.{name}": value for name, value in extra.items()}
    return load(adapter(HEADED, ["q_proj"]) | tensors, HEADED, config(**fields))


def test_heads_of_other_labels() -> None:
    """A head may have its own number of labels, but not another width inside, nor a bias of another head."""
    plan = headed({"score.weight": torch.ones(5, H), "score.bias": torch.ones(5)}, modules_to_save=["score"])
    assert {(item.path, item.name, item.ref.shape[0]) for item in plan.saved} == {
        ("score", "weight", 5),
        ("score", "bias", 5),
    }
    nested = {"classifier.dense.weight": torch.ones(H, H), "classifier.out_proj.weight": torch.ones(2, H)}
    plan = headed(nested, modules_to_save=["classifier"])
    assert {(item.path, item.name) for item in plan.saved} == {
        ("classifier", "dense.weight"),
        ("classifier", "out_proj.weight"),
    }
    for extra, words in [
        ({"score.weight": torch.ones(5, H), "score.bias": torch.ones(4)}, "different widths"),
        ({"score.weight": torch.ones(5, H)}, "score.weight and score.bias have different widths"),
        ({"score.weight": torch.ones(3, H + 1), "score.bias": torch.ones(3)}, "score.weight has the shape"),
        ({"model.norm.weight": torch.ones(H + 1)}, "norm.weight has the shape"),
        ({"score.weight": torch.ones(3, H), "score.scale": torch.ones(3)}, "no parameter 'scale'"),
    ]:
        with pytest.raises(AdapterMatchError, match=words):
            headed(extra, modules_to_save=["score", "norm"] if "model.norm.weight" in extra else ["score"])
    with pytest.raises(UnsupportedAdapterError, match="dtype torch.int8"):
        headed({"score.weight": torch.ones(3, H, dtype=torch.int8)}, modules_to_save=["score"])


def test_saved_modules_are_whole() -> None:
    known = replace(HEADED, parameters={"score.weight": (3, H), "score.bias": (3,)})
    tensors = adapter(HEADED, ["q_proj"]) | {"base_model.model.score.weight": torch.ones(3, H)}
    with pytest.raises(AdapterFormatError, match="'score', and the file lacks score.bias"):
        load(tensors, known, config(modules_to_save=["score"]))


def test_biases_that_the_file_lacks() -> None:
    base = {f"model.layers.{i}.self_attn.{n}.bias": torch.randn(H) for i in (0, 1) for n in ("q_proj", "o_proj")}
    targets = llama(base=base)
    plain = adapter(targets, ["q_proj"])
    plan = load(plain, targets, config(bias="lora_only"))
    assert "the file holds no bias" in plan.warnings[0] and all(factor.shift is None for factor in plan.factors)
    one = {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias": torch.zeros(H)}
    with pytest.raises(AdapterFormatError, match="1 biases are not in the file: model.layers.1.self_attn.q_proj.bias"):
        load(plain | one, targets, config(bias="lora_only"))
    with pytest.raises(AdapterMatchError, match="bias has the shape .5,., the layer's 32"):
        load(plain | {key: torch.zeros(5) for key in one}, targets, config(bias="lora_only"))
    whole = {f"base_model.model.{name}": value + 1 for name, value in base.items()}
    plan = load(plain | whole, targets, config(bias="all"))
    assert [(f.rank, f.a is None, round(float(f.shift.read()[0]), 5)) for f in plan.factors] == [
        (4, False, 1.0),
        (0, True, 1.0),
    ] * 2
    assert plan.rank == 4 and not plan.warnings


def test_two_tensors_for_one_parameter() -> None:
    twice = {f"base_model.model.lm_head.{part}weight": BASE["lm_head.weight"] + 1 for part in ("", "base_layer.")}
    with pytest.raises(AdapterFormatError, match="mean the same parameter"):
        read(twice)


def rows_of(tokens: dict[str, int], **fields):
    rows = {
        f"base_model.model.{path}.token_adapter.trainable_tokens_delta": torch.ones(n, H) for path, n in tokens.items()
    }
    return load(adapter(TARGETS, ["q_proj"]) | rows, TARGETS, config(**fields))


def test_trained_tokens() -> None:
    plan = rows_of({"model.embed_tokens": 2}, trainable_token_indices=[7, 3])
    assert [(rows.path, rows.ids, rows.ref.shape) for rows in plan.tokens] == [("model.embed_tokens", (7, 3), (2, H))]
    for tokens, indices, error, words in [
        ({"model.embed_tokens": 2}, None, AdapterFormatError, "does not say for which tokens"),
        ({"model.embed_tokens": 2}, [1, 2, 3], AdapterMatchError, "3 trained rows.*need the shape .3, 32."),
        ({}, [1], AdapterFormatError, "no rows for them"),
        ({"model.embed_tokens": 1}, {"embed_tokens": [1], "lm_head": [1]}, AdapterFormatError, "of 'lm_head'"),
        ({"model.embed_tokens": 2}, [3, V + 1], AdapterMatchError, "beyond its vocabulary of 64.*without a gap"),
        ({"model.embed_tokens": 1}, [V], AdapterFormatError, "head 'lm_head' for it are not in the file"),
        ({"model.norm": 1}, {"norm": [1]}, AdapterMatchError, "no embedding of this model"),
        ({"model.layers": 1}, {"layers": [1]}, AdapterMatchError, "no embedding of this model"),
    ]:
        with pytest.raises(error, match=words):
            rows_of(tokens, trainable_token_indices=indices)
    both = {"base_model.model.model.embed_tokens.weight": BASE["model.embed_tokens.weight"] + 1}
    both["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"] = torch.ones(1, H)
    plan = load(adapter(TARGETS, ["q_proj"]) | both, TARGETS, config(trainable_token_indices=[5]))
    expected = BASE["model.embed_tokens.weight"] + 1
    expected[5] = 1
    assert plan.tokens == () and plan.saved[0].ref.read().equal(expected), "rows go into a table that is saved whole"


def test_aloras_that_peft_does_not_start() -> None:
    targets = llama(base=BASE | {f"model.layers.{i}.self_attn.q_proj.bias": torch.zeros(H) for i in (0, 1)})
    plain = adapter(targets, ["q_proj"])
    assert load(plain, targets, config(alora_invocation_tokens=[5, 5])).invocation == (5, 5)
    with pytest.raises(AdapterMatchError, match="beyond the vocabulary of 64"):
        load(plain, targets, config(alora_invocation_tokens=[5, V]))
    bias = {f"base_model.model.model.layers.{i}.self_attn.q_proj.base_layer.bias": torch.ones(H) for i in (0, 1)}
    for tensors, what in [(adapter(targets, ["embed_tokens"]), "an embedding"), (plain | bias, "biases")]:
        with pytest.raises(UnsupportedAdapterError, match=f"aLoRA.*{what}"):
            load(tensors, targets, config(alora_invocation_tokens=[5]))


def test_saved_modules_that_the_file_lacks() -> None:
    with pytest.raises(AdapterFormatError, match="modules_to_save names 'norm', the model has 'model.norm'"):
        read({}, modules_to_save=["norm"])
    assert read({}, modules_to_save=["scores"]).ignored == [
        "modules_to_save='scores': neither the model nor the file has it"
    ]


def test_heads_of_other_tasks() -> None:
    with pytest.raises(
        UnsupportedAdapterError,
        match="score.weight is a saved module.*SEQ_CLS, to be loaded on a model with that head",
    ):
        read({"base_model.model.score.weight": torch.zeros(1, H)}, modules_to_save=["score"], task_type="SEQ_CLS")
    with pytest.raises(UnsupportedAdapterError, match="v_head"):
        read({"v_head.summary.weight": torch.zeros(1, H)})


def test_base_that_cannot_be_read() -> None:
    key = "base_model.model.lm_head.base_layer.weight"
    with pytest.raises(AdapterMatchError, match="no parameter 'weight' that can be read"):
        read({key: BASE["lm_head.weight"]}, llama())
    eights = (torch.zeros(V, H, dtype=dtype) for dtype in (torch.uint8, torch.float8_e4m3fn))
    for unreadable in (*eights, torch.empty(V, H, device="meta")):
        with pytest.raises(UnsupportedAdapterError, match="quantised or offloaded, and can neither be compared"):
            read({key: BASE["lm_head.weight"]}, llama(base={"lm_head.weight": unreadable}))


def test_copies_move_with_the_renaming() -> None:
    nested = {"layers": "model.language_model.layers", "embeddings": ("model.language_model.embed_tokens",)}
    base = {
        "model.language_model.embed_tokens.weight": BASE["model.embed_tokens.weight"],
        "lm_head.weight": BASE["lm_head.weight"],
    }
    targets = table({"self_attn.q_proj": (H, H)}, base=base, **nested)
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    assert load(TENSORS | {key: BASE["model.embed_tokens.weight"]}, targets, config()).ignored


def test_bias_beside_a_saved_weight() -> None:
    """It belongs to the saved layer: a shift of the base's output would be lost with that."""
    q = "model.layers.0.self_attn.q_proj"
    base = BASE | {f"{q}.weight": torch.randn(H, H)}
    targets = llama(base=base, modules=("model.norm",))
    own = {f"base_model.model.{q}.base_layer.{leaf}": base[f"{q}.{leaf}"] + 1 for leaf in ("weight", "bias")}
    plan = load(adapter(targets, ["q_proj"]) | own, targets, config(bias="lora_only"))
    held = {item.name: item.ref.read() for item in plan.saved if item.path == q}
    assert set(held) == {"weight", "bias"} and held["bias"].equal(base[f"{q}.bias"] + 1)
    assert [factor.path for factor in plan.factors] == [q.replace("0", "1")]


def test_factors_on_a_part_of_a_saved_weight() -> None:
    path = "model.layers.0.self_attn.qkv_proj"
    width = H + 2 * KV
    targets = phi3(base={f"{path}.weight": torch.zeros(width, H)})
    whole = {f"base_model.model.{path}.base_layer.weight": torch.ones(width, H)}
    split = factors(path.replace("qkv_proj", "q_proj"), H, H)
    with pytest.raises(UnsupportedAdapterError, match="q_proj.*the whole weight of .*qkv_proj"):
        load(split | whole, targets, config())
    plan = load(factors(path, H, width) | whole, targets, config())
    assert plan.factors == () and [(item.path, item.name) for item in plan.saved] == [(path, "weight")]
