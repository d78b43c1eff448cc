"""Parameters that ranks share (DTensors): which numbers a rank holds, and all of them together."""

from __future__ import annotations

from typing import Any

import torch


def numbers_held(weight: Any, dim: int) -> torch.Tensor:
    """Which numbers of a dimension of a DTensor this rank holds: split as the weight is, without communication.

    Raises:
        ValueError: this rank holds nothing of it.
    """
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
    found: torch.Tensor = distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local()
    if not found.numel():
        raise ValueError("this rank holds nothing of it: there are more ranks than it can be split over")
    return found


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter as a whole. Where ranks share it all of them must ask: they load the same adapters in one order."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    # Of what is split in strides torch 2.11 cannot make the whole; 2.13 can.
    strides = any(isinstance(placement, _StridedShard) for placement in tensor.placements)  # type: ignore[attr-defined]
    return _summed(tensor) if strides else tensor.full_tensor()


def _summed(tensor: Any) -> torch.Tensor:
    """Each rank puts its numbers where they belong among zeros, and all are added."""
    import torch.distributed as dist

    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=local.device)
    at = tuple(numbers_held(tensor, dim).to(local.device) for dim in range(tensor.ndim))
    whole[torch.meshgrid(*at, indexing="ij")] = local
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(whole, group=mesh.get_group(dim))
    return whole
