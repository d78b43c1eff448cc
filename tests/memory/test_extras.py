"""Saved tensors, token rows, invocation, vocabulary: in the block, in slots, in leases, through casts, in refusals."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from memory_bed import LAYOUT, RANK, Files, Ref, block, factor, holds, store_of

from hf_multilora.config import MultiLoraConfig
from hf_multilora.errors import AdapterMatchError, SlotError, UnsupportedAdapterError
from hf_multilora.memory.contents import entries_of, features_of
from hf_multilora.memory.estimate import estimate_memory
from hf_multilora.memory.pack import PackedAdapter, compose, pack
from hf_multilora.memory.registry import Loaded
from hf_multilora.memory.store import AdapterStore


@dataclass(frozen=True)
class Saved:
    """Stands in for adapters.SavedParam."""

    path: str
    name: str
    ref: Ref


@dataclass(frozen=True)
class Rows:
    """Stands in for adapters.TokenRows."""

    path: str
    ids: tuple[int, ...]
    ref: Ref


HEAD, NORM, BIAS = torch.randn(3, 5), torch.randn(7), torch.randn(3)
TOKENS = torch.randn(2, 5)
SAVED = (
    Saved("score", "out_proj.weight", Ref("head", HEAD)),
    Saved("norm", "weight", Ref("norm", NORM)),
    Saved("score", "out_proj.bias", Ref("bias", BIAS)),
    Saved("score", "steps", Ref("steps", torch.tensor(3))),
)
ROWS = (Rows("embed", (9, 4), Ref("rows", TOKENS)),)


def rich(dtype=torch.float32, base_dtype=None, **changes) -> PackedAdapter:
    """An adapter with one of everything."""
    options = {"saved": SAVED, "tokens": ROWS, "invocation": [5, 6], "vocab_size": 13} | changes
    return pack([factor("down", 0, 3)], LAYOUT, dtype, pin=False, base_dtype=base_dtype, **options)


def same_extras(packed: PackedAdapter, view, dtype: torch.dtype, norm: torch.Tensor | None = None) -> bool:
    """Whether what `view` sees is what was saved, in these dtypes."""
    saved = packed.extras.saved
    (ids, rows) = packed.extras.tokens["embed"]
    found = [
        (view(saved["score"]["out_proj.weight"]), HEAD.to(dtype)),
        (view(saved["score"]["out_proj.bias"]), BIAS.to(dtype)),
        (view(saved["norm"]["weight"]), NORM.to(dtype) if norm is None else norm),
        (view(saved["score"]["steps"]), torch.tensor(3)),
        (view(ids), torch.tensor([9, 4])),
        (view(rows), TOKENS.to(dtype)),
    ]
    return all(got.dtype == want.dtype and torch.equal(got, want) for got, want in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_is_in_the_one_block(dtype):
    packed = rich(dtype)
    extras = packed.extras
    assert extras and same_extras(packed, packed.view, torch.float32)
    assert {path: set(tensors) for path, tensors in extras.saved.items()} == {
        "score": {"out_proj.weight", "out_proj.bias", "steps"},
        "norm": {"weight"},
    }
    assert extras.invocation == (5, 6) and extras.vocab_size == 13
    tensors = [t for module in extras.saved.values() for t in module.values()] + list(extras.tokens["embed"])
    spans = sorted((t.offset, t.offset + t.nbytes) for t in tensors)
    assert all(start % 64 == 0 for start, _ in spans)
    assert spans[0][0] >= LAYOUT.packed_bytes({4: 3}, dtype) and spans[-1][1] <= packed.nbytes
    assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
    assert packed.header().tolist() == pack([factor("down", 0, 3)], LAYOUT, dtype, pin=False).header().tolist()
    with pytest.raises(TypeError):
        extras.saved["score"]["out_proj.weight"] = extras.tokens["embed"][0]


def test_plain_adapters_have_no_extras():
    assert not block(1).extras and features_of(block(1)) == []
    assert block(1).nbytes == LAYOUT.packed_bytes(block(1).ranks, torch.float32)
    for only in ({"saved": SAVED[:1]}, {"tokens": ROWS}, {"invocation": (1,)}, {"vocab_size": 11}):
        assert pack([factor("down", 0, 1)], LAYOUT, torch.float32, pin=False, **only).extras


def test_an_adapter_may_have_extras_alone():
    packed = pack([], LAYOUT, torch.bfloat16, pin=False, saved=SAVED)
    assert packed.ranks == {} and packed.rank == 0 and not packed.header().any()
    assert torch.equal(packed.view(packed.extras.saved["norm"]["weight"]), NORM)


def test_saved_tensors_have_the_dtype_of_the_base():
    kept = {
        ("norm", "weight"): torch.float32,
        ("score", "steps"): torch.bfloat16,
        ("score", "out_proj.bias"): torch.uint8,
    }

    def base(path: str, name: str) -> torch.dtype | None:
        return kept.get((path, name), torch.bfloat16)

    packed = rich(torch.float16, base)
    dtypes = {path: {name: t.dtype for name, t in tensors.items()} for path, tensors in packed.extras.saved.items()}
    assert dtypes["norm"] == {"weight": torch.float32}
    # Only what is a number with a point on both sides is cast: quantised bases and counters are not followed.
    assert dtypes["score"] == {"out_proj.weight": torch.bfloat16, "out_proj.bias": torch.float32, "steps": torch.int64}
    assert [t.dtype for t in packed.extras.tokens["embed"]] == [torch.int64, torch.bfloat16]
    assert torch.equal(packed.view(packed.extras.tokens["embed"][1]), TOKENS.bfloat16())


def test_tied_tensors_are_stored_once():
    tied = Ref("tied", torch.randn(11, 5))
    saved = (Saved("embed", "weight", tied), Saved("head", "weight", tied))
    packed = pack([], LAYOUT, torch.float32, pin=False, saved=saved)
    assert packed.extras.saved["embed"]["weight"] == packed.extras.saved["head"]["weight"]
    assert entries_of(packed) == {"embed.weight": 256, "head.weight": 0}
    cast = packed.to(torch.float32, pin=False, base_dtype=lambda path, name: torch.float16)
    assert cast.extras.saved["embed"]["weight"] == cast.extras.saved["head"]["weight"]
    assert cast.nbytes < packed.nbytes


def test_casts():
    packed = rich()
    lora = packed.to(torch.bfloat16, pin=False)
    assert lora.dtype == torch.bfloat16 and same_extras(lora, lora.view, torch.float32)
    assert lora.extras.invocation == (5, 6) and lora.extras.vocab_size == 13
    assert rich(torch.bfloat16).digest() != packed.digest()
    half = packed.to(torch.float32, pin=False, base_dtype=lambda path, name: torch.float16)
    assert half is not packed and same_extras(half, half.view, torch.float16)
    assert torch.equal(half.factors(4)[1], packed.factors(4)[1])
    assert packed.to(torch.float32, pin=False, base_dtype=lambda path, name: torch.float32) is packed
    assert packed.to(torch.float32, pin=False, base_dtype=lambda path, name: None) is packed


def test_the_content_hash_covers_extras():
    assert rich().digest() == rich().digest()
    for change in (
        {"invocation": (5, 7)},
        {"vocab_size": 14},
        {"vocab_size": None},
        {"tokens": ()},
        {"saved": SAVED[:3]},
    ):
        assert rich(**change).digest() != rich().digest()
    renamed = (Saved("core", "out_proj.weight", SAVED[0].ref), *SAVED[1:])
    assert rich(saved=renamed).digest() != rich().digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"saved": (SAVED[0], SAVED[0])}, "'score': 'out_proj.weight' is saved twice"),
        ({"tokens": (ROWS[0], ROWS[0])}, "'embed': token rows come twice"),
        ({"tokens": (Rows("embed", (1, 2, 3), Ref("rows", TOKENS)),)}, "3 tokens have the shape"),
        ({"tokens": (Rows("embed", (1,), Ref("rows", TOKENS[0])),)}, "1 tokens have the shape"),
    ],
)
def test_what_contradicts_itself_is_refused(change, message):
    with pytest.raises(AdapterMatchError, match=message):
        rich(**change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"saved": SAVED}, "saved modules (score, norm)"),
        ({"tokens": ROWS}, "token rows (embed)"),
        ({"invocation": (5,)}, "aLoRA's invocation tokens"),
        ({"vocab_size": 13}, "a vocabulary of 13"),
    ],
)
def test_mixes_are_of_plain_adapters(change, words):
    packed = pack([factor("down", 0, 2)], LAYOUT, torch.float32, pin=False, **change)
    assert features_of(packed) == [words]
    with pytest.raises(UnsupportedAdapterError):
        compose([(packed, 1.0)], LAYOUT, torch.float32, pin=False)
    store = store_of(Files(plain=1))
    store.register("rich", lambda: Loaded(packed, "memory"))
    with pytest.raises(UnsupportedAdapterError) as error:
        store.acquire([(("plain", 0.5), ("rich", 0.5))])
    assert "'rich'" in str(error.value) and words in str(error.value)
    assert store.status().slots == [None, None]
    with store.acquire(["rich", "plain"]):
        pass


# -- slots and leases


def big_store(**options) -> AdapterStore:
    return store_of(Files(plain=1), slot_bytes=rich().nbytes + 256, **options)


def test_leases_show_what_their_slots_hold():
    store = big_store()
    packed = rich()
    store.register("rich", lambda: Loaded(packed, "memory"))
    with store.acquire(["plain", "rich"]) as lease:
        assert set(lease.extras) == {"plain", "rich"} and not lease.extras["plain"]
        assert lease.extras["rich"] == packed.extras and holds(store, lease.slots["rich"], packed)
        slot = lease.slots["rich"]
        assert same_extras(packed, lambda saved: store.arena.view(slot, saved), torch.float32)
        view = store.arena.view(slot, lease.extras["rich"].saved["norm"]["weight"])
        assert view.untyped_storage().data_ptr() == store.arena.storage.untyped_storage().data_ptr()
    store.unload("rich")
    store.register("other", lambda: Loaded(block(2), "memory"))
    with store.acquire(["other"]) as lease:
        assert not lease.extras["other"]


def test_a_site_with_nothing_but_a_shift_is_touched():
    shift = Ref("shift", torch.randn(4))
    part = factor("qkv", 1, 2)
    part = type(part)("qkv", 1, "linear", 0, 1.0, None, None, None, shift)
    packed = pack([part], LAYOUT, torch.float32, pin=False)
    store = store_of()
    entry = store.register("biased", lambda: Loaded(packed, "memory"))
    assert entry.report().modules == {"qkv": 0} and entry.report().rank == 0
    with store.acquire(["biased"]) as lease:
        assert lease.touched == {2}
        row = store.arena.header(lease.slots["biased"])[2].tolist()
        start = lease.slots["biased"] * store.arena.slot_bytes // 4 + row[4]
        assert row[:4] == [0, 0, 0, 0]
        assert torch.equal(store.arena.floats[start : start + 4], shift.tensor)


def test_retarget_follows_the_base():
    store = big_store()
    made = []

    def load() -> Loaded:
        made.append(rich(store.arena.dtype))
        return Loaded(made[-1], "memory")

    store.register("rich", load)
    tag = store.entry("rich").tag
    kept = {}

    def base(path: str, name: str) -> torch.dtype:
        return kept.get(path, torch.float16)

    def served(dtype: torch.dtype, norm: torch.Tensor | None = None) -> bool:
        with store.acquire(["rich"]) as lease:
            slot, packed = lease.slots["rich"], store.entry("rich").packed
            assert lease.tags["rich"] == tag and lease.extras["rich"] == packed.extras
            return same_extras(packed, lambda saved: store.arena.view(slot, saved), dtype, norm)

    assert served(torch.float32)
    assert store.retarget("cpu", torch.bfloat16) and served(torch.float32)
    assert store.retarget("cpu", torch.bfloat16, base_dtype=base) and served(torch.float16)
    assert not store.retarget("cpu", torch.bfloat16, base_dtype=base)
    kept["norm"] = torch.float32
    assert store.retarget("cpu", torch.bfloat16) and served(torch.float16, NORM.half().float())
    # What is loaded from now on follows, too, whatever dtype its loader took.
    tag = store.register("rich", load, reload=True).tag
    assert made[-1].extras.saved["norm"]["weight"].dtype == torch.float32 and served(torch.float16, NORM.float())


def test_an_adapter_dropped_before_the_base_was_cast_counts_as_new():
    store = big_store(max_loras=1, max_cpu_loras=1)
    store.register("rich", lambda: Loaded(rich(), "memory"))
    before = store.entry("rich").generation
    store.register("next", lambda: Loaded(block(2), "memory"))
    plain = store.entry("plain").generation
    assert store.entry("rich").packed is None
    assert store.retarget("cpu", torch.float32, base_dtype=lambda path, name: torch.bfloat16)
    assert not store.retarget("cpu", torch.float32)
    with store.acquire(["rich"]) as lease:
        assert store.entry("rich").generation > before
        assert lease.extras["rich"].saved["norm"]["weight"].dtype == torch.bfloat16
    with store.acquire(["plain"]):
        assert store.entry("plain").generation == plain


def test_what_does_not_fit_is_refused_with_bytes_and_the_largest_entries():
    head = Saved("score", "weight", Ref("large", torch.randn(1000, 5)))
    packed = rich(saved=(head, *SAVED))
    store = store_of()
    assert packed.nbytes > store.arena.slot_bytes
    with pytest.raises(SlotError) as error:
        store.register("big", lambda: Loaded(packed, "memory"))
    words = str(error.value)
    assert f"needs {packed.nbytes} bytes" in words and f"slot_bytes={packed.nbytes}" in words
    assert "largest entries: score.weight 20 kB," in words and "big" not in store
    config = MultiLoraConfig(max_loras=1, max_lora_rank=RANK, slot_bytes=packed.nbytes)
    roomy = AdapterStore(LAYOUT, config, "cpu", torch.float32)
    roomy.register("big", lambda: Loaded(packed, "memory"))
    with roomy.acquire(["big"]) as lease:
        assert holds(roomy, lease.slots["big"], packed)


def test_entries_add_up_to_the_block():
    packed = rich()
    entries = entries_of(packed)
    assert list(entries) == [
        "down", "score.out_proj.weight", "score.out_proj.bias", "score.steps", "norm.weight", "token rows of embed"
    ]  # fmt: skip
    assert LAYOUT.header_bytes + sum(entries.values()) == packed.nbytes


def test_estimates_count_what_is_saved():
    head = {"score.weight": 4 * 1000 * 5}
    plain = estimate_memory(LAYOUT, 2, RANK, torch.float32, {"down": 3})
    rich_one = estimate_memory(LAYOUT, 2, RANK, torch.float32, {"down": 3}, saved=head)
    assert rich_one["slot"] == plain["slot"] < rich_one["adapter"]
    assert rich_one["adapter"] - plain["adapter"] == 20032
    assert next(iter(rich_one["largest"].items())) == ("score.weight", 20032)
    saved = (Saved("score", "weight", Ref("large", torch.randn(1000, 5))),)
    packed = pack([factor("down", 0, 3)], LAYOUT, torch.float32, pin=False, saved=saved)
    assert packed.nbytes == rich_one["adapter"]


def test_a_block_that_the_base_makes_larger_is_checked_as_it_will_be():
    store = store_of(slot_bytes=LAYOUT.packed_bytes({4: 3}, torch.float32) + 20 * 512)
    assert not store.retarget("cpu", torch.float32, base_dtype=lambda path, name: torch.float64)
    saved = (Saved("score", "weight", Ref("large", torch.randn(512, 5))),)
    small = rich(saved=saved, tokens=())
    assert small.nbytes <= store.arena.slot_bytes
    with pytest.raises(SlotError, match="largest entries: score.weight 20 kB"):
        store.register("big", lambda: Loaded(small, "memory"))
    assert "big" not in store
