"""Arena: one flat device buffer that holds every slot, or the part of every slot that one device is for."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import ConfigError, SlotError
from .extras import SavedTensor
from .layout import META, SLOT_ALIGN, Layout, align


def arena_bytes(layout: Layout, max_loras: int, slot_bytes: int, dtype: torch.dtype) -> int:
    """Bytes that an Arena of these options allocates, the zeros at its end included."""
    # The kernels gather whole rows of up to max_dim elements from the zeros.
    return max_loras * align(slot_bytes, SLOT_ALIGN) + align(layout.max_dim * dtype.itemsize, SLOT_ALIGN)


class Arena:
    """`max_loras` slots of `slot_bytes` bytes each, then zeros, in one zero-initialised uint8 tensor.

    Addresses stay as they are until `to` is called. Slot s begins at element `s * slot_elems` of `data`.

    Args:
        layout: the model's sites.
        max_loras: number of slots.
        slot_bytes: bytes of one slot (here), rounded up to a multiple of 256.
        device, dtype: of the slots' factors.

    Attributes:
        storage: uint8 [max_loras * slot_bytes + tail].
        data: the same bytes in the lora dtype, flat.
        floats: the same bytes in float32, flat, the tail included; gain_off and shift_off count in it from the slot's
            first element, `s * slot_bytes // 4`.
        meta: int64 [max_loras, slot_bytes // 8]; `meta[s, 5 * site + i]` is (a_off, b_off, rank, gain_off,
            shift_off)[i] of that site; any other tables of the header follow (`layout`).
        tail: the zeros at the end; at least `layout.max_dim` elements.
        zero_off: index in `data` of the first element of the zeros.
        slot_elems: elements of one slot.
        vectors: whether an adapter with gains or shifts has ever been loaded.
        rare_sites: sites of what adapters seldom train: embeddings, the output head, experts, routers.
        rare: whether an adapter that trained one of these has ever been loaded.

    Raises:
        ConfigError: `slot_bytes` does not even hold the header.
        SlotError: the device has no room for it.
    """

    storage: torch.Tensor
    data: torch.Tensor
    floats: torch.Tensor
    meta: torch.Tensor
    tail: torch.Tensor

    def __init__(
        self, layout: Layout, max_loras: int, slot_bytes: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self.layout = layout
        self.max_loras = max_loras
        self.vectors = self.rare = False
        self.rare_sites: frozenset[int] = frozenset()
        self._allocate(align(slot_bytes, SLOT_ALIGN), torch.device(device), dtype)

    def expect(self, sites: Iterable[int], vectors: bool) -> None:
        """An adapter may come that trained these sites, and whether it has gains or shifts: graphs are made for it."""
        self.vectors = self.vectors or vectors
        self.rare = self.rare or not self.rare_sites.isdisjoint(sites)

    def _allocate(self, slot_bytes: int, device: torch.device, dtype: torch.dtype) -> None:
        if slot_bytes <= self.layout.header_bytes:
            raise ConfigError(
                f"slot_bytes={slot_bytes} leaves no room for factors: the table of this model's {self.layout.n_sites} "
                f"sites alone takes {self.layout.header_bytes} bytes. Raise slot_bytes, or leave it None."
            )
        nbytes = arena_bytes(self.layout, self.max_loras, slot_bytes, dtype)
        try:
            # Under inference_mode these would become inference tensors, which nobody may write outside of it.
            with torch.inference_mode(False):
                storage = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
                raise
            raise SlotError(
                f"No room on {device} for {self.max_loras} slots of {slot_bytes} bytes ({nbytes} in all). Lower "
                f"max_loras, max_lora_rank or slot_bytes, or narrow target_modules. ({str(error).splitlines()[0]})"
            ) from error
        slots = self.max_loras * slot_bytes
        with torch.inference_mode(False):
            data, floats = storage.view(dtype), storage.view(torch.float32)
            meta = storage[:slots].view(torch.int64).view(self.max_loras, slot_bytes // 8)
            tail = data[slots // dtype.itemsize :]
        if storage.is_cuda:
            # Copies and forwards come on other streams: none may see memory that is not zeroed yet.
            torch.cuda.current_stream(storage.device).synchronize()
        self.storage, self.data, self.floats, self.meta, self.tail = storage, data, floats, meta, tail
        self.device, self.dtype = storage.device, dtype
        self.slot_bytes, self.slot_elems = slot_bytes, slot_bytes // dtype.itemsize
        self.zero_off = slots // dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.storage.numel()

    def slot(self, index: int) -> torch.Tensor:
        """The bytes of one slot, uint8 [slot_bytes]."""
        return self.storage[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def view(self, slot: int, saved: SavedTensor) -> torch.Tensor:
        """A saved tensor of the adapter in a slot, as a view; the slot's lease says what `saved` may be."""
        return saved.view(self.slot(slot))

    def header(self, index: int) -> torch.Tensor:
        """The table of one slot, int64 [n_sites, 5] = (a_off, b_off, rank, gain_off, shift_off)."""
        return self.meta[index, : META * self.layout.n_sites].view(self.layout.n_sites, META)

    def to(self, device: torch.device | str, dtype: torch.dtype, slot_bytes: int | None = None) -> Arena:
        """Allocate anew, empty, on another device or in another dtype; every address changes.

        `slot_bytes` None keeps the number of bytes. On an error the arena stays as it was. Returns self.
        """
        self._allocate(align(slot_bytes or self.slot_bytes, SLOT_ALIGN), torch.device(device), dtype)
        return self
