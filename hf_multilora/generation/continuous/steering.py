"""Steering: transformers' own objects for continuous batching, made to ask `Batching` and `Forwards`.

An object that exists already gets a class that derives from its own, with a few methods in front: nothing of
transformers is patched, and each object's class goes with the object. Methods have the names of transformers' and call
on to them; what they do there is said in `batching` and `forwards`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import UnsupportedAdapterError
from ..capture import no_collection, recover
from .batching import Batching
from .forwards import Forwards
from .requests import carrier_of
from .sampling import ALL
from .steer import steer


def steer_processor(processor: Any, batching: Batching, forwards: Forwards) -> None:
    """Steer a batch processor and all that belongs to it."""
    common = {"_batching": batching, "_forwards": forwards}
    cache, ios = processor.cache, processor.inputs_and_outputs
    steer(processor, _processor, **common)
    steer(processor.scheduler, _scheduler, **common)
    steer(processor.model_runner, _runner, **common)
    steer(ios, _ios, **common, _router=processor.output_router)
    steer(cache, _cache, **common, _state=None)
    if hasattr(cache, "cache_allocators"):
        for allocator in cache.cache_allocators.values():
            steer(allocator, _allocator, _cache=cache)
    else:
        steer(cache._block_manager, _block_manager, _cache=cache)
    device = ios.io_pairs[0].device_io if hasattr(ios, "io_pairs") else ios
    forwards.masked = device.attention_mask is not None
    batching.processor, batching.scheduler = processor, processor.scheduler


@functools.cache
def _processor(own: Any) -> Any:
    class Processor(own):
        """In front of ContinuousBatchProcessor."""

        def prepare_next_batch(self) -> bool:
            batching = self._batching
            batching.sweep()
            batching.batch = ()
            ready = self._prepared()
            if batching.ranks is not None:
                batching.ranks.agree(batching.batch, len(self.scheduler.waiting_requests))
            if not ready or not self._forwards.captured(self.model_runner, self.inputs_and_outputs.use_block_table):
                self.output_router.release()
            return ready

        def _prepared(self) -> bool:
            while True:
                try:
                    return bool(super().prepare_next_batch())
                except RuntimeError as error:  # the cache is full, and nobody can be put off
                    if "can be offloaded" not in str(error) or not self._batching.fail_largest():
                        raise

        def update_batch(self) -> None:
            forking = bool(self.scheduler._requests_to_fork)
            super().update_batch()
            self._batching.traffic.steps += 1
            if forking:
                self._batching.forked()
            self._batching.sweep()

        def reset(self) -> None:
            super().reset()
            self._batching.clear()

        def warmup(self, model: Any) -> None:
            if self._forwards.graphs == "decode":  # its graphs are captured as their sizes come
                return
            self._forwards.needs = ALL
            with self._forwards.rehearsal():
                super().warmup(model)
            super().warmup(model)

    return Processor


@functools.cache
def _scheduler(own: Any) -> Any:
    class Scheduler(own):
        """In front of the scheduler of whatever kind."""

        _requests_to_cancel: Iterable[str]

        def add_waiting_request(self, state: Any) -> None:
            self._batching.check(state)
            super().add_waiting_request(state)
            self._batching.arrived(state)

        def finish_request(self, request_id: str) -> None:
            super().finish_request(request_id)
            self._batching.touched()

        def clear_cancelled_requests(self) -> Any:
            if self._requests_to_cancel:
                self._batching.touched()
            if self._batching.ranks is not None:  # a set of strings has another order in each process
                self._requests_to_cancel = dict.fromkeys(sorted(self._requests_to_cancel))
            return super().clear_cancelled_requests()

        def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
            self._batching.before(token_budget)
            result = super().schedule_batch(token_budget, cache_budget)
            self._batching.after()
            self._batching.batch = result[0] or ()
            self._forwards.decoding = bool(result[0]) and len(result[0]) == result[2]
            return result

        def _get_waiting_candidates(self) -> list[Any]:
            return self._batching.offer(super()._get_waiting_candidates())

        def _infer_request_tokens(self, state: Any, *args: Any) -> Any:
            before, cache = state.position_offset, self.cache
            with cache.writing(state):
                tokens = super()._infer_request_tokens(state, *args)
            if state.position_offset > before:
                self._batching.traffic.shared(state, state.position_offset - before)
            return tokens

    return Scheduler


@functools.cache
def _cache(own: Any) -> Any:
    class Cache(own):
        """In front of PagedAttentionCache: prefixes belong to their adapters, and what is not finite stays outside."""

        _state: Any  # the request whose blocks are looked up or completed

        @contextmanager
        def writing(self, state: Any) -> Iterator[None]:
            self._state = state
            try:
                yield
            finally:
                self._state = None

        def seeded(self, tokens: Any) -> Any:
            return tokens if self._state is None else self._batching.seeded(self._state, tokens)

        def search_prefix_match(self, request_id: str, prompt_ids: Any) -> Any:
            return super().search_prefix_match(request_id, self.seeded(prompt_ids))

        def mark_complete_blocks(self, state: Any, *args: Any) -> None:
            with self.writing(state):
                super().mark_complete_blocks(state, *args)

        def mark_shareable_blocks_as_complete(self, state: Any, *args: Any, **kwargs: Any) -> None:
            """The same in transformers 5.17."""
            with self.writing(state):
                super().mark_shareable_blocks_as_complete(state, *args, **kwargs)

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._forwards.guard(key_states, value_states)
            return super().update(key_states, value_states, *args, **kwargs)

    return Cache


@functools.cache
def _allocator(own: Any) -> Any:
    class Allocator(own):
        """In front of what hashes blocks."""

        _cache: Any

        def mark_complete_blocks(self, request_id: str, token_ids: Any, *args: Any) -> None:
            super().mark_complete_blocks(request_id, self._cache.seeded(token_ids), *args)

    return Allocator


@functools.cache
def _block_manager(own: Any) -> Any:
    class BlockManager(own):
        """The same in transformers 5.17."""

        _cache: Any

        def mark_shareable_blocks_as_complete(self, *, prompt_ids: Any, **kwargs: Any) -> None:
            super().mark_shareable_blocks_as_complete(prompt_ids=self._cache.seeded(prompt_ids), **kwargs)

    return BlockManager


@functools.cache
def _ios(own: Any) -> Any:
    class InputsOutputs(own):
        """In front of the inputs and outputs, synchronous or not."""

        def retrieve_device_outputs(self) -> None:
            self._router.release()  # the device has its work; here the host waits for it
            self._forwards.fetch(self, self._batching.ranks)
            super().retrieve_device_outputs()

        def prepare_batch_update(self) -> Any:
            """What came out of a batch, without the requests that have failed (their values are not finite) or were
            cancelled since the batch was made: their blocks are gone."""
            requests, tokens, logprobs = super().prepare_batch_update()
            for request in self._forwards.poisoned(self, requests):
                state = request.state
                if state.status.name not in ("FINISHED", "FAILED", "PENDING"):
                    self._batching.fail(state, UnsupportedAdapterError(_NOT_FINITE.format(_name(state))))
            lost = [self._batching.lost(request.state) for request in requests]
            if not any(lost):
                return requests, tokens, logprobs
            kept: tuple[list[Any], list[Any], list[Any]] = [], [], []
            at = 0
            for request, gone in zip(requests, lost, strict=True):
                if not gone:
                    kept[0].append(request)
                if request.has_new_token:
                    if not gone:
                        kept[1].append(tokens[at])
                        kept[2].extend(logprobs[at : at + 1] if logprobs is not None else [])
                    at += 1
            return kept[0], kept[1], kept[2] if logprobs is not None else None

    return InputsOutputs


_NOT_FINITE = "{}: the values that it computes for this request are not finite (NaN or infinite)."


def _name(state: Any) -> str:
    carrier = carrier_of(state)
    return "The base model" if carrier is None or carrier.key is None else f"Adapter {carrier.key!r}"


@functools.cache
def _runner(own: Any) -> Any:
    class Runner(own):
        """In front of ModelRunner."""

        @property
        def pad_inputs(self) -> bool:
            return self._forwards.pads(self.__dict__["pad_inputs"])

        def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, *args: Any, **kwargs: Any) -> Any:
            if self._forwards.graphs == "given":
                sizes = super().maybe_pad_inputs(num_q_tokens, max_kv_read, *args, **kwargs)
            elif self.pad_inputs:
                sizes = self._forwards.sizes(num_q_tokens, max_kv_read, self.cache)
            else:
                sizes = num_q_tokens, max_kv_read
            self._forwards.expect(sizes[0], self.pad_inputs)
            return sizes

        def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
            own = self.logit_processor.own_lines
            with self._forwards.running(self, model, batch_data, own):
                super().compute_batch(model, batch_data)

        def _get_forward_fn(self, use_block_table: bool) -> Any:
            function, _ = super()._get_forward_fn(use_block_table)
            return function, self._forwards.captured(self, use_block_table)

        def _capture_graph(self, *args: Any) -> None:
            try:
                with no_collection():  # the memory of a manager that is gone, say, is freed by its last reference
                    super()._capture_graph(*args)
            except Exception as error:
                recover(self.cache.device, self.graph_pool_id)
                # The forward in front of the capture has run, so that the batch is done all the same.
                if self._forwards.graphs == "given":
                    raise
                self._forwards.not_captured(error)

        def _forward_process_and_sample(self, model: Any, batch_data: dict[str, Any], *args: Any) -> None:
            self._forwards.places, self._forwards.greedy = batch_data["logits_indices"], None
            super()._forward_process_and_sample(model, batch_data, *args)

        def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
            scores = self._forwards.check_scores(scores, self.do_sample)
            greedy, count = self._forwards.greedy, scores.shape[1]
            if greedy is None or not self.do_sample:
                super()._sample(scores, output_ids)
                return
            tokens = scores[0].argmax(-1)
            if self._forwards.needs.draws:
                super()._sample(scores, output_ids)
                tokens = torch.where(greedy, tokens, output_ids[0, :count])
            output_ids[0, :count].copy_(tokens)
            if self.return_logprobs:
                chosen = scores[0].log_softmax(-1).gather(1, tokens[:, None].long())[:, 0]
                output_ids[1, :count].copy_(chosen.view(torch.int32))

    return Runner
