"""Layers of quantisers that cannot be installed or run on a CPU: the real class with another forward where
transformers has it, else a class with the attributes and buffers of the real one. Each is filled from an nn.Linear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations import bitnet, fbgemm_fp8, finegrained_fp8
from transformers.integrations.gguf.utils import GgufLinear

_E4M3 = torch.float8_e4m3fn
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns of AWQ's eight nibbles, from the lowest bits on
GROUP = 32


def _take_bias(layer: Any, linear: nn.Linear, buffer: bool = False) -> Any:
    if linear.bias is not None:
        bias = linear.bias.detach().clone()
        if buffer:
            layer.register_buffer("bias", bias)
        else:
            layer.bias = nn.Parameter(bias)
    return layer


@torch.no_grad()
def bit_linear(linear: nn.Linear) -> nn.Module:
    """transformers' BitLinear, as it is."""
    layer = bitnet.BitLinear(linear.in_features, linear.out_features, linear.bias is not None, dtype=torch.float32)
    scale = 1 / linear.weight.abs().mean()
    layer.weight = bitnet.pack_weights((linear.weight * scale).round().clamp(-1, 1))
    layer.weight_scale.fill_(scale)
    if linear.bias is not None:
        layer.bias.copy_(linear.bias)
    return layer


@torch.no_grad()
def gguf_linear(linear: nn.Linear) -> nn.Module:
    """transformers' GgufLinear with blocks of Q8_0: an fp16 scale and 32 values each. Inputs come permuted."""
    layer = GgufLinear(linear.in_features, linear.out_features, ggml_type=8)
    order = torch.randperm(linear.in_features, generator=torch.Generator().manual_seed(1))
    blocks = linear.weight.float()[:, order].reshape(-1, 32)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).half()
    values = (blocks / scales.float()).round().clamp(-127, 127).to(torch.int8)
    raw = torch.cat([scales.view(torch.uint8).reshape(-1, 2), values.view(torch.uint8)], 1)
    layer.weight.data = raw.reshape(linear.out_features, -1)
    layer.input_permutation = order
    return _take_bias(layer, linear)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as they come out of fp8 with a scale for each token."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6).float() / 448
    return (x.float() / scale).to(_E4M3).float() * scale


class PlainFP8Linear(finegrained_fp8.FP8Linear):
    """The forward of FP8Linear's kernels, in torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = self.block_size
        scale = self.weight_scale_inv.repeat_interleave(rows, 0)[: self.out_features]
        scale = scale.repeat_interleave(columns, 1)[:, : self.in_features]
        y = F.linear(_rounded(x), self.weight.float() * scale)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


@torch.no_grad()
def fp8_linear(linear: nn.Linear) -> nn.Module:
    """Blocks of 48 x 80, so that those at the edges are cut."""
    out, inside = linear.weight.shape
    layer = PlainFP8Linear(inside, out, block_size=(48, 80), has_bias=linear.bias is not None)
    scale = torch.empty(layer.weight_scale_inv.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            scale[i, j] = linear.weight[48 * i : 48 * i + 48, 80 * j : 80 * j + 80].abs().max() / 448
    spread = scale.repeat_interleave(48, 0)[:out].repeat_interleave(80, 1)[:, :inside]
    layer.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
    layer.weight = nn.Parameter((linear.weight / spread).to(_E4M3), requires_grad=False)
    return _take_bias(layer, linear)


class PlainFbgemmLinear(fbgemm_fp8.FbgemmFp8Linear):
    """The forward of fbgemm's f8f8bf16_rowwise, in torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(_rounded(x), self.weight.float() * self.weight_scale)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


@torch.no_grad()
def fbgemm_linear(linear: nn.Linear) -> nn.Module:
    layer = PlainFbgemmLinear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    scale = linear.weight.abs().amax(1, keepdim=True) / 448
    layer.weight = nn.Parameter((linear.weight / scale).to(_E4M3), requires_grad=False)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    return _take_bias(layer, linear)


def _grouped(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values of 4 bits [in, out], and for each group of inputs scales and zeros [groups, out]."""
    groups = weight.float().t().unflatten(0, (-1, GROUP))
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15).int()
    values = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15).int()
    return values.flatten(0, 1), scales, zeros


def _packed(values: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight values of 4 bits along `dim` in each int32."""
    eights = values.long().unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    words = sum(eights[..., column] << (4 * place) for place, column in enumerate(order))
    return torch.as_tensor(words).to(torch.int64).where(words < 2**31, words - 2**32).to(torch.int32)


def _unpacked(words: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    found = [(words >> (4 * order.index(column))) & 15 for column in range(8)]
    return torch.stack(found, dim + 1).flatten(dim, dim + 1)


class StandInLayer(nn.Module):
    """What BaseQuantLinear of gptqmodel has: sizes as attributes, tensors as buffers, no parameter, no weight."""

    def __init__(self, linear: nn.Linear, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits, self.group_size, self.pack_dtype = 4, GROUP, torch.int32
        for name, value in buffers.items():
            self.register_buffer(name, value)
        self.bias = None
        if linear.bias is not None:
            del self.bias
            _take_bias(self, linear, buffer=True)

    def numbers(self) -> torch.Tensor:
        """The weight as [in, out]."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(x.reshape(-1, x.shape[-1]), self.numbers().to(x.dtype))
        return (y if self.bias is None else y + self.bias).reshape(*x.shape[:-1], self.out_features)


class TorchLinear(StandInLayer):
    """gptqmodel's TorchLinear (GPTQ, version 2 of the format): packed along the inputs, groups by g_idx."""

    class _Metadata:  # what the real class answers to .weight: no tensor
        def __init__(self, layer: nn.Module) -> None:
            self.shape, self.dtype = (layer.out_features, layer.in_features), torch.float16

    @property
    def weight(self) -> Any:
        return self._Metadata(self)

    def dequantize_weight(self, num_itr: int = 1) -> torch.Tensor:
        groups = self.g_idx.long()
        values, zeros = _unpacked(self.qweight, 0), _unpacked(self.qzeros, 1)
        return self.scales[groups] * (values - zeros[groups])

    numbers = dequantize_weight


@torch.no_grad()
def gptq_linear(linear: nn.Linear) -> nn.Module:
    """Inputs belong to groups in no order, as with desc_act."""
    order = torch.randperm(linear.in_features, generator=torch.Generator().manual_seed(2))
    values, scales, zeros = _grouped(linear.weight[:, order])
    back = order.argsort()
    groups = (torch.arange(linear.in_features) // GROUP)[back].int()
    return TorchLinear(linear, qweight=_packed(values[back], 0), qzeros=_packed(zeros, 1), scales=scales, g_idx=groups)


class AwqTorchLinear(StandInLayer):
    """gptqmodel's AwqTorchLinear and autoawq's WQLinear_GEMM: packed along the outputs."""

    def numbers(self) -> torch.Tensor:
        values, zeros = _unpacked(self.qweight, 1, _ORDER), _unpacked(self.qzeros, 1, _ORDER)
        return (values - zeros.repeat_interleave(GROUP, 0)) * self.scales.repeat_interleave(GROUP, 0)


@torch.no_grad()
def awq_linear(linear: nn.Linear) -> nn.Module:
    values, scales, zeros = _grouped(linear.weight)
    return AwqTorchLinear(linear, qweight=_packed(values, 1, _ORDER), qzeros=_packed(zeros, 1, _ORDER), scales=scales)


class AwqGEMVLinear(StandInLayer):
    """gptqmodel's AwqGEMVLinear: all of it the other way round, [out, in / 8]."""

    def numbers(self) -> torch.Tensor:
        values, zeros = _unpacked(self.qweight, 1), _unpacked(self.qzeros, 1)[:, : self.in_features // GROUP]
        scales = self.scales[:, : self.in_features // GROUP]
        return ((values - zeros.repeat_interleave(GROUP, 1)) * scales.repeat_interleave(GROUP, 1)).t()


@torch.no_grad()
def awq_gemv_linear(linear: nn.Linear) -> nn.Module:
    values, scales, zeros = _grouped(linear.weight)
    groups = scales.shape[0]
    room = -groups % 8  # groups are filled up to whole words
    return AwqGEMVLinear(
        linear,
        qweight=_packed(values.t(), 1),
        qzeros=_packed(F.pad(zeros.t(), (0, room)), 1),
        scales=F.pad(scales.t(), (0, room)).contiguous(),
    )
