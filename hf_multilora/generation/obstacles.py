"""What of a model, and of torch's switches, decides whether and how its decode steps are captured."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import PretrainedConfig


def environment(model: Any) -> Hashable:
    """Switches outside of the inputs that choose kernels, or dtypes."""
    kind = model.device.type
    experts: Any = getattr(model, "get_experts_implementation", lambda: None)()
    return (
        model.dtype,
        model.config._attn_implementation,
        tuple(sorted(experts.items())) if isinstance(experts, dict) else experts,
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        *_fp32_precision(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


def _fp32_precision() -> tuple[Hashable, ...]:
    """How products of fp32 are made. The older switches cannot be read once one of the newer was set."""
    backends: Any = torch.backends
    found = [backend.fp32_precision for backend in (backends, backends.cuda.matmul, backends.cudnn.conv)]
    with suppress(RuntimeError):
        found += [torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32]
    return tuple(found)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def obstacle_for_all() -> str | None:
    """What runs around the forward of every module, if anything."""
    found = any(getattr(torch_module, f"_global{name}") for name in _HOOKS)
    return "a hook is registered for all modules" if found else None


def obstacle_of(module: Any) -> str | None:
    """What runs around a module's forward or in its place, or around that of the layer that a wrapper runs."""
    state = module.__dict__
    for own in (state, state["base_layer"].__dict__) if "base_layer" in state else (state,):
        if "_hf_hook" in own or "forward" in own or own.get("_compiled_call_impl") is not None:
            return f"a {type(module).__name__} has a forward of its own (offloaded, compiled, or patched)"
    for name in _HOOKS:
        hooks = state[name]
        if hooks and not all(map(_harmless, hooks.values())):
            return f"a {type(module).__name__} has a forward hook"
    return None


def survey_model(model: Any) -> tuple[str | None, tuple[Hashable, ...]]:
    """What stands in the way of capturing a model (None: nothing), and what a captured step has taken for granted.

    The latter: which modules there are and what they run, where their weights are, the numbers that they and their
    configs hold. A step that was captured before any of it changed would go on with what was.
    """
    given: list[Hashable] = []
    configs: dict[int, Any] = {}
    obstacle = None
    if "llama4" in str(getattr(model.config, "model_type", "")):
        obstacle = "transformers does not compile this architecture either"
    if (getattr(model, "_tp_size", None) or 1) > 1 or model.multilora.store.spread:
        return "the model is spread over several devices", ()
    obstacle = obstacle_for_all() or obstacle
    for module in model.modules():
        obstacle = obstacle_of(module) or obstacle
        # A wrapper's own attributes are no part of what the base layer computes.
        state = module.__dict__
        runs = state.get("base_layer", module)
        held = runs.__dict__
        for tensors in (state["_parameters"], state["_buffers"]):
            given.extend(tensor.data_ptr() for tensor in tensors.values() if tensor is not None)
        # The class beside the id, for an id may come again.
        kind: Any = type(runs)
        given += [id(runs), kind, kind.forward]
        given += [value for name, value in held.items() if type(value) in PLAIN and name != _OF_GENERATE]
        if "config" in held:
            configs[id(held["config"])] = held["config"]
    given += [_numbers(config.__dict__) for config in configs.values() if isinstance(config, PretrainedConfig)]
    return obstacle, tuple(given)


_OF_GENERATE = "_previous_max_cache_length"  # generate() keeps it on the model, whose forward does not read it
PLAIN = frozenset(
    (bool, int, float, complex, str, NoneType, FunctionType, BuiltinFunctionType, type, torch.dtype, torch.device)
)


def _numbers(value: Any) -> Hashable:
    """What a config holds, to be compared; None for objects of which nothing is known."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, dict):
        return tuple((str(name), _numbers(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_numbers(item) for item in value)
    return _numbers(value.__dict__) if isinstance(value, PretrainedConfig) else None


def _harmless(hook: Any) -> bool:
    """Those by which transformers collects hidden states do nothing but pass tensors on."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("transformers.utils.output_capturing")
