"""Where the layers that carry adapters compute: on one device, or in groups on several."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from .config import MultiLoraConfig
from .errors import ModelError, UnsupportedAdapterError
from .layers.hooks import execution_device
from .layers.quantised import is_quantised, own_tensors
from .survey import Found

_SLOTS = (torch.float32, torch.float16, torch.bfloat16)  # dtypes that slots may have


@dataclass(frozen=True)
class Placement:
    """Devices and dtype of the slots.

    Attributes:
        devices: of each group, in the order in which the model has them.
        groups: module path -> group; of all modules with tensors, and of the projections of blocks of experts.
        elsewhere: modules that compute where no layer carries adapters, and where.
        dtype: of the slots: that of most weights of the wrapped layers, unless the config names one.
    """

    devices: tuple[torch.device, ...]
    groups: Mapping[str, int]
    elsewhere: Mapping[str, torch.device]
    dtype: torch.dtype

    def group_of(self, path: str) -> int:
        """Raises: UnsupportedAdapterError for a module that has no slot on its device."""
        if path in self.elsewhere:
            raise UnsupportedAdapterError(
                f"{path!r} computes on {self.elsewhere[path]}, where no layer carries adapters, so that what an "
                "adapter saves of it has no place. Choose a device_map that keeps it beside a layer."
            )
        return self.groups.get(path, 0)


def group_key(path: str, device: torch.device) -> Hashable:
    """What layers of one group have in common."""
    return device


def place(model: nn.Module, found: Mapping[str, Found], config: MultiLoraConfig) -> Placement:
    """Where the wrapped layers compute, and in which dtype.

    A quantised layer's tensors do not say in which dtype it is called. Where there is one, it is the dtype of what the
    model holds unquantised (embeddings, norms), and bfloat16 where that is nothing.
    """
    keys: dict[Hashable, int] = {}
    devices: list[torch.device] = []
    groups: dict[str, int] = {}
    dtypes: dict[torch.dtype, int] = {}
    quantised = False
    for path in (path for path, _ in model.named_modules() if path in found):  # the first device is the embeddings'
        item = found[path]
        weight = next(own_tensors(item.module), None)
        if is_quantised(item.module):
            quantised = True
        elif weight is not None:
            dtypes[weight.dtype] = dtypes.get(weight.dtype, 0) + weight.numel()
        device = device_of(model, path)
        if device is None and devices:
            device = devices[0]
        elif device is None:
            device = torch.device("cpu")
        group = keys.setdefault(group_key(path, device), len(keys))
        if group == len(devices):
            devices.append(device)
        groups |= dict.fromkeys([path, *(target.path for target in item.targets)], group)
    if quantised:
        dtypes = _unquantised(model)
    elsewhere = {}
    for path, module in model.named_modules() if len(devices) > 1 else ():
        if path not in groups and (module._parameters or module._buffers):
            device = device_of(model, path) or devices[0]
            if (known := keys.get(group_key(path, device))) is not None:
                groups[path] = known
            else:
                elsewhere[path] = device
    return Placement(tuple(devices) or (torch.device("cpu"),), groups, elsewhere, _slot_dtype(dtypes, config))


def devices_now(model: nn.Module, found: Mapping[str, Found], groups: Mapping[str, int]) -> list[torch.device]:
    """The device of each group of layers, after the model was moved.

    Raises:
        ModelError: layers that were on one device no longer are.
    """
    devices: dict[int, tuple[torch.device, str]] = {}
    for path in (path for path, _ in model.named_modules() if path in found):
        device = device_of(model, path)
        if device is None:
            continue
        known, other = devices.setdefault(groups.get(path, 0), (device, path))
        if known != device:
            raise ModelError(
                f"{path} computes on {device} now, and {other} on {known}, but their slots were made for one device. "
                "Call disable_multilora(model), move or dispatch it, and enable it again."
            )
    return [device for _, (device, _) in sorted(devices.items())]


def device_of(model: nn.Module, path: str) -> torch.device | None:
    """Where a module computes: where its hook says, else where its weights lie, else where hooks around it say."""
    module = model.get_submodule(path)
    device = execution_device(module)
    if device is None:
        tensors = (*module._parameters.values(), *module._buffers.values())
        device = next((t.device for t in tensors if t is not None and t.device.type != "meta"), None)
    while device is None and path:
        path = path.rpartition(".")[0]
        device = execution_device(model.get_submodule(path))
    return None if device is None else _indexed(device)


def _slot_dtype(dtypes: Mapping[torch.dtype, int], config: MultiLoraConfig) -> torch.dtype:
    wanted = config.torch_dtype()
    if wanted is not None:
        return wanted
    common = max(dtypes, key=lambda dtype: dtypes[dtype]) if dtypes else torch.bfloat16
    wanted = {torch.float64: torch.float32}.get(common, common)
    return wanted if wanted in _SLOTS else torch.bfloat16


def _unquantised(model: nn.Module) -> dict[torch.dtype, int]:
    """dtype -> elements of the parameters of layers that are not quantised."""
    dtypes: dict[torch.dtype, int] = {}
    for module in model.modules():
        if not is_quantised(module):
            for parameter in module.parameters(recurse=False):
                if parameter.dtype in _SLOTS:
                    dtypes[parameter.dtype] = dtypes.get(parameter.dtype, 0) + parameter.numel()
    return dtypes


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
