"""The rows of one batch: which slot each of them uses, and what the adapters in those slots replace."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import RoutingError
from .kernels.segments import row_table


def tabled(device: torch.device) -> bool:
    """Whether the kernels of this device read row tables."""
    return torch.device(device).type == "cuda"


@dataclass(frozen=True)
class Saved:
    """What one resident adapter replaces of one module.

    Attributes:
        slot: the adapter's slot.
        parameters: name in the module -> the adapter's own tensor (a view of the arena).
        tokens: of an embedding or a head, ids `[n]` whose rows are replaced and those rows `[n, width]`.
    """

    slot: int
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tokens: tuple[torch.Tensor, torch.Tensor] | None = None


class RowState:
    """Slots of the rows of one batch.

    Args:
        slots: slot of each row, -1 for the base model.
        device: where the arena lies.
        touched: sites that any adapter of these rows trained; all other wrappers skip their delta.
        uniform: every row names the same adapter, so that a batch of any size is served (what `set_adapter` or one id
            for all rows asks for).
        saved: module path -> what the adapters of these rows replace there.
        adapters: number of slots.

    Attributes:
        tensor: int32 on the device: a row table for the kernels (`kernels.segments`) on CUDA, else the slots `[rows]`.
        plain: deltas are all there is: nothing is saved, and no row begins late.
        same: all rows have one slot, whether by one id or by a list of equal ones.
        starts: int32 `[rows]`, the token of this forward from which each row's adapter is active; None: the first.
    """

    packed = False  # whether the rows are the tokens of one long row (`packed.PackedState`)

    __slots__ = (
        "_filled", "_on", "_streams", "adapters", "memo", "plain", "rows", "same", "saved",
        "slots", "starts", "tensor", "tokens", "touched", "uniform",
    )  # fmt: skip

    def __init__(
        self,
        slots: tuple[int, ...],
        device: torch.device,
        touched: Collection[int],
        uniform: bool = False,
        saved: Mapping[str, Sequence[Saved]] | None = None,
        adapters: int = 0,
    ) -> None:
        self.slots = slots
        self.adapters = adapters
        self.rows = len(slots)
        self.touched = touched
        self.uniform = uniform
        self.same = len(set(slots)) <= 1
        self.saved = saved or {}
        self.plain = not self.saved
        self.starts: torch.Tensor | None = None
        self.tokens = 0
        self._streams = [torch.cuda.current_stream(device)] if torch.device(device).type == "cuda" else []
        values = [row_table(slots, adapters)] if tabled(device) and adapters else slots
        self.tensor = torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)
        self.memo: dict[Any, Any] = {}  # kernels keep here what follows from slots alone (the CPU path's indices)
        self._filled: dict[int, RowState] = {}
        self._on: dict[int, RowState] = {}

    def repeated(self, times: int) -> RowState:
        """Each row `times` times in a row, as `repeat_interleave` does for beams and return sequences."""
        return self.with_slots(tuple(slot for slot in self.slots for _ in range(times)))

    def with_slots(self, slots: tuple[int, ...]) -> RowState:
        """The same adapters over other rows."""
        return RowState(slots, self.tensor.device, self.touched, self.uniform, self.saved, self.adapters)

    def on(self, place: int, device: torch.device) -> RowState:
        """The same rows for layers on another device; made once for each place where there are any."""
        state = self._on.get(place)
        if state is None:
            state = self._on[place] = RowState(
                self.slots, device, self.touched, self.uniform, self.saved, self.adapters
            )
            if self.starts is not None:
                state.plain, state.tokens = False, self.tokens
                state.starts = self.starts.to(device, non_blocking=True)
        return state

    def starting(self, starts: Sequence[int], tokens: int) -> RowState:
        """The same rows, each active from its own one of the next forward's `tokens` tokens on."""
        state = copy.copy(self)
        state._filled, state._on = {}, {}
        state.plain = False
        if self._streams:
            state._streams = [torch.cuda.current_stream(self.tensor.device)]
            state._join(self._streams[0], state._streams[0])
        state.tokens = tokens
        state.starts = torch.tensor(starts, dtype=torch.int32).to(self.tensor.device, non_blocking=True)
        return state

    def follow(self, stream: torch.cuda.Stream) -> None:
        """A forward on `stream` is about to read these tensors, which were perhaps made on another one."""
        for state in (self, *self._filled.values()):
            if stream not in state._streams:
                state._join(state._streams[0], stream)
                state._streams.append(stream)

    def _join(self, made_on: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
        if stream == made_on:
            return
        stream.wait_stream(made_on)
        for tensor in (self.tensor, self.starts):
            if tensor is not None:
                tensor.record_stream(stream)  # its memory is not given to others before `stream` is done with it

    def captured(self, touched: Collection[int]) -> RowState:
        """A state of as many rows for a forward that is recorded once and runs again for any adapters.

        Its `tensor` is a buffer of its own, to be filled before each run; nothing else of it tells one mix from
        another, so that nothing of this one is recorded.

        Args:
            touched: the sites of all adapters that may ever run.
        """
        state = copy.copy(self)
        state.slots, state.touched, state.uniform, state.same = (-1,) * self.rows, touched, False, False
        state.memo, state._filled = {}, {}
        state._streams = list(self._streams)
        with torch.inference_mode(False):
            state.tensor = torch.empty_like(self.tensor)
        return state

    def for_layer(self, behind: bool) -> RowState:
        """The state of a layer; `behind`: of those behind the place where a model leaves out tokens without logits."""
        return self

    def for_rows(self, rows: int) -> RowState:
        """The state for a batch of `rows` rows: itself, or one adapter over all of them."""
        return self if rows == self.rows else self.for_shape(torch.Size((rows,)), False, 0, "the batch")

    def starts_for(self, tokens: int) -> torch.Tensor:
        """`starts` as a layer sees them that gets only the last `tokens` tokens of each row (a head often does)."""
        assert self.starts is not None
        return self.starts if tokens == self.tokens else (self.starts - (self.tokens - tokens)).clamp(min=0)

    def for_shape(self, shape: torch.Size, flat: bool, tokens: int, where: str) -> RowState:
        """The state whose rows fit an input of this shape.

        An input `[rows, ...]` is this state's, and so is `[rows * tokens, H]` where `flat` says that the layer may see
        a batch flattened row by row; where all rows name one adapter, any other leading size is served as well.

        Args:
            tokens: tokens of each row in this forward, 0 where they are not known.

        Raises:
            RoutingError: the shape cannot be mapped to the rows of the batch.
        """
        first = shape[0]
        if first == self.rows or (flat and (first == self.rows * tokens if tokens else first % self.rows == 0)):
            return self
        if self.same:
            state = self._filled.get(first)
            if state is None:
                state = self.with_slots((self.slots[0],) * first)
                if self.starts is not None:
                    state.starts, state.tokens = self.starts[:1].expand(first).contiguous(), self.tokens
                self._filled[first] = state
            return state
        raise RoutingError(
            f"{where}: an input of shape {tuple(shape)} does not show which of the {self.rows} rows it belongs to. "
            "This layer can serve one adapter at a time: pass one id (a string) for all rows."
        )
