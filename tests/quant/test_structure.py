"""What is found by structure; PEFT beside it; dtypes of slots; saved files; what quantisers themselves cannot do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from quant import stand_ins
from quant.quant_bed import KINDS, VOCAB, adapter, bnb, enabled, inputs, logits, lora_config, relative, replaced
from torch import nn
from transformers import PreTrainedModel

from hf_multilora import disable_multilora, enable_multilora
from hf_multilora.errors import UnsupportedAdapterError
from hf_multilora.layers.quantised import acts_as_linear, is_quantised

README = Path(__file__).resolve().parents[2] / "README.md"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_features = self.out_features = 8
        self.fc = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.scale


class Empty(nn.Module):
    in_features = out_features = 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Pair(stand_ins.StandInLayer):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + y


def test_structure():
    linear = nn.Linear(64, 32)
    gptq = stand_ins.gptq_linear(linear)
    assert acts_as_linear(gptq) and is_quantised(gptq)
    assert not is_quantised(linear) and not is_quantised(linear.half())
    assert not acts_as_linear(Mlp()) and not acts_as_linear(Empty()) and not acts_as_linear(nn.Bilinear(8, 8, 8))
    assert not acts_as_linear(Pair(linear, qweight=torch.zeros(8, 32, dtype=torch.int32)))


@pytest.mark.parametrize("make", [stand_ins.gptq_linear, stand_ins.gguf_linear, stand_ins.fbgemm_linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_slots_have_the_dtype_of_what_is_not_quantised(dtype: torch.dtype, make: Any, offload: bool):
    model = replaced(make).to(dtype)
    if offload:
        cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    model = enable_multilora(model, target_modules=["q_proj"])
    assert model.multilora.store.arena.dtype == dtype
    assert str(model.multilora.store.arena.device) == "cpu"


@pytest.mark.parametrize("name", ["bnb4", "bnb8", "ao_int8", "hqq"])
def test_as_peft(name: str):
    """PEFT's own layers for these quantisers give the same row."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    kind = KINDS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=4, lora_alpha=8, target_modules=lora_config()["target_modules"], task_type="CAUSAL_LM")
        peft = get_peft_model(kind.build(), config).eval()
        set_peft_model_state_dict(peft, dict(adapter(5)))
    with torch.no_grad():
        want = peft(**inputs(), use_cache=False).logits
    got = logits(enabled(kind.build(), {"a": (5, False)}), adapter_ids=["a", None, "a", "a"])
    assert relative(got[0], want[0]) <= kind.tolerance
    taken = enable_multilora(peft)
    got = logits(taken, adapter_ids=["default", None, "default", None])
    assert relative(got[2], want[2]) <= kind.tolerance


def test_packed_for_a_cpu():
    """A forward on a CPU with AVX-512 packs the weight anew; its norm stays the same."""
    fresh, used = (bnb_or_skip(load_in_4bit=True, bnb_4bit_quant_type="nf4") for _ in range(2))
    logits(used)
    want = logits(enabled(fresh, {"a": (5, True)}), adapter_ids="a")
    assert relative(logits(enabled(used, {"a": (5, True)}), adapter_ids="a"), want) < 1e-2


def test_altered_bases_are_refused():
    config = {**lora_config(), "init_lora_weights": "pissa"}
    model = enable_multilora(KINDS["gptq"].build(), max_lora_rank=8)
    with pytest.raises(UnsupportedAdapterError, match="PiSSA.*quantised"):
        model.multilora.load(adapter(5), "a", config=config)


def test_outliers_span_rows():
    """LLM.int8 chooses outlier columns by the whole batch: what a row gives depends on its neighbours' tokens, with
    no adapter in sight. Without a threshold it does not."""
    for threshold, same in ((6.0, False), (0.0, True)):
        model = bnb_or_skip(load_in_8bit=True, llm_int8_threshold=threshold)
        other = inputs()
        other["input_ids"][1:] = 5
        with torch.no_grad():
            changed = model(**other, use_cache=False).logits
        assert torch.equal(changed[0], logits(model)[0]) == same


@pytest.mark.parametrize("name", ["bnb4", "ao_int8", "ct_w4"])
def test_saved_as_the_bare_model(name: str, tmp_path: Path):
    """What an enabled model saves is what the bare one would have, after as many calls."""
    from safetensors.torch import load_file

    bare, model = KINDS[name].build(), enabled(KINDS[name].build(), {"a": (5, False)})
    for each, folder in ((bare, "bare"), (model, "enabled")):
        logits(each)
        each.save_pretrained(tmp_path / folder)
    want, got = (load_file(tmp_path / folder / "model.safetensors") for folder in ("bare", "enabled"))
    assert want.keys() == got.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    base = logits(bare)
    assert torch.equal(logits(model), base)
    assert relative(logits(model, adapter_ids=["a", None, None, None])[0], base[0]) > 0.05
    assert torch.equal(logits(disable_multilora(model)), base)


def test_readme_has_the_matrix():
    text = README.read_text()
    missing = [kind.row for kind in KINDS.values() if kind.row not in text]
    assert not missing, "\n".join(missing)


def bnb_or_skip(**options: Any) -> PreTrainedModel:
    pytest.importorskip("bitsandbytes")
    return bnb(**options).eval()


def test_a_quantised_head_is_not_replaced():
    """By one of another vocabulary either: the layer would read scales that are not that head's."""
    model = bnb_or_skip(load_in_8bit=True, llm_int8_threshold=0.0, llm_int8_skip_modules=["none"])
    enable_multilora(model, max_lora_rank=8, slot_bytes=1 << 20, extra_vocab_size=3)
    config = {**lora_config(), "modules_to_save": ["lm_head", "embed_tokens"]}
    table = torch.randn(VOCAB + 3, model.config.hidden_size)
    tensors = {f"base_model.model.{path}.weight": table for path in ("lm_head", "model.embed_tokens")}
    with pytest.raises(UnsupportedAdapterError, match=r"lm_head.weight takes the place.*quantised"):
        model.multilora.load({**adapter(5), **tensors}, "a", config=config)
