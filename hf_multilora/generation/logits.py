"""LogitsProcessor that keeps each row inside its adapter's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor

from ..errors import RoutingError


class Vocabulary:
    """The base model's vocabulary, and the columns that adapters may own beyond it.

    Args:
        size: rows of the base's embedding.
        extra: columns that logits have beyond them.
    """

    def __init__(self, size: int, extra: int) -> None:
        self.size = size
        self.extra = extra
        self._limits: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}

    def sizes(self, own: Sequence[int | None]) -> list[int]:
        """Vocabulary size of each row, where None stands for the base's."""
        return [self.size if size is None else size for size in own]

    def mask(self, logits: torch.Tensor, own: Sequence[int | None]) -> torch.Tensor:
        """Put foreign columns back to -inf: what comes after the head (Gemma's soft cap) may have moved them.

        Args:
            logits: `[rows, ..., columns]`.
            own: vocabulary sizes of the rows; one: the same for all.
        """
        sizes = self.sizes(own or [None])
        if logits.shape[-1] <= min(sizes):
            return logits
        limit = self._limit(tuple(sizes if len(sizes) == logits.shape[0] else sizes[:1]), logits.device)
        foreign = torch.arange(logits.shape[-1], device=logits.device) >= limit[:, None]
        return logits.masked_fill(foreign.view(len(limit), *[1] * (logits.dim() - 2), -1), float("-inf"))

    def _limit(self, sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """The sizes on the device; copied once and not at each step, which would wait for the device."""
        limit = self._limits.get((sizes, device))
        if limit is None:
            if len(self._limits) >= 64:
                self._limits.clear()
            with torch.inference_mode(False):
                limit = self._limits[sizes, device] = torch.tensor(sizes, device=device)
        return limit

    def check(self, ids: torch.Tensor | None, own: Sequence[int | None]) -> None:
        """Refuse tokens that a row does not have.

        Args:
            ids: `[rows, tokens]`, or None where the model was given something else.
            own: vocabulary sizes of the rows; empty or one: the same for all.

        Raises:
            RoutingError: naming the first row and token.
        """
        if ids is None or ids.dim() != 2:
            return
        sizes = self.sizes(own or [None])
        limit = torch.tensor(sizes if len(sizes) == ids.shape[0] else sizes[:1], device=ids.device)
        beyond = (ids >= limit[:, None]).nonzero()
        if len(beyond):
            row, at = beyond[0].tolist()
            raise RoutingError(
                f"Row {row} holds token {int(ids[row, at])} at position {at}, but its vocabulary ends at "
                f"{int(limit[row % len(limit)]) - 1}. Tokens that an adapter added are known to its own rows only."
            )


class AdapterVocabularyLogitsProcessor(LogitsProcessor):
    """Overwrites the columns beyond each row's own vocabulary with -inf.

    It runs after every other processor: some of them (CFG) compute with the columns and would turn an earlier -inf
    into NaN.

    Args:
        sizes: vocabulary size of each row, in the order of the batch (beams and return sequences repeated).

    Example:
        >>> import torch
        >>> processor = AdapterVocabularyLogitsProcessor([2, 3])
        >>> processor(torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 3)).tolist()
        [[0.0, 0.0, -inf], [0.0, 0.0, 0.0]]
    """

    supports_continuous_batching = False

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = torch.tensor(list(sizes), dtype=torch.int64)
        self._mask: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """scores `[rows, columns]` -> the same with the foreign columns at -inf.

        Raises:
            ValueError: another number of rows than sizes.
        """
        rows, columns = scores.shape
        if rows != len(self._sizes):
            raise ValueError(f"{rows} rows of scores, but the vocabulary sizes of {len(self._sizes)} rows.")
        if self._mask is None or self._mask.shape != scores.shape or self._mask.device != scores.device:
            self._mask = (torch.arange(columns) >= self._sizes[:, None]).to(scores.device)
        return scores.masked_fill(self._mask, float("-inf"))  # type: ignore[return-value]
