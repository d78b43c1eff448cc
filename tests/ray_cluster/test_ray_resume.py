"""What an earlier run has answered, without Ray: `unanswered` gives Ray a function of tables."""

from __future__ import annotations

from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")

import pyarrow.parquet as pq  # noqa: E402

from hf_multilora.integrations.ray import unanswered  # noqa: E402


class Blocks:
    """A dataset of one block."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def map_batches(self, function: Any, **options: Any) -> Any:
        return function(self.table)


def test_rows_without_a_key_are_not_dropped(tmp_path):
    """A null among the answers would stand for all of them."""
    pq.write_table(pa.table({"id": [1, None]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="2 rows of a block have no 'id'"):
        unanswered(Blocks(pa.table({"id": [1, 2, None, None]})), tmp_path)
    assert unanswered(Blocks(pa.table({"id": [1, 2]})), tmp_path)["id"].to_pylist() == [2]
    assert unanswered(Blocks(pa.table({})), tmp_path).num_rows == 0


def test_a_folder_that_is_called_like_a_file_stays(tmp_path):
    """Of a torn part in it, the part alone is moved aside."""
    folder = tmp_path / "out.parquet"
    folder.mkdir()
    pq.write_table(pa.table({"id": [1]}), folder / "a.parquet")
    (folder / "b.parquet").write_bytes(b"PAR1 and no end")
    assert unanswered(Blocks(pa.table({"id": [1, 2]})), tmp_path)["id"].to_pylist() == [2]
    assert sorted(path.name for path in folder.iterdir()) == ["_b.parquet.torn", "a.parquet"]
