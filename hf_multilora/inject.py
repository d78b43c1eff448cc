"""Finds the layers of a model that can carry adapters, swaps wrappers in, and puts the base layers back."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .adapters.targets import Target, TargetTable
from .config import MultiLoraConfig
from .errors import ConfigError, ModelError, closest
from .layers import LoraLayer, wrapper_for
from .layers.linear import LoraHead, LoraLinear
from .layers.saved import SavedLayer
from .routing import Routing

# Fused projections whose output rows are plain concatenations: name -> (names of the parts, pattern that the source of
# the class that owns the layer must match, so that the order of the parts is known and not guessed).
_FUSED = {
    "qkv_proj": (("q_proj", "k_proj", "v_proj"), r"qkv\[\.\.\., :query_pos\]"),
    "gate_up_proj": (("gate_proj", "up_proj"), r"gate, up_states = up_states\.chunk\(2"),
}
# Reading .weight for its dtype, device or shape is not using it.
_WEIGHT_USED = r"(?<!isinstance\()self\.{name}\.weight\b(?!\.(?:dtype|device|shape|size|data|is_))"


@dataclass
class Found:
    """One layer that carries adapters: its wrapper class and every place it has in the model.

    `target` is None for a module that adapters only save whole.
    """

    module: nn.Module
    wrapper: type[LoraLayer]
    target: Target | None
    places: list[tuple[nn.Module, str]] = field(default_factory=list)  # (parent, attribute)
    scattered: str = ""  # why its inputs do not begin with rows of the batch; empty where they do


@dataclass
class Survey:
    """What a model offers: layers to wrap, and the table that checkpoints are matched against."""

    found: dict[str, Found]
    table: TargetTable


def survey(model: PreTrainedModel, config: MultiLoraConfig) -> Survey:
    """Look at every module of `model` once; nothing is changed.

    Raises:
        ConfigError: `target_modules` selects nothing, or selects a layer that cannot carry an adapter.
    """
    found: dict[str, Found] = {}
    refused: dict[str, str] = {}
    untargeted: set[str] = set()
    first_path: dict[int, str] = {}
    aliases: list[tuple[str, str]] = []
    modules = []
    outside = _outside_of_text(model)
    head = model.get_output_embeddings()
    for path, parent, name, module in _walk(model):
        modules.append(path)
        wrapper = wrapper_for(type(module))
        if wrapper is None:
            continue
        if id(module) in first_path:
            original = first_path[id(module)]
            aliases.append((rf"^{re.escape(path)}(?=\.)", original))
            if original in found:
                found[original].places.append((parent, name))
            continue
        first_path[id(module)] = path
        reason = _refusal(path, parent, name, module, outside)
        if reason is None:
            try:
                inside, out = wrapper.dimensions(module)
            except ValueError as error:
                reason = f"its size is unknown: {error}"
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
                _slices(model, parent, name, out),
                wrapper.output_scale(module),
                transposed=isinstance(module, Conv1D),
                has_bias=wrapper.kind == "linear" and getattr(module, "bias", None) is not None,
            )
            found[path] = Found(module, wrapper, target, [(parent, name)], _scattered(model, path))
    _check_selection(config, found, refused, modules)
    table = TargetTable(
        targets={path: item.target for path, item in found.items() if item.target is not None},
        refused=refused,
        untargeted=frozenset(untargeted),
        modules=tuple(modules),
        base_name=getattr(model.config, "_name_or_path", None) or None,
        read_base=functools.partial(_read_base, model),
        prefixes=(*aliases, *_renamed_keys(model)),
        parameters={name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)},
        tied=frozenset(tied_groups(model)),
    )
    return Survey(found, table)


def saved_layer(model: nn.Module, path: str) -> Found:
    """A module that an adapter saves whole, with every place it has."""
    module = model.get_submodule(path)
    places = [(parent, name) for _, parent, name, child in _walk(model) if child is module]
    return Found(module, SavedLayer, None, places)


def tied_groups(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name of each parameter that is tied -> the names of all that share it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}


def swap_in(found: dict[str, Found], routing: Routing) -> dict[str, LoraLayer]:
    """Put a wrapper in the place of every layer of `found`."""
    wrappers = {}
    for path, item in found.items():
        wrappers[path] = wrapper = item.wrapper.wrap(item.module, path, routing, item.scattered)
        for parent, name in item.places:
            setattr(parent, name, wrapper)
    return wrappers


def check_intact(
    paths: Iterable[str], found: dict[str, Found], wrappers: dict[str, LoraLayer], wrapped: bool = True
) -> None:
    """Refuse to serve adapters through layers that somebody has replaced since: their part would be missing.

    PEFT's unload() goes down to the base layer itself and puts that in the wrapper's place; the wrapper is put back.

    Args:
        wrapped: let pass what holds the wrapper inside (a PEFT layer around it calls it).

    Raises:
        ModelError: naming the layer and what is there now.
    """
    for path in paths:
        for parent, name in found[path].places:
            present = getattr(parent, name, None)
            if present is found[path].module:
                setattr(parent, name, wrappers[path])
            elif present is not wrappers[path] and not (wrapped and _holds(present, wrappers[path])):
                raise ModelError(
                    f"{path} has been replaced by a {type(present).__name__} since enable_multilora, so that adapters "
                    "cannot reach it. Remove what was put there (PEFT layers, for example), or call "
                    "disable_multilora(model) before a change and enable_multilora(model) after it."
                )


def containers(model: nn.Module, paths: Iterable[str]) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, attribute, child) of everything between the model and the layers of these paths."""
    found: dict[tuple[int, str], tuple[nn.Module, str, nn.Module]] = {}
    for path in paths:
        parent = model
        for name in path.split(".")[:-1]:
            child = parent._modules[name]
            assert child is not None
            found[id(parent), name] = (parent, name, child)
            parent = child
    return list(found.values())


def check_containers(chain: Iterable[tuple[nn.Module, str, nn.Module]]) -> None:
    """Raises: ModelError where a block of layers was replaced, and its adapters with it."""
    for parent, name, child in chain:
        if parent._modules.get(name) is not child:
            raise ModelError(
                f"{name!r} of {type(parent).__name__} has been replaced since enable_multilora, so that adapters "
                "cannot reach its layers. Call disable_multilora(model) before a change, and enable it again after."
            )


def _holds(module: Any, wrapper: LoraLayer) -> bool:
    return isinstance(module, nn.Module) and any(inner is wrapper for inner in module.modules())


def swap_out(found: dict[str, Found], wrappers: dict[str, LoraLayer]) -> None:
    """Put every base layer back.

    Raises:
        ModelError: somebody else has replaced a wrapper since; nothing is changed then.
    """
    check_intact(found, found, wrappers, wrapped=False)
    for path, item in found.items():
        base = wrappers[path].unwrap()
        for parent, name in item.places:
            setattr(parent, name, base)


def placement(found: dict[str, Found], config: MultiLoraConfig) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the slots: where the wrapped layers compute, in the dtype of their weights.

    Raises:
        ModelError: the layers compute on several devices.
    """
    devices: dict[torch.device, str] = {}
    dtypes: dict[torch.dtype, int] = {}
    for path, item in found.items():
        hook = getattr(item.module, "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        weight = next(item.module.parameters(recurse=False), None)
        if weight is not None:
            dtypes[weight.dtype] = dtypes.get(weight.dtype, 0) + weight.numel()
        if device is not None:
            place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            devices.setdefault(_indexed(place), path)
        elif weight is not None and weight.device.type != "meta":
            devices.setdefault(_indexed(weight.device), path)
    if len(devices) > 1:
        raise ModelError(
            "The model computes on several devices ("
            + ", ".join(f"{path} on {device}" for device, path in devices.items())
            + "). Slots on more than one device are not served in this version: load the model onto one device."
        )
    wanted = config.torch_dtype()
    if wanted is None:
        common = max(dtypes, key=lambda dtype: dtypes[dtype]) if dtypes else torch.float32
        wanted = {torch.float64: torch.float32}.get(common, common)
        wanted = wanted if wanted in (torch.float32, torch.float16, torch.bfloat16) else torch.bfloat16
    return next(iter(devices), torch.device("cpu")), wanted


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class InstanceGuard:
    """Lets ids reach a forward or generate on the instance (accelerate puts one there), which hides the class's.

    Attributes:
        hidden: what lay on the instance, by name.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.hidden: dict[str, Any] = {
            name: model.__dict__[name] for name in ("forward", "generate") if name in model.__dict__
        }
        self._guards = {name: self._guarded(inner) for name, inner in self.hidden.items()}
        model.__dict__.update(self._guards)

    def _guarded(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs.pop("adapter_ids", None)
            names = kwargs.pop("adapter_names", None)
            if ids is None and names is None:
                return inner(*args, **kwargs)
            with self._model.__dict__["multilora"].use(ids if ids is not None else names):
                return inner(*args, **kwargs)

        return call

    def undo(self) -> None:
        """Put back what lay there, unless somebody has replaced it since."""
        for name, guard in self._guards.items():
            if self._model.__dict__.get(name) is guard:
                self._model.__dict__[name] = self.hidden[name]


def selected(path: str, target_modules: Sequence[str] | str | None) -> bool:
    """PEFT's rule: a string is a regex over the whole path, a list holds whole names or dotted suffixes."""
    if target_modules is None:
        return True
    if isinstance(target_modules, str):
        return re.fullmatch(target_modules, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in target_modules)


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(path, parent, attribute, module), once per place; a module that hangs in two places comes twice."""
    for parent_path, parent in model.named_modules():
        for name, module in parent._modules.items():
            if module is not None:
                yield f"{parent_path}.{name}" if parent_path else name, parent, name, module


def _outside_of_text(model: PreTrainedModel) -> tuple[tuple[str, str], ...]:
    """Path prefixes whose inputs are not rows of the batch, with the reason.

    Vision towers see patches and images; their first dimension can equal the number of rows by accident. In a model
    of several modalities everything beside the text model (towers, projectors) is left alone.
    """
    config = model.config
    modalities = [key for key in ("vision_config", "audio_config") if getattr(config, key, None) is not None]
    if not modalities or not hasattr(config, "get_text_config") or config.get_text_config() is config:
        return ()
    text = model.get_decoder() if hasattr(model, "get_decoder") else None
    if text is None or text is model:
        return ()
    paths = {id(module): path for path, module in model.named_modules()}
    inner = paths.get(id(text))
    if inner is None:
        return ()
    reason = (
        f"it is outside of the text model ({inner}): images and sounds are not rows of the batch, so that adapters "
        "cannot be told apart there"
    )
    keep = (inner, "lm_head", "score")
    return tuple((path, reason) for path in paths.values() if path and not _kin(path, keep))


def _kin(path: str, keep: Sequence[str]) -> bool:
    return any(path == k or path.startswith(f"{k}.") or k.startswith(f"{path}.") for k in keep)


def _refusal(
    path: str, parent: nn.Module, name: str, module: nn.Module, outside: tuple[tuple[str, str], ...]
) -> str | None:
    """Why a layer of a known class cannot carry an adapter, or None."""
    for prefix, reason in outside:
        if path == prefix:
            return reason
    if re.search(r"(^|\.)experts(\.|$)", path):
        return "it is one expert of a mixture: it sees the tokens that were routed to it, not rows of the batch"
    if isinstance(parent, nn.MultiheadAttention) or isinstance(
        module, nn.modules.linear.NonDynamicallyQuantizableLinear
    ):
        return "torch's MultiheadAttention reads its weight without calling it"
    # BLOOM reads its weights piece by piece only where it imitates the sharded training run.
    imitates = getattr(parent, "slow_but_exact", None)
    if imitates is not False and _weight_is_read(type(parent), name):  # type: ignore[arg-type]
        return f"{type(parent).__name__} reads its weight without calling it, so that a delta would never be added"
    if isinstance(module, nn.Embedding) and re.search(r"relative|rel_(attn|embed|pos)", name):
        return "it is looked up with pairs of positions, which are not rows of the batch"
    if isinstance(module, nn.Embedding) and _odd_embedding(type(module)):  # type: ignore[arg-type]
        return f"{type(module).__name__} is not called with one tensor of ids"
    return None


@functools.cache
def _weight_is_read(parent_type: type[Any], name: str) -> bool:
    if parent_type.__module__.startswith("torch.") or not name.isidentifier():
        return False
    pattern = re.compile(_WEIGHT_USED.format(name=re.escape(name)))
    for method_name, method in vars(parent_type).items():
        if method_name in ("__init__", "_init_weights", "reset_parameters") or not inspect.isfunction(method):
            continue
        try:
            source = inspect.getsource(inspect.unwrap(method))
        except (OSError, TypeError):
            continue
        if pattern.search(source):
            return True
    return False


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


def _scattered(model: nn.Module, path: str) -> str:
    names = path.split(".")
    for depth in range(len(names)):
        owner = type(model.get_submodule(".".join(names[:depth])))
        if _turns_around(owner):  # type: ignore[arg-type]
            return f"{owner.__name__} puts the sequence first"
    return ""


@functools.cache
def _turns_around(owner: type[Any]) -> bool:
    if owner.__module__.startswith("torch."):
        return False
    methods = (method for name, method in vars(owner).items() if inspect.isfunction(method) and "init" not in name)
    for method in methods:
        try:
            source = inspect.getsource(inspect.unwrap(method))
        except (OSError, TypeError):
            continue
        if _TURNED.search(source):
            return True
    return False


def _slices(model: PreTrainedModel, parent: nn.Module, name: str, out: int) -> tuple[tuple[str, int], ...]:
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


def _read_base(model: nn.Module, name: str) -> torch.Tensor | None:
    """The base model's own parameter or buffer of this name, or None."""
    path, _, attribute = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    value = getattr(module, attribute, None)
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        # accelerate keeps the weights of an offloaded layer with the hook on it, or on what it wraps.
        layers = [module, module.base_layer] if isinstance(module, LoraLayer) else [module]
        maps = [getattr(layer.__dict__.get("_hf_hook"), "weights_map", None) for layer in layers]
        value = next((weights[attribute] for weights in maps if weights is not None), value)
    return value if isinstance(value, torch.Tensor) else None


def _renamed_keys(model: PreTrainedModel) -> tuple[tuple[str, str], ...]:
    """Renamings of module paths that transformers applies to older checkpoints of this class."""
    mapping = getattr(model, "_checkpoint_conversion_mapping", None) or {}
    return tuple((str(old), str(new)) for old, new in mapping.items())


def _check_selection(
    config: MultiLoraConfig, found: dict[str, Found], refused: dict[str, str], modules: list[str]
) -> None:
    wanted = config.target_modules
    if wanted is None:
        if not found:
            raise ModelError("The model has no layer that can carry an adapter (linear, Conv1D or embedding).")
        return
    named = [wanted] if isinstance(wanted, str) else list(wanted)
    for entry in named:
        pattern: Sequence[str] | str = entry if isinstance(wanted, str) else [entry]
        if any(selected(path, pattern) for path in found):
            continue
        hit = next((path for path in refused if selected(path, pattern)), None)
        if hit is not None:
            raise ConfigError(f"target_modules names {entry!r}, but {hit} cannot carry an adapter: {refused[hit]}.")
        raise ConfigError(
            f"target_modules={entry!r} matches no layer of the model."
            + closest(entry.rpartition(".")[2], {path.rpartition(".")[2] for path in modules})
        )
