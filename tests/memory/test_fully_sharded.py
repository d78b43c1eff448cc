"""Factors that ranks split by both dimensions: what each stores and reads, and that their parts make up the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from memory_bed import Part, Ref
from safetensors.torch import save_file
from together import Together, unwritten_is_nan

from hf_multilora.adapters.checkpoint import TensorRef, open_checkpoint
from hf_multilora.adapters.shards import Shard
from hf_multilora.adapters.stored import FileBytes, Stored, TensorBytes
from hf_multilora.adapters.targets import Target
from hf_multilora.config import MultiLoraConfig
from hf_multilora.errors import ModelError, SlotError
from hf_multilora.kernels import launch
from hf_multilora.kernels.ops import LinearOp, Workspace
from hf_multilora.kernels.sharded import InputsOp, OutputsOp
from hf_multilora.memory.arena import Arena
from hf_multilora.memory.layout import Layout
from hf_multilora.memory.pack import PackedAdapter, compose, pack
from hf_multilora.memory.registry import Loaded
from hf_multilora.memory.store import AdapterStore

MAX_RANK = 36
WHOLE = {
    "wide": Target("wide", "linear", 20, 29),
    "packed": Target("packed", "linear", 20, 30, (("q", 18), ("k", 6), ("v", 6))),
    "down": Target("down", "linear", 24, 20),
    "head": Target("head", "linear", 20, 7),
}


def shard_of(name: str, part: int, parts: int) -> Shard | None:
    """Parts of the outputs, of each slice of the outputs, or of the inputs; the head is whole."""
    if name == "head":
        return None
    if name == "packed":
        slices = ((0, 18 // parts), (18, 6 // parts), (24, 6 // parts))
        return Shard(part, rows=tuple((first + part * step, first + (part + 1) * step) for first, step in slices))
    size = WHOLE[name].in_features if name == "down" else WHOLE[name].out_features
    mine = ((size * part // parts, size * (part + 1) // parts),)
    return Shard(part, columns=mine) if name == "down" else Shard(part, rows=mine)


def layout_of(part: int, parts: int, fully: bool = True) -> Layout:
    targets = {name: dataclasses.replace(t, shard=shard_of(name, part, parts)) for name, t in WHOLE.items()}
    return Layout.from_targets(targets, parts=parts if fully else 1)


def tensors_of(ranks: dict[str, int], seed: int) -> dict[str, torch.Tensor]:
    """A and B of each slice, gains of one adapter and shifts of another, whatever else is trained there."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for path, target in WHOLE.items():
        for i, width in enumerate(target.widths):
            rank = ranks.get(path, 0)
            if rank:
                found[f"{path}.{i}.a"] = torch.randn(rank, target.in_features, generator=generator) / 4
                found[f"{path}.{i}.b"] = torch.randn(width, rank, generator=generator) / 4
            if seed == 2:
                found[f"{path}.{i}.gain"] = torch.randn(width, generator=generator)
            elif seed == 3:
                found[f"{path}.{i}.shift"] = torch.randn(width, generator=generator)
    return found


def parts_of(tensors: dict[str, torch.Tensor], ref=Ref) -> list[Part]:
    """Factors of them; `ref` makes a reference of a name and a tensor."""
    found = []
    for path, target in WHOLE.items():
        for i in range(len(target.widths)):
            refs = [
                ref(f"{path}.{i}.{what}", tensors[f"{path}.{i}.{what}"]) if f"{path}.{i}.{what}" in tensors else None
                for what in ("a", "b", "gain", "shift")
            ]
            if any(refs):
                found.append(Part(path, i, "linear", refs[0].tensor.shape[0] if refs[0] else 0, 0.5, *refs))
    return found


ADAPTERS = [
    tensors_of({"wide": 1, "down": 1, "packed": 1, "head": 2}, 0),
    tensors_of({"wide": 3, "down": 33, "packed": 3}, 1),
    tensors_of({"wide": 33, "down": 3, "packed": 8, "head": 3}, 2),
    tensors_of({"wide": 2, "packed": 33}, 3),
]


def packed_for(layout: Layout, dtype: torch.dtype = torch.float32) -> list[PackedAdapter]:
    """The adapters, and last a mix of the first two."""
    found = [pack(parts_of(tensors), layout, dtype, pin=False) for tensors in ADAPTERS]
    return [*found, compose([(found[0], 2.0), (found[0], -1.0), (found[1], 0.5)], layout, dtype, pin=False)]


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("order", [("wide", "head"), ("head", "wide")], ids=str)
def test_one_a_of_a_split_layer_and_of_a_whole_one(order: tuple[str, str], part: int) -> None:
    """They share it in the checkpoint, and store other rows of it."""
    a = Ref("a", torch.randn(4, 20))
    layout = layout_of(part, 2)
    both = [Part(name, 0, "linear", 4, 0.5, a, Ref(name, torch.randn(WHOLE[name].out_features, 4))) for name in order]
    packed = pack(both, layout, torch.float32, pin=False)
    assert torch.equal(packed.factors(layout.site("wide").index)[0], a.tensor[part::2])
    assert torch.equal(packed.factors(layout.site("head").index)[0], a.tensor)


class Rank:
    """The slots and ops of one rank; of `parts` = 1 those of a model of one process."""

    def __init__(self, part: int, parts: int, ranks: Together | None, dtype: torch.dtype, device: str = "cpu") -> None:
        self.layout = layout_of(part, parts) if ranks else Layout.from_targets(WHOLE)
        blocks = packed_for(self.layout, dtype)
        self.arena = Arena(self.layout, len(blocks), max(block.nbytes for block in blocks), device, dtype)
        for slot, packed in enumerate(blocks):
            self.arena.slot(slot)[: packed.nbytes].copy_(packed.block)
        self.ops = {name: self._op(name, ranks) for name in WHOLE}

    def _op(self, name: str, ranks: Together | None) -> LinearOp:
        arena, workspace = self.arena, Workspace()
        sites = [self.layout.site(name, i) for i in range(len(WHOLE[name].widths))]
        where = (arena.data, arena.meta, arena.floats, arena.slot_elems, arena.zero_off, sites[0].index)
        given = (*where, sites[0].in_features, [site.out_features for site in sites], MAX_RANK, workspace)
        if sites[0].parts == 1:
            return LinearOp(*given)
        more = {"sites": self.layout.n_sites, "ranks": ranks, "vectors": lambda: True}
        if sites[0].columns is None:
            return OutputsOp(*given, **more)
        return InputsOp(*given, spans=[site.span for site in sites], **more)


def pieces(tensor: torch.Tensor, ranges) -> torch.Tensor:
    return tensor if ranges is None else torch.cat([tensor[:, start:stop] for start, stop in ranges], 1)


def check_parts(parts: int, slots: list[int], tokens: int, dtype: torch.dtype, device: str, apply) -> None:
    """Ranks' outputs, put together, are what one process computes."""
    together = Together(parts)
    whole = Rank(0, 1, None, torch.float32)
    ranks = [Rank(part, parts, together, dtype, device) for part in range(parts)]
    rows, generator = torch.tensor(slots, dtype=torch.int32), torch.Generator().manual_seed(1)
    base = (rows < 0).repeat_interleave(tokens)
    for name, target in WHOLE.items():
        x = torch.randn(len(slots) * tokens, target.in_features, generator=generator).to(dtype)
        y = torch.randn(len(slots) * tokens, target.out_features, generator=generator).to(dtype)
        (want,) = whole.ops[name]((y.float(),), x.float(), rows, len(slots))

        def one(part: int, name=name, x=x, y=y) -> torch.Tensor:
            shard = shard_of(name, part, parts) or Shard(part)
            x, y = pieces(x, shard.columns), pieces(y, shard.rows) / (parts if shard.columns else 1)
            (out,) = apply(ranks[part].ops[name], y.to(device), x.to(device), rows.to(device), len(slots))
            out = out.cpu()
            assert torch.equal(out[base], y[base]), "rows without an adapter keep their bits"
            return out.float()

        found = together.run(one)
        got = torch.empty_like(want)
        for part, out in enumerate(found):
            shard = shard_of(name, part, parts)
            if shard is None:
                got = out
            elif shard.columns is not None:
                got = sum(found)
            else:
                at = 0
                for start, stop in shard.rows:
                    got[:, start:stop] = out[:, at : at + stop - start]
                    at += stop - start
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2
        assert (got - want).norm() <= tolerance * want.norm(), name


def by_call(op: LinearOp, y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, count: int):
    return op((y,), x, rows, count)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("tokens", [1, 5])
def test_parts_make_up_the_whole(parts: int, tokens: int) -> None:
    check_parts(parts, [0, -1, 4, 1, 2, 3, 0], tokens, torch.float32, "cpu", by_call)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_parts_make_up_the_whole_on_a_gpu(tokens: int, dtype: torch.dtype) -> None:
    for _ in range(2):  # at once, and from the recipe
        check_parts(2, [0, -1, 4, 1, 2, 3, 0], tokens, dtype, "cuda", by_call)


@pytest.mark.parametrize("tokens", [1, 20])
def test_kernels_in_the_interpreter(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What shrink leaves unwritten, NaN here, expand does not read."""
    unwritten_is_nan(monkeypatch)

    def apply(op, y, x, rows, count):
        if type(op) is LinearOp:
            return op((y,), x, rows, count)
        counters = torch.zeros(64, dtype=torch.int32)
        op.arena = launch.Arena(op.data, op.meta, op.floats, counters, op.slot_elems, op.max_rank)
        op._launch_halves([out := y.clone()], x, launch.Rows(rows, None, count))
        return (out,)

    check_parts(2, [0, -1, 4, 2, 3], tokens, torch.float32, "cpu", apply)


def test_neighbours_change_no_bit() -> None:
    together = Together(2)
    ranks = [Rank(part, 2, together, torch.float32) for part in range(2)]
    x = {name: torch.randn(9, ranks[0].ops[name].in_features) for name in WHOLE}

    def outputs(slots: list[int]):
        rows = torch.tensor(slots, dtype=torch.int32)
        return together.run(
            lambda part: [
                op((torch.ones(9, op.out_features),), x[name], rows, 3)[0][3:6] for name, op in ranks[part].ops.items()
            ]
        )

    for slot in range(5):
        alone, beside = outputs([-1, slot, -1]), outputs([1, slot, 2])
        assert all(
            torch.equal(a, b) for one, two in zip(alone, beside, strict=True) for a, b in zip(one, two, strict=True)
        )


@pytest.mark.parametrize("parts", [2, 3])
def test_bytes_of_factors_are_divided(parts: int) -> None:
    for part in range(parts):
        plain, fully = layout_of(part, parts, False), layout_of(part, parts)
        for site, other in zip(plain.sites, fully.sites, strict=True):
            rank = 6 * parts
            a, b = site.a_shape(rank), site.b_shape(rank)
            if site.path == "head":
                assert (other.a_shape(rank), other.b_shape(rank)) == (a, b)
            elif site.path == "down":
                assert other.a_shape(rank) == a and abs(other.b_shape(rank)[1] - b[1] / parts) < 1
            else:
                assert other.b_shape(rank) == b and other.a_shape(rank) == (rank // parts, a[1])
        assert fully.default_slot_bytes(64, torch.float32) < 0.8 * plain.default_slot_bytes(64, torch.float32)
    assert sum(layout_of(part, parts).site("down").b_shape(1)[1] for part in range(parts)) == 20


def test_more_ranks_than_outputs_are_refused() -> None:
    narrow = Target("narrow", "linear", 8, 2, shard=Shard(0, columns=((0, 2),)))
    with pytest.raises(ModelError, match="narrow has 2 outputs"):
        Layout.from_targets({"narrow": narrow}, parts=4)


def test_mixes_round_ranks_up() -> None:
    layout = layout_of(1, 2)
    store = AdapterStore(layout, MultiLoraConfig(max_loras=2, max_lora_rank=4), "cpu", torch.float32)
    for name, rank in {"one": 1, "three": 3, "two": 2}.items():
        factors = parts_of(tensors_of({"wide": rank}, 0))
        store.register(
            name, lambda factors=factors: Loaded(pack(factors, layout, torch.float32, pin=False), source="")
        )
    with pytest.raises(SlotError, match="add up to 6 .*multiple of 2"):
        store.acquire([(("one", 1.0), ("three", 1.0))])
    with store.acquire([(("one", 1.0), ("two", 1.0))]) as lease:
        (slot,) = lease.slots.values()
        assert store.arena.header(slot)[layout.site("wide").index, 2] == 4


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of each reading; nothing is read as a tensor of its own."""
    sizes: list[int] = []
    for source in (FileBytes, TensorBytes):
        read = source.read_into

        def spy(self, buffers, start, read=read):
            sizes.extend(len(buffer) for buffer in buffers)
            return read(self, buffers, start)

        monkeypatch.setattr(source, "read_into", spy)
    monkeypatch.setattr(Stored, "read", lambda self: pytest.fail("a whole tensor was read"))
    yield sizes


@pytest.mark.parametrize("fully", [False, True])
@pytest.mark.parametrize("form", ["safetensors", "pt"])
@pytest.mark.parametrize("parts", [2, 3])
def test_a_rank_reads_its_part_alone(parts: int, form: str, fully: bool, tmp_path: Path, counted: list[int]) -> None:
    tensors = ADAPTERS[1]
    path = tmp_path / f"adapter_model.{form}"
    (save_file if form == "safetensors" else torch.save)(tensors, path)
    for part in range(parts):
        layout, checkpoint = layout_of(part, parts, fully), open_checkpoint(path)

        @dataclasses.dataclass(frozen=True)
        class File(TensorRef):
            tensor: torch.Tensor = dataclasses.field(default=None, compare=False)

        factors = parts_of(tensors, lambda name, tensor, c=checkpoint: File(c, name, None, tensor))
        counted.clear()
        packed = pack(factors, layout, torch.float32, pin=False)
        own = 0
        for site in layout.sites:
            rank = packed.ranks.get(site.index, 0)
            split = site.parts > 1 and site.columns is None
            rows = len(range(part, rank, parts)) if split else rank
            own += 4 * rows * site.in_features + 4 * rank * site.b_shape(1)[1]
        assert sum(counted) == own
        assert own < 0.75 * 4 * sum(t.numel() for t in tensors.values())
        assert torch.equal(packed.block, pack(parts_of(tensors), layout, torch.float32, pin=False).block)
        a, b = tensors["down.0.a"], tensors["down.0.b"]
        (columns,), site = shard_of("down", part, parts).columns, layout.site("down")
        stored_a, stored_b = packed.factors(site.index)
        assert torch.equal(stored_a, a[:, slice(*columns)]) and torch.equal(
            stored_b, 0.5 * b.t()[:, slice(*site.span)]
        )
        first, _ = packed.factors(layout.site("wide", 0).index)
        if fully:
            assert torch.equal(first[: len(range(part, 3, parts))], tensors["wide.0.a"][part::parts])
            assert not first[len(range(part, 3, parts)) :].any() and len(first) == -(-3 // parts)
        else:
            assert torch.equal(first, tensors["wide.0.a"])
        checkpoint.close()
