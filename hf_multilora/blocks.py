"""What structure and source of a model say about its mixtures of experts: stacked weights, their layout, routers."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import torch
from torch import nn
from transformers.integrations import moe

from .adapters.targets import ExpertBlock

# Implementations whose products are known. Others (deepgemm, sonicmoe) are one kernel, with no place for a delta.
SERVED = ("batched_mm", "grouped_mm", "eager")
_PRODUCTS = ("_batched_linear", "_grouped_linear")  # transformers' own, without a promise that they stay

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Llama 4's experts: tokens of one expert after the other, all of them scaled before.
_EXPERT_MAJOR = re.compile(r"hidden_states\.view\(self\.gate_up_proj\.shape\[0\], -1,.*torch\.bmm\(", re.DOTALL)


def block_of(path: str, module: nn.Module) -> ExpertBlock | str | None:
    """The block that a module is; the reason why its experts cannot carry adapters; None: it is none."""
    state, weights = module.__dict__, module._parameters
    if not any(weight.dim() == 3 for weight in weights.values() if weight is not None):
        return None
    gated = weights.get("gate_up_proj") is not None
    up, down = weights.get("gate_up_proj" if gated else "up_proj"), weights.get("down_proj")
    name = type(module).__name__
    if up is None or down is None or up.dim() != 3 or down.dim() != 3:
        if not re.search(r"expert", f"{path.rpartition('.')[2]} {name}", re.IGNORECASE):
            return None
        return f"{name} keeps the weights of its experts in a form that is not known ({', '.join(weights)})"
    if up.dtype not in _FLOATS or down.dtype not in _FLOATS:
        return f"{name} holds experts in {up.dtype}, whose kernels have no place for a delta"
    decorated = "is_transposed" in state and "config" in state
    major = not decorated and expert_major(type(module))  # type: ignore[arg-type]
    if not decorated and not major:
        return f"{name} computes its experts in a way that is not known"
    if decorated and bool(state.get("has_gate", True)) != gated:
        return f"{name} says has_gate={state.get('has_gate')}, which its weights are not made for"
    implementation = getattr(state.get("config"), "_experts_implementation", None)
    if implementation is not None and implementation not in SERVED:
        return (
            f"its experts are computed by {implementation!r}, which has no place for a delta; "
            "model.set_experts_implementation('grouped_mm') has"
        )
    lost = [product for product in _PRODUCTS if decorated and not hasattr(moe, product)]
    if lost:
        return f"this version of transformers has no {' and '.join(lost)}, by which its experts would be computed"
    transposed = major or bool(state.get("is_transposed"))
    experts, inside, out = up.shape if transposed else (up.shape[0], up.shape[2], up.shape[1])
    return ExpertBlock(
        path=path,
        gate_up="gate_up_proj" if gated else "up_proj",
        down="down_proj",
        experts=int(experts),
        hidden=int(inside),
        intermediate=int(out) // 2 if gated else int(out),
        transposed=transposed,
        interleaved=decorated and not state.get("is_concatenated", True),
        has_gate=gated,
        swapped=major,
    )


def is_router(parent: nn.Module, module: nn.Module) -> bool:
    """Whether a module beside a block of experts makes their logits itself, by a weight `[experts, hidden]`."""
    weight, kind = module._parameters.get("weight"), type(module)
    if weight is None or weight.dim() != 2 or kind.forward is nn.Linear.forward:
        return False
    if isinstance(module, nn.Linear) and not re.search(r"rout|gate", kind.__name__, re.IGNORECASE):
        return False  # a quantised layer, say, whose forward is its own for that reason
    blocks = [
        child for name, child in parent._modules.items() if child is not None and block_of(name, child) is not None
    ]
    stacks = [stack for block in blocks for stack in block._parameters.values() if stack is not None]
    return weight.shape[0] in {stack.shape[0] for stack in stacks}


def replaced(parent: nn.Module) -> str | None:
    """Why what lies in a module may never be called: kernels that take the place of a whole block read weights."""
    state = parent.__dict__
    if "forward" not in state or "_hf_hook" in state:
        return None
    return f"the forward of the {type(parent).__name__} around it was replaced, and need not call it"


@functools.cache
def expert_major(kind: type[Any]) -> bool:
    """Whether a block is given each expert's tokens one expert after the other, instead of what the router chose."""
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return False
    return _EXPERT_MAJOR.search(source) is not None
