"""The models of one run: the bare one, twins over its weights that are enabled, and PEFT over the same weights."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from ..api import enable_multilora
from .measure import milliseconds
from .results import Results
from .workload import DTYPES, adapter_config, build_model, linear_shapes, load_model, nbytes, random_adapter, twin


@dataclass
class Settings:
    """What to run, and on what. The fields are the options of benchmarks/bench_generate.py."""

    shape: str = "tiny"
    model: str | None = None
    device: str = "cpu"
    dtype: str = "fp32"
    layers: int | None = None
    rank: int = 16
    max_lora_rank: int | None = None
    max_loras: int | None = None
    reps: int = 7
    budget_s: float = 220
    out: str = "."
    parts: list[str] = field(default_factory=lambda: ["eager", "prefill"])
    batch: list[int] = field(default_factory=lambda: [32])
    adapters: list[int] = field(default_factory=lambda: [0, 1, 8, 32])
    sparse: bool = True
    new_tokens: int = 48
    prefill: list[int] = field(default_factory=lambda: [8192])
    prefill_rows: int = 16
    prefill_adapters: list[int] = field(default_factory=lambda: [0, 1, 4, 16])
    peft_adapters: list[int] = field(default_factory=lambda: [1, 8, 32])
    peft_batch: list[int] = field(default_factory=lambda: [32])
    peft_tokens: int = 5
    peft_reps: int = 3
    mixes: int = 100
    busy: bool = True

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def full(self) -> bool:
        """Whether the goals, which are those of the 8B shape on a GPU, mean anything here."""
        return self.cuda and self.shape == "8B" and self.model is None and self.layers is None

    @property
    def slots(self) -> int:
        """`max_loras`; at least as many as any part of the run mixes, and 8 where it is not given."""
        return max(self.max_loras or 8, *self.adapters, *(self.prefill_adapters if "prefill" in self.parts else ()))


class Models:
    """Builds each model when a part first asks for it; all of them share the base's parameters."""

    def __init__(self, settings: Settings, results: Results) -> None:
        self.settings, self.results = settings, results
        dtype = DTYPES[settings.dtype]
        if settings.model is None:
            self.bare = build_model(settings.shape, settings.device, dtype, settings.layers)
        else:
            self.bare = load_model(settings.model, settings.device, dtype)
        self.shapes = linear_shapes(self.bare)
        # Twins are made of the bare model: before anything compiles it or leaves a cache behind in it.
        self._pristine = twin(self.bare)
        self._ours: dict[bool, Any] = {}
        self.note("the model is there")

    def note(self, what: str) -> None:
        self.results.note(what)

    def adapter(self, seed: int, host: bool = True) -> dict[str, torch.Tensor]:
        """The tensors of adapter number `seed`."""
        settings = self.settings
        return random_adapter(
            self.shapes, settings.rank, seed, dtype=DTYPES[settings.dtype], device=settings.device, host=host
        )

    def config(self) -> dict[str, Any]:
        return adapter_config(self.settings.rank, 2.0 * self.settings.rank, self.suffixes())

    def suffixes(self) -> list[str]:
        return sorted({path.rpartition(".")[2] for path in self.shapes})

    def ours(self, decode_graphs: bool = False) -> Any:
        """The enabled model, with adapters a0, a1, ... in as many slots."""
        if decode_graphs not in self._ours:
            self._ours[decode_graphs] = self._enable(decode_graphs)
        return self._ours[decode_graphs]

    def _enable(self, decode_graphs: bool) -> Any:
        settings = self.settings
        options: dict[str, Any] = {"decode_graphs": True} if decode_graphs else {}
        model = enable_multilora(
            twin(self._pristine),
            max_loras=settings.slots,
            max_lora_rank=settings.max_lora_rank or settings.rank,
            **options,
        )
        times = []
        for number in range(settings.slots):
            tensors = self.adapter(number)
            load = functools.partial(model.multilora.load, tensors, f"a{number}", config=self.config())
            times.append(milliseconds(load, "cpu"))
        if not self._ours:
            what = f"register {nbytes(tensors) / 1e6:.3g} MB from tensors in memory"
            self.results.add(what, statistics.median(times), "ms", count=len(times))
        self.note(f"enabled, {settings.slots} adapters" + (", decode_graphs" if decode_graphs else ""))
        return model

    def base(self) -> Any:
        """A model to put PEFT's layers into, which changes it."""
        return twin(self._pristine)


def ids(rows: int, distinct: int) -> list[str] | None:
    """`distinct` names, one after another over the rows; None: all rows are the base."""
    return [f"a{row % distinct}" for row in range(rows)] if distinct else None


def sparse_ids(rows: int, adapted: int = 4) -> list[str | None]:
    """`adapted` rows, spread over the batch, each with an adapter of its own; the others are the base."""
    apart = rows // adapted
    return [f"a{row // apart}" if row % apart == 0 and row // apart < adapted else None for row in range(rows)]
