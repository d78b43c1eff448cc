"""The LogitsProcessor in its continuous form: keeps requests inside their adapters' vocabularies, and carries slots.

transformers keeps the values of logits processors in lines of its tensor of small inputs. Its list of them gets a
class that asks for more lines than its processors need, and writes the slots of the batch's tokens there (`table`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from .batching import Batching
from .forwards import Forwards
from .requests import KEYWORD, Carrier, carrier_of
from .sampling import ALL, TopK, needs_of
from .steer import steer

_ALL = 2**31 - 1


def steer_processors(processors: Any, batching: Batching, forwards: Forwards, columns: int) -> None:
    """Steer the list of logits processors, which gets one more.

    Args:
        columns: of the logits, at most.
    """
    others = processors.do_processing
    processors.logits_processor.append(AdapterContinuousLogitsProcessor(batching))
    processors._retrieve_processors_kwargs()
    own = [one for one in processors.logits_processor if isinstance(one, ContinuousBatchingLogitsProcessor)]
    for name in ("tensors_required", "do_processing"):
        del processors.__dict__[name]
    common = {"_batching": batching, "_forwards": forwards}
    steer(processors, _processor_list, **common, _own=own, _others=others, _columns=columns)


@functools.cache
def _processor_list(own: Any) -> Any:
    class ProcessorList(own):
        """In front of ContinuousBatchingLogitsProcessorList: carries the slots in lines of its own."""

        _own: list[ContinuousBatchingLogitsProcessor]  # those with values per request, a line of them each
        _others: bool  # whether there are processors beside ours
        _columns: int

        @property
        def own_lines(self) -> int:
            """Lines of the processors themselves."""
            return len(self._own)

        @property
        def tensors_required(self) -> int:
            return self.own_lines + self._forwards.lines

        @property
        def do_processing(self) -> bool:
            return self._others or self._batching.calls.vocabulary is not None

        def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
            int32_tensor.fill_(-1)
            super().fill_defaults(int32_tensor)

        def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: torch.Tensor) -> torch.Tensor:
            last = [request for request in requests_in_batch if request.has_new_token]
            values = torch.stack([one.prepare_tensor_args(last) for one in self._own])
            arg_storage[: self.own_lines, : len(last)] = values.to(arg_storage.device)  # in one copy
            # how probable a token was is said of what the processors leave
            telling = self._forwards.config.return_logprobs
            self._forwards.needs = ALL if telling else needs_of(self._own, last, self._columns)
            self._forwards.write(requests_in_batch, arg_storage[self.own_lines :])
            return arg_storage

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: torch.Tensor) -> Any:
            forwards, lines = self._forwards, iter(logits_processor_args)
            for one in self.logits_processor:
                values = next(lines) if isinstance(one, ContinuousBatchingLogitsProcessor) else None
                if values is not None and isinstance(one, TopK):
                    forwards.greedy = values[: scores.shape[0]] == 1
                if not forwards.needs.skips(one):
                    scores = one(input_ids, scores) if values is None else one(scores, values)
            return scores

    return ProcessorList


class AdapterContinuousLogitsProcessor(ContinuousBatchingLogitsProcessor):
    """Overwrites the columns beyond each request's own vocabulary with -inf, after all other processors.

    Args:
        batching: of the manager.
    """

    supported_kwargs = {KEYWORD: Carrier}
    ignored_kwargs = ()

    def __init__(self, batching: Batching) -> None:
        self._batching = batching

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.fill_(_ALL)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """int32 `[requests]`: the number of columns that each may use."""
        vocabulary = self._batching.calls.vocabulary
        own = []
        for request in requests_with_new_token:
            carrier = carrier_of(request.state)
            own.append(None if carrier is None or carrier.seat is None else carrier.seat.extras.vocab_size)
        return torch.tensor([_ALL] * len(own) if vocabulary is None else vocabulary.sizes(own), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill(columns >= tensor_arg[: scores.shape[0], None], float("-inf"))
