"""Who asks: API keys, and how many adapters each of them may name."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Sequence

from .problems import ApiError
from .settings import Settings

ANYBODY = "anybody"


class Keys:
    """API keys; compared by their digests, all of them, so that the time says nothing about any."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def client(self, authorization: bytes | None) -> str | None:
        """The client whose key the header bears, `ANYBODY` where no key is needed; None: not admitted."""
        if not self._digests:
            return ANYBODY
        scheme, _, key = (authorization or b"").partition(b" ")
        given = _digest(key.strip())
        same = [hmac.compare_digest(given, digest) for digest in self._digests]
        return f"key {same.index(True)}" if scheme.lower() == b"bearer" and any(same) else None


class Shares:
    """Counts the distinct adapters that each client has named lately."""

    def __init__(self, settings: Settings) -> None:
        self._most, self._window = settings.max_adapters_per_client, settings.client_window_s
        self._named: dict[str, OrderedDict[str, float]] = {}

    def take(self, client: str, adapter: str) -> bool:
        """Count an adapter; returns whether it is a new one. Raises: ApiError 429 where it would be one too many."""
        if self._most is None:
            return False
        named, now = self._named.setdefault(client, OrderedDict()), time.monotonic()
        while named and now - next(iter(named.values())) > self._window:
            named.popitem(last=False)
        if adapter not in named and len(named) >= self._most:
            wait = self._window - (now - next(iter(named.values())))
            raise ApiError(
                429,
                f"More than {self._most} adapters within {self._window:g} s: name one of "
                f"{', '.join(map(repr, named))}, "
                f"or try again in {wait:.0f} s.",
                "too_many_adapters",
                "model",
                retry_after=max(1, int(wait) + 1),
            )
        new = adapter not in named
        named[adapter] = now
        named.move_to_end(adapter)
        return new

    def give_back(self, client: str, adapter: str) -> None:
        self._named[client].pop(adapter, None)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
