"""Waves: generate() for a batch that names more adapters than there are slots.

The rows are split by adapter into parts that fit, each part is generated as a batch of its own, and the results come
back in the caller's order, padded to one length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ..errors import SlotError
from ..memory.ahead import Ahead
from ..memory.store import AdapterStore
from .ids import Key, names_of

# Arguments that tell rows apart only along dimension 0; anything else that holds tensors cannot be split safely.
_BY_ROW = {
    "inputs", "input_ids", "attention_mask", "inputs_embeds", "token_type_ids", "input_features", "input_values",
    "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds", "negative_prompt_ids",
    "negative_prompt_attention_mask", "position_ids",
}  # fmt: skip


def plan_waves(keys: Sequence[Key | None], slots: int, resident: Collection[str] = ()) -> list[list[int]]:
    """Row numbers of each wave: adapters in the order of their first row, `slots` of them a wave.

    Rows of the base and of `resident` adapters (pinned: they have their slots already) go with the first wave. There
    are as few waves as can be, and of these none is much smaller than the others: what a wave leaves free of slots is
    filled for the next one meanwhile.

    Example:
        >>> plan_waves(["a", None, "b", "c", "a"], 2)
        [[0, 1, 2, 4], [3]]
        >>> plan_waves(["a", "b", "c", "d"], 3)
        [[0, 1], [2, 3]]
    """
    order = list(dict.fromkeys(key for key in keys if key is not None and key not in resident))
    count = max(1, -(-len(order) // max(slots, 1)))
    size = max(1, -(-len(order) // count))
    wave_of: dict[Key | None, int] = {key: i // size for i, key in enumerate(order)}
    waves: list[list[int]] = [[] for _ in range(max(wave_of.values(), default=0) + 1)]
    for row, key in enumerate(keys):
        waves[wave_of.get(key, 0)].append(row)
    return waves


def refuse_waves(count: int, slots: int, enough: int, kwargs: dict[str, Any], returns_dict: bool) -> None:
    """Raise where a batch of `count` adapters cannot run in waves.

    Args:
        enough: the `max_loras` with which it would need none.

    Raises:
        SlotError: naming the reason and that number.
    """
    foreign = [
        name
        for name, value in kwargs.items()
        if isinstance(value, torch.Tensor) and value.dim() and name not in _BY_ROW
    ]
    reasons = {
        "every slot is pinned": slots == 0,
        "a KV cache was passed in": any(
            kwargs.get(n) is not None for n in ("cache", "past_key_values", "cache_params")
        ),
        "a streamer wants its tokens in step": kwargs.get("streamer") is not None,
        "return_dict_in_generate asks for scores and caches of one batch": returns_dict,
        "prefix_allowed_tokens_fn is told row numbers": kwargs.get("prefix_allowed_tokens_fn") is not None,
        "encoder_outputs were passed in": kwargs.get("encoder_outputs") is not None,
        f"{', '.join(foreign)} cannot be split by rows": bool(foreign),
    }
    for reason, applies in reasons.items():
        if applies:
            raise SlotError(
                f"The batch names {count} adapters, {slots} slots are free for them, and it cannot run in waves: "
                f"{reason}. Enable the model with max_loras={enough} or more, or name fewer adapters in one batch."
            )


class Following:
    """What the next wave needs, prepared while one runs. A context manager: leaving it lets go of everything.

    Args:
        store: of the model.
        keys: each row's.
        waves: see `plan_waves`.
    """

    def __init__(self, store: AdapterStore, keys: Sequence[Key | None], waves: list[list[int]]) -> None:
        self._store, self._keys, self._waves = store, keys, waves
        self._ahead: Ahead | None = None

    def begin(self, rows: list[int]) -> None:
        """The wave of these rows has got its slots: begin with the one after it."""
        # What was kept for this wave, it holds itself by now.
        before, self._ahead = self._ahead, None
        if before is not None:
            before.close()
        at = self._waves.index(rows) + 1
        if at < len(self._waves):
            keys = dict.fromkeys(self._keys[row] for row in self._waves[at])
            self._ahead = self._store.ahead(name for key in keys if key is not None for name in names_of(key))

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *error: object) -> None:
        if self._ahead is not None:
            self._ahead.close()


def take_rows(value: Any, name: str, rows: torch.Tensor, total: int) -> Any:
    """The part of an argument that belongs to `rows`."""
    if not isinstance(value, torch.Tensor) or name not in _BY_ROW:
        return value
    dim = 1 if name == "position_ids" and value.dim() == 3 else 0
    if value.shape[dim] != total:
        return value
    return value.index_select(dim, rows.to(value.device))


def merge(parts: list[torch.Tensor], waves: list[list[int]], total: int, pad: int) -> torch.Tensor:
    """Sequences `[rows of a wave * k, length]` of each wave -> `[rows * k, longest]` in the caller's order.

    Example:
        >>> import torch
        >>> merge([torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5]])], [[1], [0]], 2, 0).tolist()
        [[3, 4, 5], [1, 2, 0]]
    """
    times = parts[0].shape[0] // len(waves[0])
    length = max(part.shape[1] for part in parts)
    merged = parts[0].new_full((total * times, length), pad)
    for part, rows in zip(parts, waves, strict=True):
        at = torch.tensor([row * times + i for row in rows for i in range(times)], device=part.device)
        merged[at, : part.shape[1]] = part
    return merged


def run_waves(
    generate: Callable[[list[int], tuple[Any, ...], dict[str, Any]], torch.Tensor],
    waves: list[list[int]],
    total: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    pad: int,
) -> torch.Tensor:
    """Generate wave after wave; `generate` gets the rows of a wave and that wave's arguments."""
    parts = []
    for rows in waves:
        index = torch.tensor(rows)
        part_args = tuple(take_rows(v, "inputs" if i == 0 else "", index, total) for i, v in enumerate(args))
        part_kwargs = {name: take_rows(value, name, index, total) for name, value in kwargs.items()}
        part = generate(rows, part_args, part_kwargs)
        if not isinstance(part, torch.Tensor):
            raise SlotError(
                f"The batch runs in {len(waves)} waves, and generate() returned a {type(part).__name__}, which cannot "
                "be joined from parts. Enable the model with more max_loras, or name fewer adapters in one batch."
            )
        parts.append(part)
    return merge(parts, waves, total, pad)
