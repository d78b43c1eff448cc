"""The shortcut past nn.Linear.forward: the same product, and whatever is put in its way is heard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from hf_multilora.layers.direct import direct


class Doubled(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return 2 * w


class Odd(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize("base", [nn.Linear(6, 4), nn.Linear(6, 4, bias=False), Odd(6, 4), Conv1D(4, 6)], ids=repr)
def test_same_bits(base: Any) -> None:
    x = torch.randn(2, 3, 6)
    assert torch.equal(direct(base)(x), base.forward(x))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_what_changes_later_is_heard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, x = nn.Linear(6, 4), torch.randn(2, 6)
    run = direct(base)
    before = run(x)
    setattr(base, name, nn.Parameter(torch.randn_like(getattr(base, name))))
    assert torch.equal(run(x), base.forward(x)) and not torch.equal(run(x), before)
    parametrize.register_parametrization(base, name, Doubled())
    assert torch.equal(run(x), base.forward(x))
    base.forward = lambda x: x  # type: ignore[method-assign]
    assert run(x) is x
    del base.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x + 7)
    assert torch.equal(run(x), x + 7)
