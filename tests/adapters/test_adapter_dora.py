"""DoRA and the bias of B: gains and shifts are those of PEFT's own layers, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_bed import KV, H, adapter, config, llama, load, phi3
from peft_bed import assert_same, make, saved, table_of

from hf_multilora.adapters import dora
from hf_multilora.adapters.load import load_plan
from hf_multilora.errors import AdapterFormatError, AdapterMatchError, UnsupportedAdapterError

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PATTERNS = {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {r".*0\.mlp\..*": 3}}
CASES = [
    ("llama", {"use_dora": True, "target_modules": ALL}),
    ("llama", {"use_dora": True, "target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_rslora": True}),
    ("biased", {"use_dora": True, "target_modules": ALL} | PATTERNS),
    ("tied", {"use_dora": True, "target_modules": ["embed_tokens", "o_proj"]}),
    ("qwen2", {"use_dora": True, "target_modules": "all-linear"}),
    ("gemma", {"use_dora": True, "target_modules": ["embed_tokens", "q_proj", "down_proj"]}),
    ("gpt2", {"use_dora": True, "target_modules": ["c_attn", "c_proj", "wte"]}),
    ("phi3", {"use_dora": True, "target_modules": "all-linear", "use_rslora": True}),
    ("t5", {"use_dora": True, "target_modules": ["q", "v", "wo"], "task_type": "SEQ_2_SEQ_LM"}),
    ("bert-cls", {"use_dora": True, "target_modules": ["query", "value", "dense"]}),
    ("llama", {"lora_bias": True, "target_modules": ALL}),
    ("biased", {"lora_bias": True, "target_modules": ["q_proj", "lm_head"], "use_rslora": True}),
    ("gpt2", {"lora_bias": True, "target_modules": ["c_attn", "c_fc"]}),
    ("phi3", {"lora_bias": True, "target_modules": ["qkv_proj", "gate_up_proj"]}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_as_peft(family: str, options: dict, tmp_path: Path) -> None:
    base = make(family)
    theirs = saved(base, tmp_path, **options)
    table = table_of(base)
    with load_plan(tmp_path, table, max_lora_rank=16) as plan:
        assert_same(theirs, base, plan, table)
        assert all((factor.gain is not None) == options.get("use_dora", False) for factor in plan.factors)


def base_of(targets) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    base = {}
    for path, target in targets.targets.items():
        base[f"{path}.weight"] = torch.randn(target.out_features, target.in_features, generator=generator)
        if target.kind == "embedding":
            base[f"{path}.weight"] = base[f"{path}.weight"].t().contiguous()
        else:
            base[f"{path}.bias"] = torch.randn(target.out_features, generator=generator)
    return base


def with_magnitudes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    rows = {key.replace("lora_B.weight", "lora_magnitude_vector"): t for key, t in tensors.items() if "lora_B" in key}
    return tensors | {key: b.abs().sum(1) + 1 for key, b in rows.items()}


def fuse(base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The base of `llama()` in the layout of `phi3()`."""
    parts = {
        "qkv_proj": ("self_attn", ["q_proj", "k_proj", "v_proj"]),
        "gate_up_proj": ("mlp", ["gate_proj", "up_proj"]),
    }
    fused = dict(base)
    for i in range(2):
        for name, (parent, names) in parts.items():
            for leaf in ("weight", "bias"):
                path = f"model.layers.{i}.{parent}"
                fused[f"{path}.{name}.{leaf}"] = torch.cat([base[f"{path}.{part}.{leaf}"] for part in names])
    return fused


@pytest.mark.parametrize(
    "names", [["qkv_proj", "gate_up_proj"], ["q_proj", "v_proj", "up_proj"]], ids=["fused", "split"]
)
def test_fused_and_split(names: list[str]) -> None:
    """One adapter on the fused and on the split form of one base: the same gains and shifts, row for row."""
    base = base_of(llama())
    fused, split = phi3(base=fuse(base)), llama(base=base)
    tensors = with_magnitudes(adapter(fused if "qkv_proj" in names else split, names))
    found = []
    for targets in (fused, split):
        with load(tensors, targets, config(use_dora=True)) as plan:
            found.append([(f.gain.read(), f.shift.read(), f.b.read()) for f in plan.factors])
    assert len(found[0]) == len(found[1]) == (10 if "qkv_proj" in names else 6)
    for one, other in zip(*found, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b)


def test_norms_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, a, b = torch.randn(7, 50), torch.randn(3, 50), torch.randn(7, 3)
    expected = torch.linalg.norm(weight + 0.7 * b @ a, dim=1)
    for chunk in (1, 40, 1 << 24):
        monkeypatch.setattr(dora, "_CHUNK", chunk)
        torch.testing.assert_close(dora.row_norms(weight, a, b, 0.7), expected)
        torch.testing.assert_close(dora.row_norms(weight.t().contiguous().t(), a, b, 0.7), expected)


def test_half_precision_base() -> None:
    """The norm is that of the base as it is, taken in float32."""
    base = {name: value.bfloat16() for name, value in base_of(llama()).items()}
    tensors = with_magnitudes(adapter(llama(), ["q_proj"]))
    plan = load(tensors, llama(base=base), config(use_dora=True))
    factor = plan.factors[0]
    whole = base[f"{factor.path}.weight"].float() + factor.scaling * factor.b.read() @ factor.a.read()
    magnitude = tensors[f"base_model.model.{factor.path}.lora_magnitude_vector"]
    torch.testing.assert_close(factor.gain.read(), magnitude / whole.norm(dim=1))
    assert factor.gain.read() is factor.gain.read() and factor.gain.dtype == torch.float32


def test_missing_and_misshapen_magnitudes() -> None:
    targets = llama(base=base_of(llama()))
    tensors = with_magnitudes(adapter(targets, ["q_proj", "v_proj"]))
    key = "base_model.model.model.layers.1.self_attn.v_proj.lora_magnitude_vector"
    fewer = {name: t for name, t in tensors.items() if name != key}
    with pytest.raises(AdapterFormatError, match="use_dora=true, and 1 of 4.*magnitude.*layers.1.self_attn.v_proj"):
        load(fewer, targets, config(use_dora=True))
    with pytest.raises(AdapterFormatError, match="4 of 4"):
        load(adapter(targets, ["q_proj", "v_proj"]), targets, config(use_dora=True))
    with pytest.raises(AdapterFormatError, match="has no lora_A"):
        load(
            {name: t for name, t in tensors.items() if "layers.1.self_attn.v_proj.lora_A" not in name},
            targets,
            config(),
        )
    with pytest.raises(AdapterMatchError, match=f"{key} has the shape .5,., the layer needs .{KV},."):
        load(tensors | {key: torch.ones(5)}, targets, config(use_dora=True))
    with pytest.raises(AdapterFormatError, match="float"):
        load(tensors | {key: torch.ones(KV, dtype=torch.int32)}, targets, config(use_dora=True))


def test_tensors_decide() -> None:
    """Magnitudes that the config does not announce count, and the report says so. So does a bias of B."""
    targets = llama(base=base_of(llama()))
    plan = load(with_magnitudes(adapter(targets, ["q_proj"])), targets, config(use_dora=False))
    assert plan.factors[0].gain is not None and "does not say use_dora" in plan.warnings[0]
    biases = {f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_B.bias": torch.ones(H) for i in (0, 1)}
    plan = load(adapter(targets, ["q_proj"]) | biases, targets, config())
    assert plan.factors[0].shift.read().equal(torch.full((H,), 2.0)) and "does not say lora_bias" in plan.warnings[0]
    with pytest.raises(AdapterFormatError, match="lora_bias=true"):
        load(adapter(targets, ["q_proj"]), targets, config(lora_bias=True))
    with pytest.raises(UnsupportedAdapterError, match="the magnitude of DoRA and the bias of B"):
        load(with_magnitudes(adapter(targets, ["q_proj"])) | biases, targets, config())


@pytest.mark.parametrize(
    "weight", [None, torch.zeros(H * H // 2, 1, dtype=torch.uint8), torch.empty(H, H, device="meta")]
)
def test_base_that_cannot_be_read(weight: torch.Tensor | None) -> None:
    """Nothing is guessed: the error comes when the norm is asked for, which loading does before anything changes."""
    base = {} if weight is None else {f"model.layers.{i}.self_attn.q_proj.weight": weight for i in (0, 1)}
    plan = load(with_magnitudes(adapter(llama(), ["q_proj"])), llama(base=base), config(use_dora=True))
    with pytest.raises(
        UnsupportedAdapterError, match="q_proj.lora_magnitude_vector .DoRA. is computed.*q_proj.weight"
    ):
        plan.factors[0].gain.read()


def test_names_of_old_versions() -> None:
    """PEFT before 0.10 and raw state dicts keep the adapter's name, or `.weight`, at the end of the key."""
    targets = llama(base=base_of(llama()))
    tensors = with_magnitudes(adapter(targets, ["embed_tokens", "q_proj"]))
    for ending in (".weight", ".default", ".default.weight"):
        named = {k + ending if "magnitude" in k else k: t for k, t in tensors.items() if "embed" not in k}
        assert load(named, targets, config(use_dora=True)).factors[0].gain is not None
