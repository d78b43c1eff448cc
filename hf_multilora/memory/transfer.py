"""Copies of host blocks into slots: one each, on a stream of their own, ordered by events.

A copy waits for the last forwards that read the slot, and whoever uses the slot waits for the copy. Nothing here waits
on the host. On devices without CUDA streams a copy is a plain one.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from contextlib import suppress

import torch

from .arena import Arena
from .pack import PackedAdapter

_PENDING = 16


class Transfer:
    """The copies into one arena; `before` passes on what it has counted.

    Args:
        group: of the sites that the arena is for: it is given their part of each block.

    Attributes:
        ms: milliseconds that finished copies took (on CUDA measured on the device); `collect` brings it up to date.
        copies: their number, unfinished ones included.
    """

    def __init__(self, arena: Arena, before: Transfer | None = None, group: int = 0) -> None:
        self.arena, self.group = arena, group
        self.cuda = arena.device.type == "cuda"
        self.ms: float = before.ms if before else 0.0
        self.copies: int = before.copies if before else 0
        # Blocks are kept until their copies have ended, whatever becomes of the adapter meanwhile.
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event, PackedAdapter]] = (
            before._pending if before else []
        )
        self._known: set[int] = set()
        if self.cuda:
            self.stream = torch.cuda.Stream(arena.device)
            self._know(self.stream)

    # The arena is written in place: under inference_mode that is allowed for ordinary tensors, in autograd it is not.
    @torch.no_grad()
    def start(
        self, slot: int, packed: PackedAdapter, after: Iterable[torch.cuda.Event] = ()
    ) -> torch.cuda.Event | None:
        """Copy a block to the start of a slot, after the given events. Returns the copy's own event (CUDA)."""
        block = packed.part(self.group)
        target = self.arena.slot(slot)[: block.numel()]
        self.copies += 1
        if not self.cuda:
            began = time.perf_counter()
            target.copy_(block)
            self.ms += (time.perf_counter() - began) * 1e3
            return None
        if len(self._pending) >= _PENDING:
            self.collect()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self.arena.device), torch.cuda.stream(self.stream):
            for event in after:
                self.stream.wait_event(event)
            begin.record(self.stream)
            target.copy_(block, non_blocking=True)
            end.record(self.stream)
        self._pending.append((begin, end, packed))
        return end

    def wait(
        self,
        events: Iterable[torch.cuda.Event | None],
        waited: dict[Hashable, torch.cuda.Stream],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Let `stream` (the current one by default) wait for copies, unless it is one of those in `waited`."""
        if not self.cuda:
            return
        stream = stream or torch.cuda.current_stream(self.arena.device)
        if stream.cuda_stream in waited:
            return
        self.follow(stream, events)
        waited[stream.cuda_stream] = stream

    def follow(self, stream: torch.cuda.Stream, events: Iterable[torch.cuda.Event | None]) -> None:
        """Let a stream, which uses the arena from now on, wait for copies."""
        self._know(stream)
        for event in events:
            if event is not None:
                stream.wait_event(event)

    def mark(self, streams: Iterable[torch.cuda.Stream] = ()) -> dict[Hashable, torch.cuda.Event]:
        """Record where the current stream, and others, are now: stream's number -> event. Empty without CUDA."""
        if not self.cuda:
            return {}
        marks: dict[Hashable, torch.cuda.Event] = {}
        for stream in (torch.cuda.current_stream(self.arena.device), *streams):
            if stream.cuda_stream not in marks:
                marks[stream.cuda_stream] = stream.record_event()
        return marks

    def collect(self) -> None:
        """Account for finished copies and let go of their blocks."""
        unfinished = []
        for begin, end, packed in self._pending:
            if end.query():
                self.ms += begin.elapsed_time(end)
            else:
                unfinished.append((begin, end, packed))
        self._pending = unfinished

    def __del__(self) -> None:
        # A block that is unmapped under its copy would be a fault on the device.
        with suppress(Exception):
            for _, end, _ in self._pending:
                end.synchronize()

    def _know(self, stream: torch.cuda.Stream) -> None:
        # Tells the allocator who uses the arena, so that its memory is not given to others before they are done.
        if stream.cuda_stream not in self._known:
            self._known.add(stream.cuda_stream)
            self.arena.storage.record_stream(stream)
