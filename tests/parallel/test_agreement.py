"""What ranks compare: numbers that are equal in every process where facts are."""

from __future__ import annotations

from pathlib import Path

from hf_multilora.handle import _content
from hf_multilora.parallel import number_of


def test_sets_have_no_order() -> None:
    """A live LoraConfig holds sets of names, whose order is another one in each process."""
    one, other = {0, 8}, {8, 0}
    assert repr(one) != repr(other), "the two show what processes do"
    assert number_of("a", {"target_modules": one}) == number_of("a", {"target_modules": other})
    assert number_of(["a", (frozenset(one), 1)]) == number_of(["a", (frozenset(other), 1)])
    assert number_of({"target_modules": one}) != number_of({"target_modules": {0, 16}})


def test_facts_that_differ() -> None:
    facts = [("a",), ("a", None), (["a"],), ({"a": 1},), ({"a": 2},), ({1},), ([1],), (1,), ("1",)]
    assert len({number_of(*each) for each in facts}) == len(facts)


def test_the_files_of_an_adapter(tmp_path: Path) -> None:
    """Those of the subfolder that is loaded; a folder beside them that is called like them is none."""
    (tmp_path / "inner" / "adapter_old").mkdir(parents=True)
    weights = tmp_path / "inner" / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    outer, one = _content(tmp_path, None), _content(tmp_path, "inner")
    assert one == _content(tmp_path / "inner", None) != outer
    weights.write_bytes(b"two")
    assert _content(tmp_path, "inner") != one and _content(tmp_path, None) == outer
    assert _content("org/name", "inner") == "org/name"
