"""The wrappers of an enabled model: put in, bound to the slots, looked after, taken out."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .errors import ModelError
from .inject import check_containers, check_intact, containers, saved_layer, swap_in, swap_out
from .kernels.experts_op import ExpertsOp, projections_of
from .kernels.ops import ArenaOp, EmbeddingOp, LinearOp, Workspace
from .kernels.sharded import InputsOp, OutputsOp, Ranks
from .kernels.sharded_experts import ShardedExpertsOp
from .layers import LoraLayer
from .layers.embedding import LoraEmbedding
from .layers.linear import LoraHead, may_group
from .layers.siblings import form_groups
from .memory.layout import Layout, Site
from .memory.store import AdapterStore
from .placement import Placement, devices_now
from .routing import Routing
from .spread import SpreadRouting, routings_of
from .survey import Survey, tied_groups


class Wrapped:
    """The layers of a model that serve adapters.

    Args:
        model: of which they are a part.
        found: what `survey` found in it.
        layout: of the slots.
        placement: of the layers on devices.
        store: whose arenas they read.
        routing: of the model's calls.
        max_rank: the most ranks of an adapter.
        extra: tokens of adapters beyond the base vocabulary.
        group: of the ranks over which the layout is fully sharded.

    Attributes:
        by_path: the wrappers.
        tied: names of parameters -> names that share their memory.
        all_sites: every site of the layout.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        found: Survey,
        layout: Layout,
        placement: Placement,
        store: AdapterStore,
        routing: Routing | SpreadRouting,
        max_rank: int,
        extra: int,
        group: Any = None,
    ) -> None:
        self._model, self._survey, self._layout, self._placement = model, found, layout, placement
        self._store, self._routings = store, routings_of(routing)
        self._max_rank, self._extra = max_rank, extra
        self._ranks = Ranks(group) if layout.tables > 1 else None
        self._lock = threading.Lock()
        self._dispatched = model.__dict__.get("_hf_hook")
        self.tied = tied_groups(model)
        self.all_sites = frozenset(range(layout.n_sites))
        self.by_path: dict[str, LoraLayer] = swap_in(found.found, self._routing_of)
        self.bind()
        self._containers = containers(model, self.by_path)

    def bind(self) -> None:
        """Build the ops of all wrappers over the arenas as they lie now."""
        arenas = [(arena, Workspace()) for arena in self._store.arenas]
        for path, wrapper in self.by_path.items():
            targets = self._survey.found[path].targets
            if not targets:
                continue
            target = targets[0]
            site = self._layout.site(target.path, 0)
            first, (arena, workspace) = site.index, arenas[site.group]
            where = (arena.data, arena.meta, arena.floats, arena.slot_elems, arena.zero_off)
            op: ArenaOp
            if target.kind == "experts":
                sites = frozenset(range(first, first + len(targets)))
                projections = projections_of(self._survey.table.blocks[path].local, first)
                given = (*where, *projections, self._max_rank, workspace)
                down = self._layout.sites[first + len(targets) - 1]
                shared: dict[str, Any] = {"sites": self._layout.n_sites, "ranks": self._ranks, "span": down.span}
                op = ExpertsOp(*given) if site.parts == 1 else ShardedExpertsOp(*given, **shared)
                wrapper.bind(sites, op)
                continue
            common = (*where, first)
            if target.kind == "embedding":
                op = EmbeddingOp(*common, target.out_features, self._max_rank, workspace)
            else:
                here = [self._layout.site(target.path, i) for i in range(len(target.widths))]
                op = self._linear(common, here, workspace)
            wrapper.bind(frozenset(range(first, first + len(target.widths))), op)
        for routing in self._routings:
            form_groups((item for item in self._single_places() if item[2]._routing is routing), routing)
        tied = self._tied_embeddings()
        for path in tied & self.by_path.keys():
            self.by_path[path].__dict__["_rare"] = True
        rare = [wrapper._sites for wrapper in self.by_path.values() if wrapper._rare]
        self._store.arena.rare_sites = frozenset().union(*rare)
        self._path_of = {site: path for path, wrapper in self.by_path.items() for site in wrapper._sites}
        self._usual_sites = self.all_sites - self._store.arena.rare_sites
        for path in tied if self._extra else ():
            if isinstance(self.by_path.get(path), (LoraEmbedding, LoraHead)):
                self.by_path[path].__dict__["extra"] = self._extra
        self._place_behind()
        tokens = self._model.get_input_embeddings()
        for wrapper in self.by_path.values():
            if isinstance(wrapper, LoraEmbedding):
                wrapper.positions = wrapper is not tokens and wrapper._path not in tied

    def _linear(self, where: tuple[Any, ...], sites: Sequence[Site], workspace: Workspace) -> LinearOp:
        given = (*where, sites[0].in_features, [site.out_features for site in sites], self._max_rank, workspace)
        if sites[0].parts == 1:
            return LinearOp(*given)
        arena = self._store.arena
        more: dict[str, Any] = {"sites": self._layout.n_sites, "ranks": self._ranks, "vectors": lambda: arena.vectors}
        if sites[0].columns is None:
            return OutputsOp(*given, **more)
        return InputsOp(*given, spans=[site.span for site in sites], **more)

    def wrap(self, paths: Iterable[str]) -> None:
        """Put wrappers around modules that adapters save as a whole, where there are none yet."""
        with self._lock:
            for path in set(paths) - set(self.by_path):
                self._survey.found[path] = item = saved_layer(self._model, path, self._survey.scattered.get(path, ""))
                self.by_path |= swap_in({path: item}, self._routing_of)
                self._containers += containers(self._model, [path])
            self._place_behind()

    def saved_paths(self) -> list[str]:
        """Of wrappers that only serve what adapters save."""
        return [path for path, item in self._survey.found.items() if not item.targets]

    def served_sites(self) -> frozenset[int]:
        """The sites that graphs have to look at: of embeddings and the head only once an adapter has trained them."""
        return self.all_sites if self._store.arena.rare else self._usual_sites

    def memory(self) -> list[torch.Tensor]:
        """What wrappers read for adapters: the slots, and the ops' workspace."""
        spaces = [w._op.workspace.planes for w in self.by_path.values() if w._op is not None]
        return [*(arena.storage for arena in self._store.arenas), *(planes for planes in spaces if planes is not None)]

    def check(self, sites: Collection[int], saved: Iterable[str]) -> None:
        """Raises: ModelError where a layer of these sites, or a saved module, is not in the model any more."""
        if self._model.__dict__.get("_hf_hook") is not self._dispatched:
            self._check_dispatched()
        paths = dict.fromkeys(self._path_of[site] for site in sites) | dict.fromkeys(saved)
        check_intact(paths, self._survey.found, self.by_path)
        check_containers(self._containers)

    def devices(self) -> list[torch.device]:
        """Where each group of layers computes now."""
        return devices_now(self._model, self._survey.found, self._placement.groups)

    def take_out(self) -> None:
        """Put the base layers back."""
        swap_out(self._survey.found, self.by_path)

    def _check_dispatched(self) -> None:
        """Raises: ModelError where accelerate lets the model compute elsewhere than its slots are."""
        for arena, device in zip(self._store.arenas, self.devices(), strict=False):
            if arena.device != device:
                raise ModelError(
                    f"The model was dispatched to {device} since enable_multilora, and its slots are on "
                    f"{arena.device}. Call disable_multilora(model), dispatch it, and enable it again."
                )
        self._dispatched = self._model.__dict__.get("_hf_hook")

    def _routing_of(self, path: str) -> Routing:
        return self._routings[self._placement.group_of(path) if self._store.spread else 0]

    def _place_behind(self) -> None:
        """Tell the wrappers behind the model's body: a forward may leave out tokens without logits for them."""
        body = self._model.base_model_prefix
        if body and getattr(self._model, body, None) is not None:
            for path, wrapper in self.by_path.items():
                wrapper.__dict__["_behind"] = path.partition(".")[0] != body

    def _single_places(self) -> Iterator[tuple[nn.Module, str, LoraLayer]]:
        """(parent, attribute, wrapper) of the layers that may be served in groups."""
        for path, wrapper in self.by_path.items():
            places = self._survey.found[path].places
            if len(places) == 1 and may_group(wrapper):
                yield (*places[0], wrapper)

    def _tied_embeddings(self) -> set[str]:
        """Paths of the input embedding, the head, and every module that shares a matrix with one of them."""
        ends = (self._model.get_input_embeddings(), self._model.get_output_embeddings())
        paths = {path for path, module in self._model.named_modules() if any(module is end for end in ends)}
        for path in list(paths):
            paths |= {name.rpartition(".")[0] for name in self.tied.get(f"{path}.weight", ())}
        return paths
