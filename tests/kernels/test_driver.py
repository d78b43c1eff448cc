"""Prepared launches: what the driver is handed, read back from memory as it would read it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_multilora.kernels import driver

INVALID_VALUE = 1


class Attribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attrs", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


class Driver:
    """In place of CUDA's: knows one kernel's parameters, and keeps what it was asked to launch."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.launches: list[dict[str, Any]] = []
        self.status = 0

    def info(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        if index.value >= len(self.sizes):
            return INVALID_VALUE
        size._obj.value = self.sizes[index.value]
        return 0

    def launch(self, config: ctypes.c_void_p, function: ctypes.c_void_p, params: ctypes.c_void_p, extra: None) -> int:
        read = ctypes.cast(config, ctypes.POINTER(Config))[0]
        addresses = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))
        kinds = {4: ctypes.c_int32, 8: ctypes.c_int64, 1: ctypes.c_bool}
        values = [
            ctypes.cast(addresses[i], ctypes.POINTER(kinds[size]))[0] for i, size in enumerate(self.sizes)
        ]  # fmt: skip
        attributes = [(read.attrs[i].id, read.attrs[i].value) for i in range(read.count)]
        self.launches.append(
            {
                "function": function.value,
                "grid": tuple(read.grid),
                "block": tuple(read.block),
                "shared": read.shared,
                "stream": read.stream,
                "attributes": attributes,
                "values": values,
            }
        )
        return self.status


def compiled(types: list[str], **metadata: Any) -> Any:
    usual = {
        "num_ctas": 1,
        "num_warps": 4,
        "shared": 2048,
        "launch_pdl": False,
        "launch_cooperative_grid": False,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
    }
    source = SimpleNamespace(signature={f"a{i}": kind for i, kind in enumerate(types)})
    return SimpleNamespace(function=77, src=source, metadata=SimpleNamespace(**{**usual, **metadata}))


TYPES = ["*bf16", "*i32", "i32", "i64", "constexpr", "i1", "constexpr", "i32"]
SIZES = [8, 8, 4, 8, 1, 4, 8, 8]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver(SIZES)
    monkeypatch.setattr(driver, "_driver", lambda: (fake.launch, fake.info))
    yield fake


def arguments() -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    x, slots = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    return x, slots, [x, slots, -5, -(2**40), "native", True, 16, 2**31 - 1]


@pytest.mark.parametrize("pdl", [False, True])
def test_the_driver_reads_what_was_given(cuda: Driver, pdl: bool) -> None:
    x, slots, args = arguments()
    launch = driver.prepare([driver.Kernel(compiled(TYPES, launch_pdl=pdl), (3, 5, 7), args, (0, 1, 2))])
    assert launch is not None and not cuda.launches
    fixed = [-(2**40), True, 2**31 - 1]
    expected = {"function": 77, "grid": (3, 5, 7), "block": (128, 1, 1), "shared": 2048}
    expected["attributes"] = [(6, 1)] if pdl else []
    for stream, leading in ((0, [x.data_ptr(), slots.data_ptr(), 9]), (2**47 + 1, [2**48, 2**33 + 8, 0])):
        launch(stream, *leading)
        want = {**expected, "stream": stream or None, "values": [*leading, *fixed, 0, 0]}
        assert cuda.launches.pop() == want


def test_kernels_share_what_varies(cuda: Driver) -> None:
    x, slots, args = arguments()
    kernels = [
        driver.Kernel(compiled(TYPES), (3, 1, 1), args, (2, 0)),
        driver.Kernel(compiled(TYPES), (4, 1, 1), args, (1, 0, 3)),
    ]
    launch = driver.prepare(kernels)
    assert launch is not None
    fixed = [-(2**40), True, 2**31 - 1, 0, 0]
    for stream in (5, 5, 0):
        launch(stream, 1000 + stream, 2000, 3000, 40)
        first, second = cuda.launches
        cuda.launches.clear()
        assert (first["grid"], second["grid"]) == ((3, 1, 1), (4, 1, 1))
        assert first["stream"] == second["stream"] == (stream or None)
        assert first["values"] == [3000, 1000 + stream, -5, *fixed]
        assert second["values"] == [2000, 1000 + stream, 40, *fixed]


def test_an_error_of_the_driver_is_raised(cuda: Driver) -> None:
    launch = driver.prepare([driver.Kernel(compiled(TYPES), (1, 1, 1), arguments()[2], (0, 1, 2))])
    assert launch is not None
    cuda.status = 700
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        launch(0, 1, 2, 3)


@pytest.mark.parametrize(
    "kernel",
    [
        compiled(TYPES, num_ctas=2),
        compiled(TYPES, launch_cooperative_grid=True),
        compiled(TYPES, global_scratch_size=64),
        compiled(TYPES, profile_scratch_size=64),
        compiled(TYPES[:-1]),
        compiled([*TYPES[:-1], "fp32"]),
        compiled([*TYPES[:-1], "i64"]),
        compiled(["tensordesc<fp16[16, 16]>", *TYPES[1:]]),
        SimpleNamespace(function=77),
    ],
)
def test_what_is_not_known_is_not_prepared(cuda: Driver, kernel: Any) -> None:
    assert driver.prepare([driver.Kernel(kernel, (1, 1, 1), arguments()[2], (0, 1, 2))]) is None


@pytest.mark.parametrize("sizes", [SIZES[:-1], [*SIZES, 8], [8, 8, 8, *SIZES[3:]], []])
def test_a_kernel_with_other_parameters_is_not_prepared(cuda: Driver, sizes: list[int]) -> None:
    cuda.sizes = sizes
    assert driver.prepare([driver.Kernel(compiled(TYPES), (1, 1, 1), arguments()[2], (0, 1, 2))]) is None


def test_without_a_driver_nothing_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_driver", lambda: None)
    assert driver.prepare([driver.Kernel(compiled(TYPES), (1, 1, 1), arguments()[2], (0, 1, 2))]) is None
