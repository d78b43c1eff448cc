"""Copies where slots have parts on several devices: each device's part by a stream of its own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from .arena import Arena
from .pack import PackedAdapter
from .transfer import Transfer


class SpreadTransfer:
    """What `Transfer` is for one arena, for the arenas of all groups. What a copy returns is one event for each."""

    def __init__(self, arenas: Sequence[Arena], before: SpreadTransfer | None = None) -> None:
        olds: Sequence[Transfer | None] = before.parts if before else [None] * len(arenas)
        self.parts: list[Transfer] = [
            Transfer(arena, old, group) for group, (arena, old) in enumerate(zip(arenas, olds, strict=True))
        ]
        self.cuda = any(part.cuda for part in self.parts)

    @property
    def ms(self) -> float:
        return sum(part.ms for part in self.parts)

    @property
    def copies(self) -> int:
        return self.parts[0].copies

    def start(self, slot: int, packed: PackedAdapter, after: Iterable[torch.cuda.Event] = ()) -> Any:
        events = list(after)
        return tuple([part.start(slot, packed, events) for part in self.parts])

    def wait(
        self, events: Iterable[Any], waited: dict[Hashable, torch.cuda.Stream], stream: torch.cuda.Stream | None = None
    ) -> None:
        """Let each device's current stream (`stream` on its own device) wait for the copies to that device."""
        if not self.cuda:
            return
        copies = [event for event in events if event is not None]
        for group, part in enumerate(self.parts):
            if not part.cuda:
                continue
            here = stream if stream is not None and stream.device == part.arena.device else None
            here = here or torch.cuda.current_stream(part.arena.device)
            if (group, here.cuda_stream) not in waited:
                part.follow(here, [copy[group] for copy in copies])
                waited[group, here.cuda_stream] = here

    def mark(self, streams: Iterable[torch.cuda.Stream] = ()) -> dict[Hashable, torch.cuda.Event]:
        marks: dict[Hashable, torch.cuda.Event] = {}
        current = [torch.cuda.current_stream(part.arena.device) for part in self.parts if part.cuda]
        for stream in (*current, *streams):
            where = stream.device_index, stream.cuda_stream
            if where not in marks:
                marks[where] = stream.record_event()
        return marks

    def collect(self) -> None:
        for part in self.parts:
            part.collect()
