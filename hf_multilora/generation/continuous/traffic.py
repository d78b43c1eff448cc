"""What happened to the requests of each adapter."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...memory.lease import label_of
from ...report import AdapterTraffic
from ..ids import BASE, Key
from .requests import carrier_of


class Traffic:
    """Counters of one manager. The generation thread writes; others read copies."""

    def __init__(self) -> None:
        self.steps = 0
        self._of: dict[Key | None, AdapterTraffic] = {}
        self._live: dict[str, Any] = {}  # every request that has arrived and not ended: its newest state
        self._begun: set[str] = set()

    @property
    def live(self) -> Mapping[str, Any]:
        return self._live

    def of(self, key: Key | None) -> AdapterTraffic:
        found = self._of.get(key)
        if found is None:
            found = self._of[key] = AdapterTraffic()
        return found

    def served(self) -> dict[Key | None, int]:
        """Tokens that each key has had so far, those of running requests among them."""
        found = {key: traffic.prompt_tokens + traffic.new_tokens for key, traffic in self._of.items()}
        for state in self._live.values():
            found[_key(state)] = found.get(_key(state), 0) + _new_tokens(state)
        return found

    def unfinished_tokens(self) -> int:
        """New tokens of requests that have not ended, which no adapter's counter holds yet."""
        return sum(map(_new_tokens, list(self._live.values())))

    def arrived(self, state: Any) -> None:
        """A request, or its state after a reset."""
        if state.request_id not in self._live:
            self.of(_key(state)).requests += 1
        self._live[state.request_id] = state

    def began(self, state: Any) -> None:
        """A request takes part in a step."""
        if state.request_id in self._begun:
            return
        self._begun.add(state.request_id)
        traffic, waited = self.of(_key(state)), time.perf_counter() - state.created_time
        traffic.prompt_tokens += state._true_initial_tokens or len(state.initial_tokens)
        traffic.wait_s += waited
        traffic.longest_wait_s = max(traffic.longest_wait_s, waited)
        carrier = carrier_of(state)
        if carrier is not None:
            traffic.passed_over = max(traffic.passed_over, carrier.passed)

    def shared(self, state: Any, tokens: int) -> None:
        """So many tokens of its prompt were found in the cache."""
        self.of(_key(state)).prefix_tokens += tokens

    def ended(self, request_id: str) -> None:
        """A request is gone from the scheduler."""
        state = self._live.pop(request_id)
        self._begun.discard(request_id)
        traffic, status = self.of(_key(state)), state.status.name
        if status == "FINISHED":
            traffic.finished += 1
        elif status == "FAILED":
            traffic.failed += 1
        else:
            traffic.cancelled += 1
        traffic.new_tokens += _new_tokens(state)

    def snapshot(self) -> dict[str, AdapterTraffic]:
        found = {key: replace(traffic) for key, traffic in list(self._of.items())}
        for request_id, state in list(self._live.items()):
            traffic = found.setdefault(_key(state), AdapterTraffic())
            if request_id in self._begun:
                traffic.running += 1
            else:
                traffic.waiting += 1
        return {BASE if key is None else label_of(key): traffic for key, traffic in found.items()}


def _new_tokens(state: Any) -> int:
    """What it has generated; after a reset, some of that lies behind its prompt."""
    prompt = state._true_initial_tokens or len(state.initial_tokens)
    return len(state.initial_tokens) - prompt + len(state.generated_tokens)


def _key(state: Any) -> Key | None:
    carrier = carrier_of(state)
    return None if carrier is None else carrier.key
