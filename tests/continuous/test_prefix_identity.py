"""What cached blocks are hashed over: tokens, and whose they are."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hf_multilora.generation.continuous.prefix import Seeded, identity_of

PAGE = 4


def blocks(tokens):
    """As transformers cuts them: whole blocks, by slices."""
    return [tuple(tokens[b * PAGE : (b + 1) * PAGE]) for b in range(len(tokens) // PAGE)]


@given(st.lists(st.integers(0, 9), max_size=23), st.integers(0, 25))
def test_the_block_of_the_start_alone_begins_with_the_identity(tokens, start):
    plain, seeded = blocks(tokens), blocks(Seeded(tokens, (70, 80), start))
    assert len(plain) == len(seeded)
    for number, (before, after) in enumerate(zip(plain, seeded, strict=True)):
        own = number * PAGE <= start < (number + 1) * PAGE
        assert after == ((70, 80, *before) if own else before)


def test_what_is_not_a_whole_block_is_as_it_was():
    tokens = Seeded(list(range(6)), (70,), 4)
    assert tokens[4:8] == [4, 5]  # not complete yet
    assert tokens[:] == list(range(6)) and tokens[2:] == [2, 3, 4, 5] and tokens[4] == 4


def test_identities_differ():
    tags = [
        (1, 2), (1, 3), (2, 1), (12, 1), (((1, 2), 0.5),), (((1, 2), 0.25),), (((1, 2), 0.5), ((1, 3), 0.5)),
        (((1, 3), 0.5), ((1, 2), 0.5)),
    ]  # fmt: skip
    identities = [identity_of(tag) for tag in tags]
    for one, other in itertools.combinations(identities, 2):
        assert one != other
    assert all(-(2**31) <= number < 2**31 for identity in identities for number in identity)
