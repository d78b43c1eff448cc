"""The header of a safetensors file: what the format's own reader refuses is refused, what it reads is read alike."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from hf_multilora.adapters.checkpoint import TensorRef, open_checkpoint
from hf_multilora.errors import AdapterFormatError

TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a.weight": torch.arange(8, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(3.5),
    "ids": torch.tensor([[1, 2]]),
    "flag": torch.tensor([True, False, True]),
}


def theirs(path: Path) -> dict[str, torch.Tensor] | None:
    """What safetensors reads, None where it refuses."""
    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError):
        return None


def ours(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        checkpoint = open_checkpoint(path)
    except AdapterFormatError as error:
        assert str(path) in str(error)
        return None
    try:
        return {key: checkpoint.read(key) for key in checkpoint.infos}
    finally:
        checkpoint.close()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype and a[key].shape == b[key].shape and torch.equal(a[key], b[key]) for key in a
    )


def written(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_everything_that_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    assert equal(ours(path) or {}, load_file(path))
    checkpoint = open_checkpoint(path)
    assert torch.equal(TensorRef(checkpoint, "b", (1, 2)).read(), TENSORS["b"][1:2])
    stored = TensorRef(checkpoint, "b", (1, 2)).stored()
    assert stored is not None and stored.shape == (1, 3) and torch.equal(stored.read(), TENSORS["b"][1:2])


GOOD: dict[str, Any] = {
    "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "y": {"dtype": "F16", "shape": [1, 2], "data_offsets": [8, 12]},
}


@pytest.mark.parametrize(
    "change",
    [
        {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"y": {"dtype": "F16", "shape": [1, 2], "data_offsets": [6, 10]}},
        {"y": {"dtype": "F16", "shape": [1, 2], "data_offsets": [0, 4]}},
        {"y": {"dtype": "F16", "shape": [1, 2], "data_offsets": [12, 8]}},
        {"y": {"dtype": "F16", "shape": [1, 4], "data_offsets": [8, 16]}},
        {"y": {"dtype": "F16", "shape": [-1, -2], "data_offsets": [8, 12]}},
        {"y": {"dtype": "F16", "shape": [1, 2.0], "data_offsets": [8, 12]}},
        {"y": {"dtype": "F16", "shape": [1, 2], "data_offsets": [8]}},
        {"y": {"dtype": "F16", "shape": "12", "data_offsets": [8, 12]}},
        {"y": {"dtype": 16, "shape": [1, 2], "data_offsets": [8, 12]}},
        {"y": {"dtype": "F99", "shape": [1, 2], "data_offsets": [8, 12]}},
        {"y": {"shape": [1, 2], "data_offsets": [8, 12]}},
        {"y": [8, 12]},
        {"y": None},
        {"z": {"dtype": "F16", "shape": [1 << 63, 1 << 63], "data_offsets": [12, 12]}},
        {},
    ],
    ids=str,
)
def test_headers_that_do_not_fit(tmp_path: Path, change: dict[str, Any]) -> None:
    path = written(tmp_path / "x.safetensors", GOOD | change, bytes(range(12)))
    assert (theirs(path) is None) == bool(change)
    assert (ours(path) is None) == bool(change)


@pytest.mark.parametrize(
    "raw",
    [
        b"x" * 7, struct.pack("<Q", 1 << 62), struct.pack("<Q", 5) + b"{}", struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{}" + b"more", struct.pack("<Q", 2) + b"\xff\xfe", struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 100_000) + b'{"a":' * 20_000,
    ],
)  # fmt: skip
def test_no_safetensors_file(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    assert theirs(path) is None and ours(path) is None


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_in_any_byte(data: st.DataObject, tmp_path: Path) -> None:
    """One byte changed, or the end cut off or grown: refused wherever safetensors refuses it, or read alike."""
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    raw = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["change", "cut", "grow"]))
    at = data.draw(st.integers(0, len(raw) - 1))
    if kind == "change":
        raw[at] = data.draw(st.integers(0, 255))
    elif kind == "cut":
        del raw[at:]
    else:
        raw += b"\0" * (1 + at)
    path.write_bytes(bytes(raw))
    want, got = theirs(path), ours(path)
    if want is None:
        assert got is None
    elif got is not None:  # what this reader does not know (dtypes) it may refuse
        assert equal(want, got)


def test_a_file_that_is_replaced_after_it_was_opened(tmp_path: Path) -> None:
    """Header and bytes are of one file, that which was there when it was opened."""
    path, other = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    save_file({"w": torch.ones(4)}, path)
    save_file({"w": torch.zeros(4)}, other)
    checkpoint = open_checkpoint(path)
    other.replace(path)
    assert torch.equal(checkpoint.read("w"), torch.ones(4))
