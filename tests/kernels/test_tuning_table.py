"""Tuned block sizes: which table is in force, what a bad one is told, what a search tries."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import FAMILIES

from hf_multilora import enable_multilora
from hf_multilora.bench.tune import CALLS, Problem, common_problems
from hf_multilora.errors import ConfigError
from hf_multilora.kernels import table, tuning
from hf_multilora.kernels.tuning import Call, call_of, expand_rule, expand_tiling, shrink_rule, shrink_tiling

SHAPE = {"n": 32, "k": 4096, "widths": [4096], "max_rank": 16, "dtype": "bfloat16"}
BF16 = torch.bfloat16
CALL = Call(32, 32, 4096, (4096,), 16, 32, BF16, BF16, BF16, 32)
SHIPPED = sorted(table.FOLDER.glob("*.json"))


def row(kind: str = "shrink_rows", tiling: Any = None, **changes: Any) -> dict[str, Any]:
    return {"kind": kind, "shape": {**SHAPE, **changes}, "tiling": {"warps": 2} if tiling is None else tiling}


def write(path: Path, *rows: Any, **about: Any) -> Path:
    path.write_text(json.dumps({"format": 1, "device": "some device", **about, "rows": list(rows)}))
    return path


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """A process asks once which table is in force."""
    asked = (table._named, table._shipped, table._has_cuda)
    for function in asked:
        function.cache_clear()
    yield
    for function in asked:
        function.cache_clear()


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a table of these rows into force."""

    def put(*rows: Any) -> Path:
        path = write(tmp_path / "table.json", *rows)
        monkeypatch.setenv(table.TABLE_ENV, str(path))
        table._named.cache_clear()
        return path

    return put


def on(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a table may be shipped for this device")
def test_without_a_table_the_rule_decides(monkeypatch):
    monkeypatch.delenv(table.TABLE_ENV, raising=False)
    assert shrink_tiling(CALL) == shrink_rule(CALL) and expand_tiling(CALL) == expand_rule(CALL)


def test_a_row_replaces_sizes_and_what_follows_from_them(named):
    named(row(tiling={"chunk": 1024, "block_k": 1024, "warps": 8}), row("expand_rows", {"block_n": 512}))
    assert shrink_tiling(CALL) == dataclasses.replace(
        shrink_rule(CALL), chunk=1024, block_k=1024, warps=8, split=4096 // 1024
    )
    assert expand_tiling(CALL) == dataclasses.replace(expand_rule(CALL), block_n=512)


def test_a_row_serves_its_shape_alone(named):
    named(row(tiling={"warps": 2}), row("expand_rows", {"block_n": 512}))
    for same in ({"n": 17, "rows": 17}, {"adapters": 40}, {"capacity": None}, {"pdl": True}, {"starts": True}):
        call = dataclasses.replace(CALL, **same)
        assert shrink_tiling(call).warps == 2 and expand_tiling(call).block_n == 512, same
    call = dataclasses.replace(CALL, widths=(4096, 4096))  # a shrink's key is without widths
    assert shrink_tiling(call) == shrink_tiling(CALL) and expand_tiling(call) == expand_rule(call)
    for other in (
        {"n": 16, "rows": 16},
        {"n": 33, "rows": 33},
        {"k": 4097},
        {"max_rank": 32},
        {"data": torch.float16, "x": torch.float16, "y": torch.float16},
        {"y": torch.float32},
        {"adapters": 2},  # rows that share slots: another kernel
    ):
        call = dataclasses.replace(CALL, **other)
        assert shrink_tiling(call) == shrink_rule(call) and expand_tiling(call) == expand_rule(call), other


# What says in which order numbers are added.
ORDER = {
    "shrink": ("kind", "split", "chunk", "block_m", "block_k", "block_r", "stages", "warps", "dot"),
    "expand": ("block_m", "block_r", "dot"),
}
FULL = [
    row("shrink_rows", {"chunk": 1024, "block_k": 256, "warps": 2}, max_rank=64),
    row("shrink_segments", {"chunk": 512, "block_k": 128, "stages": 4, "warps": 2}),
    row("shrink_tiles", {"chunk": 2048, "block_m": 32, "block_k": 64, "stages": 3, "warps": 8}, n=2048),
    row("expand_rows", {"block_n": 1024}),
    row("expand_segments", {"block_n": 64, "stages": 2, "warps": 2}),
    row("expand_tiles", {"block_n": 64, "steps": 1, "stages": 2, "warps": 8}, n=2048),
]


@pytest.mark.parametrize("tuned", [False, True])
def test_nothing_that_orders_sums_depends_on_widths(named, tuned):
    """A neighbour that saves modules has the whole batch served ungrouped: no bit of a row may change."""
    named(*FULL) if tuned else named()
    rng, served = random.Random(0), set()
    for _ in range(600):
        rows, per_row = rng.choice((1, 8, 32, 128, 300)), rng.choice((1, 1, 3, 64, 500))
        dtypes = rng.choices((BF16, torch.float16, torch.float32), k=3)
        if rng.random() < 0.7:
            dtypes, (rows, per_row) = [BF16] * 3, rng.choice(((rows, per_row), (32, 1), (32, 64)))
        k, rank, adapters = rng.choice((33, 4096, 14336)), rng.choice((3, 16, 64, 128)), rng.choice((2, 8, 32))
        capacity = rng.choice((None, rows))
        found = []
        for widths in [(4096,)] + [rng.choices((29, 1024, 4096, 14336, 152064), k=rng.randint(1, 4)) for _ in "123"]:
            call = Call(rows * per_row, rows, k, tuple(widths), rank, adapters, *dtypes, capacity)
            shrink, expand = shrink_tiling(call), expand_tiling(call)
            order = [expand.warps if shrink.kind == "rows" else 0]
            order += [expand.block_n if shrink.kind == "rows" and rank > 16 else 0]
            order += [getattr(shrink, name) for name in ORDER["shrink"]]
            found.append(order + [getattr(expand, name) for name in ORDER["expand"]])
            if (shrink, expand) != (shrink_rule(call), expand_rule(call)):
                served.add(shrink.kind)
        assert all(order == found[0] for order in found), (call, found)
    assert served == ({"rows", "segments", "tiles"} if tuned else set())


def test_a_shrink_needs_no_widths_and_an_expand_does(named):
    shape = {name: value for name, value in SHAPE.items() if name != "widths"}
    named({"kind": "shrink_rows", "shape": shape, "tiling": {"warps": 2}})
    assert shrink_tiling(CALL).warps == 2
    named({"kind": "expand_rows", "shape": shape, "tiling": {}})
    with pytest.raises(ConfigError, match="the shape has no widths"):
        shrink_tiling(CALL)


def test_a_chunk_stays_a_multiple_of_what_is_read_at_a_time(named):
    named(row(tiling={"block_k": 1024}), row("shrink_tiles", {"block_m": 128, "block_k": 64, "chunk": 2112}, n=4096))
    tiling = shrink_tiling(CALL)
    assert shrink_rule(CALL).chunk == 512 and (tiling.chunk, tiling.split) == (1024, 4)
    tiling = shrink_tiling(dataclasses.replace(CALL, n=2560, rows=80))
    assert (tiling.kind, tiling.block_m, tiling.chunk, tiling.split) == ("tiles", 32, 2112, 2)


def test_the_file_is_read_once(named):
    path = named(row())
    assert shrink_tiling(CALL).warps == 2
    write(path, row(tiling={"warps": 8}))
    assert shrink_tiling(CALL).warps == 2
    path.unlink()
    assert shrink_tiling(CALL).warps == 2


def test_a_table_for_the_device_is_used_and_a_named_one_goes_before_it(tmp_path, monkeypatch, named, caplog):
    monkeypatch.delenv(table.TABLE_ENV, raising=False)
    monkeypatch.setattr(table, "FOLDER", tmp_path / "shipped")
    table.FOLDER.mkdir()
    write(table.FOLDER / "some_gpu_2.json", row(), device="Some GPU-2")
    for device, warps in (("Some GPU-2", 2), ("Some GPU 2", 4), ("Some GPU-2 NVL", 4), ("Some", 4)):
        table._shipped.cache_clear()
        on(monkeypatch, device)
        assert shrink_tiling(CALL).warps == warps, device
    path = named(row(tiling={"warps": 8}))
    assert shrink_tiling(CALL).warps == 8
    assert str(path) in caplog.text and "'Some'" in caplog.text  # made for another device


def test_an_empty_table_turns_tuning_off(named, monkeypatch):
    on(monkeypatch, "NVIDIA H200")
    assert table.lookup("shrink_rows", 32, 14336, (4096,), 64, BF16)
    named()
    assert not table.lookup("shrink_rows", 32, 14336, (4096,), 64, BF16)


BAD = [
    ("none at all", "cannot be read"),
    ("{", "cannot be read"),
    ("[]", "format 1"),
    ('{"rows": []}', "format 1"),
    ('{"format": 2, "rows": []}', "format 1"),
    ('{"format": 1, "rows": {}}', "format 1"),
    (["text"], "row 0: expected an object"),
    ([row("shrink")], "row 0: kind 'shrink'"),
    ([row(), row("expand_rows", {}), row(n=20)], "row 2: an earlier row"),
    ([row(), row(widths=[1024, 64])], "row 1: an earlier row .*widths aside"),
    ([row("expand_rows", {}), row("expand_rows", {}, widths=[64]), row("expand_rows", {})], "row 2: an earlier row"),
    ([{**row(), "shape": 3}], "row 0: shape 3"),
    ([row(row=1)], "row 0: a shape has no 'row'"),
    ([{**row(), "shape": {"n": 1}}], "row 0: the shape has no k"),
    ([row(n="32")], "row 0: n '32'"),
    ([row(k=True)], "row 0: k True"),
    ([row(widths=4096)], "row 0: widths 4096"),
    ([row(widths=[1] * 5)], "row 0: widths"),
    ([row(widths=[0.5])], "row 0: widths 0.5"),
    ([row(dtype="bf16")], "row 0: dtype 'bf16'"),
    ([row(tiling=7)], "row 0: tiling 7"),
    ([row(tiling={"block_n": 64})], "row 0: shrink_rows takes no 'block_n'"),
    ([row(tiling={"block_m": 16})], "row 0: shrink_rows takes no 'block_m'"),
    ([row("expand_segments", {"steps": 2})], "takes no 'steps'"),
    ([row(tiling={"split": 4})], "takes no 'split'"),
    ([row(tiling={"dot": "tf32"})], "takes no 'dot'"),
    ([row(), row("shrink_tiles", {"warps": 3})], "row 1: warps 3: expected a power of two"),
    ([row(tiling={"warps": 2.0})], "row 0: warps 2.0"),
    ([row(tiling={"warps": True})], "row 0: warps True"),
    ([row(tiling={"warps": 64})], "from 1 to 16"),
    ([row("expand_tiles", {"block_r": 16})], "takes no 'block_r'"),
    ([row("expand_tiles", {"block_m": 32})], "takes no 'block_m'"),
    ([row("expand_tiles", {"warps": 2})], "from 4"),
    ([row("expand_segments", {"block_r": 16})], "takes no 'block_r'"),
    ([row("expand_segments", {"block_n": 8})], "from 16"),
    ([row("expand_rows", {"warps": 1})], "takes no 'warps'"),
    ([row("expand_rows", {"block_n": 128})], "from 256"),
    ([row("expand_rows", {"block_n": 512}, max_rank=17)], "no block_n above max_rank 16"),
    ([row("expand_rows", {"block_n": 64}, dtype="float32")], "from 128"),
    ([row(tiling={"block_r": 16})], "takes no 'block_r'"),
    ([row("shrink_tiles", {"block_m": 48})], "a power of two"),
    ([row("shrink_tiles", {"stages": 0})], "a whole number from 1"),
    ([row(tiling={"chunk": 768, "block_k": 512})], "no multiple of block_k"),
    ([row(tiling={"chunk": 40})], "no multiple of block_k"),
    ([row(tiling={"chunk": 64, "block_k": 64})], "more than 32 parts"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_a_bad_table_is_an_error_that_names_file_and_row(named, content, message):
    path = named(*content) if isinstance(content, list) else named()
    if isinstance(content, str):
        path.write_text(content)
    if content == "none at all":
        path.unlink()
    with pytest.raises(ConfigError, match=f"table.json.*{message}"):
        shrink_tiling(CALL)


def test_a_bad_table_is_known_when_a_model_is_enabled(named):
    named({"kind": "shrink_row"})
    model = FAMILIES["llama"].build()
    before = type(model)
    with pytest.raises(ConfigError, match="table.json, row 0"):
        enable_multilora(model)
    assert type(model) is before


def test_a_trial_stands_alone_and_ends(named):
    named(row(tiling={"warps": 8}), row("expand_rows", {"block_n": 512}))
    before = shrink_tiling(CALL), expand_tiling(CALL)
    with table.tried("shrink_rows", {**SHAPE, "rows": 32, "adapters": 32}, {"warps": 2}):
        assert shrink_tiling(CALL).warps == 2 and expand_tiling(CALL) == expand_rule(CALL)
    with table.tried("shrink_rows", SHAPE, {}):
        assert shrink_tiling(CALL) == shrink_rule(CALL)
    with pytest.raises(KeyError), table.tried("shrink_rows", SHAPE, {"warps": 2}):
        raise KeyError
    assert (shrink_tiling(CALL), expand_tiling(CALL)) == before
    with pytest.raises(ConfigError, match="warps 3"), table.tried("shrink_rows", SHAPE, {"warps": 3}):
        pass


def test_every_problem_is_of_its_kind_and_has_candidates_that_a_table_may_hold():
    problems = common_problems()
    assert {problem.kind for problem in problems} == set(table.FIELDS)
    keys = [table._key(problem.kind, **table._shape(problem.kind, problem.shape, "")) for problem in problems]
    assert len(set(keys)) == len(keys)
    assert {(p.shape["n"], p.shape["max_rank"]) for p in problems} >= {
        (n, r) for n in (1, 8, 32, 128) for r in (16, 64)
    }
    for problem, key in zip(problems, keys, strict=True):
        call, op = call_of(problem.shape), problem.kind.split("_")[0]
        assert problem.kind == f"{op}_{tuning.kind_of(call)}"
        make = shrink_tiling if op == "shrink" else expand_tiling
        candidates = tuning.search_space(problem.kind, **problem.shape)
        tilings = []
        for candidate in candidates:
            with table.tried(problem.kind, problem.shape, candidate):
                assert table.lookup(*key) == candidate
                tilings.append(make(call))
        assert candidates[0] == {} and tilings[0] == (shrink_rule if op == "shrink" else expand_rule)(call)
        least = 1 if problem.kind == "expand_rows" else 4  # a warp's registers hold no more columns of 16 ranks
        assert len(set(tilings)) == len(candidates) and least <= len(candidates) <= 100
        for tiling in tilings[1:]:
            threads = 32 * tiling.warps
            if op == "expand":
                assert tiling.block_r * tiling.block_n <= 128 * threads
                assert tiling.block_m * tiling.block_n <= 128 * threads
                continue
            assert (
                tiling.block_k * tiling.block_r <= 128 * threads and tiling.block_m * tiling.block_k <= 128 * threads
            )
            assert tiling.split <= 32 and (tiling.split - 1) * tiling.chunk < call.k <= tiling.split * tiling.chunk
            assert tiling.stages * tiling.block_k * (tiling.block_m + tiling.block_r) * 2 <= 200_000


def test_a_common_shrink_is_tuned_only_where_no_groups_share_its_k():
    problems = [problem for problem in common_problems() if problem.kind.startswith("shrink")]
    assert {problem.shape["k"] for problem in problems} == {14336, 12288, 6144, 3072}


def test_families_share_their_candidates():
    """Whose compiled kernels are the same take the same candidates, whatever the number of rows."""
    for kind, calls in CALLS.items():
        for op in ("shrink", "expand"):
            found, families = [], set()
            for n, rows, adapters in calls:
                shape = {**SHAPE, "n": n, "rows": rows, "adapters": adapters}
                problem = Problem(f"{op}_{kind}", {**shape, "widths": (4096,)})
                families.add(problem.family)
                found.append([sizes for sizes in tuning.search_space(problem.kind, **shape) if sizes])
            assert len(families) == 1
            every = [sizes for sizes in found[0] if all(sizes in others for others in found)]
            assert all(len(others) - len(every) <= 3 for others in found)  # but for the one that is the rule's own
            assert all([sizes for sizes in others if sizes in every] == every for others in found)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables_say_whose_they_are_and_differ_from_the_rule(path):
    content = json.loads(path.read_text())
    assert table.file_of(content["device"]) == path and content["rows"] and table.read(path)
    assert {"torch", "triton", "date", "origin"} <= set(content)
    for entry in content["rows"]:
        call = call_of(entry["shape"])
        op, kind = entry["kind"].split("_")
        assert tuning.kind_of(call) == kind
        rule = shrink_rule(call) if op == "shrink" else expand_rule(call)
        assert tuning.with_sizes(rule, call, entry["tiling"]) != rule
        assert entry["over_us"] + entry["us"] / 2 <= 0.96 * (entry["untuned_over_us"] + entry["untuned_us"] / 2) + 1e-3


def test_a_table_is_shipped_for_the_h200():
    assert [path.name for path in SHIPPED] == ["nvidia_h200.json"]


def test_the_script_keeps_what_is_clearly_better(tmp_path):
    """Against the rule's own setting where that was measured, else the first; not where the gain is scatter."""
    rule = {"chunk": 512, "block_k": 256, "warps": 4}
    tried = [
        [4.0, 8.0, "d", None],
        [9.0, 8.0, "s", rule],
        [5.0, 8.0, "s", {"warps": 2}],
        [3.0, 9.5, "e", {"block_n": 512}],
        [1.0, 2.0, "e", {"block_n": 128, "warps": 1}],  # too few columns for a warp
        [1.0, 2.0, "e", {"block_n": 512, "warps": 2}],
    ]
    scatter = [[0.2, 2.0, "d", None], [0.1, 1.5, "s", {"warps": 2}], [-0.9, 1.0, "e", {"block_n": 512}]]
    problems = [["32,32,16", "down", "rows", tried], ["1,1,16", "down", "rows", scatter]]
    problems += [["16,16,16,512", "o", "tiles", []], ["32,32,16", "o", "rows", tried]]  # o shares its k with q/k/v
    search, out = tmp_path / "search.json", tmp_path / "out.json"
    search.write_text(json.dumps(problems))
    root = Path(__file__).parents[2]
    script = root / "benchmarks" / "tuning_table.py"
    subprocess.run([sys.executable, str(script), str(search), str(out)], cwd=root, check=True, capture_output=True)
    content = json.loads(out.read_text())
    assert [(entry["kind"], entry["tiling"], entry["untuned_over_us"]) for entry in content["rows"]] == [
        ("shrink_rows", {"warps": 2}, 9.0)
    ]
    assert content["device"] == "NVIDIA H200" and len(table.read(out)) == 1
