"""A streamer for batches: text of every row as it comes. (transformers' own take one row.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer
from transformers.generation.streamers import BaseStreamer


class _RowStreamer(TextStreamer):
    """transformers' rules for when a piece of text is final, for one row."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, emit: Callable[[str, bool], None], **decode: Any) -> None:
        super().__init__(tokenizer, **decode)
        self._emit = emit

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text or stream_end:
            self._emit(text, stream_end)


class BatchTextStreamer(BaseStreamer):
    """Streams a whole batch: `(row, text)` in the order in which text becomes final.

    Pass it to `generate(..., streamer=...)` like transformers' own streamers. With `on_text` it calls back from inside
    of generate(); without, iterate over it while generate() runs in another thread. Pass the ids to that generate()
    itself: a `use` block of one thread does not reach another.

    Args:
        tokenizer: decodes each row; its `eos_token_id` ends a row, and the padding after it is not text.
        skip_prompt: leave the prompt out (it is the first thing that generate() sends).
        on_text: called with (row, text, whether the row has ended).
        timeout: seconds that iteration waits for the next piece; None: for ever.
        decode_kwargs: for `tokenizer.decode`, such as `skip_special_tokens=True`.

    Raises:
        queue.Empty: while iterating, after `timeout` seconds without text.

    Example:
        >>> class Letters:
        ...     eos_token_id = 0
        ...     def decode(self, ids, **kwargs):
        ...         return "".join(".abcdef"[i] for i in ([ids] if isinstance(ids, int) else ids))
        >>> import torch
        >>> said = []
        >>> streamer = BatchTextStreamer(Letters(), True, on_text=lambda row, text, end: said.append((row, text, end)))
        >>> streamer.put(torch.tensor([[1], [1]]))
        >>> streamer.put(torch.tensor([2, 3])); streamer.put(torch.tensor([0, 4])); streamer.end()
        >>> said
        [(0, 'b', False), (1, 'c', False), (0, '.', True), (1, 'd', False), (1, '', True)]
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        skip_prompt: bool = False,
        on_text: Callable[[int, str, bool], None] | None = None,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_prompt = skip_prompt
        self._timeout = timeout
        self._decode = decode_kwargs
        self._queue: Queue[tuple[int, str] | None] = Queue()
        self._on_text = on_text or self._enqueue
        eos = tokenizer.eos_token_id
        self._eos = set(eos) if isinstance(eos, (list, tuple)) else {eos}
        self._rows: list[_RowStreamer | None] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts `[rows, tokens]` first, then one token of each row `[rows]` at a time."""
        if not self._rows:
            value = value if value.dim() > 1 else value[None]
            self._rows = [self._row(row) for row in range(value.shape[0])]
            if not self._skip_prompt:
                for row, streamer in enumerate(self._rows):
                    assert streamer is not None
                    streamer.put(value[row])
            return
        for row, token in enumerate(value.reshape(-1).tolist()):
            streamer = self._rows[row]
            if streamer is None:
                continue
            if token not in self._eos:
                streamer.put(torch.tensor([token]))
                continue
            streamer.token_cache.append(token)  # its text comes with the end
            streamer.end()
            self._rows[row] = None

    def end(self) -> None:
        for streamer in self._rows:
            if streamer is not None:
                streamer.end()
        self._rows = []
        self._queue.put(None)

    def _row(self, row: int) -> _RowStreamer:
        return _RowStreamer(self._tokenizer, lambda text, end: self._on_text(row, text, end), **self._decode)

    def _enqueue(self, row: int, text: str, end: bool) -> None:
        if text:
            self._queue.put((row, text))

    def __iter__(self) -> Iterator[tuple[int, str]]:
        while (item := self._queue.get(timeout=self._timeout)) is not None:
            yield item
