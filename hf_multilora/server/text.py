"""Tokens to text while they arrive: whole characters only, and cut before the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 4  # bytes of a character, so tokens that one may be spread over
_PATIENCE = 2 * _LONGEST


class Detokenizer:
    """Decodes a growing list of tokens, a window at a time.

    Text is given out once no later token can change it: a window that ends in the middle of a character waits.

    Args:
        decode: token ids -> text, without special tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._start = 0  # of the window, whose tokens up to `_read` only give context (a leading space, say)
        self._read = 0

    def feed(self, tokens: Sequence[int], end: bool = False) -> str:
        """The text that came to be since the last call.

        Args:
            tokens: all so far.
            end: there will be no others; what waits is given out as it is.
        """
        if self._read == len(tokens):
            return ""
        context = self._decode(tokens[self._start : self._read])
        text, cut = self._decode(tokens[self._start :]), len(tokens)
        if text.endswith(_BROKEN) and not end:
            cut, text = self._stable(tokens, text)
        if cut == self._read:
            return ""
        self._start, self._read = self._read, cut
        return text[len(context) :]

    def _stable(self, tokens: Sequence[int], text: str) -> tuple[int, str]:
        """Up to where bytes that never become characters can be given out, so that the window stays short."""
        if len(tokens) - self._read > _PATIENCE:
            for cut in range(len(tokens) - _LONGEST, self._read, -1):
                part = self._decode(tokens[self._start : cut])
                if text.startswith(part):
                    return cut, part
        return self._read, ""


class Stops:
    """Holds back text that may be the beginning of a stop string, and cuts before the first one that is whole.

    Attributes:
        found: whether there was one; nothing is given out afterwards.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False

    def feed(self, text: str, end: bool = False) -> str:
        """What can be given out, now that `text` has been added. `end`: nothing else will be."""
        if self.found:
            return ""
        text = self._held + text
        # The one that ends first, however the text came in pieces.
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.found, self._held = True, ""
            return text[: min(found)[1]]
        keep = 0 if end else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that a stop string begins with.

    >>> _overlap("one tw", "two"), _overlap("aab", "ab!"), _overlap("x", "y")
    (2, 2, 0)
    """
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
