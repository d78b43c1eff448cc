"""The fields of a LoRA config, as data: what each one means at inference. Known up to PEFT 0.21."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Decide the mathematics, or which modules were trained; AdapterSpec carries them.
HONOURED = (
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "modules_to_save", "bias", "init_lora_weights", "use_dora", "lora_bias",
    "alora_invocation_tokens", "trainable_token_indices", "use_bdlora", "use_qalora", "qalora_group_size",
    "kasa_config", "target_parameters", "lora_B_layout",
)  # fmt: skip

# Say where an adapter comes from.
METADATA = (
    "base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version", "inference_mode",
)  # fmt: skip

# Set, but without effect on inference: name -> why.
NO_EFFECT = {
    "lora_dropout": "training only",
    "fan_in_fan_out": "the layout of the base weight; saved factors have one layout only",
    "megatron_config": "parallel layers of the training run",
    "megatron_core": "parallel layers of the training run",
    "runtime_config": "run-time options of PEFT itself",
    "loftq_config": "counts only with init_lora_weights='loftq'",
    "eva_config": "initialisation only",
    "corda_config": "counts only with init_lora_weights='corda'",
    "lora_ga_config": "initialisation only",
    "velora_config": "changes the backward pass only",
    "monteclora_config": "training noise only",
    "ensure_weight_tying": "tied factors are saved for both layers",
    "merge_weights": "PEFT 0.2: whether to merge when evaluating",
    "lora_dtype": "ms-swift: dtype of training",
    "lorap_lr_ratio": "ms-swift: learning rates of LoRA+",
    "lorap_emb_lr": "ms-swift: learning rates of LoRA+",
}

_MEANWHILE = "Load it with PEFT meanwhile."

# Change the mathematics and are not served: name -> what it is, and the next step.
REFUSED = {
    "layer_replication": "the adapter repeats layers of the base; a base that all rows share cannot grow for one "
    "of them. Load it with PEFT, alone.",
    "arrow_config": f"Arrow routes tokens over other loaded adapters, which is not served. {_MEANWHILE}",
    "enable_lora": "MergedLinear of PEFT 0.2 (a grouped convolution over parts of a fused layer) is not served; load "
    "it with PEFT 0.2 and merge it, or train again.",
}

# Fields that later versions of PEFT no longer know.
LEGACY = {
    "enable_lora": "a field of PEFT 0.2, not set",
    "merge_weights": "a field of PEFT 0.2, not set",
}

# What PEFT, or an old version of it, writes without being asked: as good as absent.
DEFAULTS: dict[str, Any] = {
    "lora_dropout": 0,
    "bias": "none",
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "runtime_config": {"ephemeral_gpu_offload": False},
}

# Initialisations after which the base is what it was.
PLAIN_INITS = ("true", "gaussian", "eva", "orthogonal", "mica", "lora_ga")

# Initialisations that take a part out of the base, which can be computed again from the base alone.
RECOMPUTED_INITS = ("pissa", "olora")

_CONVERT = (
    "Its factors mean nothing on the plain base. PEFT converts it: save the untrained adapter as INIT, and the "
    "trained one with model.save_pretrained(PATH, path_initial_model_for_weight_conversion=INIT)."
)

# Initialisations that change the base by what cannot be computed again: prefix -> what became of it, and what to do.
REWRITING_INITS = {
    "pissa": f"PiSSA took components out of the base by a randomised SVD, which is not repeatable. {_CONVERT}",
    "corda": f"CorDA took components out of the base that depend on its calibration data. {_CONVERT}",
    "loftq": "LoftQ quantised the base and corrected it by the adapter, so its factors mean nothing on the plain "
    "base. Load it with PEFT on the base that LoftQ made, and merge it: "
    "model.merge_and_unload().save_pretrained(PATH).",
}


def foreign_config(config: Mapping[str, Any]) -> str:
    """Whose config it is that lacks `peft_type`, and what to do: one or two sentences."""
    if "lora_parameters" in config or "lora_layers" in config or "fine_tune_type" in config:
        return (
            "this is an MLX adapter. Its scale is not alpha / r and its factors are transposed; convert it to PEFT: "
            "A = lora_a.T, B = lora_b.T, lora_alpha = scale * rank."
        )
    if str(config.get("version", "")).startswith("adapters.") or "model_class" in config:
        return "this is an adapter of the AdapterHub library ('adapters'), a bottleneck module or the like."
    found = ", ".join(sorted(map(str, config))[:8]) or "none"
    return f"the field 'peft_type' is missing (fields: {found}). PEFT writes it; add it only if a PEFT LoRA lost it."
