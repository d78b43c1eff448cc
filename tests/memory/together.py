"""Ranks of a model without processes of their own, and their kernels in the interpreter."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_multilora.kernels import tuning


class Together:
    """Ranks that are threads of this process, which run one at a time (Triton's interpreter knows no threads)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier, self._board = threading.Barrier(size, timeout=60), [torch.empty(0)] * size
        self._mine, self._turn = threading.local(), threading.Lock()

    def run(self, work) -> list:
        found: list = [None] * self.size
        errors: list[BaseException] = []

        def one(part: int) -> None:
            self._mine.part = part
            try:
                with self._turn:
                    found[part] = work(part)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(part,)) for part in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    def _all(self, h: torch.Tensor) -> torch.Tensor:
        self._board[self._mine.part] = h.clone()
        self._meet()
        found = torch.stack(self._board)
        self._meet()
        return found

    def _meet(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()

    def gather(self, h: torch.Tensor) -> torch.Tensor:
        return self._all(h).permute(1, 2, 0).flatten(1)

    def total(self, h: torch.Tensor) -> torch.Tensor:
        return self._all(h).sum(0)


def unwritten_is_nan(patch: pytest.MonkeyPatch) -> None:
    """New tensors hold NaN, and kernels run in the interpreter, whose dot knows no splits."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    empty = torch.empty
    patch.setattr(tuning, "_expand_dot", lambda y, data: "ieee")
    patch.setattr(
        torch, "empty", lambda *a, **k: t.fill_(torch.nan) if (t := empty(*a, **k)).is_floating_point() else t
    )
