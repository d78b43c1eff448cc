"""The base model's numbers, as the computations of a plan need them: row ranges in float32, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import UnsupportedAdapterError
from .dtensors import gathered
from .plan import Readable
from .targets import Part, TargetTable


def is_plain(tensor: torch.Tensor | None) -> bool:
    """Whether its elements are the numbers themselves: not quantised (as 8-bit floats are, and whatever tensors of a
    quantiser's own class hold), and not offloaded."""
    if tensor is None or tensor.is_meta or not tensor.is_floating_point() or tensor.element_size() == 1:
        return False
    return type(tensor).__module__.partition(".")[0] == "torch"


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
        target = self.table.targets.get(path)
        if target is not None and target.has_bias:
            return True  # quantised layers keep theirs as a buffer
        if self.table.parameters:
            return f"{path}.bias" in self.table.parameters
        return self.table.read_base(f"{path}.bias") is not None

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

    def weight(self, part: Part, why: str, *, dequantise: bool = False) -> torch.Tensor:
        """The rows of a layer's weight that a part stands for, [rows, in] (an embedding: [d, V]); a view.

        Args:
            dequantise: take the numbers that a quantised layer computes with.
        """
        target = self.table.targets[part.path]
        name = f"{part.path}.weight"
        quantised = dequantise and name not in self.overrides and self.table.read_dequantised is not None
        if quantised and not is_plain(self.table.read_base(name)):
            weight = self._dequantised(part.path, why)
        else:
            weight = self.read(name, why)
        matrix = weight.t() if target.transposed or target.kind == "embedding" else weight
        if tuple(matrix.shape) != (target.out_features, target.in_features) and target.kind == "linear":
            raise UnsupportedAdapterError(
                f"{self.where}: {why} is computed from {part.path}.weight, whose shape {tuple(weight.shape)} is not "
                f"that of a layer of {target.in_features} inputs and {target.out_features} outputs (quantised?)."
            )
        start, stop = self.rows(part)
        return matrix[start:stop]

    def _dequantised(self, path: str, why: str) -> torch.Tensor:
        assert self.table.read_dequantised is not None
        try:
            return self.table.read_dequantised(path)
        except ValueError as error:
            raise UnsupportedAdapterError(
                f"{self.where}: {why} is computed from the weight of {path}, which cannot be dequantised: {error}. "
                "Load the base in half precision, or train without DoRA."
            ) from error

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
