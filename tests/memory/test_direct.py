"""Entries made straight from stored bytes: the bits of plain torch, whatever the dtypes, chunks and threads."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_bed import LAYOUT, Part, block
from safetensors.torch import save_file

from hf_multilora.adapters.checkpoint import Checkpoint, TensorRef, from_tensors, open_checkpoint
from hf_multilora.adapters.plan import SavedParam, TokenRows
from hf_multilora.adapters.stored import Stored, in_memory
from hf_multilora.errors import AdapterFormatError, AdapterMatchError
from hf_multilora.memory import direct, pinned
from hf_multilora.memory.layout import Layout, Site
from hf_multilora.memory.pack import pack

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STORED = [*DTYPES, torch.float64, torch.float8_e4m3fn]


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of every size that the dtype has: subnormal ones, the largest, infinite ones, -0, NaN."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-150, 130, shape, generator=generator).double()
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * exponents.exp2()
    flat = values.view(-1)
    for i, special in enumerate((0.0, -0.0, torch.inf, -torch.inf, torch.nan)):
        flat[i :: max(7, len(flat) // 3)] = special
    return values.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, but for which NaN it is."""
    assert a.dtype == b.dtype and a.shape == b.shape
    nan = a.isnan()
    ints = {2: torch.int16, 4: torch.int32}[a.element_size()]
    equal = a.contiguous().view(ints) == b.contiguous().view(ints)
    return bool(torch.equal(nan, b.isnan()) and (equal | nan).all())


def expected_b(b: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """By the definition: multiplied in fp32, rounded once."""
    return b.t().to(torch.float32).mul(scaling).to(dtype)


def opened(tensors: dict[str, torch.Tensor], path: Path, form: str) -> Checkpoint:
    if form == "memory":
        return from_tensors(tensors)
    if form == "bin":
        torch.save(tensors, path.with_suffix(".bin"))
        return open_checkpoint(path.with_suffix(".bin"))
    save_file(tensors, path)
    return open_checkpoint(path)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks, shared by three threads, for adapters of a few KB."""
    monkeypatch.setattr(direct, "_CHUNK", 200)
    monkeypatch.setattr(direct, "_ALONE", 0)
    monkeypatch.setattr(direct, "_TILE", 16)
    monkeypatch.setattr(direct, "cores", lambda: 3)


@pytest.mark.parametrize("form", ["file", "bin", "memory"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    seed=st.integers(0, 1000),
    stored=st.sampled_from(STORED),
    scaling=st.sampled_from([1.0, 2.0, 0.3, -1.7, 1e-30, 3e38]) | st.floats(1e-6, 1e6),
    ranks=st.lists(st.integers(1, 8), min_size=5, max_size=5),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bits(
    form: str, dtype: torch.dtype, seed: int, stored: torch.dtype, scaling: float, ranks: list[int],
    tmp_path: Path, small_chunks: None,
) -> None:  # fmt: skip
    """Every site of a small model, the embedding among them; qkv's B is one tensor of which each slice has rows."""
    tensors = {"whole_b": numbers((16, ranks[1]), stored, seed), "saved": numbers((3, 40), stored, seed + 1)}
    for site in LAYOUT.sites:
        tensors[f"{site.index}.a"] = numbers((ranks[site.index], site.in_features), stored, seed + 2 + site.index)
        tensors[f"{site.index}.b"] = numbers((site.out_features, ranks[site.index]), stored, seed + 20 + site.index)
    checkpoint = opened(tensors, tmp_path / "x.safetensors", form)
    rows = {1: (0, 9), 2: (9, 13), 3: (13, 16)}

    def b_of(site: Site) -> tuple[str, tuple[int, int] | None]:
        whole = site.index in rows and ranks[site.index] == ranks[1]
        return ("whole_b", rows[site.index]) if whole else (f"{site.index}.b", None)

    factors: list[Any] = [
        Part(site.path, site.slice, site.kind, ranks[site.index], scaling,
             TensorRef(checkpoint, f"{site.index}.a"), TensorRef(checkpoint, *b_of(site)))  # type: ignore[arg-type]
        for site in LAYOUT.sites
    ]  # fmt: skip
    assert all(factor.a.stored() is not None and factor.b.stored() is not None for factor in factors)
    packed = pack(
        factors,
        LAYOUT,
        dtype,
        pin=False,
        saved=[SavedParam("norm", "weight", TensorRef(checkpoint, "saved"))],
        tokens=[TokenRows("embed", (4, 2, 7), TensorRef(checkpoint, "saved"))],
        base_dtype=lambda path, name: torch.bfloat16,
    )
    for site in LAYOUT.sites:
        a, b = packed.factors(site.index)
        key, part = b_of(site)
        want_a = tensors[f"{site.index}.a"].to(dtype)
        assert same(a, want_a.t() if site.kind == "embedding" else want_a)
        want_b = tensors[key] if part is None else tensors[key][part[0] : part[1]]
        assert same(b, expected_b(want_b, scaling, dtype)), (stored, dtype, scaling)
    want = tensors["saved"].to(torch.bfloat16)
    assert same(packed.view(packed.extras.saved["norm"]["weight"]), want)
    assert same(packed.view(packed.extras.tokens["embed"][1]), want)
    checkpoint.close()


def test_large_entries_are_read_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout([Site(0, "wide", 0, "linear", 300_000, 200_000)])
    tensors = {"a": torch.randn(16, 300_000).bfloat16(), "b": torch.randn(200_000, 16).bfloat16()}
    save_file(tensors, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    monkeypatch.setattr(direct, "cores", lambda: 3)
    seen: set[int] = set()
    make, all_there = direct._make, threading.Barrier(3)

    def watched(*args: Any) -> None:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            all_there.wait(20)
        make(*args)

    monkeypatch.setattr(direct, "_make", watched)
    factor: Any = Part("wide", 0, "linear", 16, 0.7, TensorRef(checkpoint, "a"), TensorRef(checkpoint, "b"))  # type: ignore[arg-type]
    packed = pack([factor], layout, torch.bfloat16, pin=False)
    a, b = packed.factors(0)
    assert torch.equal(a, tensors["a"]) and same(b, expected_b(tensors["b"], 0.7, torch.bfloat16))
    assert len(seen) == 3 and threading.get_ident() in seen


def test_every_byte_is_written(tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was another adapter's shows nowhere: blocks of equal content are of equal bytes."""
    tensors = {"a": torch.randn(3, 7).half(), "b": torch.randn(6, 3).half()}
    save_file(tensors, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    blocks = []
    for dirt in (0, 255):

        def dirty(nbytes: int, fill: Any, *, pin: bool, dirt: int = dirt) -> torch.Tensor:
            made = torch.full((nbytes,), dirt, dtype=torch.uint8)
            fill(made)
            return made

        monkeypatch.setattr("hf_multilora.memory.build.host_block", dirty)
        factor: Any = Part("down", 0, "linear", 3, 0.7, TensorRef(checkpoint, "a"), TensorRef(checkpoint, "b"))  # type: ignore[arg-type]
        blocks.append(pack([factor], LAYOUT, torch.float16, pin=False))
    assert torch.equal(blocks[0].block, blocks[1].block) and blocks[0].digest() == blocks[1].digest()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_is_cut_off_while_it_is_read(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(direct, "cores", lambda: threads)
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.randn(3, 7), "b": torch.randn(6, 3)}, path)
    checkpoint = open_checkpoint(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 40)
    factor: Any = Part("down", 0, "linear", 3, 0.7, TensorRef(checkpoint, "a"), TensorRef(checkpoint, "b"))  # type: ignore[arg-type]
    with pytest.raises(AdapterFormatError, match=r"x\.safetensors: was cut off"):
        pack([factor], LAYOUT, torch.float32, pin=False)
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        pack([factor], LAYOUT, torch.float32, pin=False)


def test_an_error_of_what_runs_beside_it(small_chunks: None) -> None:
    """It is raised when nobody writes to the block any more."""
    entries = [direct.Entry(64 * i, torch.float32, direct.Recipe(_stored(torch.randn(4, 4)))) for i in range(200)]
    raw = torch.zeros(64 * 200, dtype=torch.uint8)

    def meanwhile() -> None:
        raise RuntimeError("beside")

    for _ in range(20):
        raw.zero_()
        with pytest.raises(RuntimeError, match="beside"):
            direct.fill(raw, entries, meanwhile)
        before = raw.clone()
        time.sleep(0.002)
        assert torch.equal(raw, before)


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("cut", [False, True])
def test_threads_that_cannot_be_started(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch, threads: int, cut: bool
) -> None:
    """A container has a limit of them. When fill returns, whoever was started has done its chunk, or failed."""
    path, tensor = tmp_path / "x.safetensors", torch.arange(4096.0)
    save_file({"x": tensor}, path)
    checkpoint = open_checkpoint(path)
    stored = TensorRef(checkpoint, "x").stored()
    assert stored is not None
    make, start = direct._make, threading.Thread.start
    helps, started = threading.Event(), []

    def slow(*args: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            assert not threads or helps.wait(20)
            return make(*args)
        helps.set()
        time.sleep(0.3)
        if cut:
            raise AdapterFormatError("cut off")
        make(*args)

    def limited(self: threading.Thread) -> None:
        if len(started) == threads:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(direct, "_pool", None)
    monkeypatch.setattr(direct, "_make", slow)
    monkeypatch.setattr(threading.Thread, "start", limited)
    raw = torch.full((4 * 4096,), 7, dtype=torch.uint8)
    if cut and threads:
        with pytest.raises(AdapterFormatError, match="cut off"):
            direct.fill(raw, [direct.Entry(0, torch.float32, direct.Recipe(stored))])
    else:
        direct.fill(raw, [direct.Entry(0, torch.float32, direct.Recipe(stored))])
        assert torch.equal(raw.view(torch.float32), tensor)
    checkpoint.close()


def test_who_comes_late_does_not_keep_the_block(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers that are still in the queue find nothing to do, and hold nothing."""
    queued: list[Any] = []
    monkeypatch.setattr(direct, "_start", lambda help, threads: queued.append(help))
    memory = np.zeros(4 * 4096, dtype=np.uint8)
    alive, tensor = weakref.ref(memory), torch.arange(4096.0)
    direct.fill(torch.from_numpy(memory), [direct.Entry(0, torch.float32, direct.Recipe(_stored(tensor)))])
    assert memory.tobytes() == tensor.numpy().tobytes()
    del memory
    assert queued and alive() is None
    queued[0]()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(small_chunks: None) -> None:
    tensor = torch.arange(4096.0)
    entry = direct.Entry(0, torch.float32, direct.Recipe(_stored(tensor), scale=2.0))

    def doubled() -> bool:
        raw = torch.zeros(4 * 4096, dtype=torch.uint8)
        direct.fill(raw, [entry])
        return torch.equal(raw.view(torch.float32), 2 * tensor)

    assert doubled()
    child = os.fork()
    if not child:
        os._exit(0 if doubled() else 1)
    end = time.monotonic() + 30
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child waits for threads that it does not have")
        time.sleep(0.01)
    assert status[1] == 0


def _stored(tensor: torch.Tensor) -> Stored:
    found = in_memory(tensor)
    assert found is not None
    return found


def test_shapes_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.randn(3, 7), "b": torch.randn(5, 3)}, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    factor: Any = Part("down", 0, "linear", 3, 0.7, TensorRef(checkpoint, "a"), TensorRef(checkpoint, "b"))  # type: ignore[arg-type]
    with pytest.raises(AdapterMatchError, match=r"B has shape \(5, 3\), the layer needs \(6, 3\)"):
        pack([factor], LAYOUT, torch.float32, pin=False)


def test_tensors_in_memory_are_not_written_to(small_chunks: None) -> None:
    tensors = {"a": torch.randn(3, 7), "b": torch.nn.Parameter(torch.randn(6, 3))}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    checkpoint = from_tensors(tensors)
    factor: Any = Part("down", 0, "linear", 3, 0.7, TensorRef(checkpoint, "a"), TensorRef(checkpoint, "b"))  # type: ignore[arg-type]
    with torch.inference_mode():
        packed = pack([factor], LAYOUT, torch.float32, pin=False)
    assert not packed.block.is_inference()
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


@pytest.mark.parametrize("kind", ["transposed", "expanded", "meta", "conjugate"])
def test_tensors_that_are_no_plain_bytes_go_the_other_way(kind: str) -> None:
    tensor = {
        "transposed": torch.randn(7, 3).t(),
        "expanded": torch.randn(1, 7).expand(3, 7),
        "meta": torch.empty(3, 7, device="meta"),
        "conjugate": torch.randn(3, 7, dtype=torch.complex64).conj(),
    }[kind]
    assert TensorRef(from_tensors({"a": tensor}), "a").stored() is None


class TestMappings:
    """Large blocks are mappings, of which the last few are used again."""

    @pytest.fixture(autouse=True)
    def empty(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(pinned, "_LARGE", 1 << 12)
        monkeypatch.setattr(pinned, "_KEPT", 100_000)
        gc.collect()
        pinned._spare.clear()
        yield
        pinned._spare.clear()

    def address(self, nbytes: int) -> int:
        return self.block(nbytes).data_ptr()

    def block(self, nbytes: int) -> torch.Tensor:
        made = pinned.host_block(nbytes, lambda block: None, pin=False)
        assert made.shape == (nbytes,) and made.dtype == torch.uint8
        return made

    def test_memory_is_used_again(self) -> None:
        first = self.address(50_000)
        assert self.address(49_000) == first
        assert self.address(20_000) != first, "far too large for it"
        assert self.address(60_000) != first, "too small"

    def test_not_while_anything_looks_at_it(self) -> None:
        block = self.block(50_000)
        view, first = block[100:200].view(torch.float32), block.data_ptr()
        del block
        gc.collect()
        assert not pinned._spare
        other = self.block(50_000)
        assert other.data_ptr() != first
        other.fill_(255)
        assert view.data_ptr() == first + 100
        del view
        gc.collect()
        assert [mapping.address for mapping in pinned._spare] == [first]

    def test_no_more_than_a_few_are_kept(self) -> None:
        blocks = [self.block(40_000) for _ in range(5)]
        del blocks
        gc.collect()
        assert len(pinned._spare) >= 1 and sum(len(mapping.memory) for mapping in pinned._spare) <= 100_000

    def test_a_fill_that_fails_gives_the_memory_back(self) -> None:
        first = self.address(50_000)

        def broken(block: torch.Tensor) -> None:
            assert block.data_ptr() == first
            raise OSError("no")

        with pytest.raises(OSError):
            pinned.host_block(50_000, broken, pin=False)
        gc.collect()
        assert self.address(50_000) == first

    def test_registered_once_and_handed_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With CUDA's part of it played: memory that is locked stays locked from block to block."""
        calls: list[str] = []

        class Cudart:
            def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
                calls.append("register")
                return 0

            def cudaHostUnregister(self, address: int) -> int:
                calls.append("unregister")
                return 0

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "cudart", Cudart)
        filled: list[list[str]] = []
        for _ in range(3):
            pinned.host_block(50_000, lambda block: filled.append(list(calls)), pin=True)
            gc.collect()
        assert filled == [[], ["register"], ["register"]], "registered after it was filled, and once"
        assert calls == ["register"]
        assert self.address(50_000) != pinned._spare[0].address, "locked memory is for those who asked for it"
        several = [pinned.host_block(50_000, lambda block: None, pin=True) for _ in range(4)]
        del several
        gc.collect()
        assert calls.count("unregister") >= 1
        assert calls.count("register") - calls.count("unregister") == sum(m.registered for m in pinned._spare)

    @pytest.mark.skipif(sys.platform != "linux", reason="no such advice here")
    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    @pytest.mark.parametrize("pin", [True, False])
    def test_pages_that_a_device_reads_stay_in_a_fork(self, monkeypatch: pytest.MonkeyPatch, pin: bool) -> None:
        """Shared with a child, they would be copied at the next write, and the device would read the old ones."""
        _play_cuda(monkeypatch, lambda: 0)
        made = pinned.host_block(50_000, lambda block: block.fill_(7), pin=pin)  # type: ignore[arg-type, return-value]
        child = os.fork()
        if not child:
            os._exit(int(made.numpy()[100]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if pin else 7)
        assert (made == 7).all()

    def test_a_failed_registration_leaves_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CUDA keeps it for the thread's next launch, which is to be one of here."""
        kept: list[str] = []

        def fail() -> int:
            kept.append("out of memory")
            return 2

        def launch(*args: Any, device: str) -> None:
            assert device == "cuda"
            raise RuntimeError(kept.pop())

        _play_cuda(monkeypatch, fail)
        monkeypatch.setattr(torch, "ones", launch)
        made = pinned.host_block(50_000, lambda block: block.fill_(7), pin=True)  # type: ignore[arg-type, return-value]
        assert (made == 7).all() and not kept

    def test_without_registration_it_is_pageable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")

        def cudart() -> Any:
            raise RuntimeError("no driver")

        monkeypatch.setattr(torch.cuda, "cudart", cudart)
        made = pinned.host_block(50_000, lambda block: block.fill_(7), pin=True)  # type: ignore[arg-type, return-value]
        assert (made == 7).all()


def _play_cuda(monkeypatch: pytest.MonkeyPatch, register: Callable[[], int]) -> None:
    class Cudart:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            return register()

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)


def test_a_recycled_block_is_another_adapters_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_LARGE", 0)
    before = block(3).to(torch.bfloat16, pin=False).block.clone()
    for _ in range(3):
        again = block(3).to(torch.bfloat16, pin=False)
        assert torch.equal(again.block, before)
        del again
        gc.collect()
