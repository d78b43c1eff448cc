"""Ray Data: a class for map_batches whose actors answer rows, each under its own adapter."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...api import enable_multilora
from ...base_model import check_dtype, load_base, load_tokenizer
from ...bulk.adapters import Adapters
from ...bulk.answers import Sampling, answering
from ...bulk.lines import ANSWER, Line, check, check_names
from ...bulk.prompts import check_template
from ...errors import ConfigError, closest

_ASKED = ("prompt", "messages", "adapter", "max_new_tokens")
_TYPES = {"text": pa.string(), "tokens": pa.int64(), "finish_reason": pa.string(), "error": pa.string()}


class MultiLoraPredictor:
    """Answers batches of rows through continuous batching; one model and one generation thread for each actor.

        ds.map_batches(
            MultiLoraPredictor, fn_constructor_kwargs={"model": "org/base", "adapters": "/shared/adapters"},
            concurrency=2, batch_size=256, num_gpus=1,
        )

    Columns of a row: `prompt` (a text) or `messages` (a chat); `adapter` (a name; null: the base), `max_new_tokens`
    (null: as below). All columns are given back, in their order, with `text`, `tokens` (their number), `finish_reason`
    ("stop" or "length") and `error`. A row that cannot be answered has an error and no text; the others go on.

    Within a batch, rows come and go as they finish; the batch ends with its longest. So `batch_size` should be several
    times `max_requests_per_batch`. Adapters are loaded at their first row, and share the slots.

    Args:
        model: folder or hub id.
        adapters: folder whose sub-folders are adapters, the same on every node; paths and hub ids work without it.
        max_new_tokens, temperature, top_p, top_k, chat: of `hf-multilora generate`.
        dtype, device, offline: of the base model, see `load_base`.
        batching: num_blocks, page_size, max_batch_tokens, max_requests_per_batch; what is left out is transformers'
            choice.
        slots: options of enable_multilora: max_loras, max_lora_rank, max_cpu_loras.

    Raises:
        ConfigError: an option, or columns of a batch, that cannot be honoured.
        ModelError: the model cannot be loaded, or generation has ended: Ray starts the actor anew.
    """

    def __init__(
        self,
        model: str,
        adapters: str | None = None,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        chat: bool = False,
        dtype: str = "auto",
        device: str | None = None,
        offline: bool = False,
        batching: dict[str, int | None] | None = None,
        **slots: Any,
    ) -> None:
        check_dtype(dtype)
        self._find = Adapters(None if adapters is None else Path(adapters), offline).find
        self._tokenizer, self._name = load_tokenizer(model, offline), model
        if chat:
            check_template(self._tokenizer, model)
        base = enable_multilora(load_base(model, dtype, device, offline), **slots)
        sampling = Sampling(max_new_tokens, temperature, top_p, top_k, chat)
        self._running = ExitStack()
        self._thread = self._running.enter_context(answering(base, self._tokenizer, sampling, batching or {}))

    def __call__(self, batch: Any) -> Any:
        """A batch with its answers: a dict of columns (Ray's batch_format="numpy"), or a pyarrow.Table ("pyarrow")."""
        rows = _rows(batch)
        answers: dict[int, dict[str, Any]] = {}
        lines = []
        for number, fields in enumerate(rows):
            try:
                check(fields)
                if "messages" in fields:
                    check_template(self._tokenizer, self._name)
                lines.append(Line(number, fields))
            except (ValueError, RuntimeError) as error:
                answers[number] = {"error": str(error)}
        for line, answer in self._thread.answers(lines, self._find):
            answers[line.number] = answer
        return _with(batch, [answers[number] for number in range(len(rows))])

    def close(self) -> None:
        """End the generation thread."""
        self._running.close()


def _rows(batch: Any) -> list[dict[str, Any]]:
    """What each row asks for, without what is null.

    Raises:
        ConfigError: a batch of another kind, or columns that would be misunderstood.
    """
    if isinstance(batch, pa.Table):
        names = batch.column_names
    elif isinstance(batch, dict):
        names = list(batch)
    else:
        raise ConfigError(
            f'A batch is a {type(batch).__name__}: call map_batches with batch_format="numpy" or "pyarrow".'
        )
    try:
        check_names(names)
    except ValueError as error:
        raise ConfigError(f"Columns {', '.join(names)}: {error}") from None
    asked = [name for name in names if name in _ASKED]
    if names and not {"prompt", "messages"} & set(asked):
        raise ConfigError(f'Columns {", ".join(names)}: expected "prompt" or "messages".{closest("prompt", names)}')
    columns = [batch.column(name).to_pylist() if isinstance(batch, pa.Table) else list(batch[name]) for name in asked]
    rows = []
    for values in zip(*columns, strict=True):
        fields = {name: _plain(value) for name, value in zip(asked, values, strict=True)}
        rows.append({name: value for name, value in fields.items() if value is not None})
    return rows


def _plain(value: Any) -> Any:
    """A value of a column as JSON would have it: Ray makes NaN of nulls, and floats of numbers beside them.

    Example:
        >>> import numpy as np
        >>> [_plain(value) for value in (float("nan"), np.float64(7.0), np.array([{"role": "user", "name": None}]))]
        [None, 7, [{'role': 'user'}]]
    """
    if hasattr(value, "tolist"):  # numpy's
        value = value.tolist()
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    return value


def _with(batch: Any, answers: list[dict[str, Any]]) -> Any:
    """The batch with the columns of the answers, of the same types whatever they hold."""
    columns = {name: pa.array([answer.get(name) for answer in answers], _TYPES[name]) for name in ANSWER}
    if isinstance(batch, dict):
        # Ray makes floats of a column that is null throughout a block: its type would not be that of other blocks.
        for name, kind, plain in (("adapter", pa.string(), str), ("max_new_tokens", pa.int64(), int)):
            values = [_plain(value) for value in batch.get(name, ())]
            if name in batch and all(value is None or isinstance(value, plain) for value in values):
                batch = {**batch, name: pa.array(values, kind)}
        return {**batch, **columns}
    for name, column in columns.items():
        batch = batch.append_column(name, column)
    return batch
