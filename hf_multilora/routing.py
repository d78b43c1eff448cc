"""The map row -> slot of one forward, as the wrappers read it.

`Routing` belongs to one model and holds the `RowState` that is in force; the model's lock spans each forward, so that
wrappers read it without a lock of their own. Compiled forwards cannot take a new tensor at each call: they read
`Routing.static`, one buffer with a fixed address that `trace` fills outside the graph. Whether they may is a matter of
their thread (`Force`), which graphs are guarded by: a compiled call takes no lock and runs no Python of ours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .errors import RoutingError
from .kernels.segments import TILE, table_size, tile_count
from .rows import RowState, tabled

SAVED = (
    "an adapter of this batch is an aLoRA in its prompt, or saves whole modules, which compiled forwards do not serve."
)


class Idle:
    """Stands where no forward is running. A layer that is called all the same asks for the rows of its caller.

    Args:
        serve: called with a function and the base's output; runs the function under the rows of the caller's call, or
            returns the base's output where the caller has none.
    """

    plain = False  # as a RowState's: there are no deltas to add at once

    def __init__(self, serve: Callable[[Callable[[], torch.Tensor], torch.Tensor, str], torch.Tensor]) -> None:
        self.serve = serve


class Force:
    """What compiled forwards of one thread run under.

    Attributes:
        inside: whether the thread is in a forward or in a `use` block; else it names no rows.
        way: where its rows come from, "forward" or "block"; empty where they are all the base. Their slots are in
            `Routing.static`.
        refusal: why they cannot be served; empty where they can.
    """

    def __init__(self) -> None:
        self.inside = False
        self.way = ""
        self.refusal = ""


class _Threads(threading.local):
    def __init__(self) -> None:
        self.force = Force()


def refuse(message: str) -> None:
    """Raise from a compiled forward, whether or not its graph may break.

    What is raised while a graph is traced lets the compiler run the whole frame uncompiled, for good.
    """
    torch._dynamo.graph_break(msg=message)
    raise RoutingError(message)


class Routing:
    """What the wrappers of one model read.

    Args:
        device: where the arena lies.
        adapters: number of slots.
        capacity: rows that compiled forwards have room for.

    Attributes:
        static: the slots of compiled forwards, as `RowState.tensor`, at a fixed address.
        state: the rows of the forward that is running, None where they are all the base; an `Idle` between forwards.
        tokens: tokens of each row in that forward, 0 where they are not known.
        default: whether there is a default adapter.
        compiled: whether any compiled forward reads `static`.
        on_trace: called when a compiled forward of the calling thread is traced, before it reads anything here.
        overlap: whether the forward that is running is being captured: layers then start their adapters' part beside
            their own.
        open: outputs of siblings (`layers.siblings.Stash`) that wait to be taken.
        vectors: whether slots may hold gains or shifts, which compiled forwards then look for.
        rare: the same for what adapters seldom train: embeddings, the output head, experts, routers.
    """

    def __init__(self, device: torch.device, adapters: int, capacity: int = 1024) -> None:
        self.adapters = adapters
        self.overlap = False
        self.vectors = self.rare = False
        self.open: Any = None
        self.state: RowState | Idle | None = None
        self.tokens = 0
        self.default = False
        self.compiled = False
        self.on_trace: Callable[[], None] | None = None
        self._threads = _Threads()
        self.rows = 1
        self.uniform = False
        self._allocate(device, capacity)

    def _allocate(self, device: torch.device, capacity: int) -> None:
        # Under inference_mode it would become an inference tensor, which nobody may fill outside of it.
        self.capacity = capacity
        shape = (1, table_size(capacity, self.adapters)) if tabled(device) else (capacity,)
        with torch.inference_mode(False):
            self.static = torch.full(shape, -1, dtype=torch.int32, device=device)
            self._all_rows = torch.arange(TILE * -(-capacity // TILE), dtype=torch.int32, device=device)
        torch._dynamo.mark_static_address(self.static)
        self._in_static: RowState | None = None
        self._expect(0, capacity)

    @property
    def force(self) -> Force:
        """The calling thread's."""
        return self._threads.force

    def _expect(self, least: int, most: int) -> None:
        # Numbers that graphs compare with but are not made anew for: sizes of a tensor, where 0 and 1 were constants.
        with torch.inference_mode(False):
            self._span = torch.empty(1).expand(least + 2, most + 2)
        torch._dynamo.mark_dynamic(self._span, [0, 1])

    def to(self, device: torch.device) -> None:
        self._allocate(device, self.capacity)

    def publish(self, state: RowState | Idle | None, tokens: int = 0) -> None:
        """Put a state in force."""
        if self.open is not None:
            self.open.drop()
        self.state = state
        self.tokens = tokens

    def trace(self, state: RowState | None, force: Force, way: str, refusal: str = "", fill: bool = True) -> None:
        """Let compiled forwards of a thread run under a state; to be called outside of the graph.

        Args:
            way: "forward" or "block"; empty where the thread is in none.
            refusal: why the state cannot be served there, whatever it says itself.
            fill: whether `static` is the thread's to fill: it holds the model's lock.
        """
        plain = state is None or not (state.saved or state.starts is not None)
        force.refusal = "" if state is None else refusal or ("" if plain else SAVED)
        force.inside = bool(way)
        force.way = way if state is not None else ""
        if state is None or not (fill and self.compiled):
            return
        self.uniform = state.uniform
        if not state.uniform:  # one id serves any batch; `rows` stays, for graphs that depend on it
            self.rows = state.rows
        if state is self._in_static:
            return
        if state.rows > self.capacity:
            self._allocate(self.static.device, 2 * state.rows)
        if state.uniform:
            self._expect(0, self.capacity)
        else:
            self._expect(state.rows, state.rows)
        if self.static.is_cuda:
            state.follow(torch.cuda.current_stream(self.static.device))
        self._fill(self.static.view(-1), state)
        self._in_static = state

    def _fill(self, static: torch.Tensor, state: RowState) -> None:
        own, rows, capacity = state.tensor.view(-1), state.rows, self.capacity
        tables, room = tabled(static.device), tile_count(capacity, self.adapters)
        tile_rows = static[capacity + room :]
        if state.uniform:  # one slot for as many rows as a batch may have
            tiles = -(-capacity // TILE)
            static[:capacity].copy_(own[:1].expand(capacity))
            if tables:
                static[capacity : capacity + tiles].copy_(own[:1].expand(tiles))
                tile_rows[: TILE * tiles].copy_(self._all_rows)
                tile_rows[TILE * tiles :].fill_(-1)
            return
        static[:rows].copy_(own[:rows])
        static[rows:capacity].fill_(-1)  # what earlier, larger batches have left
        if tables:
            tiles = tile_count(rows, self.adapters)
            static[capacity : capacity + tiles].copy_(own[rows : rows + tiles])
            static[capacity + tiles : capacity + room].fill_(-1)
            tile_rows[: TILE * tiles].copy_(own[rows + tiles :])
            tile_rows[TILE * tiles :].fill_(-1)

    @torch._dynamo.assume_constant_result
    def _traced(self) -> bool:
        """Runs as it stands while a graph is made; no part of the graph."""
        if self.on_trace is not None:
            self.on_trace()
        return True

    def serving(self, where: str, scattered: str = "") -> bool:
        """Whether compiled forwards of this thread add deltas, for the slots in `static`; called in a graph.

        Args:
            scattered: why the layer does not see rows of the batch first; empty where it does.

        Raises:
            RoutingError: the thread's rows cannot be served by a compiled forward, or not by this layer.
        """
        self._traced()
        force = self._threads.force
        if not force.way:
            if self.default and not force.inside:
                refuse(
                    f"{where}: compiled forwards do not know the default adapter. Put `with "
                    "model.multilora.use(name):` around the compiled call, or use(None) for the base model."
                )
            return False
        if force.refusal:
            refuse(f"{where}: {force.refusal}")
        if scattered and not self.uniform:
            refuse(
                f"{where} does not see rows of the batch first ({scattered}). It can serve one adapter at a time: "
                "pass one id (a string) for all rows."
            )
        return True

    def compiled_rows(self, shape: torch.Size, flat: bool, where: str) -> int:
        """Rows that an input of this shape holds, for a compiled forward; their slots are the first ones of `static`.

        A graph must not depend on how many ids there are, or on whether one id stands for all rows: it would be made
        anew for each. So `[rows, ...]` is taken as it comes if their number is in `_span`, which is checked at each
        call, before the graph runs.

        Raises:
            RoutingError: not as many rows as ids, or a flattened batch that `rows` does not divide.
        """
        first = shape[0]
        if not flat:
            if self._span.shape[0] <= first + 2 <= self._span.shape[1]:
                return first
        elif first % self.rows == 0:
            return self.rows
        elif self.uniform:
            return 1
        if self.uniform:
            refuse(f"{where}: compiled forwards serve up to {self.capacity} rows.")
        refuse(f"{where}: the first dimension of its input does not count the {self.rows} rows of adapter_ids.")
        return 0
