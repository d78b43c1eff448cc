"""The weight that a quantised layer computes with, as numbers. Kinds are told by what a layer holds, never by class.

Formulas are those of the quantisers' own kernels: bitsandbytes (blocks of 4 bits with a table of 16 values; rows of
int8 with a scale), HQQ, torchao and compressed-tensors (their own dequantisation), GPTQ, AWQ (Lin et al. 2023, layout
"gemm"), BitNet, fp8 with a scale for the tensor, for each row or for each block, GGUF.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..adapters.base import is_plain

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of the eight columns in an int32, from its lowest bits on
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class CannotDequantise(ValueError):
    """The reason, beginning with the class of the layer, and that of its weight."""


@torch.no_grad()
def dequantised(layer: nn.Module) -> torch.Tensor:
    """The weight [out, in] of a linear layer, in floating point, on its device; nothing of the layer changes.

    Raises:
        CannotDequantise: a kind that is not known, a weight that is offloaded, or a quantiser that gave an error.
    """
    base: Any = layer
    name = type(layer).__name__
    weight = getattr(base, "weight", None)
    if isinstance(weight, torch.Tensor) and type(weight).__module__.partition(".")[0] != "torch":
        name += f" with a {type(weight).__name__}"
    if isinstance(weight, torch.Tensor) and is_plain(weight):
        return weight.detach()
    if isinstance(weight, torch.Tensor) and weight.is_meta:
        raise CannotDequantise(f"{name} is offloaded")
    make = _kind_of(base)
    if make is None:
        raise CannotDequantise(f"{name} keeps its weight in a form that is not known here")
    try:
        numbers = make(base)
    except Exception as error:  # whatever a foreign package raises: the adapter is refused, and the reason said
        raise CannotDequantise(f"{name}: {type(error).__name__}: {error}") from error
    shape = (int(base.out_features), int(base.in_features))
    if type(numbers) is not torch.Tensor or tuple(numbers.shape) != shape:
        raise CannotDequantise(f"{name} gives a weight of shape {tuple(numbers.shape)}, not {shape}")
    return numbers


def _kind_of(base: Any) -> Callable[[Any], torch.Tensor] | None:
    """What dequantises a layer, going by what it holds."""
    held = {name for name, value in (*base._parameters.items(), *base._buffers.items()) if value is not None}
    weight = getattr(base, "weight", None)
    if {"qweight", "qzeros", "scales"} <= held:
        if "g_idx" in held:
            return _gptq if hasattr(type(base), "dequantize_weight") else None
        return _awq if _is_awq_gemm(base) else None
    if hasattr(base, "W_q"):
        return _hqq
    if hasattr(base, "quantization_scheme"):
        return _compressed
    if not isinstance(weight, torch.Tensor):
        return None
    if hasattr(base, "ggml_type"):
        return _gguf
    if hasattr(weight, "quant_state"):
        return _bnb4
    if hasattr(weight, "SCB"):
        return _bnb8
    if weight.dtype in _FP8 and held & {"weight_scale", "weight_scale_inv"}:
        return _fp8
    if weight.dtype == torch.uint8 and "weight_scale" in held and weight.shape[0] * 4 >= base.out_features:
        return _bitnet
    if any("dequantize" in vars(cls) for cls in type(weight).__mro__ if not cls.__module__.startswith("torch.")):
        return _tensor
    return None


def _tensor(base: Any) -> torch.Tensor:
    """torchao and optimum-quanto: the weight is a tensor of their own class."""
    numbers: torch.Tensor = base.weight.dequantize()
    return numbers


def _bnb4(base: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    weight = base.weight.data
    state = base.weight.quant_state or base.quant_state
    if not getattr(state, "packing_format_for_cpu", False):
        numbers: torch.Tensor = dequantize_4bit(weight, state)
        return numbers
    # A forward on a CPU has put blocks of 32 rows together: an index of a row and its neighbour 16 rows below in each
    # byte; dequantize_4bit takes no notice and gives other numbers.
    rows, columns = state.shape
    packed = weight.view(torch.uint8).reshape(-1, 32)
    index = torch.cat([packed & 15, packed >> 4], 1).reshape(rows // 32, columns // 2, 32, 2)
    index = index.transpose(1, 2).reshape(rows, columns)
    scales = state.absmax.float().t().repeat_interleave(state.blocksize, 1)
    return state.code.float()[index.long()] * scales


def _bnb8(base: Any) -> torch.Tensor:
    state = getattr(base, "state", None)
    scales = getattr(state, "SCB", None)
    scales = base.weight.SCB if scales is None else scales
    return base.weight.data.float() * (scales.float().view(-1, 1) / 127)


def _hqq(base: Any) -> torch.Tensor:
    numbers: torch.Tensor = base.dequantize()
    return numbers.detach()


def _compressed(base: Any) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor

    scheme = base.quantization_scheme
    held = {**base._parameters, **base._buffers}
    state = {name: value.data for name, value in held.items() if value is not None}
    compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
    numbers: torch.Tensor = compressor.decompress(state, scheme)["weight"]
    return numbers.data


def _gptq(base: Any) -> torch.Tensor:
    return base.dequantize_weight().detach().t()


def _is_awq_gemm(base: Any) -> bool:
    inside, out, bits = base.in_features, base.out_features, getattr(base, "bits", getattr(base, "w_bit", None))
    return (
        bits == 4
        and base.qweight.dtype == torch.int32
        and tuple(base.qweight.shape) == (inside, out // 8)
        and base.scales.shape[1] == out
        and tuple(base.qzeros.shape) == (base.scales.shape[0], out // 8)
    )


def _awq(base: Any) -> torch.Tensor:
    group = base.in_features // base.scales.shape[0]
    values, zeros = (_nibbles(packed)[..., _AWQ_ORDER].flatten(1) for packed in (base.qweight, base.qzeros))
    scales = base.scales.float().repeat_interleave(group, 0)
    return ((values - zeros.repeat_interleave(group, 0)) * scales).t()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The eight values in each int32, from the lowest bits on: [..., 8]."""
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    return (packed[..., None] >> shifts) & 15


def _bitnet(base: Any) -> torch.Tensor:
    """Values 0, 1, 2 for -1, 0, 1: two bits each, a quarter of the rows in each pair of bits."""
    ternary = torch.cat([(base.weight >> shift) & 3 for shift in (0, 2, 4, 6)])[: base.out_features].float() - 1
    return ternary / base.weight_scale.float()


def _fp8(base: Any) -> torch.Tensor:
    weight = base.weight.float()
    scale = getattr(base, "weight_scale_inv", None)
    scale = (base.weight_scale if scale is None else scale).float()
    rows, columns = weight.shape
    block = getattr(base, "block_size", None)
    if block is not None and scale.dim() == 2:
        scale = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    elif scale.numel() == rows:
        scale = scale.reshape(-1, 1)
    elif scale.numel() != 1:
        raise ValueError(f"scales of shape {tuple(scale.shape)} for a weight of {tuple(weight.shape)}")
    return weight * scale


def _gguf(base: Any) -> torch.Tensor:
    from transformers.integrations.gguf.dequant import dequantize

    numbers = dequantize(base.weight.data.reshape(-1), base.ggml_type).reshape(base.out_features, base.in_features)
    order = base.input_permutation
    if order is None:
        return numbers
    # the layer reads x[order]: column i of the file belongs to input order[i]
    return torch.empty_like(numbers).index_copy_(1, order, numbers)
