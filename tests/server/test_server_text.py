"""Text that comes in pieces: no character is split, and stop strings cut where they first end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_bed import tokenizer

from hf_multilora.server.text import Detokenizer, Stops

BYTES = tokenizer().convert_tokens_to_ids
DECODE = tokenizer().decode


def token_ids(raw: bytes) -> list[int]:
    """The tokens of these bytes, which need not be text."""
    from tokenizers.pre_tokenizers import ByteLevel

    table = dict(zip(range(256), _alphabet(), strict=True))
    assert set(table.values()) == set(ByteLevel.alphabet())
    return [BYTES(table[byte]) for byte in raw]


def _alphabet() -> list[str]:
    """GPT-2's characters for the bytes 0 to 255."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + others.index(byte)) for byte in range(256)]


def pieces(tokens: list[int], sizes: list[int]) -> list[str]:
    detokenizer, given, end = Detokenizer(DECODE), [], 0
    for size in sizes:
        end = min(end + size, len(tokens))
        given.append(detokenizer.feed(tokens[:end]))
    return [*given, detokenizer.feed(tokens, end=True)]


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=60))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_text_comes_whole_and_its_characters_too(text, sizes):
    got = pieces(token_ids(text.encode()), sizes)
    assert "".join(got) == text
    assert "\N{REPLACEMENT CHARACTER}" in text or not any("\N{REPLACEMENT CHARACTER}" in piece for piece in got)


@given(st.binary(max_size=80), st.lists(st.integers(1, 5), max_size=80))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_bytes_that_are_no_text_come_as_they_would_at_once(raw, sizes):
    tokens = token_ids(raw)
    assert "".join(pieces(tokens, sizes)) == DECODE(tokens) == raw.decode("utf-8", "replace")


def test_a_long_run_of_broken_bytes_does_not_wait_for_its_end():
    tokens = token_ids(b"\xff" * 500)
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return DECODE(ids)

    detokenizer = Detokenizer(decode)
    given = [detokenizer.feed(tokens[: i + 1]) for i in range(500)]
    assert len("".join(given)) > 480
    assert max(lengths) < 40


@pytest.mark.parametrize(
    ("stops", "text", "want"),
    [
        (["world"], "hello world!", "hello "),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["lo w", "o wor"], "hello world", "hel"),
        (["abc", "b"], "xabc", "xa"),
        (["never"], "nev", "nev"),
        ([], "all of it", "all of it"),
    ],
)
def test_stop_strings(stops, text, want):
    for size in range(1, len(text) + 1):
        cut = Stops(stops)
        got = "".join(cut.feed(text[i : i + size]) for i in range(0, len(text), size)) + cut.feed("", end=True)
        assert got == want, size
        assert cut.found == any(stop in text for stop in stops)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.integers(1, 7))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_pieces_change_nothing_about_stop_strings(text, stops, size):
    whole, parted = Stops(stops), Stops(stops)
    want = whole.feed(text, end=True)
    got = "".join(parted.feed(text[i : i + size]) for i in range(0, len(text), size)) + parted.feed("", end=True)
    assert got == want and whole.found == parted.found
    assert not any(stop in got for stop in stops)
