"""MultiLoraConfig: the options that are fixed while a model is enabled."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from .errors import ConfigError, closest

# Integers: the least value, and whether None is one.
_NUMBERS = {
    "max_loras": (1, False),
    "max_lora_rank": (1, False),
    "max_cpu_loras": (1, True),
    "slot_bytes": (1, True),
    "extra_vocab_size": (0, False),
}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class MultiLoraConfig:
    """Options of `enable_multilora`, which hold until the model is disabled.

    Args:
        max_loras: slots, i.e. distinct adapters that one forward can mix.
        max_lora_rank: largest rank of an adapter (of the ranks' sum for a mix).
        max_cpu_loras: registered adapters kept in host memory; None: no limit but memory; at least `max_loras`.
        slot_bytes: bytes of one slot (of a model over several devices: on each of them); None: room for every wrapped
            layer at `max_lora_rank`.
        extra_vocab_size: columns added to the logits for adapters' own tokens.
        on_demand: load an unknown id that is a folder or holds a slash at first use.
        lora_dtype: dtype of the slots; "auto" follows the base weights, and where those are quantised what is not
            (embeddings, norms), else bfloat16.
        fully_sharded_loras: of a tensor-parallel model: split over its ranks what the base's plan leaves whole of an
            adapter, too (A of layers split by outputs, B of layers split by inputs). Slots get smaller, and each
            split layer communicates once more.
        decode_graphs: decode with CUDA graphs and without a compiler where generate() would compile
            (`cache_implementation="static"`); the bits are those of uncompiled decoding.
        target_modules: suffixes (list) or a regex (str, full match) that narrow what is wrapped; None wraps all.

    Raises:
        ConfigError: a value out of range, or of the wrong type.
    """

    max_loras: int = 8
    max_lora_rank: int = 64
    max_cpu_loras: int | None = None
    slot_bytes: int | None = None
    extra_vocab_size: int = 0
    on_demand: bool = True
    lora_dtype: str | torch.dtype = "auto"
    target_modules: Sequence[str] | str | None = None
    decode_graphs: bool = False
    fully_sharded_loras: bool = False

    def __post_init__(self) -> None:
        for name, (least, optional) in _NUMBERS.items():
            value = getattr(self, name)
            if optional and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                also = ", or None" if optional else ""
                raise ConfigError(f"{name}={value!r}: expected an integer of at least {least}{also}.")
        for name in ("on_demand", "decode_graphs", "fully_sharded_loras"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected True or False.")
        self._check_targets()
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} is less than max_loras={self.max_loras}: what is in a slot is "
                f"kept in host memory too. Raise max_cpu_loras to at least {self.max_loras}, or leave it None."
            )
        if self.lora_dtype != "auto":
            self.torch_dtype()

    def _check_targets(self) -> None:
        wanted = self.target_modules
        if wanted is None:
            return
        if isinstance(wanted, str):
            try:
                re.compile(wanted)
            except re.error as error:
                raise ConfigError(f"target_modules={wanted!r}: not a valid regex ({error}).") from error
        elif not isinstance(wanted, Collection) or not all(isinstance(name, str) for name in wanted):
            raise ConfigError(f"target_modules={wanted!r}: expected a list of names, a regex, or None.")
        elif not wanted:
            raise ConfigError("target_modules=[] would wrap nothing; leave it None to wrap every layer.")

    def torch_dtype(self) -> torch.dtype | None:
        """The slots' dtype, or None where it follows the base model."""
        if self.lora_dtype == "auto":
            return None
        dtype = _DTYPES.get(str(self.lora_dtype).removeprefix("torch."))
        if dtype is None:
            raise ConfigError(f"lora_dtype={self.lora_dtype!r}: expected 'auto' or one of {', '.join(_DTYPES)}.")
        return dtype


def check_names(options: Iterable[str]) -> None:
    """Raises: ConfigError where one of these names is no option."""
    known = MultiLoraConfig.__dataclass_fields__
    for name in options:
        if name not in known:
            raise ConfigError(f"enable_multilora has no option {name!r}.{closest(name, known)}")
