"""The map row -> slot where a model computes on several devices: a `Routing` for each, all of one forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .routing import Force, Idle, Routing
from .rows import RowState

NOT_COMPILED = (
    "the model computes on several devices, over which compiled forwards do not serve adapters. Call it uncompiled."
)


class SpreadRouting(Routing):
    """What the wrappers on the first device read; `others` are for those on the other ones.

    Each row's slot is copied to a device once for all forwards of a batch, and layers read it there as they would
    alone.

    Args:
        devices: of each group of sites.
        adapters: number of slots.
    """

    def __init__(self, devices: Sequence[torch.device], adapters: int) -> None:
        super().__init__(devices[0], adapters)
        self.others = [Routing(device, adapters, capacity=1) for device in devices[1:]]
        self._streams: list[torch.cuda.Stream | None] = [None] * len(self.others)
        for other in self.others:
            other._threads = self._threads

    def publish(self, state: RowState | Idle | None, tokens: int = 0) -> None:
        super().publish(state, tokens)
        for place, other in enumerate(self.others):
            if isinstance(state, RowState):
                device = other.static.device
                twin = state.on(place, device)
                if device.type == "cuda":
                    self._order(place, twin, torch.cuda.current_stream(device))
                other.publish(twin, tokens)
            else:
                other.publish(state, tokens)

    def _order(self, place: int, state: RowState, stream: torch.cuda.Stream) -> None:
        """Forwards on different streams of a device share its workspace: the later one waits for the earlier."""
        last = self._streams[place]
        if last is not None and last != stream:
            stream.wait_stream(last)
        self._streams[place] = stream
        state.follow(stream)

    def trace(self, state: RowState | None, force: Force, way: str, refusal: str = "", fill: bool = True) -> None:
        super().trace(state, force, way, refusal or NOT_COMPILED, fill=False)


def routings_of(routing: Routing) -> list[Routing]:
    """By group of sites."""
    return [routing, *routing.others] if isinstance(routing, SpreadRouting) else [routing]
