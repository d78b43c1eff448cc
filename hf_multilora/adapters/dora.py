"""Gains and shifts of one site: what DoRA's magnitudes and the biases of an adapter come to at inference.

DoRA computes m / |W + s B A| (W x + s B A x) + b, the norm over each output row (tuners/lora/dora.py of PEFT). Nothing
in the quotient depends on x, so it is a gain per output column; with a bias in y0, the shift makes up for what the
gain did to it. An adapter's own bias takes the base's place; the bias of B is scaled like B.
"""

from __future__ import annotations

import torch

from .base import Base
from .computed import Computed
from .plan import Readable
from .targets import Part

_CHUNK = 1 << 24  # elements of W + s B A at once: bounds the memory that the norm takes


def gain_of(
    base: Base, part: Part, magnitude: Readable, a: Readable, b: Readable, scaling: float, name: str
) -> Computed:
    """The gain of one site.

    Args:
        base: of the model.
        part: the site.
        magnitude: [rows of the part].
        a, b: its factors, [rank, in] and [rows, rank].
        scaling: of the update alone, without the layer's own output scale.
        name: of the magnitude, for errors.
    """

    def compute() -> torch.Tensor:
        weight = base.weight(part, f"the norm for {name} (DoRA)", dequantise=True)
        norms = row_norms(weight, a.read(), b.read(), scaling)
        return magnitude.read().to(norms.device, torch.float32) / norms

    return Computed((part.stop - part.start,), compute)


def row_norms(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """|W + scaling B A| of every row: float32 [rows], on the device of W ([rows, in])."""
    a = a.to(weight.device, torch.float32)
    b = b.to(weight.device, torch.float32) * scaling
    total = torch.zeros(weight.shape[0], device=weight.device)
    step = max(1, _CHUNK // weight.shape[0])
    for columns in range(0, weight.shape[1], step):
        piece = slice(columns, columns + step)
        total += torch.addmm(weight[:, piece].to(torch.float32), b, a[:, piece]).square_().sum(1)
    return total.sqrt_()


def shift_of(
    base: Base,
    part: Part,
    *,
    gain: Readable | None = None,
    new_bias: Readable | None = None,
    b_bias: Readable | None = None,
    scaling: float = 1.0,
) -> Computed | None:
    """The shift of one site: b_new - gain b_base + scaling b_B, with b_new = b_base where the adapter has no bias.

    None where it would be zero for every adapter like this one.
    """
    if new_bias is None and b_bias is None and (gain is None or not base.has_bias(part.path)):
        return None

    def compute() -> torch.Tensor:
        total = torch.zeros(part.stop - part.start)
        if new_bias is not None or gain is not None:
            old = base.bias(part, "the shift of its bias")
            new = old if new_bias is None else new_bias.read().to("cpu", torch.float32)
            total = total + (new - (old if gain is None else gain.read() * old))
        if b_bias is not None:
            total = total + scaling * b_bias.read().to("cpu", torch.float32)
        return total

    return Computed((part.stop - part.start,), compute)
