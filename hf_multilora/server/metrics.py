"""Prometheus metrics of one server, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .engine import Engine
from .tickets import Ticket

OTHER = "other"
_PREFIX = "hf_multilora_"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """What /metrics shows.

    Args:
        base: the base model's label.
        max_adapters: adapters with a label of their own, the first that are asked for; the rest is "other". Clients
            cannot make labels: only names that were found count.
    """

    def __init__(self, engine: Engine, base: str, max_adapters: int) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._engine, self._base, self._most = engine, base, max_adapters
        self._labels: set[str] = set()
        by = ["adapter"]
        self._requests = Counter(
            f"{_PREFIX}requests", "Requests by outcome.", [*by, "outcome"], registry=self.registry
        )
        self._refused = Counter(
            f"{_PREFIX}refused", "Requests that were refused, by HTTP status.", ["status"], registry=self.registry
        )
        self._prompt = Counter(f"{_PREFIX}prompt_tokens", "Tokens of prompts.", by, registry=self.registry)
        self._new = Counter(f"{_PREFIX}new_tokens", "Tokens of answers.", by, registry=self.registry)
        self._first = Histogram(
            f"{_PREFIX}time_to_first_token_seconds",
            "From arrival to the first token.",
            by,
            buckets=_FIRST,
            registry=self.registry,
        )
        self._between = Histogram(
            f"{_PREFIX}inter_token_seconds",
            "Mean time between tokens of an answer.",
            by,
            buckets=_BETWEEN,
            registry=self.registry,
        )
        self.registry.register(_Status(engine))

    def label(self, adapter: str | None) -> str:
        if adapter is None:
            return self._base
        if adapter not in self._labels:
            if len(self._labels) >= self._most:
                return OTHER
            self._labels.add(adapter)
        return adapter

    def ended(self, adapter: str | None, outcome: str, prompt_tokens: int, tickets: Iterable[Ticket]) -> None:
        """A request has ended: "ok", "cancelled", "timeout" or "failed"."""
        label, tickets = self.label(adapter), list(tickets)
        self._requests.labels(label, outcome).inc()
        self._prompt.labels(label).inc(prompt_tokens)
        self._new.labels(label).inc(sum(len(ticket.tokens) for ticket in tickets))
        for ticket in tickets:
            if ticket.first_s is not None and ticket.last_s is not None:
                self._first.labels(label).observe(max(0.0, ticket.first_s - ticket.created_s))
                if len(ticket.tokens) > 1:
                    self._between.labels(label).observe((ticket.last_s - ticket.first_s) / (len(ticket.tokens) - 1))

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Status:
    """Reads the engine's own counters when somebody looks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterable[Any]:
        engine = self._engine
        status = engine.multilora.status()
        traffic = status.batching.adapters.values() if status.batching else ()
        gauges = {
            "ready": ("Whether requests are answered.", float(engine.why_not_ready() is None)),
            "requests_running": ("Requests in the batch.", sum(item.running for item in traffic)),
            "requests_waiting": ("Requests that wait for a slot or room.", sum(item.waiting for item in traffic)),
            "requests_in_work": ("Requests that the server has not ended.", engine.in_work),
            "slots": ("Slots.", status.max_loras),
            "slots_used": ("Slots that hold an adapter.", sum(name is not None for name in status.slots)),
            "adapters_registered": ("Registered adapters.", len(status.adapters)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(_PREFIX + name, text, value)
        for level, counters in (("slots", status.resident), ("host", status.registered)):
            values = {
                "hits": ("Adapters that were found there.", counters.hits),
                "misses": ("Adapters that had to be brought in.", counters.misses),
                "evictions": ("Adapters that had to go.", counters.evictions),
                "copied_bytes": ("Bytes brought in.", counters.nbytes),
                "copy_seconds": ("Seconds spent on it.", counters.ms / 1e3),
            }
            for name, (text, value) in values.items():
                yield CounterMetricFamily(f"{_PREFIX}{level}_{name}", text, value)
