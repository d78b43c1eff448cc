"""Two ranks on one GPU: NCCL refuses that, and gloo's gathering of CUDA tensors ends the process (torch 2.11). So they
gather through host memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_LIBRARY: list[torch.library.Library] = []


def gather_through_host() -> None:
    """From now on, in this process."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _functional, "CUDA")
    _LIBRARY.append(library)
    dist.all_gather_into_tensor = dist.distributed_c10d.all_gather_into_tensor = _in_place


def _functional(tensor: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return _gathered(tensor, dist.distributed_c10d._resolve_process_group(group))


def _in_place(output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> None:
    assert not async_op
    output.copy_(_gathered(tensor, group).view_as(output))


def _gathered(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    mine = tensor.detach().contiguous().cpu()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts).to(tensor.device)
