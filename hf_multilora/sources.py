"""What the source and structure of a model say about its layers: who reads a weight without calling it, who puts the
sequence first, which fused rows are whose.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# Fused projections whose output rows are plain concatenations: name -> (names of the parts, pattern that the source of
# the class that owns the layer must match, so that the order of the parts is known and not guessed).
_FUSED = {
    "qkv_proj": (("q_proj", "k_proj", "v_proj"), r"qkv\[\.\.\., :query_pos\]"),
    "gate_up_proj": (("gate_proj", "up_proj"), r"gate, up_states = up_states\.chunk\(2"),
}


# Reading .weight for its dtype, device or shape is not using it.
_WEIGHT_USED = r"(?<!isinstance\()self\.{name}\.weight\b(?!\.(?:dtype|device|shape|size|data|is_))"


def outside_of_text(model: PreTrainedModel) -> dict[str, str]:
    """Paths of the modules whose inputs are not rows of the batch, with the reason.

    Vision towers see patches and images; their first dimension can equal the number of rows by accident. In a model
    of several modalities everything beside the text model (towers, projectors) is left alone.
    """
    config = model.config
    modalities = [key for key in ("vision_config", "audio_config") if getattr(config, key, None) is not None]
    if not modalities or not hasattr(config, "get_text_config") or config.get_text_config() is config:
        return {}
    text = model.get_decoder() if hasattr(model, "get_decoder") else None
    if text is None or text is model:
        return {}
    paths = {id(module): path for path, module in model.named_modules()}
    inner = paths.get(id(text))
    if inner is None:
        return {}
    reason = (
        f"it is outside of the text model ({inner}): images and sounds are not rows of the batch, so that adapters "
        "cannot be told apart there"
    )
    keep = (inner, "lm_head", "score")
    return {path: reason for path in paths.values() if path and not _kin(path, keep)}


def _kin(path: str, keep: Sequence[str]) -> bool:
    return any(path == k or path.startswith(f"{k}.") or k.startswith(f"{path}.") for k in keep)


def astray(path: str, name: str, module: nn.Module, outside: Mapping[str, str]) -> str | None:
    """Why what a module sees is no rows of the batch, or None."""
    if path in outside:
        return outside[path]
    if re.search(r"(^|\.)experts\.", path):
        return "it is one expert of a mixture: it sees the tokens that were routed to it, not rows of the batch"
    if isinstance(module, nn.Embedding) and re.search(r"relative|rel_(attn|embed|pos)", name):
        return "it is looked up with pairs of positions, which are not rows of the batch"
    return None


def bypassed(parent: nn.Module, name: str, module: nn.Module) -> str | None:
    """Why a module may compute nothing although its weight is used, or None."""
    if isinstance(parent, nn.MultiheadAttention) or isinstance(
        module, nn.modules.linear.NonDynamicallyQuantizableLinear
    ):
        return "torch's MultiheadAttention reads its weight without calling it"
    # BLOOM reads its weights piece by piece only where it imitates the sharded training run.
    imitates = getattr(parent, "slow_but_exact", None)
    if imitates is not False and _weight_is_read(type(parent), name):  # type: ignore[arg-type]
        return f"{type(parent).__name__} reads its weight without calling it, so that a delta would never be added"
    return None


def refusal(module: nn.Module) -> str | None:
    """Why a layer of a known class cannot carry an adapter, wherever it is, or None."""
    if isinstance(module, nn.Embedding) and _odd_embedding(type(module)):  # type: ignore[arg-type]
        return f"{type(module).__name__} is not called with one tensor of ids"
    return None


@functools.cache
def _weight_is_read(parent_type: type[Any], name: str) -> bool:
    if parent_type.__module__.startswith("torch.") or not name.isidentifier():
        return False
    pattern = re.compile(_WEIGHT_USED.format(name=re.escape(name)))
    starts = ("__init__", "_init_weights", "reset_parameters")
    return any(pattern.search(source) for method, source in _sources(parent_type).items() if method not in starts)  # type: ignore[arg-type]


@functools.cache
def _sources(owner: type[Any]) -> dict[str, str]:
    """The source of every method that a class has itself, where there is one to read."""
    found = {}
    for name, method in vars(owner).items():
        if inspect.isfunction(method):
            with suppress(OSError, TypeError):
                found[name] = inspect.getsource(inspect.unwrap(method))
    return found


@functools.cache
def _odd_embedding(layer_type: type[Any]) -> bool:
    if layer_type.forward is nn.Embedding.forward:
        return False
    required = [p for p in list(inspect.signature(layer_type.forward).parameters.values())[1:] if p.default is p.empty]
    return len(required) != 1 or "input" not in required[0].name or "Position" in layer_type.__name__


# Sequence-first models turn what they are given around; rows are the second dimension from there on.
_TURNED = re.compile(
    r"\b(?:input_ids|inputs_embeds|hidden_states?|embeds|embeddings|x)\.(?:transpose\(0, ?1\)|permute\(1, ?0)"
)


def turned(parent: nn.Module) -> str | None:
    """Why the modules in this one are given the sequence first, as its own source shows, or None."""
    owner: type[Any] = type(parent)
    return f"{owner.__name__} puts the sequence first" if _turns_around(owner) else None  # type: ignore[arg-type]


@functools.cache
def _turns_around(owner: type[Any]) -> bool:
    if owner.__module__.startswith("torch."):
        return False
    return any(_TURNED.search(source) for name, source in _sources(owner).items() if "init" not in name)  # type: ignore[arg-type]


def slices(model: PreTrainedModel, parent: nn.Module, name: str, out: int) -> tuple[tuple[str, int], ...]:
    if name not in _FUSED:
        return ()
    parts, pattern = _FUSED[name]
    try:
        source = inspect.getsource(type(parent))
    except (OSError, TypeError):
        return ()
    if re.search(pattern, source) is None:
        return ()
    if name == "gate_up_proj":
        return tuple((part, out // 2) for part in parts)
    config = getattr(parent, "config", model.config)
    head = getattr(parent, "head_dim", None)
    heads, kv_heads = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if not head or not heads or not kv_heads or (heads + 2 * kv_heads) * head != out:
        return ()
    return tuple(zip(parts, (heads * head, kv_heads * head, kv_heads * head), strict=True))
