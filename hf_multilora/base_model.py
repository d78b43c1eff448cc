"""Loading a base model and its tokenizer by name, for the commands that run one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import ConfigError, ModelError

DTYPES = ("auto", "float32", "float16", "bfloat16")
# What a model's generation_config may ask for and continuous batching does not do: the value that asks for nothing.
_UNSERVED = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "num_beams": 1,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None, "sequence_bias": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None,
    "min_p": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "guidance_scale": None,
    "penalty_alpha": None, "stop_strings": None,
}  # fmt: skip


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
    """The causal language model of a folder or hub id, in eval mode, to be run by continuous batching.

    What its generation_config asks for and continuous batching does not do is told in a warning.

    Args:
        dtype: one of DTYPES; "auto" is the checkpoint's own.
        device: as transformers' device_map; None: CUDA where there is one, else the CPU.
        offline: ask no hub.

    Raises:
        ModelError: nothing that can be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with _told(name):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=where, local_files_only=offline)
    asked = unserved(model.generation_config)
    if asked:
        logging.get_logger(__name__).warning(
            f"The generation_config of {name!r} asks for {', '.join(asked)}. Continuous batching does not do that: "
            "answers are those of generate() without it."
        )
    return model.eval()


def unserved(config: Any) -> list[str]:
    """What a GenerationConfig asks for and continuous batching does not do, as "name=value".

    Example:
        >>> from transformers import GenerationConfig
        >>> unserved(GenerationConfig(repetition_penalty=1.05, temperature=0.7, no_repeat_ngram_size=0))
        ['repetition_penalty=1.05']
    """
    found = {name: getattr(config, name, None) for name in _UNSERVED}
    return [f"{name}={value}" for name, value in found.items() if value not in (None, [], _UNSERVED[name])]


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """End tokens of the model's generation config and of the tokenizer."""
    found: list[int] = []
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        found += [value] if isinstance(value, int) else list(value or ())
    return sorted({token for token in found if token >= 0})


@contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"The base model {name!r} cannot be loaded: {str(error).strip()}") from error
