"""One call: its slots, its rows, and where each of them is at present."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..errors import RoutingError
from ..memory.core import StoreCore
from ..memory.lease import Lease, label_of
from ..rows import RowState, Saved
from .alora import Activated, invocations
from .ids import Key

_ROW_ARGUMENTS = (
    "inputs", "input_ids", "inputs_embeds", "input_features", "input_values", "decoder_input_ids",
    "decoder_inputs_embeds", "attention_mask", "encoder_outputs", "pixel_values",
)  # fmt: skip


T = TypeVar("T")


def batch_rows(args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """Rows of the batch that a forward or generate() was given, or None where the arguments do not say."""
    rows = _rows_of(args[0]) if args else None
    if rows is None:
        for name in _ROW_ARGUMENTS:
            if name in kwargs and (rows := _rows_of(kwargs[name])) is not None:
                break
    return rows


def _rows_of(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor):
        value = getattr(value, "last_hidden_state", None)
    return int(value.shape[0]) if isinstance(value, torch.Tensor) and value.dim() > 0 else None


def token_ids(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The token ids `[rows, tokens]` that a forward was given, or None."""
    for value in (kwargs.get("input_ids"), *args[:1]):
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            return value
    return None


@dataclass
class Life:
    """Whether a call, and all that inherit from it, still have their slots."""

    ended: bool = False


class Call:
    """One call: its lease, and the rows that its forwards run at present (prompts, then beams).

    Attributes:
        state, row_tags: slots and KV tags of the rows, None and all None for the base.
        life, outer: shared with all that inherit from it; the call that it is nested in.
        vocabulary: each row's own vocabulary size, None for the base's.
        invocation: each row's aLoRA tokens; None where no row has any.
        prompt: length of the prompt and each row's start in it, once `invoke` has seen it.
    """

    def __init__(
        self,
        keys: Sequence[Key | None],
        lease: Lease | None,
        store: StoreCore,
        uniform: bool,
        life: Life,
        outer: Call | None = None,
    ) -> None:
        self.uniform = uniform
        self.life = life
        self.outer = outer
        self.lease = lease
        self.token = object()  # marks the caches that this call writes
        self.state: RowState | None = None
        self.row_tags: tuple[Hashable | None, ...] = (None,) * len(keys)
        self.vocabulary: tuple[int | None, ...] = (None,) * len(keys)
        self.invocation: tuple[tuple[int, ...], ...] | None = None
        self.prompt: tuple[int, tuple[int, ...]] | None = None
        self.prompt_seen = False  # generate() has shown its prompts to `invoke` and to the vocabulary check
        if lease is not None:
            slots = tuple(-1 if key is None else lease.slots[key] for key in keys)
            device, adapters = store.arena.device, store.arena.max_loras
            self.state = RowState(slots, device, lease.touched, uniform, saved_by(lease, store), adapters)
            self.row_tags = tuple(None if key is None else (label_of(key), lease.tags[key]) for key in keys)
            extras = [None if key is None else lease.extras[key] for key in keys]
            self.vocabulary = tuple(None if extra is None else extra.vocab_size for extra in extras)
            tokens = tuple(() if extra is None else extra.invocation for extra in extras)
            self.invocation = tokens if any(tokens) else None
        self._origin: Call | None = None  # as it was before generate() began

    def inherit(self) -> Call:
        """A nested call over the same rows and the same lease."""
        twin = copy.copy(self)
        twin.token, twin._origin = object(), None
        return twin

    def begin(self, input_ids: torch.Tensor | None, times: int, rows: int | None) -> None:
        """generate() begins: from now on every prompt row runs `times` times, in `rows` rows altogether.

        A generate() that hands over to another one begins twice, each time from the prompts.

        Args:
            input_ids: the prompts, before they are repeated; None where they are embeddings.

        Raises:
            RoutingError: the prompts are not as many as the ids, or cannot invoke an aLoRA.
        """
        origin = self._origin or copy.copy(self)
        self.__dict__.update({**origin.__dict__, "_origin": origin, "token": self.token})
        if rows is not None and not self.uniform and rows != times * len(self.row_tags):
            raise RoutingError(
                f"adapter_ids names {len(self.row_tags)} prompt rows, but there are {rows // times} prompts. "
                "Pass one id per prompt row."
            )
        self.invoke(input_ids)
        self.prompt_seen = True
        if times == 1:
            return

        def repeated(values: tuple[T, ...]) -> tuple[T, ...]:
            return tuple(value for value in values for _ in range(times))

        self.row_tags, self.vocabulary = repeated(self.row_tags), repeated(self.vocabulary)
        self.state = self.state.repeated(times) if self.state is not None else None
        if self.prompt is not None:
            self.prompt = (self.prompt[0], repeated(self.prompt[1]))

    def invoke(self, input_ids: torch.Tensor | None, past: int = 0, before: Sequence[Hashable | None] = ()) -> None:
        """Find the invocation tokens of aLoRAs in `input_ids` `[rows, tokens]`; rows without them become the base.

        Args:
            past: tokens that a cache holds before these.
            before: tags of that cache's rows; who was invoked there stays so.

        Raises:
            RoutingError: the prompts are embeddings, which hold no tokens to find.
        """
        if self.invocation is None or self.state is None:
            return
        if input_ids is None or input_ids.dim() != 2 or not input_ids.shape[1]:
            raise RoutingError(
                "An aLoRA is invoked by tokens of the prompt, so that it needs input_ids (no embeddings)."
            )
        rows, wanted, tags, state = input_ids.shape[0], self.invocation, self.row_tags, self.state
        if self.uniform:  # rows of one adapter, each with a start of its own
            wanted, tags, state = wanted[:1] * rows, tags[:1] * rows, state.with_slots(state.slots[:1] * rows)
            self.vocabulary, self.uniform, state.uniform = self.vocabulary[:1] * rows, False, False
        starts = [None if start is None else start + past for start in invocations(input_ids, wanted)]
        for row, old in enumerate(before):
            if isinstance(old, Activated) and wanted[row] and old.tag == tags[row]:
                starts[row] = old.start
        self.state = state.with_slots(
            tuple(-1 if start is None else slot for slot, start in zip(state.slots, starts, strict=True))
        )
        self.row_tags = tuple(
            None if start is None else Activated(tag, start) if tokens else tag
            for tag, start, tokens in zip(tags, starts, wanted, strict=True)
        )
        self.prompt = (
            past + input_ids.shape[1],
            tuple(start if start and tokens else 0 for start, tokens in zip(starts, wanted, strict=True)),
        )

    def state_for(self, tokens: int, past: int) -> RowState | None:
        """The rows' state for a forward of `tokens` tokens after `past` cached ones."""
        if self.prompt is None or self.state is None:
            return self.state
        starts = [max(start - past, 0) for start in self.prompt[1]]
        if past + tokens >= self.prompt[0] and past:
            self.prompt = None if self.prompt_seen else self.prompt
        return self.state.starting(starts, tokens) if any(starts) else self.state

    def check_rows(self, rows: int | None) -> None:
        """Raises: RoutingError where a batch of `rows` rows is not what the ids are for."""
        if rows is not None and not self.uniform and rows != len(self.row_tags):
            raise RoutingError(
                f"The batch has {rows} rows, but adapter_ids names {len(self.row_tags)}. Pass one id per row, or one "
                "(a string) for all rows."
            )

    def tags(self, rows: int | None) -> tuple[Hashable | None, ...]:
        """Who writes each row of a cache."""
        return self.row_tags[:1] * rows if self.uniform and rows is not None else self.row_tags


def saved_by(lease: Lease, store: StoreCore) -> dict[str, list[Saved]]:
    """What the adapters of a lease replace, by module path."""
    found: dict[str, dict[int, tuple[dict[str, torch.Tensor], Any]]] = {}
    own: dict[str, torch.Tensor]
    for key, extras in lease.extras.items():
        slot = lease.slots[key]
        for path, parameters in extras.saved.items():
            for name, where in parameters.items():
                owner, _, attribute = f"{path}.{name}".rpartition(".")
                at = found.setdefault(owner, {}).setdefault(slot, ({}, None))
                at[0][attribute] = store.view(slot, where)
        for path, (ids, rows) in extras.tokens.items():
            own, _ = found.setdefault(path, {}).get(slot, ({}, None))
            found[path][slot] = (own, (store.view(slot, ids), store.view(slot, rows)))
    return {
        path: [Saved(slot, parameters, tokens) for slot, (parameters, tokens) in slots.items()]
        for path, slots in found.items()
    }
