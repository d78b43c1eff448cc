"""The base model's numbers, as the computations of a plan need them: row ranges in float32, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import UnsupportedAdapterError
from .plan import Readable
from .targets import Part, TargetTable


def is_plain(tensor: torch.Tensor | None) -> bool:
    """Whether its elements are the numbers themselves: not quantised (as 8-bit floats are), and not offloaded."""
    return tensor is not None and not tensor.is_meta and tensor.is_floating_point() and tensor.element_size() > 1


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter as a whole. Where ranks share it all of them must ask: they load the same adapters in one order."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@dataclass(frozen=True)
class Base:
    """Reads the base, or what a checkpoint puts in its place.

    Args:
        table: of the model.
        where: the adapter's file, for errors.
        overrides: parameter name -> the adapter's own version of it.
        shipped: module paths whose weight the checkpoint holds, be it a copy of the base's.
    """

    table: TargetTable
    where: str
    overrides: Mapping[str, Readable] = field(default_factory=dict)
    shipped: frozenset[str] = frozenset()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the base's own parameter, None where there is none."""
        known = self.table.parameters.get(name)
        if known is not None:
            return tuple(known)
        tensor = self.table.read_base(name)
        return None if tensor is None else tuple(tensor.shape)

    def has_bias(self, path: str) -> bool:
        """Whether the layer adds a bias of its own."""
        if self.table.parameters:
            return f"{path}.bias" in self.table.parameters
        return self.table.targets[path].has_bias or self.table.read_base(f"{path}.bias") is not None

    def read(self, name: str, why: str) -> torch.Tensor:
        """A parameter as it is, on its device.

        Raises:
            UnsupportedAdapterError: it cannot be read as floating-point numbers.
        """
        override = self.overrides.get(name)
        tensor = self.table.read_base(name) if override is None else override.read()
        if not is_plain(tensor):
            raise UnsupportedAdapterError(
                f"{self.where}: {why} is computed from the base's own {name}, which cannot be read as numbers "
                "(quantised, or offloaded). Load the base in half precision, on one device."
            )
        assert tensor is not None
        return gathered(tensor).detach()

    def weight(self, part: Part, why: str) -> torch.Tensor:
        """The rows of a layer's weight that a part stands for, [rows, in] (an embedding: [d, V]); a view."""
        target = self.table.targets[part.path]
        weight = self.read(f"{part.path}.weight", why)
        matrix = weight.t() if target.transposed or target.kind == "embedding" else weight
        if tuple(matrix.shape) != (target.out_features, target.in_features) and target.kind == "linear":
            raise UnsupportedAdapterError(
                f"{self.where}: {why} is computed from {part.path}.weight, whose shape {tuple(weight.shape)} is not "
                f"that of a layer of {target.in_features} inputs and {target.out_features} outputs (quantised?)."
            )
        start, stop = self.rows(part)
        return matrix[start:stop]

    def whole(self, parts: Sequence[Part], why: str) -> torch.Tensor:
        """The weight that the checkpoint's module had in training: the parts one under the other, float32."""
        return torch.cat([self.weight(part, why).to(torch.float32) for part in parts])

    def bias(self, part: Part, why: str) -> torch.Tensor:
        """The same rows of its bias, float32 on the CPU; zeros where the layer has none."""
        start, stop = self.rows(part)
        if not self.has_bias(part.path):
            return torch.zeros(stop - start)
        return self.table_bias(part.path, why)[start:stop].to("cpu", torch.float32)

    def table_bias(self, path: str, why: str) -> torch.Tensor:
        """The base's own bias, never the adapter's: it is what the layer's output holds."""
        tensor = self.table.read_base(f"{path}.bias")
        if tensor is None or tensor.is_meta:
            raise UnsupportedAdapterError(
                f"{self.where}: {why} is computed from the base's own {path}.bias, which cannot be read (offloaded?)."
            )
        return tensor.detach()

    def rows(self, part: Part) -> tuple[int, int]:
        """The rows of the layer's own weight that a part stands for."""
        widths = self.table.targets[part.path].widths
        start = sum(widths[: part.slice])
        return start, start + widths[part.slice]
