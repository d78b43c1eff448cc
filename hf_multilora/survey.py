"""Finds the layers of a model that can carry adapters, by type."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .adapters.targets import ExpertBlock, Target, TargetTable
from .blocks import block_of, is_router, replaced
from .config import MultiLoraConfig
from .errors import ConfigError, ModelError, closest
from .expert_shards import block_shard
from .layers import LoraLayer, experts, wrapper_for
from .layers.dequant import dequantised
from .layers.hooks import offloaded
from .layers.linear import LoraHead, LoraLinear
from .layers.quantised import acts_as_linear
from .layers.router import LoraRouter
from .parallel import shard_of
from .sources import astray, bypassed, outside_of_text, refusal, slices, turned


@dataclass
class Found:
    """One layer that carries adapters: its wrapper class and every place it has in the model.

    `targets` has one, those of its projections for a block of experts, and none for a module that adapters only save
    whole.
    """

    module: nn.Module
    wrapper: type[LoraLayer]
    targets: tuple[Target, ...]
    places: list[tuple[nn.Module, str]] = field(default_factory=list)  # (parent, attribute)
    scattered: str = ""  # why its inputs do not begin with rows of the batch; empty where they do


@dataclass
class Survey:
    """What a model offers: layers to wrap, the table that checkpoints are matched against, and what was seen of all
    other modules, since their classes say nothing any more once the model is enabled.
    """

    found: dict[str, Found]
    table: TargetTable
    scattered: dict[str, str]  # module path -> why its inputs do not begin with rows of the batch


def survey(model: PreTrainedModel, config: MultiLoraConfig) -> Survey:
    """Look at every module of `model` once; nothing is changed.

    Raises:
        ConfigError: `target_modules` selects nothing, or selects a layer that cannot carry an adapter.
        ModelError: no layer of the model can carry one.
    """
    found: dict[str, Found] = {}
    refused: dict[str, str] = {}
    blocks: dict[str, ExpertBlock] = {}
    untargeted: set[str] = set()
    first_path: dict[int, str] = {}
    aliases: list[tuple[str, str]] = []
    modules = []
    outside = outside_of_text(model)
    head = model.get_output_embeddings()
    scattered: dict[str, str] = {}
    unused: dict[str, str] = {}
    for path, parent, name, module in walk(model):
        modules.append(path)
        unseen, unread = astray(path, name, module, outside), bypassed(parent, name, module)
        around = scattered.get(path.rpartition(".")[0]) or turned(parent)
        if unseen or around:
            scattered[path] = unseen or around or ""
        if unread:
            unused[path] = unread
        wrapper = wrapper_for(type(module)) or (LoraLinear if acts_as_linear(module) else None)
        block = block_of(path, module) if wrapper is None else None
        if isinstance(block, str):
            refused[path] = block
            continue
        if block is not None:
            wrapper = experts.wrapper_of(module)
        elif is_router(parent, module):
            wrapper = LoraRouter
        if wrapper is None:
            continue
        if id(module) in first_path:
            original = first_path[id(module)]
            aliases.append((rf"^{re.escape(path)}(?=\.)", original))
            if original in found:
                found[original].places.append((parent, name))
            continue
        first_path[id(module)] = path
        reason = unseen or unread or refusal(module)
        if block is not None or wrapper is LoraRouter:
            reason = reason or replaced(parent)
        if block is not None:
            if reason is None:
                try:
                    block = replace(block, shard=block_shard(module, block, config.fully_sharded_loras))
                except ValueError as error:
                    reason = str(error)
            blocks[path] = block
            if reason is not None:
                refused[path] = reason
            elif any(selected(known, config.target_modules) for known in block.names):
                found[path] = Found(module, wrapper, block.targets, [(parent, name)])
            else:
                untargeted.update(target.path for target in block.targets)
            continue
        shard = None
        if reason is None:
            try:
                inside, out = wrapper.dimensions(module)
            except ValueError as error:
                reason = f"its size is unknown: {error}"
        if reason is None:
            try:
                shard = shard_of(module, isinstance(module, Conv1D))
            except ValueError as error:
                reason = str(error)
        if reason is not None:
            refused[path] = reason
        elif not selected(path, config.target_modules):
            untargeted.add(path)
        else:
            if module is head and config.extra_vocab_size and issubclass(wrapper, LoraLinear):
                wrapper = LoraHead
            target = Target(
                path,
                wrapper.kind,
                inside,
                out,
                slices(model, parent, name, out),
                wrapper.output_scale(module),
                transposed=isinstance(module, Conv1D),
                has_bias=wrapper.kind == "linear" and getattr(module, "bias", None) is not None,
                shard=shard,
            )
            found[path] = Found(module, wrapper, (target,), [(parent, name)], scattered.get(path, ""))
    _check_selection(config, found, blocks, refused, modules)
    table = TargetTable(
        targets={target.path: target for item in found.values() for target in item.targets},
        refused=refused,
        untargeted=frozenset(untargeted),
        modules=tuple(modules),
        base_name=getattr(model.config, "_name_or_path", None) or None,
        read_base=functools.partial(_read_base, model),
        prefixes=(*aliases, *_renamed_keys(model)),
        parameters={name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)},
        tied=frozenset(tied_groups(model)),
        blocks=blocks,
        read_dequantised=functools.partial(_read_dequantised, model),
        unused=unused,
    )
    return Survey(found, table, scattered)


def tied_groups(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name of each parameter that is tied -> the names of all that share it."""
    names: dict[int, list[str]] = {}
    by_name = dict(model.named_parameters(remove_duplicate=False))
    of = {name: id(parameter) for name, parameter in by_name.items()}
    # Offloaded ones are tied no more: each has a placeholder of its own, and its values elsewhere.
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        both = by_name.get(name), by_name.get(source)
        if None in both or both[0] is both[1] or not any(p is not None and p.device.type == "meta" for p in both):
            continue
        one, other = _read_base(model, name), _read_base(model, source)
        if one is not None and other is not None and _same(one, other):
            old = of[name]
            of |= {alias: of[source] for alias, number in of.items() if number == old}
    for name, number in of.items():
        names.setdefault(number, []).append(name)
    return {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device.type == "meta" or other.device.type == "meta" or one.shape != other.shape:
        return False
    return one.data_ptr() == other.data_ptr() or torch.equal(one.to(other.device), other)


def selected(path: str, target_modules: Sequence[str] | str | None) -> bool:
    """PEFT's rule: a string is a regex over the whole path, a list holds whole names or dotted suffixes."""
    if target_modules is None:
        return True
    if isinstance(target_modules, str):
        return re.fullmatch(target_modules, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in target_modules)


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(path, parent, attribute, module), once per place; a module that hangs in two places comes twice."""
    for parent_path, parent in model.named_modules():
        for name, module in parent._modules.items():
            if module is not None:
                yield f"{parent_path}.{name}" if parent_path else name, parent, name, module


def _read_base(model: nn.Module, name: str) -> torch.Tensor | None:
    """The base model's own parameter or buffer of this name, or None."""
    path, _, attribute = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    value = getattr(module, attribute, None)
    if not isinstance(value, torch.Tensor):
        return None
    if value.device.type == "meta":  # accelerate keeps the weights of a layer with the hook on it, or around it
        parts = name.split(".")
        for depth in range(len(parts) - 1, -1, -1):
            held = offloaded(model.get_submodule(".".join(parts[:depth])), ".".join(parts[depth:]))
            if held is not None:
                return held
    return value


def _read_dequantised(model: nn.Module, path: str) -> torch.Tensor:
    layer = model.get_submodule(path)
    return dequantised(layer.base_layer if isinstance(layer, LoraLayer) else layer)


def _renamed_keys(model: PreTrainedModel) -> tuple[tuple[str, str], ...]:
    """Renamings of module paths that transformers applies to older checkpoints of this class."""
    mapping = getattr(model, "_checkpoint_conversion_mapping", None) or {}
    return tuple((str(old), str(new)) for old, new in mapping.items())


def _check_selection(
    config: MultiLoraConfig,
    found: dict[str, Found],
    blocks: dict[str, ExpertBlock],
    refused: dict[str, str],
    modules: list[str],
) -> None:
    wanted = config.target_modules
    if wanted is None:
        if not found:
            raise ModelError("The model has no layer that can carry an adapter (linear, Conv1D or embedding).")
        return
    named = [wanted] if isinstance(wanted, str) else list(wanted)
    names = [name for path, block in blocks.items() if path in found for name in block.names]
    for entry in named:
        pattern: Sequence[str] | str = entry if isinstance(wanted, str) else [entry]
        if any(selected(path, pattern) for path in (*found, *names)):
            continue
        hit = next((path for path in refused if selected(path, pattern)), None)
        if hit is not None:
            raise ConfigError(f"target_modules names {entry!r}, but {hit} cannot carry an adapter: {refused[hit]}.")
        raise ConfigError(
            f"target_modules={entry!r} matches no layer of the model."
            + closest(entry.rpartition(".")[2], {path.rpartition(".")[2] for path in modules})
        )
