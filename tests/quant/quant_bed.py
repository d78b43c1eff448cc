"""Tiny quantised Llamas, one for each quantiser, and what their rows must be.

The reference of a row is the bare quantised model with forward hooks that add one adapter's delta, in fp32, from the
inputs that the layers are given. What a layer's weight is, for DoRA's norm, the layer itself says: its outputs for the
identity matrix.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from quant import stand_ins
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_multilora import enable_multilora

DEVICE = "cpu"  # where models are built and run
VOCAB = 113
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 4
SCALING = 2.0  # folded into B without rounding


@dataclass(frozen=True)
class Kind:
    """A quantiser, and what it does here; a row of the README's matrix.

    Attributes:
        name: in the matrix.
        run: how it is run here.
        make: gives the bare model.
        needs: package without which it is skipped.
        dtype: of the activations.
        tolerance: ||difference|| / ||reference|| of a row's logits.
        dora: DoRA is served, not refused by name.
        compiles: whether torch.compile makes one graph of the model, bare and enabled. None: not tried, since what is
            compiled would be the stand-in.
        context: in which it runs here.
    """

    name: str
    run: str
    make: Callable[[], PreTrainedModel]
    needs: str = "torch"  # always there
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-2  # of one rounding of 16 bits that falls otherwise, and what comes of it
    dora: bool = True
    compiles: bool | None = True
    context: Callable[[], Any] = field(default=contextlib.nullcontext)

    def build(self) -> PreTrainedModel:
        pytest.importorskip(self.needs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.make().to(DEVICE).eval()

    @property
    def row(self) -> str:
        """Of the README's matrix."""
        dora = "yes" if self.dora else "refused"
        compiled = {True: "yes", False: "no, nor the bare model", None: "not tried"}[self.compiles]
        return f"| {self.name} | yes | yes | {dora} | {compiled} | {self.run} |"


@cache
def folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="multilora-quant-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def plain() -> PreTrainedModel:
    """The model before it is quantised; with biases in attention. Do not change it."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_bias=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn(parameter.shape))
                else:
                    parameter.copy_(torch.randn(parameter.shape) * (0.5 if "embed" in name else 1 / math.sqrt(128)))
    return model.eval()


@cache
def saved() -> Path:
    plain().save_pretrained(folder() / "plain")
    return folder() / "plain"


def loaded(quantisation: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return LlamaForCausalLM.from_pretrained(
        saved(), quantization_config=quantisation, dtype=dtype, device_map={"": DEVICE}
    )


def replaced(make: Callable[[nn.Linear], nn.Module], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The plain model with other linear layers, but for the head."""
    model = copy.deepcopy(plain()).to(dtype)
    for path, layer in list(model.named_modules()):
        if path.rpartition(".")[2] in TARGETS:
            model.set_submodule(path, make(layer))
    return model


def bnb(**options: Any) -> PreTrainedModel:
    from transformers import BitsAndBytesConfig

    return loaded(BitsAndBytesConfig(**options))


def _torchao(name: str, *args: Any) -> PreTrainedModel:
    import torchao.quantization as ao
    from transformers import TorchAoConfig

    return loaded(TorchAoConfig(getattr(ao, name)(*args)))


def _torchao_int4() -> PreTrainedModel:
    """The one for CPUs; torchao's own Int4WeightOnlyConfig needs a GPU."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from transformers import TorchAoConfig

    return loaded(TorchAoConfig(PrototypeInt4WeightOnlyConfig(group_size=64)), torch.bfloat16)


def _halves(make: Callable[[nn.Linear], nn.Module]) -> PreTrainedModel:
    return replaced(make, torch.float16)


@cache
def _compressed_folder(bits: int, kind: str) -> Path:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    grouped: dict[str, Any] = {"strategy": "group", "group_size": 64} if bits == 4 else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=bits, type=kind, symmetric=True, **grouped)
    tokens = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="token", dynamic=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=None if bits == 4 else tokens)
    model = copy.deepcopy(plain())
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for layer in model.modules():
        if hasattr(layer, "quantization_scheme"):
            groups = layer.weight.detach().unflatten(1, (-1, 64 if bits == 4 else layer.in_features))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
            layer.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    path = folder() / f"compressed-{bits}-{kind}"
    model.save_pretrained(path)
    compressor.update_config(path)
    return path


def _compressed(bits: int, kind: str) -> PreTrainedModel:
    return LlamaForCausalLM.from_pretrained(
        _compressed_folder(bits, kind), dtype=torch.float32, device_map={"": DEVICE}
    )


def _hqq(linear: nn.Linear) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    options = BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
    return HQQLinear(linear, options, compute_dtype=torch.float32, device=DEVICE)


_CPU = "real, CPU"
_BOTH = "real, CPU and H200"

_BF16 = torch.bfloat16
_EXACT = 1e-5  # what sums in another order come to where all is float32

KINDS: dict[str, Kind] = {
    "bnb4": Kind(
        "bitsandbytes, 4 bits (nf4, nested)",
        _BOTH,
        lambda: bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        "bitsandbytes",
    ),
    "bnb8": Kind(
        "bitsandbytes, 8 bits, llm_int8_threshold=0.0",
        _BOTH,
        lambda: bnb(load_in_8bit=True, llm_int8_threshold=0.0),
        "bitsandbytes",
        tolerance=3e-2,
    ),
    "ao_int8": Kind(
        "torchao, int8 weights", _BOTH, lambda: _torchao("Int8WeightOnlyConfig"), "torchao", tolerance=_EXACT
    ),
    "ao_int8_dynamic": Kind(
        "torchao, int8 weights and activations",
        _BOTH,
        lambda: _torchao("Int8DynamicActivationInt8WeightConfig"),
        "torchao",
        tolerance=3e-2,
    ),
    "ao_int4": Kind("torchao, int4 weights", _CPU, _torchao_int4, "torchao", _BF16, dora=False),
    "ao_intx": Kind(
        "torchao, intx weights of 4 bits",
        _CPU,
        lambda: _torchao("IntxWeightOnlyConfig", torch.int4),
        "torchao",
        tolerance=_EXACT,
    ),
    "ao_fp8": Kind(
        "torchao, fp8 weights", _BOTH, lambda: _torchao("Float8WeightOnlyConfig"), "torchao", tolerance=_EXACT
    ),
    "ct_w4": Kind(
        "compressed-tensors, int4 weights",
        _BOTH,
        lambda: _compressed(4, "int"),
        "compressed_tensors",
        tolerance=_EXACT,
        compiles=False,
    ),
    "ct_int8": Kind(
        "compressed-tensors, int8 weights and activations",
        _BOTH,
        lambda: _compressed(8, "int"),
        "compressed_tensors",
        tolerance=3e-2,
        compiles=False,
    ),
    "ct_fp8": Kind(
        "compressed-tensors, fp8 weights and activations",
        _BOTH,
        lambda: _compressed(8, "float"),
        "compressed_tensors",
        tolerance=3e-2,
        compiles=False,
    ),
    "hqq": Kind("HQQ, 4 bits", f"{_CPU}; not in CI", lambda: replaced(_hqq), "hqq", tolerance=_EXACT),
    "bitnet": Kind(
        "BitLinear",
        "real class, CPU and H200",
        lambda: replaced(stand_ins.bit_linear),
        tolerance=1e-2,
        compiles=False,
        context=lambda: torch.compiler.set_stance("force_eager"),
    ),
    "gguf": Kind(
        "GGUF (GgufLinear)", "real class, CPU and H200", lambda: replaced(stand_ins.gguf_linear), tolerance=_EXACT
    ),
    "fp8": Kind(
        "FP8Linear, in blocks", "stand-in", lambda: replaced(stand_ins.fp8_linear), tolerance=_EXACT, compiles=None
    ),
    "fbgemm": Kind(
        "FbgemmFp8Linear", "stand-in", lambda: replaced(stand_ins.fbgemm_linear), tolerance=_EXACT, compiles=None
    ),
    "gptq": Kind("GPTQ", "stand-in", lambda: _halves(stand_ins.gptq_linear), dtype=torch.float16, compiles=None),
    "awq": Kind("AWQ, gemm", "stand-in", lambda: _halves(stand_ins.awq_linear), dtype=torch.float16, compiles=None),
    "awq_gemv": Kind(
        "AWQ, gemv",
        "stand-in",
        lambda: _halves(stand_ins.awq_gemv_linear),
        dtype=torch.float16,
        dora=False,
        compiles=None,
    ),
}


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCAB, (4, 9), generator=generator).to(DEVICE)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@cache
def adapter(seed: int, dora: bool = False) -> Mapping[str, torch.Tensor]:
    """Tensors of an adapter on all projections, in numbers that bfloat16 and float16 hold."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 64).round() / 64

    tensors = {}
    for path, layer in plain().named_modules():
        if path.rpartition(".")[2] in TARGETS:
            key = f"base_model.model.{path}"
            tensors[f"{key}.lora_A.weight"] = draw(RANK, layer.in_features) / 8
            tensors[f"{key}.lora_B.weight"] = draw(layer.out_features, RANK) / 16
            if dora:
                tensors[f"{key}.lora_magnitude_vector"] = layer.weight.norm(dim=1) * (1 + 0.5 * draw(1).abs())
    return tensors


def lora_config(dora: bool = False) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK * SCALING,
        "target_modules": list(TARGETS),
        "use_dora": dora,
    }


def enabled(model: PreTrainedModel, adapters: Mapping[str, tuple[int, bool]], **options: Any) -> PreTrainedModel:
    """The model, enabled, with adapters of these (seed, dora)."""
    enable_multilora(model, **{"max_loras": 4, "max_lora_rank": 8, **options})
    for name, (seed, dora) in adapters.items():
        model.multilora.load(adapter(seed, dora), name, config=lora_config(dora))
    return model


@torch.no_grad()
def weight_of(layer: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """What a layer multiplies by, float32 [out, in]: its outputs for the identity, without its bias."""
    identity = torch.eye(int(layer.in_features), dtype=dtype, device=DEVICE)
    rows = layer(identity).float()
    bias = getattr(layer, "bias", None)
    return (rows if bias is None else rows - bias.float()).t()


@contextlib.contextmanager
def with_delta(model: PreTrainedModel, seed: int, dora: bool, dtype: torch.dtype) -> Iterator[None]:
    """The bare model, whose layers add one adapter's delta for every row."""
    tensors = adapter(seed, dora)
    handles = []
    with torch.no_grad():
        model(**inputs())  # some pack or unpack their weights at the first call
    for path, layer in model.named_modules():
        key = f"base_model.model.{path}"
        if f"{key}.lora_A.weight" not in tensors:
            continue
        a = tensors[f"{key}.lora_A.weight"].to(DEVICE)
        b = tensors[f"{key}.lora_B.weight"].to(DEVICE) * SCALING
        gain: Any = 1.0
        if dora:
            adapted = weight_of(layer, dtype) + b @ a
            gain = tensors[f"{key}.lora_magnitude_vector"].to(DEVICE) / adapted.norm(dim=1)

        def add(
            module: nn.Module, args: Any, y: torch.Tensor, a: Any = a, b: Any = b, gain: Any = gain
        ) -> torch.Tensor:
            bias = getattr(module, "bias", None)
            bias = 0.0 if bias is None else bias.float()
            delta = args[0].float() @ a.t() @ b.t()
            return (gain * (y.float() - bias + delta) + bias).to(y.dtype)

        handles.append(layer.register_forward_hook(add))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def logits(model: Any, **more: Any) -> torch.Tensor:
    return model(**inputs(), use_cache=False, **more).logits


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
