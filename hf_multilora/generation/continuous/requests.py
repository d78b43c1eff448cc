"""What a request carries: its id, and once it runs, its seat."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ..alora import last_occurrence
from ..ids import Key

if TYPE_CHECKING:
    from .seats import Seat

KEYWORD = "multilora"  # where a request's own values hold its carrier
_arrivals = itertools.count()


class Carrier:
    """One for each `add_request`; forks, resets and offloads of the request share it.

    Args:
        key: what `adapter_id` names; None: the base.
        loading: what loads adapters that were not registered.

    Attributes:
        seat: the slot that the request and its forks hold from their first step to their last.
        start: position from which its adapter is active; None: nowhere (an aLoRA that is not invoked).
        arrived: place in the order of arrival.
        passed: later requests that went first while this one waited for a slot.
    """

    def __init__(self, key: Key | None, loading: Sequence[Future[Any]] = (), arrived: int | None = None) -> None:
        self.key = key
        self.loading = list(loading)
        self.seat: Seat | None = None
        self.start: int | None = 0
        self.arrived = next(_arrivals) if arrived is None else arrived
        self.passed = 0

    def invoke(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        self.start = last_occurrence(prompt, tokens) if tokens else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Carrier:
        return self

    def __reduce__(self) -> Any:
        """On its way to other ranks, which have to see the same order."""
        return Carrier, (self.key, (), self.arrived)


class Prompt(list[int]):
    """Token ids with the key of their adapter; what transformers passes from one function to the next as a list."""

    def __init__(self, tokens: Sequence[int], key: Key | None) -> None:
        super().__init__(tokens)
        self.key = key


def carrier_of(state: Any) -> Carrier | None:
    """The carrier of a request's state; None for warm-ups and requests from elsewhere."""
    found: Carrier | None = state.logit_processor_kwargs.get(KEYWORD)
    return found
