"""Forwards of packed batches: which slots their tokens have, and whether what comes out is to be trusted."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers.generation.continuous_batching.utils import CudaGraphBuffer
from transformers.utils import logging

from ...errors import ModelError
from ...kernels.guard import guard
from ...kernels.reference import Runs
from ...packed import PackedState
from ...rows import Saved, tabled
from ..calls import Calls
from .ranks import Ranks
from .requests import carrier_of
from .sampling import ALL
from .seats import Seat
from .table import Lanes, slots_of

logger = logging.get_logger(__name__)

_VIEWS = 64
_LEAST_CACHED = 1024
_GRAPHS = 64  # of one kind; the one that was not used for the longest time makes room


class Graphs(CudaGraphBuffer):
    """transformers' buffer of graphs, with an end to their number."""

    def get_graph(self, key: Any) -> Any:
        graph = super().get_graph(key)
        if graph is not None:
            self._storage[key] = self._storage.pop(key)
        return graph

    def set_graph(self, key: Any, graph: Any) -> None:
        if len(self._storage) >= _GRAPHS:
            torch.cuda.synchronize()  # it may be running
            self._storage.pop(next(iter(self._storage))).reset()
        super().set_graph(key, graph)


def bucket(size: int, least: int, most: int) -> int:
    """The next of four sizes in each octave, from `least` on: what captured batches are padded to.

    Example:
        >>> [bucket(n, 4, 100) for n in (1, 4, 5, 9, 17, 33, 65, 99)]
        [4, 4, 5, 10, 20, 40, 80, 100]
    """
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return min(most, max(least, -(-size // step) * step))


def _runs(rows: Sequence[tuple[int, int, int]], tokens: int) -> list[tuple[int, int]]:
    """(slot, tokens) of the runs of each request, from (slot, tokens before it is active, tokens); padding last."""
    runs = []
    for slot, before, count in rows:
        runs += [run for run in ((-1, before), (slot, count - before)) if run[1]]
    padding = tokens - sum(count for *_, count in rows)
    return runs + ([(-1, padding)] if padding else [])


class Batch:
    """The batch that was prepared last.

    Attributes:
        lanes: how its slots were written.
        seats: of its requests.
        saved: what these replace.
        memos: what kernels keep, of the tokens and of those with logits.
    """

    def __init__(self, lanes: Lanes, seats: Sequence[Seat], content: Hashable, before: Batch | None) -> None:
        self.lanes = lanes
        self.seats = seats
        self.content = content
        same = before is not None and before.content == content
        self.memos: tuple[dict[Any, Any], dict[Any, Any]] = before.memos if before is not None and same else ({}, {})
        self.saved: dict[str, list[Saved]] = {}
        for seat in seats:
            for path, items in seat.saved.items():
                self.saved.setdefault(path, []).extend(items)


class Forwards:
    """What one manager's batches run under.

    Args:
        calls: of the model.
        sites: the sites that an adapter may have by now.
        config: the manager's, resolved.

    Attributes:
        guarding: the keys and values of the forward that runs are to be guarded.
        decoding: each request of the next batch brings one token.
        graphs: "given": as the configuration says. "decode": our own choice, where nobody has chosen and transformers
            would run all eagerly, unpadded: batches are padded, since attention under a mask may make a plan for each
            length (cuDNN), and those that decode are captured. "off": that was tried, and does not work here.
    """

    def __init__(self, calls: Calls, sites: Any, config: Any) -> None:
        self.calls = calls
        self.config = config
        self.rehearsing = False
        self.guarding = False
        self.decoding = False
        self.graphs = "given"
        self.masked = False  # attention is kept apart by masks
        self._sites = sites
        self._device = calls.store.arena.device
        self._adapters = calls.store.arena.max_loras if tabled(self._device) else None
        self._tokens, self._padded = 0, False
        self._batch: Batch | None = None
        self._views: dict[tuple[int, Lanes], tuple[torch.Tensor, torch.Tensor]] = {}
        self._graphs: dict[tuple[int, Hashable], Any] = {}
        self._flags: torch.Tensor | None = None
        self._fetched: dict[int, torch.Tensor | None] = {}  # by pair of buffers, of its last batch
        self._recipes: dict[Any, Any] = {}
        self.places: torch.Tensor | None = None  # tokens whose logits the forward computes
        self.needs = ALL  # of the next batch
        self.greedy: torch.Tensor | None = None  # [n]: which of these tokens are the highest, not drawn

    def forget(self) -> None:
        """Let go of all that belongs to one batch processor and its buffers: its graphs above all."""
        self._views.clear()
        self._graphs.clear()
        self._fetched.clear()
        self._recipes.clear()
        self._flags = self._batch = self.places = self.greedy = None
        self.needs = ALL

    @property
    def lines(self) -> int:
        """Reserved lines that the slots of the largest batch take."""
        most = int(self.config.max_batch_tokens)
        return Lanes(most, min(most, self.config.max_requests_per_batch), self._adapters).lines()

    # -- before the forward

    def choose_graphs(self) -> None:
        """Capture batches that decode; to be called before there is a batch processor."""
        self.graphs = "decode"
        self.config.use_cuda_graph = (True, True)

    def pads(self, given: bool) -> bool:
        """Whether the next batch is padded; `given`: what the configuration says."""
        return given if self.graphs == "given" else self.graphs == "decode"

    def sizes(self, tokens: int, cached: int, cache: Any) -> tuple[int, int]:
        """Tokens and cached tokens of a batch, padded where that is our choice."""
        most = cache.max_tokens_read if hasattr(cache, "max_tokens_read") else cache.num_pages
        return (
            bucket(tokens, 1, int(self.config.max_batch_tokens)),
            bucket(cached, _LEAST_CACHED, most) if cached else 0,
        )

    def expect(self, tokens: int, padded: bool) -> None:
        """The next batch has so many tokens, padding included."""
        self._tokens, self._padded = tokens, padded

    def write(self, requests: Sequence[Any], lines: torch.Tensor) -> None:
        """Write the slots of a batch's tokens into the reserved lines."""
        kept = min(self._tokens, self.config.max_requests_per_batch) if self._padded else len(requests)
        lanes = Lanes(self._tokens, kept, self._adapters)
        rows, last, seats, at = [], [], {}, 0
        for request in requests:
            state, count = request.state, request.query_length
            carrier = carrier_of(state)
            slot = before = -1
            if carrier is not None and carrier.seat is not None and carrier.start is not None:
                before = max(0, carrier.start - (state.position_offset - count))
                if before < count:
                    slot = carrier.seat.slot
                    seats[slot] = carrier.seat
            rows.append((slot, max(0, min(before, count)), count))
            at += count
            if request.has_new_token:
                last.append(at - 1)
        slots = slots_of(rows, lanes)
        chosen = slots_of([], Lanes(kept, 0, None))
        chosen[: len(last)] = slots[last]
        lanes.write(slots, chosen, lines)
        content = (slots.tobytes(), chosen.tobytes(), tuple((slot, seat.tag) for slot, seat in sorted(seats.items())))
        self._batch = Batch(lanes, list(seats.values()), content, self._batch)
        if self._adapters is None and seats and max(count for *_, count in rows) > 1:
            self._batch.memos[0].setdefault(Runs.KEY, Runs(_runs(rows, lanes.tokens)))

    # -- the forward

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Forwards in here run as if there were adapters: graphs are captured with all that these need."""
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing = False

    @contextmanager
    def running(self, runner: Any, model: Any, batch_data: dict[str, Any], own: int) -> Iterator[None]:
        """One forward of the batch that was prepared last.

        Args:
            own: reserved lines that come before the slots.

        Raises:
            ModelError: the model is in training mode.
        """
        batch, ios = self._batch, runner.inputs_and_outputs
        assert batch is not None
        stream, pair = ios.compute_stream, getattr(ios, "current_pair", 0)
        captured = self.captured(runner, ios.use_block_table)
        state = None
        if batch.seats or self.rehearsing:
            touched = self._sites() if captured else frozenset().union(*(seat.lease.touched for seat in batch.seats))
            whole = runner.supports_logits_to_keep(model)
            state = self._state(batch, batch_data["logits_processor_args"][own:], touched, whole)
        if captured:
            variant = (touched if state is not None else None, self.calls.vocabulary is None, self.needs)
            holder = ios.io_pairs[pair].device_io if hasattr(ios, "io_pairs") else ios
            holder.graphs = self._graphs.setdefault((pair, variant), Graphs())
        if stream is not None and not hasattr(ios, "io_pairs"):
            stream.wait_stream(torch.cuda.current_stream(stream.device))  # it has just written the inputs
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            leases = [seat.lease for seat in batch.seats]
            flags = None
            if state is not None:
                flags = self._some_flags()[: batch.lanes.tokens].zero_()
            self.guarding = flags is not None and self.masked
            self._fetched[pair] = flags
            try:
                with self.calls.packed(state, leases, captured):
                    yield
            finally:
                self.guarding = False

    def captured(self, runner: Any, use_block_table: bool) -> bool:
        """Whether the forward is a graph, or becomes one."""
        assert self._batch is not None
        graph = runner.use_cuda_graph_decode if use_block_table else runner.use_cuda_graph_varlen
        ours = self.graphs == "decode" and self.decoding
        return bool(graph) and not self._batch.saved and (self.graphs == "given" or ours)

    def not_captured(self, error: Exception) -> None:
        """A graph that was our own choice could not be captured: go on without any."""
        self.graphs = "off"
        logger.warning_once(
            f"Continuous batching decodes without CUDA graphs: {type(error).__name__}: {str(error).splitlines()[0]}"
        )

    def _state(self, batch: Batch, lines: torch.Tensor, touched: frozenset[int], whole: bool) -> PackedState:
        key = (lines.data_ptr(), batch.lanes)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            views = self._views[key] = batch.lanes.views(lines)
        adapters = self.calls.store.arena.max_loras
        memo, last = batch.memos
        kept = PackedState(views[1], batch.lanes.kept, touched, adapters, batch.saved, memo=last) if whole else None
        return PackedState(views[0], batch.lanes.tokens, touched, adapters, batch.saved, kept, memo)

    def _some_flags(self) -> torch.Tensor:
        if self._flags is None:
            with torch.inference_mode(False):
                self._flags = torch.zeros(self.config.max_batch_tokens, dtype=torch.int32, device=self._device)
        return self._flags

    def guard(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keys and values of one layer, before they are written to the cache."""
        if self.guarding:
            assert self._flags is not None
            guard(k, v, self._flags[: k.shape[2]], self._recipes)

    def check_scores(self, scores: torch.Tensor, sampled: bool) -> torch.Tensor:
        """Flag the tokens whose scores `[1, n, columns]` give no distribution; where tokens are `sampled`, replace
        these, for one such row would end the whole batch."""
        if self.calls.routing.state is None or self._flags is None or self.places is None:
            return scores
        bad = ~torch.isfinite(scores[0].amax(-1))
        self._flags.index_add_(0, self.places, bad.to(torch.int32))
        return torch.where(bad[None, :, None], 0, scores) if sampled else scores

    # -- after the forward

    def fetch(self, ios: Any, ranks: Ranks | None) -> None:
        """Start to bring the flags of the forward that was just given to the device to the host; those of all ranks,
        for each guards its own heads."""
        pair = getattr(ios, "current_pair", 0)
        flags = self._fetched.get(pair)
        if flags is None:
            return
        if ranks is not None:
            with torch.cuda.stream(ios.compute_stream) if flags.is_cuda else nullcontext():
                ranks.join_flags(flags)
        if flags.is_cuda:
            with torch.cuda.stream(ios.compute_stream):
                host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
                self._fetched[pair] = host.copy_(flags, non_blocking=True)
        elif hasattr(ios, "io_pairs"):
            self._fetched[pair] = flags.clone()  # the next batch runs before this one's are looked at

    def poisoned(self, ios: Any, requests: Sequence[Any]) -> list[Any]:
        """Requests of the last batch of these buffers, which has ended, whose values are not finite."""
        flags = self._fetched.get(getattr(ios, "current_pair", 0))
        if flags is None or not flags.any():
            return []
        values, found, at = flags.tolist(), [], 0
        for request in requests:
            if any(values[at : at + request.query_length]):
                found.append(request)
            at += request.query_length
        return found


def check_config(config: Any) -> None:
    """Raises: ModelError for a ContinuousBatchingConfig that asks for forwards which cannot carry slots."""
    asked = [
        name for name in ("varlen_compile_config", "decode_compile_config") if getattr(config, name, None) is not None
    ]
    asked += ["default_compile_level"] if getattr(config, "default_compile_level", 0) else []
    if asked:
        raise ModelError(
            f"Continuous batching with adapters runs eagerly or as CUDA graphs; {asked[0]} wants compiled ones. "
            "Leave compile configs and default_compile_level unset (use_cuda_graph=True is served)."
        )
