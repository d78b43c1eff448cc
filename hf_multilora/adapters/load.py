"""load_plan: the one way in, from a folder, a hub id or tensors in memory to a plan for one model."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import AdapterFormatError
from .checkpoint import Checkpoint, from_tensors, open_checkpoint
from .config import AdapterSpec, parse_config, read_config
from .match import match
from .plan import AdapterPlan
from .source import AdapterFiles, Request, resolve
from .targets import TargetTable

Source = str | os.PathLike[str] | Mapping[str, torch.Tensor]
# What quantised copies of a base add to its name.
_QUANTISED = re.compile(
    r"([-_.](unsloth|dynamic|bnb|gptq|awq|hqq|fp8|int[48]|[348]-?bits?|marlin|exl2|quantized(\.w\d+a\d+)?|w\d+a\d+))+$"
)


def load_plan(
    source: Source,
    targets: TargetTable,
    *,
    max_lora_rank: int,
    revision: str | None = None,
    token: str | bool | None = None,
    subfolder: str | None = None,
    strict_base: bool = False,
    ignore_untargeted: bool = False,
    local_files_only: bool = False,
    config: Mapping[str, Any] | None = None,
) -> AdapterPlan:
    """Open an adapter and fit it to a model. Tensors are read later, through the plan; close it afterwards.

    Args:
        source: a folder (also a Trainer's checkpoint-*), a hub id, or tensors by name in PEFT's format.
        targets: what the model offers.
        max_lora_rank: the largest rank that a slot takes.
        revision, token, subfolder, local_files_only: for hub ids, as in huggingface_hub; subfolder for folders too.
        strict_base: raise, rather than warn, where the adapter names another base model.
        ignore_untargeted: leave out what enable's target_modules left out, rather than raise.
        config: adapter_config.json as a dict; with tensors in memory only, and required there.

    Raises:
        AdapterNotFoundError: no such folder or repository.
        AdapterFormatError: damaged, foreign, incomplete, or not what its config says.
        AdapterMatchError: does not fit the model.
        UnsupportedAdapterError: a feature that is not served.
        SlotError: a rank over max_lora_rank.
    """
    files: AdapterFiles | None = None
    if isinstance(source, Mapping):
        if config is None:
            raise AdapterFormatError("Tensors in memory need config=, the fields of their adapter_config.json.")
        spec = parse_config(config, "config")
        open_weights: Callable[[], Checkpoint] = functools.partial(from_tensors, source)
    else:
        if config is not None:
            raise AdapterFormatError(f"{source}: config= goes with tensors in memory; a folder or hub id has its own.")
        files = resolve(
            Request(
                source=os.fspath(source),
                is_path=not isinstance(source, str),
                revision=revision,
                token=token,
                subfolder=subfolder,
                local_files_only=local_files_only,
            )
        )
        spec = parse_config(read_config(files.config), str(files.config))
        open_weights = functools.partial(open_checkpoint, files.weights)
    warnings = _check_base(spec, targets.base_name, strict_base, files)
    checkpoint = open_weights()
    try:
        plan = match(spec, checkpoint, targets, max_lora_rank=max_lora_rank, ignore_untargeted=ignore_untargeted)
    except BaseException:
        checkpoint.close()
        raise
    return dataclasses.replace(
        plan,
        source=files.label if files else "memory",
        fingerprint_of_source=files.commit if files else None,
        warnings=[*(files.warnings if files else []), *warnings, *plan.warnings],
    )


def _check_base(spec: AdapterSpec, base_name: str | None, strict: bool, files: AdapterFiles | None) -> list[str]:
    if not spec.base_model or not base_name or short_name(spec.base_model) == short_name(base_name):
        return []
    text = f"trained on {spec.base_model!r}, loaded on {base_name!r}"
    if strict:
        where = files.config if files else "config"
        raise AdapterFormatError(f"{where}: {text}. Without strict_base=True this is a warning in the report.")
    return [f"{text}: shapes and names fit, but is it the same base?"]


def short_name(base: str) -> str:
    """What identifies a base model in a path or hub id: the last component, without case and quantisation suffix.

    >>> short_name("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit") == short_name("/models/Meta-Llama-3.1-8B-Instruct/")
    True
    """
    base = base.replace("\\", "/").rstrip("/")
    cached = re.search(r"models--(?:[^/]+--)?([^/]+)/snapshots", base)
    name = cached[1] if cached else base.rpartition("/")[2]
    return _QUANTISED.sub("", name.lower())
