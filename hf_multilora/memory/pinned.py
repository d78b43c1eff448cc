"""Host memory for packed adapters, page-locked so that copies to the device are fast and asynchronous.

torch's own pinned allocator rounds a block up to a power of two (84 MB takes 128) and faults its pages in one by one.
Large blocks are mapped here instead: touched by all cores, then registered with CUDA, which locks them where they are.
Measured on an H200's host, 84 MB: 65 ms by the allocator, 8 + 6 ms this way.
"""

from __future__ import annotations

import mmap
import weakref

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

_LARGE = 1 << 20  # below, the allocator's cache of small blocks is the better choice


def host_block(nbytes: int, *, pin: bool) -> torch.Tensor:
    """uint8 `[nbytes]` in host memory, of any content; page-locked where `pin` asks for it and that is possible."""
    if pin:
        try:
            if nbytes >= _LARGE and torch.version.cuda is not None:
                return _registered(nbytes)
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except (RuntimeError, OSError) as error:
            logger.warning_once(
                "Host memory for adapters could not be pinned; pageable memory is used instead, from which copies "
                f"into slots are slower ({str(error).splitlines()[0]})."
            )
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _registered(nbytes: int) -> torch.Tensor:
    # A mapping of its own: registration goes by whole pages, which the heap would share with other objects.
    block = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    block.zero_()
    address = block.data_ptr()
    status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister failed: {status}")
    weakref.finalize(block, _unregister, address).atexit = False
    return block


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
