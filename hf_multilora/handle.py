"""The handle that an enabled model carries as `model.multilora`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .adapters.source import version
from .config import MultiLoraConfig, check_names
from .errors import AdapterNotFoundError, ConfigError, ModelError, SlotError, closest
from .generation.calls import Calls
from .generation.graphs import Graphs
from .generation.ids import BASE, Key, names_of, one_of
from .generation.mixin import restore_parts, swap_class, swap_parts
from .generation.warmup import warm_up
from .inject import InstanceGuard, decompress
from .kernels import table as tuning_table
from .memory.ahead import read_ahead
from .memory.estimate import estimate_memory as estimate_layout
from .memory.layout import Layout
from .memory.registry import Loaded
from .memory.store import AdapterStore
from .parallel import Agreement, agreement_of, alike, parts_of
from .peft_model import Takeover
from .placement import place
from .reading import Load, Reader
from .report import AdapterStatus, LoadReport, LoadReports, Status
from .routing import Routing
from .spread import SpreadRouting, routings_of
from .survey import Survey, survey
from .wrapped import Wrapped

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
        # Everything that can fail comes before the first change of the model. Unpacking is none: its first forward
        # would have done the same.
        tuning_table.check()
        agreement = agreement_of(model)
        self._layout = self._layout_of(config, agreement)
        self.store = store or AdapterStore(self._layout, config, self._placement.devices, self._placement.dtype)
        devices = [arena.device for arena in self.store.arenas]
        adapters, spread = config.max_loras, self.store.spread
        self._routing = SpreadRouting(devices, adapters) if spread else Routing(devices[0], adapters)
        self._routings = routings_of(self._routing)
        self.calls = Calls(
            self.store,
            self._routing,
            self.ensure,
            self.check_layers,
            lambda: model.training,
            bool(getattr(model.config, "is_encoder_decoder", False)),
        )
        Reader.check(model, config)
        model.__dict__.pop("_compiled_call", None)
        self.calls.agreement = agreement
        where = (self._layout, self._placement, self.store, self._routing)
        group = None if agreement is None else agreement.group
        self._wrapped = Wrapped(model, self._survey, *where, config.max_lora_rank, config.extra_vocab_size, group)
        self._reader = Reader(model, self._survey, self._wrapped, self.store, self.calls, config)
        if config.decode_graphs:
            wrapped, order = self._wrapped, self.calls.order_streams
            self.calls.graphs = Graphs(self._routing, order, wrapped.served_sites, wrapped.memory)
        self._guard = InstanceGuard(model, lambda ids, names: self.use(one_of(ids, names)))
        swap_parts(model, self.calls)
        self._old_class = swap_class(model)
        model.__dict__["multilora"] = self

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
        self.calls.check_quiet("an adapter is loaded")
        if self.calls.agreement is not None:
            self.calls.agreement.check(
                "the adapter to load", name, _content(source, subfolder), config, revision, subfolder
            )
        read = self._reader.of(
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

    def _register(
        self,
        name: str,
        read: Callable[[], Loaded],
        reload: bool,
        in_memory: bool,
        again: Callable[[], Loaded] | None = None,
    ) -> LoadReport:
        if not isinstance(name, str) or not name or name == BASE:
            raise ConfigError(f"{name!r} cannot name an adapter: expected a non-empty string other than {BASE!r}.")
        with alike(self.calls.agreement, "the adapters to load") as facts:
            entry = self.store.register(name, read, reload=reload, evictable=not in_memory, again=again)
            packed, about = entry.packed, entry.version.loaded
            ranks = {site: rank for site, rank in packed.ranks.items() if rank} if packed is not None else {}
            facts += [name, entry.tag, about.fingerprint, ranks]
        if self.calls.agreement is not None and packed is not None and packed.has_vectors:
            entry.version = replace(entry.version, evictable=False)  # to read it again would need all ranks at once
        return entry.report(hashed=False)

    def load_many(self, sources: Mapping[str, Any], **options: Any) -> LoadReports:
        """Register several adapters, `{name: source}`, with a progress bar (transformers' switches hide it).

        A few are read at once; they are registered one after the other, in their order. Where one fails, those before
        it stay, and those after it are not registered.

        Args:
            options: as for `load`.

        Returns:
            LoadReports: a dictionary of each one's LoadReport by its name.
        """
        if self.calls.agreement is not None:  # one after the other, for ranks may have to read the base together
            return LoadReports({name: self.load(source, name, **options) for name, source in sources.items()})
        reload = bool(options.pop("reload", False))
        reads = {name: self._reader.of(source, **options) for name, source in sources.items()}
        reports = LoadReports()
        remote = any(not isinstance(source, Mapping) and not Path(source).exists() for source in sources.values())
        with closing(read_ahead(reads, remote=remote)) as ahead:
            for name, read in logging.tqdm(ahead, desc="Loading adapters", unit="adapter", total=len(reads)):
                reports[name] = self._register(name, read, reload, isinstance(sources[name], Mapping), reads[name])
        return reports

    def reload(self, name: str, source: Any = None, **options: Any) -> LoadReport:
        """Read an adapter again, from `source` with the options of `load`, or from where it came as it was loaded.

        Raises:
            ConfigError: options and no source.
        """
        if source is not None:
            return self.load(source, name, reload=True, **options)
        if options:
            raise ConfigError(
                f"reload({name!r}) with {', '.join(options)} and no source: without one an adapter is read again as "
                "it was loaded. Pass the source, too."
            )
        self.calls.check_quiet("an adapter is loaded")
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
        self.calls.check_quiet("an adapter is unloaded")
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
        self.calls.check_quiet("an adapter is pinned")
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
        self.calls.check_quiet("an adapter is unpinned")
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

    def served_sites(self) -> frozenset[int]:
        """The sites that graphs have to look at."""
        return self._wrapped.served_sites()

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
        """Bytes of the slots as they are, or as they would be with other options; see `hf_multilora.estimate_memory`.

        Raises:
            ConfigError: an unknown or impossible option, or `target_modules`: what is wrapped stays as it is.
        """
        check_names(options)
        if options.get("target_modules", self.config.target_modules) != self.config.target_modules:
            raise ConfigError(
                "target_modules cannot change while the model is enabled, and was not looked at. Call "
                "disable_multilora(model) first, and estimate_memory(model, target_modules=...) then."
            )
        config = replace(self.config, **options)
        layout = self._layout_of(config, self.calls.agreement)
        return estimate(layout, config, config.torch_dtype() or self.store.arena.dtype)

    def _layout_of(self, config: MultiLoraConfig, agreement: Agreement | None) -> Layout:
        parts = parts_of(agreement, config.fully_sharded_loras)
        return Layout.from_targets(self._survey.table.targets, self._placement.group_of, parts)

    def ensure(self, name: str) -> None:
        """Load a name that is not registered yet, where on-demand loading allows it.

        Raises:
            AdapterNotFoundError: with the closest names, and what would load it.
        """
        with suppress(AdapterNotFoundError):
            self.store.entry(name)
            return
        self.check_loadable(name)
        self.calls.check_quiet("an adapter is loaded")
        self.store.ensure(name, self._reader.of(name))

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
        self._wrapped.check(sites, saved)

    def follow_model(self) -> None:
        """After model.to(), half() and the like: slots and adapters move along.

        Raises:
            ModelError: layers that computed on one device do so no longer.
        """
        dtype = place(self._model, self._survey.found, self.config).dtype
        now = self._wrapped.devices()
        devices = now if len(now) == len(self._routings) else [arena.device for arena in self.store.arenas]
        if self.calls.graphs is not None:
            self.calls.graphs.clear()
        if self.store.retarget(devices, dtype, base_dtype=self._reader.base_dtype):
            for routing, device in zip(self._routings, devices, strict=True):
                routing.to(device)
            self._wrapped.bind()

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
            for name in handle.store.names():  # what reads them again is to compute with the copy's base
                entry = handle.store.entry(name)
                if isinstance(load := entry.version.load, Load):
                    entry.version = replace(entry.version, load=replace(load, reader=handle._reader))
            handle.calls.default = self.calls.default
            handle._wrapped.wrap(self._wrapped.saved_paths())
            handle.calls.vocabulary = self.calls.vocabulary
            return twin

    def detach(self) -> None:
        """Undo everything (see `disable_multilora`)."""
        self.calls.check_managers("disabled")
        busy = [adapter.name for adapter in self.status().adapters if adapter.in_use]
        if busy:
            raise ModelError(f"Calls in flight still use {', '.join(busy)}. Let them end before disabling.")
        with self._managers_off(), self.calls.stopped("disabled"):
            self._wrapped.take_out()
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
        if getattr(self._model, "_cached_continuous_batching_manager", None) in self.calls.managers:
            self._model.destroy_cached_continuous_batching_manager()  # type: ignore[operator]

    @contextmanager
    def _managers_off(self) -> Iterator[None]:
        """No manager of continuous batching starts from here on; where the block fails, they may again."""
        managers = list(self.calls.managers)
        try:
            for manager in managers:
                manager.batching.enabled = False
            yield
        except BaseException:
            for manager in managers:
                manager.batching.enabled = True
            raise

    def __repr__(self) -> str:
        return f"MultiLora({self.status()!s})"

    def _repr_html_(self) -> str:
        return self.status()._repr_html_()


def estimate(layout: Layout, config: MultiLoraConfig, dtype: torch.dtype) -> dict[str, Any]:
    return estimate_layout(layout, config.max_loras, config.max_lora_rank, dtype, slot_bytes=config.slot_bytes)


def _content(source: Any, subfolder: str | None) -> Any:
    """What tells apart what ranks are to load: names and sizes, and the ends of files."""
    if isinstance(source, Mapping):
        return sorted((name, tuple(tensor.shape)) for name, tensor in source.items())
    folder = Path(source).expanduser() / (subfolder or "")
    return version("", folder.glob("adapter_*")) if folder.is_dir() else os.fspath(source)
