"""Continuous batching over two ranks: each request is answered as one process would, and ranks that differ say so."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from ranks import start

WAIT_S = 240


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], list[str], list[int]]:
    """What each rank found, what it printed, and how it ended. One pair of processes plays all scenes."""
    folder = tmp_path_factory.mktemp("ranks")
    scenes = "batches+batches@sharded+changes+pressure+mismatches+killed_batch"
    processes = start(scenes, str(folder), file="batch_scenes.py", device=request.param)
    try:
        printed = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = []
    for rank in range(2):
        file = Path(folder, f"{rank}.json")
        assert file.exists(), printed[rank][-4000:]
        found.append(json.loads(file.read_text()))
        assert list(found[rank]) == scenes.split("+")[:-1], printed[rank][-4000:]
    return found, printed, [process.returncode for process in processes]


@pytest.mark.parametrize("scene", ["batches", "batches@sharded"])
def test_mixed_batches_over_few_slots(played, scene: str) -> None:
    for found in (rank[scene] for rank in played[0]):
        assert found["right"] and not found["wrong"], found
        assert found["told"] == found["keys"] > 6, "each adapter answers in its own way"


@pytest.mark.parametrize("scene", ["batches", "batches@sharded"])
def test_prefixes_are_found_and_belong_to_their_adapter_on_every_rank(played, scene: str) -> None:
    first, second = (rank[scene] for rank in played[0])
    assert first["blocks"] == second["blocks"] and first["prefixes"] == second["prefixes"]
    assert first["all"] == second["all"]
    assert all(len(new) >= 2 for new in first["blocks"]), "both pages of the prompt's head, under each adapter"
    assert not any(set(one) & set(other) for one, other in combinations(first["blocks"], 2))
    assert len(first["blocks"]) == len(first["prefixes"]) == first["keys"]
    assert all(tokens == 16 for tokens in first["prefixes"].values()), "found in the second round, each its own"


def test_adapters_change_between_managers_and_in_a_pause(played) -> None:
    first, second = (rank["changes"] for rank in played[0])
    for found in (first, second):
        assert found["on demand"] and found["between"]
        assert len(found["outside"]) == 8
        for what, text in found["outside"].items():
            assert "ModelError" in text and "pause" in text, (what, text)
        assert "registered" in found["unknown"] and "load_adapter" in found["unknown"]
        assert "eagerly" in found["option"]
        if "paused" in found:  # transformers 5.17 has none
            assert found["runs"] and found["paused"] and found["ended"]
            assert "freed when they end" in found["unloaded"]
            assert "'b'" in found["gone"]
    if "fresh" in first:
        assert first["fresh"] == second["fresh"] and len(first["fresh"]) >= 2, "blocks of the new generation"


def test_cancellations_small_caches_dropped_and_poisoned_adapters(played) -> None:
    first, second = (rank["pressure"] for rank in played[0])
    assert first["status"] == second["status"]
    for found in (first, second):
        assert not found["wrong"] and found["dropped"] > 2, found
        assert "finite" in found["poison"][0] and found["poison"][1]
    assert first["status"]["r8"][1] > 0, "some were cancelled"


def test_ranks_that_differ_raise_on_each_and_go_on(played) -> None:
    for rank, found in enumerate(one["mismatches"] for one in played[0]):
        for what in ("ids", "order", "running", "registry"):
            assert "ModelError" in found[what] and "do not agree" in found[what], (what, found)
        assert ("do not agree" if rank == 0 else "nobody") in found["unknown"]
        assert ("Another rank" if rank == 0 else "not callable") in found["failed"]
        assert found["good"] and found["after"]


def test_a_killed_rank_is_an_error_and_no_endless_wait(played) -> None:
    _, printed, codes = played
    assert codes[1] == -9
    if codes[0] == -6:  # NCCL's: nobody hears of the other's end while a GPU waits for it
        assert "collective operation timeout" in printed[0], printed[0][-2000:]
        return
    assert codes[0] == 1, printed[0][-2000:]
    assert "ModelError" in printed[0] and "has ended" in printed[0], printed[0][-2000:]
