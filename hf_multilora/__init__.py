"""Many LoRA adapters, one generate() call: multi-LoRA for Hugging Face transformers models."""

from ._version import __version__
from .api import disable_multilora, enable_multilora, estimate_memory
from .config import MultiLoraConfig
from .errors import (
    AdapterExistsError,
    AdapterFormatError,
    AdapterMatchError,
    AdapterNotFoundError,
    CacheMismatchError,
    ConfigError,
    ModelError,
    MultiLoraError,
    RoutingError,
    SlotError,
    UnsupportedAdapterError,
)
from .generation.streaming import BatchTextStreamer
from .handle import MultiLora
from .layers.registry import register_layer
from .logs import follow_transformers
from .report import LoadReport, Status

follow_transformers()

__all__ = [
    "AdapterExistsError",
    "AdapterFormatError",
    "AdapterMatchError",
    "AdapterNotFoundError",
    "BatchTextStreamer",
    "CacheMismatchError",
    "ConfigError",
    "LoadReport",
    "ModelError",
    "MultiLora",
    "MultiLoraConfig",
    "MultiLoraError",
    "RoutingError",
    "SlotError",
    "Status",
    "UnsupportedAdapterError",
    "__version__",
    "disable_multilora",
    "enable_multilora",
    "estimate_memory",
    "register_layer",
]
