"""Decode steps as CUDA graphs: captured once for each batch size and cache, replayed for any mix of adapters.

A step's inputs are copied into buffers of the graph, the rows' slots among them, and one launch does the rest. A graph
is known by all that its launches depend on: the rows, the cache's tensors, the shapes of the inputs, switches outside.
Two serve a batch size, one for batches with adapters and one for those without. Which adapters is no part of it:
kernels read the slots of the moment.

What cannot be captured runs uncaptured, with one warning that says why.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import logging

from ..routing import Routing
from ..rows import RowState
from .cache import find_cache
from .capture import Audit, Constants, CudaRecorder, address_of
from .kept_caches import KeptCaches
from .obstacles import environment, survey_model
from .static_cache import CacheView, NotCapturable
from .step_graph import Input, StepGraph, flatten, unflatten

logger = logging.get_logger(__name__)

MAX_GRAPHS = 32
MAX_PER_CALL = 6  # one generate() that needs more of them has inputs that never come again
MAX_FAILURES = 4


class Graphs:
    """All captured steps of one model.

    Args:
        routing: what the model's layers read.
        order: lets the current stream wait for the model's last forward on another one.
        sites: gives the sites that an adapter may have by now.
        memory: what layers read for adapters, wherever it comes from: the slots, the kernels' workspace.

    Attributes:
        captures, replays: how many there were.
        refusals: why steps were not captured, and how often.
        make_recorder: device -> what captures there, None where nothing can.
    """

    def __init__(
        self,
        routing: Routing,
        order: Callable[[], None],
        sites: Callable[[], frozenset[int]],
        memory: Callable[[], list[torch.Tensor]] = list,
    ) -> None:
        self.routing = routing
        self.order = order
        self.sites = sites
        self.memory = memory
        self.captures = self.replays = 0
        self.refusals: dict[str, int] = {}
        self.make_recorder: Callable[[torch.device], Any] = _recorder
        self.recorder: Any = None
        self.kept = KeptCaches()
        # None: it failed, and is not tried again.
        self._graphs: OrderedDict[Hashable, StepGraph | None] = OrderedDict()
        self._given: tuple[Hashable, ...] | None = None
        self._failures = 0

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def prepare(self, model: Any, cache: Any, batch: int, length: int) -> None:
        """generate() has made a static cache: give it tensors that graphs know, if there are any."""
        self._release(self.kept.prepare(cache, batch, length, environment(model)))

    def begin(self, model: Any) -> Callable[..., Any]:
        """The forward of one generate(): replays decode steps, runs everything else. The caller holds the lock."""
        obstacle, given = survey_model(model)
        if self._given is not None and given != self._given:
            self.clear()
        self._given = given
        self._release(self.kept.sweep())
        if self.recorder is None:
            self.recorder = self.make_recorder(self.routing.static.device)
        if self.recorder is not None and obstacle is not None:
            self.refuse(obstacle)
        ready = self.recorder is not None and obstacle is None and self._failures < MAX_FAILURES
        return _Step(self, model) if ready else model.__call__

    def clear(self) -> None:
        """Let go of all graphs, and of the memory that is kept for them."""
        if self.recorder is not None and self._graphs:
            self.recorder.synchronize()
        self._graphs.clear()
        self.kept.clear()
        self.recorder = None
        self._failures = 0

    def refuse(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        logger.warning_once(f"decode_graphs: decoding is not captured, and runs step by step: {reason}.")

    def find(self, key: Hashable) -> StepGraph | None:
        """Raises: KeyError where the key is new."""
        graph = self._graphs[key]
        self._graphs.move_to_end(key)
        return graph

    def add(self, key: Hashable, graph: StepGraph | None) -> None:
        self._graphs[key] = graph
        if graph is None:
            self._failures += 1
        if len(self._graphs) > MAX_GRAPHS:
            self.recorder.synchronize()  # it may be running
            self._graphs.popitem(last=False)

    def _release(self, gone: Collection[Any]) -> None:
        keys = [key for key, graph in self._graphs.items() if graph is not None and graph.kept in gone]
        if keys:
            self.recorder.synchronize()
        for key in keys:
            del self._graphs[key]

    @contextmanager
    def captured(self, rows: RowState | None) -> Iterator[None]:
        """The forward inside of this is one that is being captured, or warms up for it."""
        routing = self.routing
        state, tokens = routing.state, routing.tokens
        routing.publish(rows, tokens)
        routing.overlap = True
        try:
            yield
        finally:
            routing.overlap = False
            routing.publish(state, tokens)


class _Step:
    """The forward of one generate()."""

    def __init__(self, graphs: Graphs, model: Any) -> None:
        self._graphs = graphs
        self._model = model
        self._environment = environment(model)
        self._made = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            output = None if args else self._replayed(kwargs)
        except NotCapturable as reason:
            self._graphs.refuse(str(reason))
            output = None
        return self._model(*args, **kwargs) if output is None else output

    def _replayed(self, kwargs: dict[str, Any]) -> Any:
        """The step's output, or None where it is no decode step, or not to be captured.

        Raises:
            NotCapturable: why not.
        """
        ids = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
        cache, state = find_cache(kwargs), self._graphs.routing.state
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] != 1 or cache is None:
            return None
        if torch.is_grad_enabled() or self._model.training or not isinstance(state, (RowState, type(None))):
            return None
        if state is not None and not state.plain:
            raise NotCapturable("an adapter of the batch saves whole modules, or is an aLoRA in its prompt")
        view = self._graphs.kept.view(cache)
        if view is None:
            return None
        kwargs = self._with_masks(kwargs, view, cache)
        tensors: list[torch.Tensor] = []
        spec = flatten(kwargs, cache, tensors)
        served = self._graphs.sites() if state is not None else None
        key = (served, ids.shape[0], self._environment, view.token, view.full(), spec)
        self._graphs.order()
        try:
            graph = self._graphs.find(key)
        except KeyError:
            graph = self._capture(key, ids.shape[0], tensors, spec, cache, view, state)
        if graph is None:
            return None
        graph.fill(tensors, state)
        self._graphs.replays += 1
        if graph.verified or view.counts() == graph.counted[0]:
            return graph.run(view, cache)
        return self._verified(key, graph, kwargs, view, cache)

    def _with_masks(self, kwargs: dict[str, Any], view: CacheView, cache: Any) -> dict[str, Any]:
        """Masks that the model would make from counts of its cache, or from a mask that grows: made beforehand, as
        transformers makes them for padded batches."""
        mask = kwargs.get("attention_mask")
        grows = isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] < view.length
        if "decoder_input_ids" in kwargs or not (grows or (mask is None and view.counters)):
            return kwargs
        ids, make = kwargs["input_ids"], _mask_function(self._model)
        names = inspect.signature(make).parameters
        embeddings = torch.empty((*ids.shape, 0), dtype=self._model.dtype, device=ids.device)
        made = make(
            config=self._model.config,
            inputs_embeds=embeddings,
            attention_mask=mask,
            position_ids=kwargs.get("position_ids"),
            **{"cache" if "cache" in names else "past_key_values": cache},
        )
        return {**kwargs, "attention_mask": made}

    def _capture(
        self,
        key: Hashable,
        rows: int,
        tensors: list[torch.Tensor],
        spec: Hashable,
        cache: Any,
        view: CacheView,
        state: RowState | None,
    ) -> StepGraph | None:
        """A new graph; None where the step cannot be captured, which leaves the cache as it was."""
        if self._made >= MAX_PER_CALL:
            raise NotCapturable("its inputs have another shape at each step")
        self._made += 1
        saved = view.save()
        try:
            graph = self._recorded(rows, tensors, spec, cache, view, state, saved)
        except Exception as error:
            with suppress(NotCapturable):
                saved.restore()
            self._graphs.add(key, None)
            reason = error if isinstance(error, NotCapturable) else f"{type(error).__name__}: {error}"
            raise NotCapturable(str(reason).splitlines()[0]) from error
        self._graphs.add(key, graph)
        self._graphs.captures += 1
        return graph

    def _recorded(
        self,
        rows: int,
        tensors: list[torch.Tensor],
        spec: Hashable,
        cache: Any,
        view: CacheView,
        state: RowState | None,
        saved: Any,
    ) -> StepGraph:
        graphs, constants = self._graphs, Constants()
        inputs = [Input(tensor) for tensor in tensors]
        slots = state.for_rows(rows).captured(graphs.sites()) if state is not None else None
        graph = StepGraph(inputs, slots, view.kept, constants)
        graph.fill(tensors, state)
        kwargs = unflatten(spec, cache, iter([place.shown for place in inputs]))

        def step() -> Any:
            with constants, graphs.captured(slots):
                if slots is not None:
                    slots.memo.clear()
                return self._model(**kwargs)

        def warm() -> None:
            step()
            saved.restore()

        graphs.recorder.warm(warm)
        known = [*self._model.parameters(), *self._model.buffers(), *view.tensors(), *constants.tensors()]
        known += [*(place.shown for place in inputs), *graphs.memory(), *([slots.tensor] if slots is not None else [])]
        audit = Audit([address_of(tensor) for tensor in known])

        def audited() -> None:
            with audit:
                step()
            saved.restore()

        graphs.recorder.warm(audited)
        audit.check()
        counts = view.counts()
        graph.replay, output = graphs.recorder.record(step)
        graph.counted = (counts, [after - before for after, before in zip(view.counts(), counts, strict=True)])
        graph.verified = not counts
        view.count(counts)
        if not view.same():
            raise NotCapturable("a step replaces tensors of its cache")
        graph.spec = flatten(output, cache, graph.outputs)
        return graph

    def _verified(self, key: Hashable, graph: StepGraph, kwargs: dict[str, Any], view: CacheView, cache: Any) -> Any:
        """Run a step both ways: counts that are kept in Python must not be part of the graph.

        Raises:
            NotCapturable: they are. The cache is as before the step.
        """
        saved = view.save()
        expected: list[torch.Tensor] = []
        flatten(self._model(**kwargs), cache, expected)
        saved.restore()
        found: list[torch.Tensor] = []
        output = graph.run(view, cache)
        flatten(output, cache, found)
        if len(expected) != len(found) or not all(map(_same_bits, expected, found)):
            saved.restore()
            self._graphs.add(key, None)
            raise NotCapturable("a step depends on counts of its cache in a way that a graph does not repeat")
        graph.verified = True
        return output


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _recorder(device: torch.device) -> CudaRecorder | None:
    return CudaRecorder(device) if device.type == "cuda" else None


def _mask_function(model: Any) -> Callable[..., Any]:
    own: Callable[..., Any] = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    return own
