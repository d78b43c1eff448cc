"""Loading a base model and its tokenizer by name, for the commands that run one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import ConfigError, ModelError

DTYPES = ("auto", "float32", "float16", "bfloat16")


def check_dtype(dtype: str) -> None:
    """Raises: ConfigError for a name that is none of DTYPES."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r}: expected one of {', '.join(DTYPES)}.")


def load_tokenizer(name: str, offline: bool) -> Any:
    """The tokenizer of a folder or hub id. Raises: ModelError."""
    from transformers import AutoTokenizer

    with _told(name):
        return AutoTokenizer.from_pretrained(name, local_files_only=offline)


def load_base(name: str, dtype: str, device: str | None, offline: bool) -> Any:
    """The causal language model of a folder or hub id, in eval mode.

    Args:
        dtype: one of DTYPES; "auto" is the checkpoint's own.
        device: as transformers' device_map; None: CUDA where there is one, else the CPU.
        offline: ask no hub.

    Raises:
        ModelError: nothing that can be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with _told(name):
        return AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, device_map=where, local_files_only=offline
        ).eval()


@contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"The base model {name!r} cannot be loaded: {str(error).strip()}") from error
