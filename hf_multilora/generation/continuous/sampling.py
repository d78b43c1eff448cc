"""What sampling a batch needs: transformers sorts all logits twice for each token, which most batches do not need.

With per-request processors a manager runs top-k and top-p for every batch, whatever its requests ask for. A batch is
looked at on the host before its forward: what would change nothing is left out of it. A request with top_k=1 is
answered with the first of its highest logits, as generate() does greedily, whoever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingTopKLogitsWarper as TopK,
)
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingTopPLogitsWarper as TopP,
)


class Needs(NamedTuple):
    """What the tokens of one batch are drawn with.

    Attributes:
        top_k, top_p: whether these processors run.
        draws: whether any token is drawn at random; else each is the highest.
    """

    top_k: bool = True
    top_p: bool = True
    draws: bool = True

    def skips(self, processor: Any) -> bool:
        return (not self.top_k and isinstance(processor, TopK)) or (not self.top_p and isinstance(processor, TopP))


ALL = Needs()


def needs_of(processors: Sequence[Any], requests: Sequence[Any], columns: int) -> Needs:
    """What these requests' next tokens need.

    Args:
        processors: those of the manager that take values per request.
        requests: those of the batch that have a new token.
        columns: of the logits, at most.
    """
    top_k = next((one for one in processors if isinstance(one, TopK)), None)
    if top_k is None:
        return ALL
    top_p = next((one for one in processors if isinstance(one, TopP)), None)
    given = [request.state.logit_processor_kwargs for request in requests]
    counts = [max(one.get("top_k", top_k.top_k), top_k.min_tokens_to_keep) for one in given]
    return Needs(
        top_k=any(1 < count < columns for count in counts),
        top_p=top_p is not None and any(one.get("top_p", top_p.top_p) < 1 for one in given),
        draws=any(count > 1 for count in counts),
    )
