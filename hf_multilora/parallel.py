"""Tensor parallelism as transformers does it: what a rank holds of a layer, and the seam inside of a split layer.

transformers puts a forward on each split layer: inputs are brought into shape, the layer's own forward runs on this
rank's part of the weight, and the outputs are brought together. Adapters follow the base layer's plan:

    split by outputs (colwise)   B is split as the weight is; A is whole; nothing more is communicated
    split by inputs (rowwise)    A is split; the delta is added to this rank's part of the sum, before transformers
                                 sums over the ranks: nothing more is communicated
    whole on the outside         (gathered heads, embeddings, replicated layers) A and B are whole on every rank

Blocks of experts have a forward of this kind as well (`expert_shards`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import dispatch
from .adapters.dtensors import numbers_held
from .adapters.shards import Ranges, Shard, ranges_of
from .errors import ModelError

_OWN = "original_forward"  # what transformers' forward calls the layer's own
# whole on the outside, whatever is inside
_WHOLE = {"EmbeddingParallel", "MlaKvAProjParallel", "EpRouterParallel"}
# what they compute is a part of a sum over ranks
_SUMS = {"RowwiseParallel", "MoeExpertsParallel", "EpDispatchExpertsParallel"}


@dataclass(frozen=True)
class Seam:
    """transformers' forward around a layer's own.

    Attributes:
        forward: the one on the layer.
        own: the layer's own.
        style: how the layer is split; None where that says nothing.
        mesh: of the ranks.
        dispatch: what brings tokens to the experts of other ranks, where a block of experts has such (`dispatch`).
    """

    forward: FunctionType
    own: Callable[..., Any]
    style: Any
    mesh: Any
    dispatch: Any = None

    @property
    def sums(self) -> bool:
        """Whether what ranks compute is summed: they see parts of the inputs, or have some of the experts."""
        return any(kind.__name__ in _SUMS for kind in type(self.style).__mro__)

    def around(self, own: Callable[..., Any], moved: Callable[..., Any] | None = None) -> FunctionType:
        """The same around another forward.

        Args:
            moved: called in its place where tokens were sent to other ranks.
        """
        code, cells = self.forward.__code__, self.forward.__closure__ or ()
        new = {_OWN: _cell(own)}
        if self.dispatch is not None:
            new = {dispatch.HELD: _cell(dispatch.redirected(self.dispatch, own, moved or own))}
        closure = tuple(new.get(name, cell) for name, cell in zip(code.co_freevars, cells, strict=True))
        forward = self.forward
        return FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, closure)


def _cell(value: Any) -> Any:
    return (lambda: value).__closure__[0]  # type: ignore[index]


def seam_of(module: nn.Module) -> Seam | None:
    """The seam of a layer, None where there is none."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, FunctionType) or not {_OWN, dispatch.HELD}.intersection(forward.__code__.co_freevars):
        return None
    cells = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells}
    if _OWN in held:
        return Seam(forward, held[_OWN], held.get("self"), held.get("mesh"))
    how = held[dispatch.HELD]
    return Seam(forward, dispatch.own_forward(how), held.get("self"), held.get("ep_mesh"), how)


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
    rank, _ = place_of(seam)
    if "PackedColwiseParallel" in kinds or ("ColwiseParallel" in kinds and local.is_shard()):
        return Shard(rank, rows=_ranges(weight, 1 if transposed else 0))
    if "ColwiseParallel" in kinds and local.is_replicate():
        return None
    if seam.sums and local.is_replicate():
        return Shard(rank, columns=_ranges(weight, 0 if transposed else 1))
    raise ValueError(f"tensor parallelism splits it ({type(style).__name__}) in a way that adapters cannot follow")


def place_of(seam: Seam) -> tuple[int, int]:
    """(rank, ranks) of this process among those that share a layer."""
    group = seam.mesh.get_group() if seam.mesh.ndim == 1 else seam.mesh.get_group("tp")
    return dist.get_rank(group), dist.get_world_size(group)


def _ranges(weight: Any, dim: int) -> Ranges:
    return ranges_of(numbers_held(weight, dim))


def whole(module: nn.Module) -> nn.Module:
    """The layer without transformers' forward, for weights that are whole; itself where there is none."""
    if seam_of(module) is None:
        return module
    twin: nn.Module = type(module).__new__(type(module))
    twin.__dict__.update({name: value for name, value in module.__dict__.items() if name != "forward"})
    return twin


def number_of(*facts: Any) -> int:
    """A number of 56 bits that differs where facts do, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(_ordered(facts)).encode()).digest()[:7], "big")


def _ordered(value: Any) -> Any:
    """The same with sets, which every process goes through in another order, as sorted tuples."""
    if isinstance(value, (set, frozenset)):
        return "set", tuple(sorted(map(repr, value)))
    if isinstance(value, Mapping):
        return {key: _ordered(item) for key, item in value.items()}
    return [_ordered(item) for item in value] if isinstance(value, (list, tuple)) else value


class Agreement:
    """Sees that all ranks do the same with adapters; without it they would wait for each other, or add up different
    adapters' parts.

    Args:
        mesh: of the ranks.

    Attributes:
        group: the ranks.
    """

    def __init__(self, mesh: Any) -> None:
        self.group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
        self._device = mesh.device_type

    def check(self, what: str, *facts: Any) -> None:
        """All ranks call this with the same facts.

        Raises:
            ModelError: they do not.
        """
        number = number_of(*facts)
        both = torch.tensor([number, -number], device=self._device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)
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


def parts_of(agreement: Agreement | None, fully_sharded: bool) -> int:
    """Over how many ranks adapters are fully sharded; 1: they are not.

    Raises:
        ModelError: they are to be, and no ranks share the model.
    """
    if not fully_sharded:
        return 1
    parts = 1 if agreement is None else dist.get_world_size(agreement.group)
    if parts == 1:
        raise ModelError(
            "fully_sharded_loras=True splits adapters over the ranks of a tensor-parallel model, and this one is not "
            "shared by several: load it with a tp_plan over as many processes, or leave the option out."
        )
    return parts


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
        return splits(module) or shard_of(module) is not None
    except ValueError:
        return True


def splits(block: nn.Module) -> bool:
    """Whether ranks share stacked weights: those of a block of experts."""
    return any(p is not None and p.dim() == 3 and hasattr(p, "device_mesh") for p in block._parameters.values())
