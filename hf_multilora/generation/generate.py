"""What generate() does with ids: one call, or waves where a batch names more adapters than there are slots; and with
those of an assistant."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..errors import RoutingError
from .call import batch_rows
from .ids import to_keys
from .waves import Following, plan_waves, refuse_waves, run_waves


def run(model: Any, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ids: Any, assistant_ids: Any) -> Any:
    """transformers' generate() of an enabled model, `fn`, under ids of its own, those around it, or the default."""
    calls = model.multilora.calls
    if assistant_ids is not None:
        return _with_assistant(model, fn, args, kwargs, ids, assistant_ids)
    if ids is None and calls.current() is not None:
        with calls.inherited():
            return fn(*args, **kwargs)
    if ids is None:
        ids = calls.default
    if ids is None and calls.vocabulary is None and calls.agreement is None:
        return fn(*args, **kwargs)
    if len(args) > 1:  # what decides about waves is looked up by name
        names = [p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        kwargs = {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}
        args = args[:1]
    if kwargs.get("cache_implementation") == "paged":  # transformers hands it all to generate_batch
        return fn(*args, **kwargs, adapter_ids=ids)
    rows = batch_rows(args, kwargs)
    if rows is None:
        rows = 1 if ids is None or isinstance(ids, (str, dict, tuple)) else len(ids)
    keys, _ = to_keys(ids, rows)
    _check_assistant(model, kwargs)
    distinct = calls.distinct(keys)
    pinned = set(calls.store.pinned())
    slots = model.multilora.config.max_loras - len(pinned)
    if sum(key not in pinned for key in distinct) <= slots:
        with calls.open(ids, rows):
            return fn(*args, **kwargs)
    enough = len(pinned.union(distinct))
    returns_dict = bool(_asked(model, kwargs, "return_dict_in_generate"))
    refuse_waves(len(distinct), slots, enough, kwargs, returns_dict)
    calls.ensure(distinct)  # an unknown name must not come up when half of the batch is done

    waves = plan_waves(keys, slots, pinned)
    calls.store.asked(enough, len(waves))
    with Following(calls.store, keys, waves) as following:

        def one_wave(part: list[int], part_args: tuple[Any, ...], part_kwargs: dict[str, Any]) -> torch.Tensor:
            with calls.open([ids[row] for row in part], len(part)):
                following.begin(part)
                return fn(*part_args, **part_kwargs)

        return run_waves(one_wave, waves, rows, args, kwargs, _pad(model, kwargs))


def _check_assistant(model: Any, kwargs: dict[str, Any]) -> None:
    """Sampling compares the assistant's probabilities with the model's, column by column."""
    assistant, extra = kwargs.get("assistant_model"), model.multilora.config.extra_vocab_size
    sampled = _asked(model, kwargs, "do_sample")
    handle = getattr(assistant, "multilora", None)
    theirs = 0 if handle is None else handle.config.extra_vocab_size
    if assistant is not None and assistant is not model and sampled and theirs != extra:
        raise RoutingError(
            f"Assisted sampling needs logits of one width, and this model has extra_vocab_size={extra}, its assistant "
            f"{theirs}. Enable the assistant with extra_vocab_size={extra}, or use do_sample=False."
        )


def _with_assistant(model: Any, fn: Any, args: Any, kwargs: dict[str, Any], ids: Any, assistant_ids: Any) -> Any:
    assistant: Any = kwargs.get("assistant_model")
    if assistant is model:
        raise RoutingError(
            "assistant_adapter_ids are for another model: this one drafts for itself, under its adapter_ids."
        )
    if getattr(assistant, "multilora", None) is None:
        raise RoutingError(
            "assistant_adapter_ids needs an assistant_model that is enabled too: enable_multilora(assistant_model)."
        )
    with assistant.multilora.calls.open(assistant_ids, batch_rows(args, kwargs)):
        return run(model, fn, args, kwargs, ids, None)


def _pad(model: Any, kwargs: dict[str, Any]) -> int:
    """The id that generate() itself pads finished rows with."""
    pad, eos = (_asked(model, kwargs, name) for name in ("pad_token_id", "eos_token_id"))
    found = eos if pad is None else pad
    found = found[0] if isinstance(found, (list, tuple)) else found
    return 0 if found is None else int(found)


def _asked(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """What generate() takes for an option: the argument, else that of the config passed in, else of the model's."""
    configs = [kwargs.get("generation_config"), model.generation_config]
    given = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
    return next((value for value in given if value is not None), None)
