"""Going on with a Ray Data job that was interrupted: what an earlier run has written need not be answered again."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...errors import ConfigError

logger = logging.getLogger(__name__)


def unanswered(ds: Any, done: str | os.PathLike[str], key: str = "id") -> Any:
    """The rows of a dataset whose key is in none of the parquet files that earlier runs have written.

        unanswered(ds, "answers", "id").map_batches(MultiLoraPredictor, ...).write_parquet("answers")

    The same lines, run again after an interruption, answer what is left. What is kept is what was written, which Ray
    does block by block: `ds.repartition(target_num_rows_per_block=256)` before it says how much may be lost. Rows with
    an error count as answered: they were written.

    A file that was being written when its writer was killed has no end. It becomes `_NAME.torn`, which readers of the
    folder pass over for its underscore, and its rows are answered again. So nobody else may be writing there.

    Args:
        ds: a Ray dataset.
        done: local (or mounted) folder of parquet files; it need not exist yet.
        key: column whose values tell rows apart.

    Raises:
        ConfigError: files without that column. A dataset without it, or with nulls in it, fails when it is read, with
            a ValueError.
    """
    found = sorted(path for path in Path(done).rglob("*.parquet") if path.is_file())
    files = [path for path in found if not path.name.startswith(("_", "."))]
    parts = [keys for path in files if (keys := _keys(path, key)) is not None]
    known = pa.chunked_array([chunk for part in parts for chunk in part.chunks]) if parts else None

    def left(table: pa.Table) -> pa.Table:
        if not table.num_columns:  # a block that had no rows
            return table
        if key not in table.column_names:
            # Not one of our own: workers would import this package, and torch with it, to read this function.
            raise ValueError(f"The dataset has no column {key!r}. It has {', '.join(table.column_names)}.")
        column = table.column(key)
        if column.null_count:
            raise ValueError(f"{column.null_count} rows of a block have no {key!r}, by which rows are told apart.")
        return table if known is None else table.filter(pc.invert(pc.is_in(column, value_set=known.cast(column.type))))

    return ds.map_batches(left, batch_format="pyarrow", batch_size=None)


def _keys(path: Path, key: str) -> pa.ChunkedArray | None:
    """The keys of a file; None where it is torn, which moves it out of the way."""
    try:
        table = pq.read_table(path, partitioning=None)
    except pa.ArrowInvalid as error:
        torn = path.with_name(f"_{path.name}.torn")
        os.replace(path, torn)
        logger.warning("%s is not whole (%s); it is now %s.", path, error, torn.name)
        return None
    if key not in table.column_names:
        raise ConfigError(f"{path} has no column {key!r}. It has {', '.join(table.column_names)}.")
    return table.column(key)
