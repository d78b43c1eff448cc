"""What ranks compare: numbers that are equal in every process where facts are."""

from __future__ import annotations

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
