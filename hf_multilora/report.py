"""What people read: LoadReport (of one load) and Status (of the slots and both levels of cache).

Each has a line for a prompt (`repr`), a text (`print`), a table for a notebook, and `to_dict` for programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Protocol

from .demand import Demand
from .display import Shown, Table


@dataclass(repr=False)
class LoadReport(Shown):
    """What `load_adapter` found in a checkpoint and what became of it."""

    name: str
    source: str  # folder, hub id (with revision), or "memory"
    generation: int
    rank: int  # largest rank over its modules
    modules: dict[str, int]  # module path in the model -> rank
    nbytes: int  # of the packed block, header included
    load_ms: float
    fingerprint: str  # hub commit, or content hash; empty until it is needed (`model.multilora.report(name)`)
    base_model: str | None  # base_model_name_or_path of the checkpoint
    ignored: list[str] = field(default_factory=list)  # config fields and tensors without effect on inference
    left_out: list[str] = field(default_factory=list)  # tensors left out because of ignore_untargeted=True
    warnings: list[str] = field(default_factory=list)
    tensors: int = 0  # of the file that are used
    features: list[str] = field(default_factory=list)  # what it has beside plain LoRA, in words
    scalings: dict[str, float] = field(default_factory=dict)  # module path -> what its B A is multiplied by
    saved: dict[str, list[int]] = field(default_factory=dict)  # parameter that replaces the base's -> its shape
    tokens: dict[str, list[int]] = field(default_factory=dict)  # embedding or head -> tokens whose rows it replaces
    invocation: list[int] = field(default_factory=list)  # aLoRA's tokens
    vocab_size: int | None = None  # of its own vocabulary, None: the base's
    converted: list[str] = field(default_factory=list)  # tensors not taken as stored, and what became of them
    unmatched: list[str] = field(default_factory=list)  # names and patterns of its config that mean no trained module

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return describe(self._title(), self._details())

    def _tables(self) -> list[Table]:
        return [Table(self._title(), None, self._details())]

    def _title(self) -> str:
        title = f"{self.name}: rank {self.rank}, {count(len(self.modules), 'module')}, {megabytes(self.nbytes)}"
        title += f", loaded in {self.load_ms:.1f} ms"
        return title + (f", {count(len(self.warnings), 'warning')}" if self.warnings else "")

    def _details(self) -> list[tuple[str, str]]:
        rows = [
            ("source", self.source),
            ("base", self.base_model or "not named"),
            ("modules", summarise_modules(self.modules)),
            *content_rows(self),
            (
                "version",
                ", fingerprint ".join([f"generation {self.generation}", *filter(None, [self.fingerprint[:12]])]),
            ),
        ]
        rows += [("ignored", abridge(self.ignored))] if self.ignored else []
        rows += [("left out", abridge(self.left_out))] if self.left_out else []
        return rows + [("warning", warning) for warning in self.warnings]


class LoadReports(Shown, dict[str, LoadReport]):
    """What `load_many` returns: the report of each adapter by its name, shown as one table."""

    _HEAD = ("adapter", "rank", "modules", "size", "loaded in", "beside", "warnings")

    def to_dict(self) -> dict[str, Any]:
        return {name: report.to_dict() for name, report in self.items()}

    def _title(self) -> str:
        warnings = sum(len(report.warnings) for report in self.values())
        title = f"{count(len(self), 'adapter')} loaded, {megabytes(sum(report.nbytes for report in self.values()))}"
        return title + (f", {count(warnings, 'warning')}" if warnings else "")

    def _tables(self) -> list[Table]:
        rows = [
            (r.name, str(r.rank), str(len(r.modules)), megabytes(r.nbytes), f"{r.load_ms:.1f} ms")
            + ("; ".join(r.features), str(len(r.warnings) or ""))
            for r in self.values()
        ]
        return [Table(self._title(), self._HEAD, rows, ("rank", "modules", "size", "loaded in", "warnings"))]


@dataclass
class AdapterStatus:
    """One registered adapter."""

    name: str
    generation: int
    rank: int
    nbytes: int
    slot: int | None  # None: registered but not resident
    pinned: bool
    in_use: int  # references held by calls in flight
    source: str
    hits: int = 0  # calls (in continuous batching: seats) that found it in a slot
    misses: int = 0
    evictions: int = 0


@dataclass
class AdapterTraffic:
    """Requests of one adapter (or mix, or the base) in continuous batching.

    `requests` is all of them; children of `num_return_sequences` count for themselves.
    """

    requests: int = 0
    waiting: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefix_tokens: int = 0  # of prompts, found in the cache
    wait_s: float = 0.0  # from arrival to the first step, in sum
    longest_wait_s: float = 0.0
    passed_over: int = 0  # the most later requests that went before one of these


@dataclass(repr=False)
class BatchingStatus(Shown):
    """A snapshot of one manager of continuous batching."""

    adapters: dict[str, AdapterTraffic]  # by name ("a*0.7+b*0.3" for a mix, "__base__")
    steps: int = 0
    seats: int = 0  # slots that running requests hold
    unfinished_tokens: int = 0  # new tokens of requests that have not ended; adapters' counters hold the others

    _HEAD = (
        "requests of", "all", "waiting", "running", "finished", "failed", "cancelled", "new tokens", "prefix tokens",
        "longest wait",
    )  # fmt: skip

    @property
    def prefix_tokens(self) -> int:
        """Prompt tokens that were found in the cache, of all adapters."""
        return sum(traffic.prefix_tokens for traffic in self.adapters.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _tables(self) -> list[Table]:
        return [Table(self._title(), self._HEAD, self._rows(), self._HEAD[1:])]

    def _title(self) -> str:
        running = sum(traffic.running for traffic in self.adapters.values())
        waiting = sum(traffic.waiting for traffic in self.adapters.values())
        return (
            f"{count(running, 'request')} running on {count(self.seats, 'slot')}, {waiting} waiting, "
            f"{count(self.steps, 'step')}"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (name, *map(str, (t.requests, t.waiting, t.running, t.finished, t.failed, t.cancelled, t.new_tokens)))
            + (str(t.prefix_tokens), f"{t.longest_wait_s:.2f} s")
            for name, t in self.adapters.items()
        ]


@dataclass
class CacheCounters:
    """Statistics of one cache level since enable."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    nbytes: int = 0  # bytes brought in so far
    ms: float = 0.0  # milliseconds spent bringing them in


@dataclass(repr=False)
class Status(Shown):
    """A snapshot of slots, adapters and counters."""

    max_loras: int
    max_lora_rank: int
    slot_bytes: int
    device: str
    dtype: str
    adapters: list[AdapterStatus]
    slots: list[str | None]  # name in each slot (mixes as "a*0.7+b*0.3"), None: free
    resident: CacheCounters  # slots
    registered: CacheCounters  # host memory
    batching: BatchingStatus | None = None  # of the manager of continuous batching that runs, if one does
    demand: Demand = field(default_factory=Demand)
    suggested_max_loras: int | None = None  # by what was asked so far; None: as it is, or nothing is known yet
    suggestion: str = ""  # the same with its reason, as a sentence

    _ADAPTER_HEAD = ("adapter", "rank", "size", "slot", "pinned", "in use", "source")
    _LEVEL_HEAD = ("level", "hits", "misses", "evictions", "brought in", "time")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n\n".join([super().__str__(), *self._advice(), *([str(self.batching)] if self.batching else [])])

    def _repr_html_(self) -> str:
        advice = "".join(f"<p style='margin:.25em 0 .75em'>{escape(line)}</p>" for line in self._advice())
        return super()._repr_html_() + advice + (self.batching._repr_html_() if self.batching else "")

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(super().__rich__(), *map(Text, self._advice()), *([self.batching] if self.batching else []))

    def _tables(self) -> list[Table]:
        return [
            Table(self._title(), self._ADAPTER_HEAD, self._adapter_rows(), ("rank", "size", "slot", "in use")),
            Table(None, self._LEVEL_HEAD, self._level_rows(), self._LEVEL_HEAD[1:]),
        ]

    def _advice(self) -> list[str]:
        return [self.suggestion] if self.suggestion else []

    def _title(self) -> str:
        used = sum(name is not None for name in self.slots)
        return (
            f"{used} of {count(self.max_loras, 'slot')} in use, {count(len(self.adapters), 'adapter')} registered, "
            f"{megabytes(self.slot_bytes)} a slot (rank {self.max_lora_rank}, {self.dtype}, {self.device})"
        )

    def _adapter_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            (
                adapter.name,
                str(adapter.rank),
                megabytes(adapter.nbytes),
                "-" if adapter.slot is None else str(adapter.slot),
                "yes" if adapter.pinned else "",
                str(adapter.in_use or ""),
                adapter.source,
            )
            for adapter in self.adapters
        ]
        names = {adapter.name for adapter in self.adapters}
        # A mix has a slot of its own but is not registered: it is composed from adapters that are.
        mixes = [(name, slot) for slot, name in enumerate(self.slots) if name is not None and name not in names]
        return rows + [(name, "", "", str(slot), "", "", "mix") for name, slot in mixes]

    def _level_rows(self) -> list[tuple[str, ...]]:
        levels = (("slots", self.resident), ("host memory", self.registered))
        return [
            (name, str(c.hits), str(c.misses), str(c.evictions), megabytes(c.nbytes), f"{c.ms:.1f} ms")
            for name, c in levels
        ]


def megabytes(nbytes: int) -> str:
    """Return bytes as people read them, in powers of ten.

    >>> megabytes(84_000_000), megabytes(6_815_744), megabytes(476_224), megabytes(1_350_000_000)
    ('84 MB', '6.8 MB', '476 kB', '1.35 GB')
    """
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.2f} GB"
    if nbytes >= 1e6:
        return f"{nbytes / 1e6:.1f}".removesuffix(".0") + " MB"
    return f"{nbytes / 1e3:.0f} kB"


def count(n: int, noun: str) -> str:
    """Return "1 slot", "2 slots"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def summarise_modules(modules: dict[str, int]) -> str:
    """Return how many modules of each kind were trained, and at which ranks.

    >>> summarise_modules({"layers.0.q_proj": 8, "layers.1.q_proj": 8, "layers.1.v_proj": 4, "lm_head": 8})
    'q_proj 2 x r8, v_proj 1 x r4, lm_head 1 x r8'
    """
    kinds = Counter((path.rpartition(".")[2], rank) for path, rank in modules.items())
    return ", ".join(f"{kind} {n} x {f'r{rank}' if rank else 'bias'}" for (kind, rank), n in kinds.items())


class Contents(Protocol):
    """What `content_rows` reads: a LoadReport, or another report with these fields."""

    tensors: int
    features: list[str]
    scalings: dict[str, float]
    saved: dict[str, list[int]]
    converted: list[str]
    unmatched: list[str]


def content_rows(report: Contents) -> list[tuple[str, str]]:
    """Lines for what an adapter holds beside modules and ranks; those that have something to say."""
    scalings = Counter(f"{scaling:.4g}" for scaling in report.scalings.values())
    saved = [f"{name} {'x'.join(map(str, shape))}" for name, shape in report.saved.items()]
    rows = [
        (
            "scaling",
            ", ".join(f"{scaling} ({n})" if len(scalings) > 1 else scaling for scaling, n in scalings.items()),
        ),
        ("beside", "; ".join(report.features)),
        ("saved", abridge(saved)),
        ("tensors", f"{report.tensors} used" if report.tensors else ""),
        ("converted", abridge(report.converted)),
        ("unmatched", abridge(report.unmatched)),
    ]
    return [row for row in rows if row[1]]


def describe(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a title and, indented below it, one line for each (word, value)."""
    return "\n".join([title, *(f"  {word:<9} {value}" for word, value in rows)])


def abridge(items: Sequence[str], shown: int = 8) -> str:
    """Return "a, b, c and 7 more"."""
    text = ", ".join(items[:shown])
    return text if len(items) <= shown else f"{text} and {len(items) - shown} more"
