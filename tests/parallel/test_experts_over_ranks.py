"""Two ranks that share mixtures of experts answer as one process does, and hold and read a part of each adapter."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from ranks import play

TOLERANCE = 2e-6
CASES = ("qwen3_moe:tp:batched_mm", "qwen2_moe:ep:batched_mm", "gpt_oss:ep:grouped_mm", "llama4:tp:eager")
# the whole ones: experts, hidden, intermediate width
E, H, INNER = 6, 40, 24


@functools.cache
def played(device: str = "cpu") -> list[dict[str, Any]]:
    return play("mixtures+mixtures@sharded+refused", ",".join(CASES), file="expert_scenes.py", device=device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", [*CASES, *(f"{case}@sharded" for case in CASES if ":tp:" in case)])
def test_ranks_answer_as_one_process(case: str, device: str) -> None:
    case, _, mode = case.partition("@")
    scene = f"mixtures@{mode}" if mode else "mixtures"
    for found in (rank[scene][case] for rank in played(device)):
        assert len(found["errors"]) > 4 and max(found["errors"].values()) < TOLERANCE, found["errors"]
        assert min(found["told"].values()) > 0.1, "each adapter changes something"
        assert found["alike"] and found["waves"] and found["again"], "tokens of generate()"
        assert found["undone"], "disabling gives back the model of before"
        if case.endswith("batched_mm"):
            assert all(found["same"]), "rows without an adapter have the bits of the bare split model"


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_its_part(case: str) -> None:
    experts, inner = (E, INNER // 2) if ":tp:" in case else (E // 2, INNER)
    for found in (rank["mixtures"][case] for rank in played()):
        widths = {path.rpartition(".")[2]: size for path, size in found["sites"].items()}
        assert widths["gate_proj"] == widths["up_proj"] == [experts, H, inner]
        assert widths["down_proj"] == [experts, inner, H]
        for name in ("three", "shared", "other", *({"two", "few", "stacks"} & found["nbytes"].keys())):
            here, whole = found["nbytes"][name]
            assert here < (0.9 if ":tp:" in case else 0.7) * whole, name


def test_fully_sharded_a_rank_holds_less() -> None:
    """Half of gate's and up's A, or two rows of three, and half of down's B."""
    for rank in played():
        plan, both = (rank[mode]["qwen3_moe:tp:batched_mm"]["nbytes"] for mode in ("mixtures", "mixtures@sharded"))
        for name in ("three", "two", "few", "stacks", "other"):
            assert both[name][0] < 0.85 * plan[name][0], name


def test_a_rank_reads_its_experts() -> None:
    for number, found in enumerate(rank["mixtures"]["qwen2_moe:ep:batched_mm"]["read"] for rank in played()):
        keys = [key for key in found["two"] if ".experts." in key]
        mine = {3 * number, 3 * number + 1, 3 * number + 2}
        assert {int(re.search(r"experts\.(\d)\.", key)[1]) for key in keys} == mine
        stacks = [part for key, part in found["stacks"].items() if ".experts." in key]
        rows = [part for key, part in found["three"].items() if re.search(r"experts\.(base_layer\.)?lora_A", key)]
        assert set(stacks) == set(rows) == {0.5}


def test_a_rank_reads_its_widths() -> None:
    for found in (rank["mixtures"]["qwen3_moe:tp:batched_mm"]["read"] for rank in played()):
        each = [part for key, part in found["two"].items() if re.search(r"experts.*(gate|up)_proj\.lora_B", key)]
        assert set(each) == {0.5}
        one = [part for key, part in found["three"].items() if "base_layer.lora_B" in key]
        assert len(one) == 2 and max(one) < 0.55, "its rows, and one by which the layout is told"
    for found in (rank["mixtures@sharded"]["qwen3_moe:tp:batched_mm"]["read"] for rank in played()):
        each = [part for key, part in found["two"].items() if re.search(r"experts.*proj\.lora_B", key)]
        assert set(each) == {0.5}, "of down as well"


def test_experts_that_adapters_cannot_follow_are_refused() -> None:
    for said in (rank["refused"] for rank in played()):
        assert "mlp.experts" in said["saved"] and "ranks" in said["saved"] and "share" in said["saved"]
        assert "mlp.experts" in said["torn"] and "gate, up and down" in said["torn"]
        assert "mlp.experts" in said["sharded"] and "fully_sharded_loras" in said["sharded"]


def test_tokens_that_leave_their_rank_are_refused() -> None:
    for said in (rank["refused"] for rank in played()):
        if "dense" not in said:
            pytest.skip("this version of transformers has no dispatch of tokens")
        assert "AllToAllEP moves tokens" in said["all_to_all"] and "all_reduce" in said["all_to_all"]
        assert said["dense"] > 0, "adapters beside experts are served"
        assert "no_grad" in said["gradients"] and said["after"]
