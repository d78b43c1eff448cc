"""Where the kernels beside base layers are launched while a graph is captured: streams that only take notes."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from hf_multilora.errors import ModelError
from hf_multilora.kernels import custom
from hf_multilora.kernels.ops import LinearOp, Workspace


class Stream:
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.notes.append(f"{self.name} forks")
        return "fork"

    def wait_event(self, event: str) -> None:
        self.notes.append(f"{self.name} waits for the {event}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    main, side = Stream("main", found), Stream("side", found)
    fake = SimpleNamespace(
        is_current_stream_capturing=lambda: True,
        current_stream=lambda device: main,
        stream=lambda stream: contextlib.nullcontext(),
    )
    monkeypatch.setattr(custom.torch, "cuda", fake)
    monkeypatch.setattr(custom, "_side_stream", lambda device, counters: side)
    monkeypatch.setattr(custom, "_launch", lambda *args: found.append("launch"))
    return found


def op_of(*outputs: int) -> LinearOp:
    data, meta = torch.zeros(64), torch.zeros(1, 32, dtype=torch.int64)
    return LinearOp(data, meta, data, 64, 0, 0, 32, outputs, 8, Workspace(), outputs)


SLOTS = torch.zeros(4, dtype=torch.int32)
ONE = ["side waits for main", "launch", "base", "main waits for side"]
SEVERAL = ["main forks", "base", "side waits for the fork", "launch", "main waits for side"]


def run(op: LinearOp, notes: list[str]) -> list[str]:
    x = torch.zeros(4, 1, 32)
    d = custom.begin(x, op, SLOTS, 4)
    notes.append("base")
    custom.join(d, x, op, SLOTS, 4)
    done = list(notes)
    notes.clear()
    return done


def test_one_base_layer_comes_after_the_deltas_and_several_before(notes: list[str]) -> None:
    assert run(op_of(16), notes) == ONE
    assert run(op_of(16, 8), notes) == SEVERAL


@pytest.mark.parametrize("after", [(16,), (16, 8)])
def test_what_was_never_joined_reaches_nobody(notes: list[str], after: tuple[int, ...]) -> None:
    """A capture that failed between the two: the next one neither launches twice nor waits for its event."""
    custom.begin(torch.zeros(4, 1, 32), op_of(16, 8), SLOTS, 4)
    notes.clear()
    assert run(op_of(*after), notes) == (ONE if len(after) == 1 else SEVERAL)


def test_a_graph_of_a_model_that_is_gone_says_so() -> None:
    key = op_of(16).key
    with pytest.raises(ModelError, match="not enabled any more: compile"):
        custom.expand_([torch.zeros(4, 16)], torch.zeros(4, 32), SLOTS, key, 4)
