"""Host memory for packed adapters, page-locked so that copies to the device are fast and asynchronous.

torch's own pinned allocator rounds a block up to a power of two (84 MB takes 128) and faults its pages in one by one,
which takes several times as long as to write them. Large blocks are private mappings here, of huge pages where the
system gives them; who fills a block faults its pages in, with all threads that do so; after that it is registered with
CUDA, which locks the pages where they are. The last few that were given up are kept for the next ones: adapters of one
fleet are of one size, and neither faults nor registrations (nor their end, for which the device may be waited for) are
to come with each change of hands.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

_LARGE = 1 << 20  # below, the allocator's cache of small blocks is the better choice
_KEPT = 256 << 20  # bytes of mappings that nobody uses and that are kept, in all
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux 4.14
_PORTABLE = 1  # cudaHostRegisterPortable: for copies to any device, not the current one alone
_SLACK = 1.25  # a mapping may be larger than the block in it by this factor


class _Mapping(NamedTuple):
    memory: mmap.mmap
    address: int
    registered: bool


# A deque, for its operations are atomic: mappings come back whenever garbage is collected, in any thread.
_spare: deque[_Mapping] = deque()


def host_block(nbytes: int, fill: Callable[[torch.Tensor], None], *, pin: bool) -> torch.Tensor:
    """A uint8 tensor `[nbytes]` in host memory, filled by `fill`; page-locked where `pin` asks for it and it can be.

    `fill` finds any content, and is called once.
    """
    if nbytes < _LARGE or (pin and torch.version.cuda is None):
        block = _allocated(nbytes, pin)
        fill(block)
        return block
    mapping = _taken(nbytes, pin) or _mapped(nbytes)
    # The view dies with the last tensor over the memory, which need not be this one.
    view = memoryview(mapping.memory)
    end = weakref.finalize(view, _give_back, mapping)
    end.atexit = False
    block = torch.frombuffer(view, dtype=torch.uint8, count=nbytes)
    fill(block)
    if pin and not mapping.registered:
        end.detach()
        weakref.finalize(view, _give_back, _registered(mapping)).atexit = False
    return block


def _allocated(nbytes: int, pin: bool) -> torch.Tensor:
    if pin:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _warn(error)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _mapped(nbytes: int) -> _Mapping:
    # Private rather than shared: shared memory is faulted in more slowly, and has no huge pages by default.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, nbytes, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return _Mapping(memory, torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), False)


def _registered(mapping: _Mapping) -> _Mapping:
    try:
        status = torch.cuda.cudart().cudaHostRegister(mapping.address, len(mapping.memory), _PORTABLE)
    except RuntimeError as error:
        _warn(error)
        return mapping
    if int(status) != 0:
        _forget_error()
        _warn(f"cudaHostRegister failed: {status}")
        return mapping
    if sys.platform == "linux":
        # Else, after a fork, what this process writes next may go to copies of its pages, while the device goes on
        # reading the old ones, with another adapter in them. A child, which cannot use CUDA, gets pages of its own.
        with suppress(OSError):
            mapping.memory.madvise(_WIPE_ON_FORK)
    return mapping._replace(registered=True)


def _forget_error() -> None:
    """CUDA keeps the last error of a thread, and torch's next launch there would raise it, in a place that has nothing
    to do with it. So one is made here."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _warn(error: object) -> None:
    logger.warning_once(
        "Host memory for adapters could not be pinned; pageable memory is used instead, from which copies into slots "
        f"are slower ({str(error).splitlines()[0]})."
    )


def _taken(nbytes: int, pin: bool) -> _Mapping | None:
    """A mapping that was given back and fits."""
    for _ in range(len(_spare)):
        try:
            mapping = _spare.popleft()
        except IndexError:
            return None
        if mapping.registered <= pin and nbytes <= len(mapping.memory) <= _SLACK * nbytes:
            return mapping
        _spare.append(mapping)
    return None


def _give_back(mapping: _Mapping) -> None:
    _spare.append(mapping)
    while sum(len(kept.memory) for kept in tuple(_spare)) > _KEPT:
        try:
            oldest = _spare.popleft()
        except IndexError:
            return
        if oldest.registered:
            torch.cuda.cudart().cudaHostUnregister(oldest.address)
