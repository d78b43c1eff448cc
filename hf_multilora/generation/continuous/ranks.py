"""Ranks of a tensor-parallel model that batch together.

transformers runs a loop with a scheduler on every rank. In front of each step rank 0 hands on what has come in, with
one small reduction over the CPU; from there on each rank decides for itself. So what decides must follow from what all
ranks see, and never from a rank's own clock, threads or files. That it does is checked: the same reduction follows
once more when a batch is ready, with a hash of it, so that a rank which went another way, or failed, is an error on
all of them before its forward would be waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import AdapterNotFoundError, ModelError
from ...parallel import number_of
from .requests import carrier_of

_HARD_STOP = 2  # transformers' word for a loop that ends at once


class Ranks:
    """The other ranks, as one manager's generation thread sees them.

    Args:
        helper: transformers' DistributedHelper, of more than one rank.

    Attributes:
        failed: this rank's loop is ending with an error, which the others have yet to hear of.
    """

    def __init__(self, helper: Any) -> None:
        self._helper = helper
        self.begin()

    def begin(self) -> None:
        """A loop begins."""
        self.failed = False
        self._over = False  # some rank has ended its loop at once: nobody waits for anybody any more

    def exchange(self, what: str, facts: Sequence[Any], *state: int) -> list[int]:
        """One reduction over the ranks; all of them call it in the same order.

        Args:
            facts: the same on every rank.
            state: transformers' numbers, up to three: requests that have come in, how soon to stop, whether to pause.

        Returns:
            the largest of each of the three over the ranks.

        Raises:
            ModelError: facts differ, or another rank has failed, or does not answer.
        """
        if self._over:
            return [0, _HARD_STOP, 0]
        number = number_of(what, *facts)
        told = [*state, 0, 0, 0][:3] + [int(self.failed), number, -number]
        values = torch.tensor(told)
        try:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._helper.cpu_comm_group)
        except RuntimeError as error:
            self._over = True
            if self.failed:  # there is nobody left to tell
                return [0, _HARD_STOP, 0]
            raise ModelError(f"A rank of this tensor-parallel model has ended, or does not answer: {error}") from error
        *found, failed, high, low = values.tolist()
        self._over = bool(failed) or found[1] == _HARD_STOP or high != -low
        if failed and not self.failed:
            raise ModelError("Another rank of this tensor-parallel model has failed; what it logged says why.")
        if high != -low and not failed and found[1] != _HARD_STOP:
            raise ModelError(
                f"The ranks of this tensor-parallel model do not agree about {what}: each must have the same adapters "
                f"and options. Here it is {str(facts)[:2000]}."
            )
        return found

    def agree(self, batch: Sequence[Any], waiting: int) -> None:
        """A batch is ready (or none is): all ranks have the same requests, tokens and weights in it.

        Raises:
            ModelError: see `exchange`.
        """
        self.exchange("the next batch", [waiting, *map(_fact, batch)])

    def check_loaded(self, missing: Sequence[str]) -> None:
        """Raises: AdapterNotFoundError where a request names what would have to be loaded first."""
        if missing:
            raise AdapterNotFoundError(
                f"No adapter {missing[0]!r} is registered, and ranks that share a model load none while they batch: "
                "each would be done at its own time. Load it on every rank first (load_adapter), inside of "
                "manager.pause() if the manager runs; generate_batch loads what its ids name before it begins."
            )

    def join_flags(self, flags: torch.Tensor) -> None:
        """Flags of one rank's part are everybody's; on the current stream."""
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._helper.tp_group)


def _fact(future: Any) -> tuple[Any, ...]:
    """What the ranks must agree about in a request of a batch; the tokens in its cache say how much of its prompt was
    found there."""
    state, carrier = future.state, carrier_of(future.state)
    seat = None if carrier is None else carrier.seat
    of_adapter = () if carrier is None or seat is None else (carrier.key, seat.identity, carrier.start)
    return (state.request_id, state.position_offset, future.query_length, future.has_new_token, *of_adapter)


@functools.cache
def with_ranks(own: Any) -> Any:
    class Helper(own):
        """In front of DistributedHelper."""

        _ranks: Ranks

        def tp_all_reduce_state(
            self, payload_size: int, stop_status: int, pause_requested: int = 0
        ) -> tuple[int, ...]:
            found = self._ranks.exchange("the step", (), payload_size, stop_status, pause_requested)
            return tuple(found[: len(self._cpu_int_acc)])  # transformers 5.17 knows no pause

    return Helper
