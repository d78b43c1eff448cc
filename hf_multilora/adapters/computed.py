"""Tensors that a plan computes from what is stored: read like stored ones, worked out when first asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Computed:
    """A float32 tensor of known shape that is computed once, when first read. Equal only to itself.

    Args:
        shape: of the result.
        compute: gives it; a result on another device is brought to the CPU.
    """

    dtype = torch.float32

    def __init__(self, shape: tuple[int, ...], compute: Callable[[], torch.Tensor]) -> None:
        self.shape = shape
        self._compute: Callable[[], torch.Tensor] | None = compute
        self._value: torch.Tensor | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """The tensor, float32 on the CPU. Do not write to it."""
        if self._value is None:
            assert self._compute is not None
            self._value = self._compute().to("cpu", torch.float32)
            assert tuple(self._value.shape) == self.shape, f"computed {tuple(self._value.shape)}, said {self.shape}"
            self._compute = None  # lets go of what it was computed from
        return self._value
