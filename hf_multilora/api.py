"""enable_multilora, disable_multilora, and what they would take."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .config import MultiLoraConfig, check_names
from .errors import ConfigError, ModelError
from .generation.mixin import MultiLoraMixin, PartMixin
from .handle import MultiLora, estimate
from .layers import LoraLayer
from .memory.layout import Layout
from .parallel import agreement_of, parts_of
from .peft_model import is_peft_layer, is_peft_model, take_over
from .placement import place
from .survey import survey


def enable_multilora(model: Any, config: MultiLoraConfig | None = None, **options: Any) -> Any:
    """Give a transformers model slots for LoRA adapters; returns the same object.

    Afterwards `model.load_adapter(path, adapter_name="a")` registers adapters, and
    `model.generate(..., adapter_ids=["a", None, "b"])` answers every row through its own. Nothing outside of this
    instance is changed, and `disable_multilora(model)` gives the model back bit for bit.

    Args:
        model: any PreTrainedModel. Of a PeftModel the transformers model inside is enabled and returned, and its
            adapters are registered.
        config: the options as one object; or give them as keywords (see `MultiLoraConfig`).

    Raises:
        ConfigError: an unknown or impossible option.
        ModelError: enabled already, natively injected adapters, no layer that can carry an adapter.
        SlotError: no room on the device for the slots.
    """
    config = _config(config, options)
    takeover = None
    if is_peft_model(model):
        takeover = take_over(model)
        model = takeover.model
    try:
        _check_model(model)
        _check_training(model)
        handle = MultiLora(model, config, takeover)
    except BaseException:
        if takeover is not None:
            takeover.give_back()
        raise
    if takeover is not None:
        try:
            for name, (tensors, adapter_config) in takeover.adapters.items():
                handle.load(tensors, name, config=adapter_config)
        except BaseException:
            handle.detach()
            raise
    return model


def disable_multilora(model: Any) -> Any:
    """Give the model back exactly as it was before `enable_multilora`; returns the same object.

    Raises:
        ModelError: not enabled, calls in flight, or a wrapper was replaced by somebody else since.
    """
    if not isinstance(model, MultiLoraMixin):
        raise ModelError("The model is not enabled: there is nothing to disable.")
    model.multilora.detach()
    return model


def estimate_memory(model: Any, config: MultiLoraConfig | None = None, **options: Any) -> dict[str, Any]:
    """Bytes that `enable_multilora(model, ...)` would allocate; nothing is allocated or changed.

    Args:
        model: as of `enable_multilora`; or one that is enabled, whose options hold where none are given.

    Returns:
        dict: "arena": all of what is allocated, on all devices together; "slot": one slot; "header": its table (one on
        each device); "tail": the zeros at the end of the arena; "adapter": one adapter that trained every layer at
        `max_lora_rank`, in host memory and as copied into a slot (where it is more than "slot", slot_bytes has to be
        raised to it); "largest": module path -> bytes of its factors, gain and shift in a slot at `max_lora_rank`,
        the largest ones first.

    Raises:
        ConfigError: an unknown or impossible option, or one that cannot change while the model is enabled.
        ModelError: a model that `enable_multilora` would refuse as such.
    """
    if isinstance(model, MultiLoraMixin):
        if config is not None:
            raise ConfigError(
                "The model is enabled already: config= would replace all of its options. Give those that are to be "
                "others as keywords: estimate_memory(model, max_loras=16)."
            )
        return model.multilora.estimate_memory(**options)
    config = _config(config, options)
    takeover = take_over(model) if is_peft_model(model) else None
    model = model if takeover is None else takeover.model
    try:
        _check_model(model)
        seen = survey(model, config)
        placed = place(model, seen.found, config)
        parts = parts_of(agreement_of(model), config.fully_sharded_loras)
    finally:
        if takeover is not None:
            takeover.give_back()
    return estimate(Layout.from_targets(seen.table.targets, placed.group_of, parts), config, placed.dtype)


def _config(config: MultiLoraConfig | None, options: dict[str, Any]) -> MultiLoraConfig:
    check_names(options)
    if config is None:
        config = MultiLoraConfig(**options)
    elif options:
        raise ConfigError(f"Give config= or single options, not both (got config and {', '.join(options)}).")
    return config


def _check_model(model: Any) -> None:
    if isinstance(model, PartMixin):
        raise ModelError("This model is part of one that is enabled already, and is served with it.")
    if isinstance(model, MultiLoraMixin):
        raise ModelError("The model is enabled already. Call disable_multilora(model) first to choose other options.")
    if not isinstance(model, PreTrainedModel):
        hint = ""
        inner = getattr(model, "model", None)
        if isinstance(inner, PreTrainedModel):
            hint = " Pass the model inside of it: enable_multilora(x.model)."
        if hasattr(model, "_orig_mod"):
            hint = " Enable the model first, then compile it: torch.compile(enable_multilora(model))."
        raise ModelError(f"Expected a transformers PreTrainedModel or a PeftModel, got {type(model).__name__}.{hint}")
    if any(isinstance(module, LoraLayer) for module in model.modules()):
        raise ModelError("A model inside of this one is enabled already. Call disable_multilora on that one first.")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            "The model carries adapters that transformers injected (model.load_adapter). Enable a model without them, "
            "and load them afterwards: they are then served through slots."
        )
    peft = next((path for path, module in model.named_modules() if is_peft_layer(module)), None)
    if peft is not None:
        raise ModelError(f"{peft} is a layer of PEFT. Pass the PeftModel itself: enable_multilora(peft_model).")


def _check_training(model: PreTrainedModel) -> None:
    if model.training:
        raise ModelError("The model is in training mode; adapters are served for inference. Call model.eval() first.")
