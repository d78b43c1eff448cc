"""accelerate's hooks, which bring a layer's input and weights to where it computes, and take offloaded weights away.

A hook belongs around the wrapper: whatever the wrapper reads of its base layer is there then, and its input lies where
the slots do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# What accelerate puts on a module that it hooks. A wrapper must not be handed its base's: it would run "the old
# forward", the base's own, and the adapters would be lost without a word.
HOOKED = ("forward", "_hf_hook", "_old_forward")


def take_hook(base: nn.Module) -> dict[str, Any]:
    """Take accelerate's hook off a layer, weights as they lie; returns what has to be put back on it, if anything."""
    if "_hf_hook" not in base.__dict__:
        return {}
    kept = {name: base.__dict__.pop(name) for name in HOOKED if name in base.__dict__}
    inner = kept.get("_old_forward")
    if inner is not None and getattr(inner, "__func__", None) is not type(base).forward:
        base.__dict__["forward"] = inner  # the instance had one of its own before
    return kept


def put_hook(module: nn.Module, hook: Any) -> None:
    """Run a module's forward under a hook whose weights lie where it wants them already."""
    inner = module.forward
    module.__dict__.update(_old_forward=inner, _hf_hook=hook)
    module.__dict__["forward"] = functools.update_wrapper(functools.partial(_run, module), inner)


def _run(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    if hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return hook.post_forward(module, output)


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """The hooks of a module, those in a sequence one by one."""
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


def only_aligns(module: nn.Module) -> bool:
    """Whether a module's hooks do nothing but bring its input to the device where its weights are."""
    hooks = list(hooks_of(module))
    inner = module.__dict__.get("_old_forward")
    return (
        bool(hooks)
        and all(type(hook).__name__ == "AlignDevicesHook" and hook.offload is False for hook in hooks)
        and getattr(inner, "__func__", None) is type(module).forward
    )


def execution_device(module: nn.Module) -> torch.device | None:
    """Where the hooks of a module let it compute; None where they do not say."""
    found: torch.device | None = None
    for hook in hooks_of(module):
        device = getattr(hook, "execution_device", None)
        if device is not None:
            found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return found


def offloaded(module: nn.Module, name: str) -> torch.Tensor | None:
    """The tensor of this name in the module ("weight", "mlp.down_proj.weight"), where its hooks keep it."""
    for hook in hooks_of(module):
        weights = getattr(hook, "weights_map", None)
        if weights is not None:
            try:
                value = weights[name]
            except KeyError:
                continue
            if isinstance(value, torch.Tensor):
                return value
    return None
