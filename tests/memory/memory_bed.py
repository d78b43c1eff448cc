"""A small model's sites, adapters for them as factors and as packed blocks, and files that can change or break."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from hf_multilora.config import MultiLoraConfig
from hf_multilora.memory.layout import Layout
from hf_multilora.memory.pack import PackedAdapter, compose, pack
from hf_multilora.memory.registry import Loaded
from hf_multilora.memory.store import AdapterStore


@dataclass(frozen=True)
class Shape:
    """Stands in for adapters.Target."""

    path: str
    kind: str
    in_features: int
    out_features: int
    widths: tuple[int, ...]
    experts: int = 0


@dataclass(frozen=True)
class Ref:
    """Stands in for adapters.TensorRef: equal refs mean the same stored tensor."""

    key: object
    tensor: torch.Tensor = field(compare=False)

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def read(self) -> torch.Tensor:
        return self.tensor


@dataclass(frozen=True)
class Part:
    """Stands in for adapters.Factor."""

    path: str
    slice: int
    kind: str
    rank: int
    scaling: float
    a: Ref | None
    b: Ref | None
    gain: Ref | None = None
    shift: Ref | None = None


TARGETS = {
    "embed": Shape("embed", "embedding", 11, 5, (5,)),
    "qkv": Shape("qkv", "linear", 6, 16, (9, 4, 3)),
    "down": Shape("down", "linear", 7, 6, (6,)),
}
LAYOUT = Layout.from_targets(TARGETS)
RANK = 8


def factor(path: str, slice: int, rank: int, *, seed: int = 0, scaling: float = 1.0, dtype=torch.float32) -> Part:
    site = LAYOUT.site(path, slice)
    generator = torch.Generator().manual_seed(hash((seed, path, slice)) % 2**31)
    a = torch.randn(rank, site.in_features, generator=generator).to(dtype)
    b = torch.randn(site.out_features, rank, generator=generator).to(dtype)
    key = (seed, path, slice)
    return Part(path, slice, site.kind, rank, scaling, Ref((key, "a"), a), Ref((key, "b"), b))


@functools.cache
def block(seed: int, dtype: torch.dtype = torch.float32) -> PackedAdapter:
    """An adapter whose bytes, ranks and sites depend on `seed`; no two seeds below 100 have the same bytes."""
    sites = [site for site in LAYOUT.sites if (seed + site.index) % 3] or [LAYOUT.sites[0]]
    factors = [factor(s.path, s.slice, 1 + (seed + s.index) % 3, seed=seed, scaling=0.5) for s in sites]
    return pack(factors, LAYOUT, torch.float32, pin=False).to(dtype, pin=False)


def mixed(parts: list[tuple[int, float]]) -> PackedAdapter:
    return compose([(block(seed), weight) for seed, weight in parts], LAYOUT, torch.float32, pin=False)


class Files:
    """Adapters on disk: name -> content, or an error. Counts what was read."""

    def __init__(self, **contents: int) -> None:
        self.contents: dict[str, int | Exception] = dict(contents)
        self.reads: list[str] = []

    def loader(self, name: str):
        def load() -> Loaded:
            self.reads.append(name)
            content = self.contents[name]
            if isinstance(content, Exception):
                raise content
            return Loaded(block(content), source=f"files/{name}")

        return load


def store_of(files: Files | None = None, *, max_loras: int = 2, **options) -> AdapterStore:
    """A store on the CPU with every adapter of `files` registered, in their order."""
    config = MultiLoraConfig(max_loras=max_loras, max_lora_rank=RANK, **options)
    store = AdapterStore(LAYOUT, config, "cpu", torch.float32)
    for name in files.contents if files else ():
        store.register(name, files.loader(name))
    return store


def holds(store: AdapterStore, slot: int, packed: PackedAdapter) -> bool:
    """Whether a slot holds exactly these bytes, seen through the arena's own tables."""
    same_bytes = torch.equal(store.arena.slot(slot)[: packed.nbytes].cpu(), packed.block)
    meta = store.arena.meta[slot, : 5 * LAYOUT.n_sites].view(-1, 5).cpu()
    return same_bytes and torch.equal(meta, packed.header())


def resident(store: AdapterStore) -> set[str]:
    return {label for label in store.status().slots if label is not None}


def in_host(store: AdapterStore) -> set[str]:
    return {name for name in store.names() if store.entry(name).packed is not None}
