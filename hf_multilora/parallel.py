"""Tensor parallelism as transformers does it: what a rank holds of a layer, and the seam inside of a split layer.

transformers puts a forward on each split layer: inputs are brought into shape, the layer's own forward runs on this
rank's part of the weight, and the outputs are brought together. Adapters follow the base layer's plan:

    split by outputs (colwise)   B is split as the weight is; A is whole; nothing more is communicated
    split by inputs (rowwise)    A is split; the delta is added to this rank's part of the sum, before transformers
                                 sums over the ranks: nothing more is communicated
    whole on the outside         (gathered heads, embeddings, replicated layers) A and B are whole on every rank
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .adapters.shards import Ranges, Shard, length, ranges_of
from .errors import ModelError

_OWN = "original_forward"  # what transformers' forward calls the layer's own
_WHOLE = {"EmbeddingParallel", "MlaKvAProjParallel"}  # whole on the outside, whatever is inside


@dataclass(frozen=True)
class Seam:
    """transformers' forward around a layer's own.

    Attributes:
        forward: the one on the layer.
        own: the layer's own.
        style: how the layer is split; None where that says nothing.
        mesh: of the ranks.
    """

    forward: FunctionType
    own: Callable[..., Any]
    style: Any
    mesh: Any

    @property
    def sums(self) -> bool:
        """Whether ranks see parts of the inputs, and what they compute is summed."""
        return any(kind.__name__ == "RowwiseParallel" for kind in type(self.style).__mro__)

    def around(self, own: Callable[..., Any]) -> FunctionType:
        """The same around another forward."""
        code, cells = self.forward.__code__, self.forward.__closure__ or ()
        new = _cell(own)
        closure = tuple(new if name == _OWN else cell for name, cell in zip(code.co_freevars, cells, strict=True))
        forward = self.forward
        return FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, closure)


def _cell(value: Any) -> Any:
    return (lambda: value).__closure__[0]  # type: ignore[index]


def seam_of(module: nn.Module) -> Seam | None:
    """The seam of a layer, None where there is none."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, FunctionType) or _OWN not in forward.__code__.co_freevars:
        return None
    cells = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells}
    return Seam(forward, held[_OWN], held.get("self"), held.get("mesh"))


def shard_of(module: nn.Module, transposed: bool = False) -> Shard | None:
    """What this rank computes of a layer; None where it is whole on the outside.

    Args:
        transposed: its weight is [in, out].

    Raises:
        ValueError: it is split in a way that adapters cannot follow; the message says how.
    """
    seam, weight = seam_of(module), module._parameters.get("weight")
    split = weight is not None and hasattr(weight, "device_mesh")
    if seam is None:
        if split:
            raise ValueError("its weight is a DTensor, which no tensor-parallel plan of transformers has made")
        return None
    style = seam.style
    kinds = {kind.__name__ for kind in type(style).__mro__}
    if style is None or kinds & _WHOLE:
        return None
    if not split or not getattr(style, "use_local_output", True):
        raise ValueError(f"tensor parallelism splits it ({type(style).__name__}) in a way that adapters cannot follow")
    local: Any = getattr(style, "output_layouts", None)
    rank = seam.mesh.get_local_rank() if seam.mesh.ndim == 1 else seam.mesh.get_local_rank("tp")
    if "PackedColwiseParallel" in kinds or ("ColwiseParallel" in kinds and local.is_shard()):
        return Shard(rank, rows=_held(weight, 1 if transposed else 0))
    if "ColwiseParallel" in kinds and local.is_replicate():
        return None
    if seam.sums and local.is_replicate():
        return Shard(rank, columns=_held(weight, 0 if transposed else 1))
    raise ValueError(f"tensor parallelism splits it ({type(style).__name__}) in a way that adapters cannot follow")


def _held(weight: Any, dim: int) -> Ranges:
    """Which numbers of a dimension of a DTensor this rank holds: split as the weight is, without communication."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, placements = weight.device_mesh, []
    for placement in weight.placements:
        if placement.is_replicate():
            placements.append(placement)
        elif placement.dim % weight.ndim != dim:
            placements.append(Replicate())
        elif isinstance(placement, _StridedShard):
            placements.append(_StridedShard(0, split_factor=placement.split_factor))
        else:
            placements.append(Shard(0))
    numbers = torch.arange(weight.shape[dim], device=mesh.device_type)
    found = ranges_of(distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local())
    if not length(found):
        raise ValueError("this rank holds nothing of it: there are more ranks than it can be split over")
    return found


def whole(module: nn.Module) -> nn.Module:
    """The layer without transformers' forward, for weights that are whole; itself where there is none."""
    if seam_of(module) is None:
        return module
    twin: nn.Module = type(module).__new__(type(module))
    twin.__dict__.update({name: value for name, value in module.__dict__.items() if name != "forward"})
    return twin


def number_of(*facts: Any) -> int:
    """A number of 56 bits that differs where facts do, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7], "big")


class Agreement:
    """Sees that all ranks do the same with adapters; without it they would wait for each other, or add up different
    adapters' parts.

    Args:
        mesh: of the ranks.
    """

    def __init__(self, mesh: Any) -> None:
        self._group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
        self._device = mesh.device_type

    def check(self, what: str, *facts: Any) -> None:
        """All ranks call this with the same facts.

        Raises:
            ModelError: they do not.
        """
        number = number_of(*facts)
        both = torch.tensor([number, -number], device=self._device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
        high, low = both.tolist()
        if high != -low:
            raise ModelError(
                f"The ranks of this tensor-parallel model do not agree about {what}: each must load, unload and name "
                f"the same adapters in the same order. Here it is {str(facts)[:2000]}."
            )

    @contextmanager
    def of(self, what: str) -> Iterator[list[Any]]:
        """What happens in the block happens on all ranks, or is an error on all; facts are put into the list."""
        facts: list[Any] = []
        try:
            yield facts
        except Exception as error:
            with suppress(ModelError):  # the others have theirs
                self.check(what, type(error).__name__, str(error))
            raise
        self.check(what, *facts)


def agreement_of(model: nn.Module) -> Agreement | None:
    """Of the ranks that share a model; None for a model of one process."""
    seams = (seam_of(module) for module in model.modules())
    mesh = next((seam.mesh for seam in seams if seam is not None and seam.mesh is not None), None)
    return None if mesh is None else Agreement(mesh)


@contextmanager
def alike(agreement: Agreement | None, what: str) -> Iterator[list[Any]]:
    """`Agreement.of`, where there are ranks."""
    if agreement is None:
        yield []
        return
    with agreement.of(what) as facts:
        yield facts


def shared(module: nn.Module) -> bool:
    """Whether ranks share what a module computes, so that nobody could replace it as a whole."""
    try:
        return shard_of(module) is not None
    except ValueError:
        return True


def splits(block: nn.Module) -> bool:
    """Whether ranks share the stacked weights of a block of experts, by tensor or expert parallelism."""
    return seam_of(block) is not None or any(hasattr(p, "device_mesh") for p in block.parameters(recurse=False))
