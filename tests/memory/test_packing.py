"""Packed blocks against plain maths: ranks, alignment, transposes, scaling, vectors, shared factors, mixes, casts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_bed import LAYOUT, RANK, TARGETS, Part, Ref, block, factor, holds, store_of

from hf_multilora.config import MultiLoraConfig
from hf_multilora.errors import AdapterMatchError, ConfigError, UnsupportedAdapterError
from hf_multilora.memory.arena import Arena
from hf_multilora.memory.contents import features_of
from hf_multilora.memory.estimate import estimate_memory
from hf_multilora.memory.layout import Layout
from hf_multilora.memory.pack import PackedAdapter, compose, pack
from hf_multilora.memory.registry import Loaded
from hf_multilora.memory.store import AdapterStore

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SITES = st.dictionaries(st.sampled_from(range(LAYOUT.n_sites)), st.integers(1, RANK), min_size=1)


def factors_of(ranks: dict[int, int], seed: int = 0, scaling: float = 0.3, dtype=torch.float32) -> list[Part]:
    sites = LAYOUT.sites
    return [
        factor(sites[i].path, sites[i].slice, rank, seed=seed, scaling=scaling, dtype=dtype)
        for i, rank in ranks.items()
    ]


def delta(packed: PackedAdapter, site: int) -> torch.Tensor:
    """[in, out] (embedding: [V, d]) in fp32, from the bytes of a block."""
    if site not in packed.ranks:
        return torch.zeros(LAYOUT.sites[site].in_features, LAYOUT.sites[site].out_features)
    a, b = (t.float() for t in packed.factors(site))
    return (a if LAYOUT.sites[site].kind == "embedding" else a.t()) @ b


def test_sites_follow_the_targets():
    assert [(s.path, s.slice, s.out_features) for s in LAYOUT.sites] == [
        ("embed", 0, 5),
        ("qkv", 0, 9),
        ("qkv", 1, 4),
        ("qkv", 2, 3),
        ("down", 0, 6),
    ]
    assert [s.index for s in LAYOUT.sites] == list(range(LAYOUT.n_sites))
    assert LAYOUT.site("qkv", 1).index == 2 and LAYOUT.site("down").index == 4
    assert LAYOUT.header_bytes == 256 >= 5 * 8 * LAYOUT.n_sites and LAYOUT.max_dim == 11


@given(ranks=SITES, dtype=st.sampled_from(DTYPES), stored=st.sampled_from(DTYPES), scaling=st.floats(0.01, 8))
@settings(max_examples=60, deadline=None)
def test_block_holds_the_factors(ranks, dtype, stored, scaling):
    factors = factors_of(ranks, scaling=scaling, dtype=stored)
    packed = pack(factors, LAYOUT, dtype, pin=False)
    assert packed.ranks == ranks and packed.rank == max(ranks.values())
    assert packed.nbytes == packed.block.numel() == LAYOUT.packed_bytes(ranks, dtype)
    header = packed.header()
    taken: list[tuple[int, int]] = []
    for site in LAYOUT.sites:
        a_off, b_off, rank, gain_off, shift_off = header[site.index].tolist()
        assert rank == ranks.get(site.index, 0) and gain_off == shift_off == 0
        if not rank:
            assert a_off == b_off == 0
            continue
        for offset, numel in ((a_off, rank * site.in_features), (b_off, rank * site.out_features)):
            start = offset * dtype.itemsize
            assert start % 64 == 0 and start >= LAYOUT.header_bytes
            taken.append((start, start + numel * dtype.itemsize))
    taken.sort()
    assert all(before[1] <= after[0] for before, after in zip(taken, taken[1:], strict=False))
    assert taken[-1][1] <= packed.nbytes
    for f in factors:
        site = LAYOUT.site(f.path, f.slice)
        a, b = packed.factors(site.index)
        want = f.a.tensor.t() if f.kind == "embedding" else f.a.tensor
        assert torch.equal(a, want.to(dtype))
        assert torch.equal(b, (f.b.tensor.float().t() * scaling).to(dtype))


def test_float64_files_and_parameters_are_packed_too():
    f = factor("down", 0, 3, dtype=torch.float64)
    trained = dataclasses.replace(
        f, a=Ref("a", torch.nn.Parameter(f.a.tensor)), b=Ref("b", f.b.tensor.requires_grad_())
    )
    packed = pack([trained], LAYOUT, torch.bfloat16, pin=False)
    assert not packed.block.requires_grad
    assert torch.equal(packed.factors(4)[1], f.b.tensor.detach().float().t().bfloat16())


def test_shared_factors_are_stored_once():
    a = Ref("shared", torch.randn(4, 6))
    parts = [dataclasses.replace(factor("qkv", i, 4), a=a) for i in range(3)]
    packed = pack(parts, LAYOUT, torch.float32, pin=False)
    assert len(set(packed.header()[1:4, 0].tolist())) == 1
    assert len(set(packed.header()[1:4, 1].tolist())) == 3
    assert packed.nbytes < LAYOUT.packed_bytes(packed.ranks, torch.float32)
    for other in (packed.to(torch.bfloat16, pin=False), compose([(packed, 0.5)], LAYOUT, torch.float32, pin=False)):
        assert len(set(other.header()[1:4, 0].tolist())) == 1


def test_one_tensor_under_two_scalings_is_two_factors():
    layout = Layout.from_targets({name: dataclasses.replace(TARGETS["down"], path=name) for name in ("one", "two")})
    a, b = Ref("a", torch.randn(2, 7)), Ref("b", torch.randn(6, 2))
    for scalings, distinct in (((1.0, 1.0), 1), ((1.0, 2.0), 2)):
        parts = [Part(name, 0, "linear", 2, s, a, b) for name, s in zip(("one", "two"), scalings, strict=True)]
        packed = pack(parts, layout, torch.float32, pin=False)
        assert len(set(packed.header()[:, 1].tolist())) == distinct
        assert torch.equal(packed.factors(1)[1], b.tensor.t() * scalings[1])


VECTORS = st.dictionaries(st.sampled_from(range(LAYOUT.n_sites)), st.tuples(st.booleans(), st.booleans()), min_size=1)


def with_vectors(factors: list[Part], wanted: dict[int, tuple[bool, bool]]) -> list[Part]:
    """`factors` with a gain and a shift where `wanted`; sites without factors get a rank of 0."""
    parts = {LAYOUT.site(f.path, f.slice).index: f for f in factors}
    generator = torch.Generator().manual_seed(5)
    for index, flags in wanted.items():
        site = LAYOUT.sites[index]
        part = parts.get(index) or Part(site.path, site.slice, site.kind, 0, 1.0, None, None)
        gain, shift = (
            Ref((name, index), torch.randn(site.out_features, generator=generator)) if flag else None
            for name, flag in zip(("gain", "shift"), flags, strict=True)
        )
        parts[index] = dataclasses.replace(part, gain=gain, shift=shift)
    return list(parts.values())


@given(ranks=SITES, wanted=VECTORS, dtype=st.sampled_from(DTYPES), stored=st.sampled_from(DTYPES))
@settings(max_examples=60, deadline=None)
def test_gains_and_shifts_beside_the_factors(ranks, wanted, dtype, stored):
    parts = with_vectors(factors_of(ranks, dtype=stored), wanted)
    packed = pack(parts, LAYOUT, dtype, pin=False)
    touched = {site for site, flags in wanted.items() if any(flags)}
    assert packed.ranks == dict.fromkeys(touched, 0) | ranks
    cast = packed.to(torch.float16, pin=False)
    assert cast.ranks == packed.ranks and (cast is packed) == (dtype == torch.float16)
    taken: set[int] = set()
    for part in parts:
        site = LAYOUT.site(part.path, part.slice)
        *_, rank, gain_off, shift_off = packed.header()[site.index].tolist()
        vectors = packed.vectors(site.index)
        for offset, ref, vector, other in zip(
            (gain_off, shift_off), (part.gain, part.shift), vectors, cast.vectors(site.index), strict=True
        ):
            if ref is None:
                assert offset == 0 and vector is None and other is None
                continue
            assert offset * 4 % 64 == 0 and offset * 4 >= LAYOUT.header_bytes
            assert vector.dtype == torch.float32 and torch.equal(vector, ref.tensor) and torch.equal(other, ref.tensor)
            here = set(range(offset, offset + site.out_features))
            assert not here & taken
            taken |= here
        if rank:
            scale = part.scaling * (part.gain.tensor if part.gain else torch.ones(site.out_features))
            want = part.b.tensor.float().t() * scale
            torch.testing.assert_close(
                packed.factors(site.index)[1],
                want.to(dtype),
                rtol=2e-3 if dtype != torch.bfloat16 else 8e-3,
                atol=1e-6,
            )
        else:
            assert packed.header()[site.index, :2].tolist() == [0, 0]


def test_a_gain_is_rounded_only_once_with_b():
    f = factor("down", 0, 3, scaling=0.7)
    gain = torch.rand(6) * 300
    packed = pack([dataclasses.replace(f, gain=Ref("gain", gain))], LAYOUT, torch.bfloat16, pin=False)
    assert torch.equal(packed.factors(4)[1], (f.b.tensor.t() * (gain * 0.7)).bfloat16())


def test_one_b_under_two_gains_is_two_factors_and_equal_vectors_are_stored_once():
    layout = Layout.from_targets({name: dataclasses.replace(TARGETS["down"], path=name) for name in ("one", "two")})
    a, b, shift = Ref("a", torch.randn(2, 7)), Ref("b", torch.randn(6, 2)), Ref("shift", torch.randn(6))
    gains = [Ref(i, torch.rand(6)) for i in range(2)]
    parts = [
        Part(name, 0, "linear", 2, 1.0, a, b, gain, shift) for name, gain in zip(("one", "two"), gains, strict=True)
    ]
    packed = pack(parts, layout, torch.float32, pin=False)
    assert [len(set(column)) for column in packed.header().t().tolist()] == [1, 2, 1, 2, 1]
    for i, gain in enumerate(gains):
        assert torch.equal(packed.factors(i)[1], b.tensor.t() * gain.tensor)
    assert torch.equal(packed.to(torch.bfloat16, pin=False).header()[:, 2:] != 0, packed.header()[:, 2:] != 0)


@pytest.mark.parametrize(
    ("change", "features"),
    [
        ({"gain": Ref("g", torch.ones(6))}, ["DoRA"]),
        ({"shift": Ref("s", torch.ones(6))}, ["biases"]),
        ({"gain": Ref("g", torch.ones(6)), "shift": Ref("s", torch.ones(6))}, ["DoRA"]),
    ],
)
def test_only_plain_adapters_are_mixed(change, features):
    packed = pack([dataclasses.replace(factor("down", 0, 2), **change)], LAYOUT, torch.float32, pin=False)
    assert features_of(packed) == features and features_of(block(1)) == []
    with pytest.raises(UnsupportedAdapterError, match=features[0]):
        compose([(block(1), 0.5), (packed, 0.5)], LAYOUT, torch.float32, pin=False)


def test_a_default_slot_has_room_for_gains_and_shifts_at_the_maximum_rank():
    everywhere = dict.fromkeys(range(LAYOUT.n_sites))
    parts = with_vectors(factors_of(dict.fromkeys(everywhere, RANK)), dict.fromkeys(everywhere, (True, True)))
    for dtype in DTYPES:
        packed = pack(parts, LAYOUT, dtype, pin=False)
        assert packed.nbytes <= LAYOUT.default_slot_bytes(RANK, dtype) < packed.nbytes + 256


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([factor("down", 0, 2), factor("down", 0, 2)], "two factors"),
        ([dataclasses.replace(factor("down", 0, 2), path="up")], "'up'"),
        ([dataclasses.replace(factor("down", 0, 2), rank=3)], "A has shape"),
        ([dataclasses.replace(factor("down", 0, 2), b=Ref("b", torch.zeros(6, 1)))], "B has shape"),
        ([dataclasses.replace(factor("down", 0, 2), a=Ref("a", torch.zeros(1, 7)))], "A has shape"),
        ([dataclasses.replace(factor("down", 0, 2), gain=Ref("g", torch.ones(5)))], "gain has shape"),
        ([dataclasses.replace(factor("down", 0, 2), shift=Ref("g", torch.ones(1)))], "shift has shape"),
    ],
)
def test_what_does_not_fit_the_layout_is_refused(wrong, message):
    with pytest.raises(AdapterMatchError, match=message):
        pack(wrong, LAYOUT, torch.float32, pin=False)


@given(one=SITES, two=SITES, weights=st.tuples(st.floats(-2, 2), st.floats(-2, 2)))
@settings(max_examples=60, deadline=None)
def test_mix_is_the_sum_of_weighted_deltas(one, two, weights):
    parts = [pack(factors_of(r, seed), LAYOUT, torch.float32, pin=False) for seed, r in enumerate((one, two))]
    mix = compose(list(zip(parts, weights, strict=True)), LAYOUT, torch.float32, pin=False)
    for site in range(LAYOUT.n_sites):
        want = weights[0] * delta(parts[0], site) + weights[1] * delta(parts[1], site)
        torch.testing.assert_close(delta(mix, site), want, rtol=1e-4, atol=1e-5)
        assert mix.ranks.get(site, 0) == one.get(site, 0) + two.get(site, 0)


@given(ranks=SITES, source=st.sampled_from(DTYPES), target=st.sampled_from(DTYPES))
@settings(max_examples=30, deadline=None)
def test_cast_is_elementwise(ranks, source, target):
    packed = pack(factors_of(ranks), LAYOUT, source, pin=False)
    other = packed.to(target, pin=False)
    assert (other is packed) == (source == target)
    assert other.nbytes == LAYOUT.packed_bytes(ranks, target) and other.ranks == ranks
    for site in ranks:
        for got, want in zip(other.factors(site), packed.factors(site), strict=True):
            assert torch.equal(got, want.to(target))


def test_digest_depends_on_nothing_but_the_content():
    again = pack(factors_of({1: 3, 4: 1}), LAYOUT, torch.float32, pin=False)
    same = pack(factors_of({1: 3, 4: 1}), LAYOUT, torch.float32, pin=False)
    other = pack(factors_of({1: 3, 4: 1}, seed=1), LAYOUT, torch.float32, pin=False)
    assert again.digest() == same.digest() != other.digest()
    large = Layout.from_targets({"wide": dataclasses.replace(TARGETS["down"], path="wide", in_features=300_000)})
    a = torch.randn(4, 300_000)
    parts = [Part("wide", 0, "linear", 4, 1.0, Ref("a", a), Ref("b", torch.randn(6, 4)))]
    before = pack(parts, large, torch.float32, pin=False).digest()
    a[3, -1] += 1  # beyond the first chunk of the hash
    assert pack(parts, large, torch.float32, pin=False).digest() != before


def test_what_is_made_in_inference_mode_can_be_written_outside():
    with torch.inference_mode():
        store = store_of(max_loras=1)
        packed = pack(factors_of({1: 2}), LAYOUT, torch.float32, pin=False)
        store.register("a", lambda: Loaded(packed, "memory"))
    store.register("b", lambda: Loaded(block(1), "memory"))
    for name, want in (("a", packed), ("b", block(1)), ("a", packed)):
        with store.acquire([name]) as lease:
            assert holds(store, lease.slots[name], want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arena_views(dtype):
    slot_bytes = LAYOUT.default_slot_bytes(RANK, dtype)
    arena = Arena(LAYOUT, 3, slot_bytes, "cpu", dtype)
    assert arena.slot_bytes == slot_bytes and slot_bytes % 256 == 0
    assert not arena.storage.any()
    arena.header(2)[3, 1] = 77
    assert arena.meta[2, 5 * 3 + 1] == 77 and arena.slot(2).view(torch.int64)[5 * 3 + 1] == 77
    arena.data[2 * arena.slot_elems] = 1
    assert arena.slot(2)[: dtype.itemsize].any()
    assert arena.tail.data_ptr() == arena.data[arena.zero_off :].data_ptr()
    assert arena.tail.numel() >= LAYOUT.max_dim and arena.zero_off == 3 * arena.slot_elems
    assert not arena.tail.any()
    assert arena.floats.numel() * 4 == arena.storage.numel()
    arena.floats[arena.slot_bytes // 4 + 64] = 1.5
    assert arena.slot(1).view(torch.float32)[64] == 1.5


def test_slot_without_room_for_its_table_is_refused():
    with pytest.raises(ConfigError, match="slot_bytes=256"):
        Arena(LAYOUT, 1, 1, "cpu", torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot_bytes", [None, 4000])
def test_estimate_is_what_is_allocated(dtype, slot_bytes):
    config = MultiLoraConfig(max_loras=3, max_lora_rank=RANK, slot_bytes=slot_bytes)
    store = AdapterStore(LAYOUT, config, "cpu", dtype)
    ranks = {"qkv": 3, "down": 2}
    estimate = estimate_memory(LAYOUT, 3, RANK, dtype, ranks, slot_bytes=slot_bytes)
    assert estimate["arena"] == store.arena.storage.numel()
    assert estimate["slot"] == store.arena.slot_bytes
    assert estimate["tail"] == store.arena.tail.numel() * dtype.itemsize
    assert estimate["header"] == LAYOUT.header_bytes
    packed = pack(factors_of({1: 3, 2: 3, 3: 3, 4: 2}), LAYOUT, dtype, pin=False)
    assert estimate["adapter"] == packed.nbytes
    assert list(estimate["largest"]) == ["qkv", "embed", "down"]
    full = estimate_memory(LAYOUT, 3, RANK, dtype)
    assert full["adapter"] <= full["slot"] == LAYOUT.default_slot_bytes(RANK, dtype)
