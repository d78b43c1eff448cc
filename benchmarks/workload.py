"""Model shapes and random adapters, as the scripts here import them; they live in the package."""

from hf_multilora.bench.workload import (
    ALL_LINEAR,
    DTYPES,
    SHAPES,
    Tensors,
    adapter_config,
    build_model,
    linear_shapes,
    merged,
    nbytes,
    prompts,
    random_adapter,
    save_adapter,
    scratch,
    twin,
)

__all__ = [
    "ALL_LINEAR",
    "DTYPES",
    "SHAPES",
    "Tensors",
    "adapter_config",
    "build_model",
    "linear_shapes",
    "merged",
    "nbytes",
    "prompts",
    "random_adapter",
    "save_adapter",
    "scratch",
    "twin",
]
