"""How transformers brings tokens to experts that other ranks hold, where a block of experts has one of its
implementations of expert parallelism (`ep_dispatch_experts`, transformers 5.21 and later).

    AllReduceEP   all ranks see all tokens; experts of others have the number `num_experts` and the weight 0, and the
                  ranks' outputs are summed: rows stay where they are, so that adapters can follow
    AllToAllEP    tokens are sent to the ranks of their experts: which row one belongs to is lost
    MegaMoeEP     the same, inside of one kernel
    AutoEP        one of them, chosen at each call; AllReduceEP where nothing needs a gradient

Each holds the forward of the block that it calls. Classes go by their names: older versions have none of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

HELD = "implementation"  # what transformers' forward calls it
_FORWARD = "experts_forward"  # and what that calls the block's own forward


def own_forward(implementation: Any) -> Callable[..., Any]:
    """The block's own forward."""
    forward: Callable[..., Any] = getattr(implementation, _FORWARD)
    return forward


def redirected(implementation: Any, forward: Callable[..., Any], moved: Callable[..., Any]) -> Any:
    """The same around another forward.

    Args:
        forward: called where tokens stay in place.
        moved: called where they were sent to other ranks.
    """
    twin = copy.copy(implementation)
    twin.__dict__[_FORWARD] = forward if type(twin).__name__ == "AllReduceEP" else moved
    for name, inner in vars(implementation).items():
        if hasattr(inner, _FORWARD):
            twin.__dict__[name] = redirected(inner, forward, moved)
    return twin


def refusal(implementation: Any) -> str | None:
    """Why adapters cannot follow its tokens; None: they can."""
    kind = type(implementation).__name__
    stays = implementation if kind == "AllReduceEP" else getattr(implementation, "all_reduce", None)
    if kind in ("AllReduceEP", "AutoEP") and stays is not None and getattr(implementation, "megamoe", None) is None:
        return None
    return (
        f"expert parallelism by {kind} moves tokens between ranks, so that adapters cannot tell whose they are; "
        "ep_implementation='all_reduce' with ep_size == tp_size leaves them in place"
    )
