"""The forward of a base layer, with as little Python as there can be.

nn.Linear.forward finds its weight and bias by nn.Module.__getattr__: Python, at every call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

_FORWARD = nn.Linear.forward


def direct(base: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """`base.forward` for an x alone: the same call of torch.

    Whatever comes between (a parametrized weight, a forward of the instance's own, one put over nn.Linear's) is heard.
    """
    weights, attributes = base._parameters, base.__dict__

    def forward(x: torch.Tensor) -> torch.Tensor:
        if "forward" in attributes or nn.Linear.forward is not _FORWARD:
            return base.forward(x)
        try:
            weight, bias = weights["weight"], weights["bias"]
        except KeyError:
            return base.forward(x)
        return F.linear(x, weight, bias)  # type: ignore[arg-type]

    return forward if type(base).forward is _FORWARD else lambda x: base.forward(x)
