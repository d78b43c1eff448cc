"""LogitsProcessor that keeps each row inside its adapter's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor


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
