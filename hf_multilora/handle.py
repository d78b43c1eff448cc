"""The handle that an enabled model carries as `model.multilora`."""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .adapters.load import load_plan
from .adapters.plan import AdapterPlan, SavedParam
from .adapters.source import version
from .config import MultiLoraConfig
from .errors import AdapterNotFoundError, ConfigError, ModelError, SlotError, UnsupportedAdapterError, closest
from .generation.calls import Calls
from .generation.graphs import Graphs
from .generation.ids import BASE, Key, names_of
from .generation.logits import Vocabulary
from .generation.mixin import restore_parts, swap_class, swap_parts
from .generation.warmup import warm_up
from .inject import (
    InstanceGuard,
    check_containers,
    check_intact,
    containers,
    decompress,
    saved_layer,
    swap_in,
    swap_out,
)
from .kernels import table as tuning_table
from .kernels.experts_op import ExpertsOp, projections_of
from .kernels.ops import EmbeddingOp, LinearOp, Workspace
from .layers import LoraLayer
from .layers.embedding import LoraEmbedding
from .layers.linear import LoraHead, may_group
from .layers.router import LoraRouter
from .layers.siblings import form_groups
from .memory.ahead import read_ahead
from .memory.estimate import estimate_memory as estimate_layout
from .memory.layout import Layout
from .memory.registry import Loaded
from .memory.store import AdapterStore
from .parallel import agreement_of, alike, shared
from .peft_model import Takeover
from .placement import devices_now, place
from .report import AdapterStatus, LoadReport, Status
from .routing import Routing
from .spread import SpreadRouting, routings_of
from .survey import Survey, survey, tied_groups

logger = logging.get_logger(__name__)


class MultiLora:
    """The handle of an enabled model: adapters, slots, and the ids of calls that cannot pass them."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: MultiLoraConfig,
        takeover: Takeover | None = None,
        store: AdapterStore | None = None,
    ) -> None:
        self.config = config
        self._model = model
        self._takeover = takeover
        decompress(model)
        self._survey: Survey = survey(model, config)
        self._placement = place(model, self._survey.found, config)
        # Everything that can fail comes before the first change of the model.
        tuning_table.check()
        self._layout = Layout.from_targets(self._survey.table.targets, self._placement.group_of)
        self.store = store or AdapterStore(self._layout, config, self._placement.devices, self._placement.dtype)
        self._tied = tied_groups(model)
        devices = [arena.device for arena in self.store.arenas]
        adapters, spread = config.max_loras, self.store.spread
        self._routing = SpreadRouting(devices, adapters) if spread else Routing(devices[0], adapters)
        self._routings = routings_of(self._routing)
        self._dispatched = model.__dict__.get("_hf_hook")
        self._wrapping = threading.Lock()
        self.calls = Calls(
            self.store,
            self._routing,
            self.ensure,
            self.check_layers,
            lambda: model.training,
            bool(getattr(model.config, "is_encoder_decoder", False)),
        )
        if config.decode_graphs:
            self.calls.graphs = Graphs(self._routing, self.calls.order_streams, self.served_sites, self._memory)
        if config.extra_vocab_size and hasattr(model, "final_logits_bias"):
            raise ConfigError(
                f"extra_vocab_size={config.extra_vocab_size}: {type(model).__name__} adds a bias as wide as the base "
                "vocabulary to its logits, which leaves no room for tokens of adapters. Leave extra_vocab_size=0."
            )
        if config.extra_vocab_size:
            self.calls.vocabulary = Vocabulary(self._base_vocabulary(), config.extra_vocab_size)
        model.__dict__.pop("_compiled_call", None)
        self.calls.agreement = agreement_of(model)
        self._wrappers = swap_in(self._survey.found, self._routing_of)
        self._bind()
        self._containers = containers(model, self._wrappers)
        self._guard = InstanceGuard(model)
        swap_parts(model, self.calls)
        self._old_class = swap_class(model)
        model.__dict__["multilora"] = self

    def _bind(self) -> None:
        """Build the ops of all wrappers over the arenas as they lie now."""
        arenas = [(arena, Workspace()) for arena in self.store.arenas]
        for path, wrapper in self._wrappers.items():
            targets = self._survey.found[path].targets
            if not targets:
                continue
            target = targets[0]
            site = self._layout.site(target.path, 0)
            first, (arena, workspace) = site.index, arenas[site.group]
            where = (arena.data, arena.meta, arena.floats, arena.slot_elems, arena.zero_off)
            if target.kind == "experts":
                sites = frozenset(range(first, first + len(targets)))
                projections = projections_of(self._survey.table.blocks[path], first)
                wrapper.bind(sites, ExpertsOp(*where, *projections, self.config.max_lora_rank, workspace))
                continue
            common = (*where, first)
            op: LinearOp | EmbeddingOp
            if target.kind == "embedding":
                op = EmbeddingOp(*common, target.out_features, self.config.max_lora_rank, workspace)
            else:
                here = [self._layout.site(target.path, i) for i in range(len(target.widths))]
                widths = tuple(site.out_features for site in here)
                op = LinearOp(*common, here[0].in_features, widths, self.config.max_lora_rank, workspace)
            wrapper.bind(frozenset(range(first, first + len(target.widths))), op)
        for routing in self._routings:
            form_groups((item for item in self._single_places() if item[2]._routing is routing), routing)
        extra, tied = self.config.extra_vocab_size, self._tied_embeddings()
        for path in tied & self._wrappers.keys():
            self._wrappers[path].__dict__["_rare"] = True
        rare = [wrapper._sites for wrapper in self._wrappers.values() if wrapper._rare]
        self.store.arena.rare_sites = frozenset().union(*rare)
        self._all_sites = frozenset(range(self._layout.n_sites))
        self._path_of = {site: path for path, wrapper in self._wrappers.items() for site in wrapper._sites}
        self._usual_sites = self._all_sites - self.store.arena.rare_sites
        for path in tied if extra else ():
            if isinstance(self._wrappers.get(path), (LoraEmbedding, LoraHead)):
                self._wrappers[path].__dict__["extra"] = extra
        self._place_behind()
        tokens = self._model.get_input_embeddings()
        for wrapper in self._wrappers.values():
            if isinstance(wrapper, LoraEmbedding):
                wrapper.positions = wrapper is not tokens and wrapper._path not in tied

    def _routing_of(self, path: str) -> Routing:
        return self._routings[self._placement.group_of(path) if self.store.spread else 0]

    def _place_behind(self) -> None:
        """Tell the wrappers behind the model's body: a forward may leave out tokens without logits for them."""
        body = self._model.base_model_prefix
        if body and getattr(self._model, body, None) is not None:
            for path, wrapper in self._wrappers.items():
                wrapper.__dict__["_behind"] = path.partition(".")[0] != body

    def served_sites(self) -> frozenset[int]:
        """The sites that graphs have to look at: of embeddings and the head only once an adapter has trained them."""
        return self._all_sites if self.store.arena.rare else self._usual_sites

    def _single_places(self) -> Iterator[tuple[nn.Module, str, LoraLayer]]:
        """(parent, attribute, wrapper) of the layers that may be served in groups."""
        for path, wrapper in self._wrappers.items():
            places = self._survey.found[path].places
            if len(places) == 1 and may_group(wrapper):
                yield (*places[0], wrapper)

    def _memory(self) -> list[torch.Tensor]:
        """What wrappers read for adapters: the slots, and the ops' workspace."""
        spaces = [w._op.workspace.planes for w in self._wrappers.values() if w._op is not None]
        return [*(arena.storage for arena in self.store.arenas), *(planes for planes in spaces if planes is not None)]

    def _tied_embeddings(self) -> set[str]:
        """Paths of the input embedding, the head, and every module that shares a matrix with one of them."""
        ends = (self._model.get_input_embeddings(), self._model.get_output_embeddings())
        paths = {path for path, module in self._model.named_modules() if any(module is end for end in ends)}
        for path in list(paths):
            paths |= {name.rpartition(".")[0] for name in self._tied.get(f"{path}.weight", ())}
        return paths

    def load(
        self,
        source: str | os.PathLike[str] | Mapping[str, torch.Tensor],
        name: str | None = None,
        *,
        config: dict[str, Any] | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        subfolder: str | None = None,
        reload: bool = False,
        strict_base: bool = False,
        ignore_untargeted: bool = False,
        local_files_only: bool = False,
    ) -> LoadReport:
        """Register an adapter: read, check and pack it into host memory. It takes a slot when a call first names it.

        Args:
            source: folder, hub id, or tensors by their names in a checkpoint (then `config` is adapter_config.json).
            name: the id to use later; the source itself if not given.
            revision, token, subfolder, local_files_only: as in huggingface_hub.
            reload: replace an adapter of this name. Rows in flight end on the weights they began with; if the new ones
                cannot be loaded, the old ones stay.
            strict_base: refuse an adapter that names another base model (else the report warns).
            ignore_untargeted: leave out what `target_modules` of enable_multilora excludes (the report names it).

        Raises:
            AdapterExistsError: the name exists, and reload is False.
            AdapterFormatError, AdapterMatchError, UnsupportedAdapterError: the checkpoint cannot be served; the
                message says what and where. Nothing is changed then.
            SlotError: it does not fit a slot, or host memory is full of pinned adapters.
        """
        if name is None:
            if isinstance(source, Mapping):
                raise ConfigError("Tensors in memory need a name: load(tensors, name, config=...).")
            name = os.fspath(source)
        if self.calls.agreement is not None:
            self.calls.agreement.check("the adapter to load", name, _content(source), config, revision, subfolder)
        read = self._loader(
            source,
            config=config,
            revision=revision,
            token=token,
            subfolder=subfolder,
            strict_base=strict_base,
            ignore_untargeted=ignore_untargeted,
            local_files_only=local_files_only,
        )
        return self._register(name, read, reload, isinstance(source, Mapping))

    def _loader(self, source: Any, **options: Any) -> Callable[[], Loaded]:
        """What reads an adapter, the first time and whenever it was dropped from host memory."""
        read = (
            self._read_once([dict(source)]) if isinstance(source, Mapping) else functools.partial(self._read, source)
        )
        return functools.partial(read, max_lora_rank=self.config.max_lora_rank, **options)

    def _register(self, name: str, read: Callable[[], Loaded], reload: bool, in_memory: bool) -> LoadReport:
        if not isinstance(name, str) or not name or name == BASE:
            raise ConfigError(f"{name!r} cannot name an adapter: expected a non-empty string other than {BASE!r}.")
        with alike(self.calls.agreement, "the adapters to load") as facts:
            entry = self.store.register(name, read, reload=reload, evictable=not in_memory)
            packed, about = entry.packed, entry.version.loaded
            ranks = {site: rank for site, rank in packed.ranks.items() if rank} if packed is not None else {}
            facts += [name, entry.generation, about.fingerprint, ranks]
        if self.calls.agreement is not None and packed is not None and packed.has_vectors:
            entry.version = replace(entry.version, evictable=False)  # to read it again would need all ranks at once
        return entry.report(hashed=False)

    def _read_once(self, box: list[dict[str, torch.Tensor]]) -> Callable[..., Loaded]:
        """A loader of tensors in memory that lets go of them: the packed block is what stays."""

        def read(**options: Any) -> Loaded:
            if not box:
                raise ModelError("This adapter was given as tensors, which are gone: pass them again to reload it.")
            loaded = self._read(box[0], **options)
            box.clear()
            return loaded

        return read

    def load_many(self, sources: Mapping[str, Any], **options: Any) -> dict[str, LoadReport]:
        """Register several adapters, `{name: source}`, with a progress bar (transformers' switches hide it).

        A few are read at once; they are registered one after the other, in their order. Where one fails, those before
        it stay, and those after it are not registered.

        Args:
            options: as for `load`.
        """
        if self.calls.agreement is not None:  # one after the other, for ranks may have to read the base together
            return {name: self.load(source, name, **options) for name, source in sources.items()}
        reload = bool(options.pop("reload", False))
        reads = {name: self._loader(source, **options) for name, source in sources.items()}
        reports = {}
        remote = any(not isinstance(source, Mapping) and not Path(source).exists() for source in sources.values())
        with closing(read_ahead(reads, remote=remote)) as ahead:
            for name, read in logging.tqdm(ahead, desc="Loading adapters", unit="adapter", total=len(reads)):
                reports[name] = self._register(name, read, reload, isinstance(sources[name], Mapping))
        return reports

    def _read(self, source: Any, **options: Any) -> Loaded:
        with load_plan(source, self._survey.table, **options) as plan:
            self._check_plan(plan)
            saved = self._with_tied(plan)
            packed = self.store.pack(
                plan.factors,
                saved=saved,
                tokens=plan.tokens,
                invocation=plan.invocation,
                vocab_size=plan.vocab_size,
                base_dtype=self._base_dtype,
            )
            self._wrap_saved(saved, plan.vocab_size)
            # Known before the first batch names it, so that a warm-up compiles for it.
            self.store.arena.expect(packed.ranks, packed.has_vectors)
            return Loaded(
                packed,
                source=plan.source,
                fingerprint=plan.fingerprint_of_source,
                base_model=plan.base_model,
                ignored=plan.ignored,
                left_out=plan.left_out,
                warnings=plan.warnings,
                facts=plan.facts(),
            )

    def _check_plan(self, plan: AdapterPlan) -> None:
        """Raises: UnsupportedAdapterError, ConfigError for what a checkpoint has and this model cannot serve."""
        if plan.invocation and (plan.saved or plan.tokens):
            raise UnsupportedAdapterError(
                f"{plan.source}: an aLoRA that also saves whole modules or tokens is not served: these have no start."
            )
        for item in plan.saved:
            path = f"{item.path}.{item.name}".rpartition(".")[0]
            wrapper = self._wrappers.get(path)
            if shared(self._model.get_submodule(path) if wrapper is None else wrapper.base_layer):
                raise UnsupportedAdapterError(
                    f"{plan.source}: it saves {path!r} whole (modules_to_save), a layer that the ranks of this "
                    "tensor-parallel model share: that is not served. Saved heads and embeddings are."
                )
            if isinstance(wrapper, LoraRouter):
                raise UnsupportedAdapterError(
                    f"{plan.source}: it saves the router {path!r} whole (modules_to_save), which is not served: "
                    "LoRA on routers is."
                )
        size = self._base_vocabulary()
        room = size + self.config.extra_vocab_size
        if plan.vocab_size is not None and plan.vocab_size > room:
            raise ConfigError(
                f"{plan.source}: its vocabulary has {plan.vocab_size} tokens, the model serves {room}. Enable it with "
                f"extra_vocab_size={plan.vocab_size - size}."
            )

    def _with_tied(self, plan: AdapterPlan) -> list[SavedParam]:
        """A resized vocabulary was written into one matrix, and so into every module that shares it."""
        saved = list(plan.saved)
        known = {f"{item.path}.{item.name}" for item in saved}
        for item in plan.saved if plan.vocab_size is not None else ():
            for name in self._tied.get(f"{item.path}.{item.name}", ()):
                if name not in known:
                    path, _, attribute = name.rpartition(".")
                    saved.append(SavedParam(path, attribute, item.ref))
                    known.add(name)
        return saved

    def _wrap_saved(self, saved: Iterable[SavedParam], vocab_size: int | None) -> None:
        """Put wrappers around modules that this is the first adapter to save."""
        self._wrap_modules(f"{item.path}.{item.name}".rpartition(".")[0] for item in saved)
        with self._wrapping:
            if vocab_size is not None and self.calls.vocabulary is None:
                self.calls.vocabulary = Vocabulary(self._base_vocabulary(), self.config.extra_vocab_size)

    def _wrap_modules(self, paths: Iterable[str]) -> None:
        with self._wrapping:
            for path in set(paths) - set(self._wrappers):
                self._survey.found[path] = item = saved_layer(self._model, path)
                self._wrappers |= swap_in({path: item}, self._routing_of)
                self._containers += containers(self._model, [path])
            self._place_behind()

    def _base_dtype(self, path: str, name: str) -> torch.dtype | None:
        """dtype of a parameter of the base model; what adapters save of it is kept in the same."""
        parameter = self._survey.table.read_base(f"{path}.{name}" if path else name)
        return None if parameter is None else parameter.dtype

    def _base_vocabulary(self) -> int:
        embedding = self._model.get_input_embeddings()
        return int(getattr(embedding, "num_embeddings", self._model.config.get_text_config().vocab_size))

    def reload(self, name: str, source: Any = None, **options: Any) -> LoadReport:
        """Read an adapter again, from `source` or from where it came; see `load`."""
        if source is not None:
            return self.load(source, name, reload=True, **options)
        version = self.store.entry(name).version
        return self._register(name, version.load, True, not version.evictable)

    def report(self, name: str) -> LoadReport:
        """The report of a registered adapter, with the hash of its content where it has no hub commit.

        Raises:
            AdapterNotFoundError: not registered.
        """
        return self.store.entry(name).report()

    def unload(self, name: str) -> None:
        """Forget an adapter. Calls that use it end first; then its slot and its host memory are free.

        Raises:
            AdapterNotFoundError: not registered.
            SlotError: called from inside of a call that uses it, which would wait for itself.
        """
        self._check_wait("unloaded")
        call = self.calls.current()
        if call is not None and call.lease is not None:
            busy = {n for key in call.lease.slots for n in names_of(key)}
            if name in busy:
                raise SlotError(f"{name!r} is in use by the call that this runs in. Unload it after that call.")
        with alike(self.calls.agreement, "the adapters to unload") as facts:
            if name in names_of(self.calls.default):
                self.calls.default = None
            self.store.unload(name)
            facts.append(name)

    def pin(self, name: str) -> None:
        """Bring an adapter into a slot and keep it there, and in host memory, until `unpin`.

        Raises:
            SlotError: every slot is pinned already.
        """
        self.ensure(name)
        self._check_wait("pinned")
        self.store.pin(name)

    def _check_wait(self, what: str) -> None:
        if self.calls.holds_lock():
            raise SlotError(
                f"An adapter cannot be {what} from inside of a forward, or of a `use` block of a compiled model: "
                "calls that would have to end first may be waiting for this one."
            )

    def unpin(self, name: str) -> None:
        """Let an adapter be evicted again."""
        self.store.unpin(name)

    def prefetch(self, names: str | Iterable[str]) -> None:
        """Start to bring adapters into slots while the device computes; nothing that is in use is evicted."""
        wanted = [names] if isinstance(names, str) else list(names)
        for name in wanted:
            self.ensure(name)
        self.store.prefetch(wanted)

    def use(self, adapter_ids: Any) -> AbstractContextManager[None]:
        """Ids for code that cannot pass them: `with model.multilora.use(["a", None]): compiled_model(...)`.

        The ids belong to this thread or task; a thread that is started inside of the block does not have them. Once
        the user has compiled the model, blocks hold its lock, and other threads wait until they end.
        """
        return self.calls.use(adapter_ids)

    def warmup(self, rows: int | Sequence[int] = 1, *, max_length: int, **options: Any) -> None:
        """Compile or capture, whichever generate() will use, before the first request.

        Generates a few tokens from dummy prompts for each number of rows, with and without padding, under adapters
        and without: afterwards no mix of adapters, and no load or eviction, compiles or captures anything. (The first
        adapter with gains or shifts, DoRA or trained biases, is the exception: compiled forwards are made once more
        for them. Load one before.) No adapter is read, brought into a slot, or counted.

        Args:
            rows: batch sizes to come (prompts times beams or return sequences).
            max_length: tokens of the longest prompt and its answer together; calls up to it share one cache size.
            options: of generate(), where they differ from its defaults and change what a step returns.

        Raises:
            ConfigError, ModelError: see `generation.warmup.warm_up`.
        """
        warm_up(self._model, self.calls, rows, max_length, options)

    @property
    def graphs(self) -> Graphs | None:
        """Captured decode steps, and their statistics; None without `decode_graphs`."""
        return self.calls.graphs

    @property
    def adapters(self) -> dict[str, AdapterStatus]:
        """Registered adapters by name."""
        return {adapter.name: adapter for adapter in self.status().adapters}

    def status(self) -> Status:
        """Slots, adapters, the statistics of both levels of cache, and those of continuous batching while it runs."""
        status = self.store.status()
        running = [manager for manager in self.calls.managers if manager.is_running()]
        status.batching = running[-1].status() if running else None
        return status

    def estimate_memory(self, **options: Any) -> dict[str, Any]:
        """Bytes of the slots as they are, or as they would be with other options."""
        config = replace(self.config, **options)
        return estimate(self._layout, config, config.torch_dtype() or self.store.arena.dtype)

    def ensure(self, name: str) -> None:
        """Load a name that is not registered yet, where on-demand loading allows it.

        Raises:
            AdapterNotFoundError: with the closest names, and what would load it.
        """
        with suppress(AdapterNotFoundError):
            self.store.entry(name)
            return
        self.check_loadable(name)
        self.store.ensure(name, functools.partial(self._read, name, max_lora_rank=self.config.max_lora_rank))

    def check_loadable(self, name: str) -> None:
        """Raises: AdapterNotFoundError where a name is nothing that on-demand loading would try to load."""
        if self.config.on_demand and ("/" in name or Path(name).is_dir()):
            return
        known = self.store.names()
        hint = "" if self.config.on_demand else " On-demand loading is off (on_demand=False)."
        listed = f" Registered: {', '.join(map(repr, known[:8]))}{' …' if len(known) > 8 else ''}." if known else ""
        raise AdapterNotFoundError(
            f"No adapter {name!r} is registered.{closest(name, known)}{listed}{hint} Load it first: "
            f"model.load_adapter(path, adapter_name={name!r})."
        )

    def missing(self, key: Key | None) -> list[str]:
        """The names of a key that have to be loaded first.

        Raises:
            AdapterNotFoundError: a name that is not registered, and is nothing that could be loaded.
        """
        names = [name for name in names_of(key) if name not in self.store]
        for name in names:
            self.check_loadable(name)
        return names

    def check_layers(self, sites: Collection[int], saved: Iterable[str]) -> None:
        """Raises: ModelError where a layer of these sites, or a saved module, is not in the model any more."""
        if self._model.__dict__.get("_hf_hook") is not self._dispatched:
            self._check_dispatched()
        paths = dict.fromkeys(self._path_of[site] for site in sites) | dict.fromkeys(saved)
        check_intact(paths, self._survey.found, self._wrappers)
        check_containers(self._containers)

    def _check_dispatched(self) -> None:
        """Raises: ModelError where accelerate lets the model compute elsewhere than its slots are."""
        wanted = devices_now(self._model, self._survey.found, self._placement.groups)
        for arena, device in zip(self.store.arenas, wanted, strict=False):
            if arena.device != device:
                raise ModelError(
                    f"The model was dispatched to {device} since enable_multilora, and its slots are on "
                    f"{arena.device}. Call disable_multilora(model), dispatch it, and enable it again."
                )
        self._dispatched = self._model.__dict__.get("_hf_hook")

    def follow_model(self) -> None:
        """After model.to(), half() and the like: slots and adapters move along.

        Raises:
            ModelError: layers that computed on one device do so no longer.
        """
        dtype = place(self._model, self._survey.found, self.config).dtype
        now = devices_now(self._model, self._survey.found, self._placement.groups)
        devices = now if len(now) == len(self._routings) else [arena.device for arena in self.store.arenas]
        if self.calls.graphs is not None:
            self.calls.graphs.clear()
        if self.store.retarget(devices, dtype, base_dtype=self._base_dtype):
            for routing, device in zip(self._routings, devices, strict=True):
                routing.to(device)
            self._bind()

    def copy_model(self, memo: dict[int, Any]) -> Any:
        """A deep copy of the model, enabled, with slots of its own and the same adapters registered."""
        with self.calls.lock:
            twin = self._old_class.__new__(self._old_class)
            memo[id(self._model)] = twin
            hidden = self._guard.hidden
            for key, value in self._model.__dict__.items():
                if key not in ("multilora", "_compiled_call"):
                    twin.__dict__[key] = copy.deepcopy(hidden.get(key, value), memo)
            handle = MultiLora(twin, self.config, None, copy.deepcopy(self.store))
            handle.calls.default = self.calls.default
            handle._wrap_modules(path for path, item in self._survey.found.items() if not item.targets)
            handle.calls.vocabulary = self.calls.vocabulary
            return twin

    def detach(self) -> None:
        """Undo everything (see `disable_multilora`)."""
        self.calls.check_managers("disabled")
        if getattr(self._model, "_cached_continuous_batching_manager", None) in self.calls.managers:
            self._model.destroy_cached_continuous_batching_manager()  # type: ignore[operator]
        for manager in self.calls.managers:
            manager.batching.enabled = False
        busy = [adapter.name for adapter in self.status().adapters if adapter.in_use]
        if busy:
            raise ModelError(f"Calls in flight still use {', '.join(busy)}. Let them end before disabling.")
        with self.calls.stopped("disabled"):
            swap_out(self._survey.found, self._wrappers)
            self.calls.steps.clear()
            if self.calls.graphs is not None:
                self.calls.graphs.clear()
            self._guard.undo()
            restore_parts(self._model)
            self._model.__class__ = self._old_class
            del self._model.__dict__["multilora"]
            self._model.__dict__.pop("_compiled_call", None)
            if self._takeover is not None:
                self._takeover.give_back()

    def __repr__(self) -> str:
        return f"MultiLora({self.status()!s})"

    def _repr_html_(self) -> str:
        return self.status()._repr_html_()


def estimate(layout: Layout, config: MultiLoraConfig, dtype: torch.dtype) -> dict[str, Any]:
    return estimate_layout(layout, config.max_loras, config.max_lora_rank, dtype, slot_bytes=config.slot_bytes)


def _content(source: Any) -> Any:
    """What tells apart what ranks are to load: names and sizes, and the ends of files."""
    if isinstance(source, Mapping):
        return sorted((name, tuple(tensor.shape)) for name, tensor in source.items())
    folder = Path(source)
    return version("", folder.glob("adapter_*")) if folder.is_dir() else os.fspath(source)
