"""Taking over a PeftModel: its transformers model is freed of PEFT's layers, its adapters are handed over as tensors.

PEFT is needed here, and nowhere else in the package: whoever has a PeftModel has PEFT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .errors import ModelError, UnsupportedAdapterError
from .survey import walk

_WORDS = ("forward", "generate")  # of a PeftModel that has been taken apart: they raise
# Initialisations that subtract from the base weights (PEFT accepts them in any case, and with suffixes).
_ALTERS_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass
class Takeover:
    """A PeftModel taken apart: `model` without PEFT's layers, adapters by name as (tensors, config)."""

    model: PreTrainedModel
    adapters: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]
    layers: list[tuple[nn.Module, str, nn.Module]]  # (parent, attribute, PEFT's layer)
    shell: Any  # the PeftModel, which would answer as the base without its layers
    own: dict[str, Any]  # its methods that somebody (accelerate, for mixed precision) had replaced on the instance

    def give_back(self) -> None:
        """Put PEFT's layers back where they were."""
        for name in _WORDS:
            self.shell.__dict__.pop(name, None)
        self.shell.__dict__.update(self.own)
        for parent, name, layer in self.layers:
            setattr(parent, name, layer)


def is_peft_model(model: Any) -> bool:
    """Whether this is a PeftModel, without importing PEFT for those who do not have it."""
    return any(cls.__name__ == "PeftModel" and cls.__module__.startswith("peft.") for cls in type(model).__mro__)


def is_peft_layer(module: nn.Module) -> bool:
    """Whether PEFT has put this module into a model."""
    return any(cls.__name__ == "BaseTunerLayer" and cls.__module__.startswith("peft.") for cls in type(module).__mro__)


def take_over(peft_model: Any) -> Takeover:
    """Take a PeftModel apart. Nothing is changed where an error is raised.

    Raises:
        ModelError: in training mode, with merged adapters, or of another method than LoRA.
        UnsupportedAdapterError: an adapter has changed the base model in ways that belong to all rows.
    """
    from peft import get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    if peft_model.training:
        raise ModelError("The PeftModel is in training mode. Call peft_model.eval() first.")
    if not isinstance(peft_model.base_model, BaseTuner):
        raise ModelError(
            f"A PeftModel of type {type(peft_model.base_model).__name__} cannot be taken over: LoRA only."
        )
    inner = peft_model.base_model.model
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(f"The PeftModel wraps a {type(inner).__name__}, which is not a transformers model.")
    for name, config in peft_model.peft_config.items():
        _check_config(name, config)
    layers: list[tuple[nn.Module, str, Any]] = []
    for path, parent, attribute, module in walk(inner):
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise UnsupportedAdapterError(
                f"{path} is saved whole by an adapter (modules_to_save or trainable tokens), which the model's own "
                "rows would see. Save the adapters and load them by path instead."
            )
        if isinstance(module, BaseTunerLayer):
            if getattr(module, "merged", False):
                raise ModelError(f"{path} has merged adapters. Call peft_model.unmerge_adapter() first.")
            if isinstance(parent, BaseTunerLayer):
                if not hasattr(module, "parameter_name"):
                    raise UnsupportedAdapterError(f"{path} holds PEFT layers inside of PEFT layers.")
                continue  # one for each of a module's target_parameters, of which the outermost goes, and comes back
            layers.append((parent, attribute, module))
    adapters = {}
    for name, config in peft_model.peft_config.items():
        tensors = get_peft_model_state_dict(peft_model, adapter_name=name, save_embedding_layers=False)
        adapters[name] = ({key: value.detach() for key, value in tensors.items()}, config.to_dict())
    for parent, attribute, layer in layers:
        setattr(parent, attribute, layer.get_base_layer())
    own = {word: peft_model.__dict__[word] for word in _WORDS if word in peft_model.__dict__}
    for word in _WORDS:
        peft_model.__dict__[word] = _moved
    return Takeover(inner, adapters, layers, peft_model, own)


def _moved(*args: Any, **kwargs: Any) -> Any:
    raise ModelError(
        "This PeftModel's adapters have moved: enable_multilora returned the model that serves them. Use that one, or "
        "disable_multilora(it) to have this one back."
    )


def _check_config(name: str, config: Any) -> None:
    if str(getattr(config.peft_type, "value", config.peft_type)).upper() != "LORA":
        raise ModelError(f"Adapter {name!r} is of type {config.peft_type}: only LoRA can be taken over.")
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_ALTERS_BASE):
        raise UnsupportedAdapterError(
            f"Adapter {name!r} was made with init_lora_weights={init!r}: PEFT has subtracted its start from the base "
            "weights, for every row. Reload the base model and load the adapter by path."
        )
    if getattr(config, "bias", "none") != "none":
        raise UnsupportedAdapterError(
            f"Adapter {name!r} has bias={config.bias!r}: PEFT has written its biases into the base model. Reload the "
            "base model and load the adapter by path."
        )
    if getattr(config, "layer_replication", None):
        raise UnsupportedAdapterError(f"Adapter {name!r} has layer_replication: PEFT has rebuilt the base model.")
