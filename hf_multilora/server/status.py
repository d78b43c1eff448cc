"""What /v1/status says: slots, adapters, both levels of cache, the queue, and sums from which rates follow."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query

from .._version import __version__
from ..errors import AdapterNotFoundError
from ..generation.ids import BASE
from ..report import AdapterTraffic, BatchingStatus, Status
from .answers import Answers

_SUMS = ("requests", "finished", "failed", "cancelled", "prompt_tokens", "prefix_tokens", "new_tokens")


def router(answers: Answers) -> APIRouter:
    """The endpoint, for one engine."""
    routes = APIRouter(prefix="/v1")
    started, began = time.time(), time.monotonic()

    def look(limit: int | None, match: str) -> dict[str, Any]:
        found = snapshot(answers, limit, match)  # may wait, so the clock is read afterwards
        return {**found, "started": started, "uptime_s": time.monotonic() - began, "version": __version__}

    @routes.get("/status")
    async def status(
        limit: Annotated[
            int | None, Query(ge=0, description="So many adapters, the busiest, and those in slots.")
        ] = None,
        match: Annotated[
            str, Query(max_length=512, description="Adapters with this in their names, and those in slots.")
        ] = "",
    ) -> dict[str, Any]:
        """Slots, adapters, both levels of cache, the queue, and sums over all requests."""
        # The locks may be held by a load for a while; the event loop does not wait for them.
        return await asyncio.to_thread(look, limit, match)

    return routes


def snapshot(answers: Answers, limit: int | None = None, match: str = "") -> dict[str, Any]:
    """The handle's status as a dictionary, and what the server knows beside it.

    `limit` and `match` leave out adapters that lie in no slot; sums are over all.
    """
    engine, base = answers.engine, answers.resolver.base
    found = engine.multilora.status()
    traffic = found.batching.adapters if found.batching else {}
    sums = _sums(found.batching) if found.batching else None
    queue = {
        "in_work": engine.in_work,
        "running": sum(item.running for item in traffic.values()),
        "waiting": sum(item.waiting for item in traffic.values()),
        "max_queue": answers.settings.max_queue,
    }
    registered, matching = len(found.adapters), _cut(found, base, limit, match)
    shown = found.to_dict()
    for adapter in shown["adapters"]:
        try:
            adapter["host"] = engine.multilora.store.entry(adapter["name"]).packed is not None
        except AdapterNotFoundError:
            adapter["host"] = False  # unloaded meanwhile
    return {
        **shown,
        "queue": queue,
        "base": base,
        "max_model_len": answers.max_len,
        "not_ready": engine.why_not_ready(),
        "sums": sums,
        "counts": {"registered": registered, "matching": matching},
    }


def _sums(batching: BatchingStatus) -> dict[str, int]:
    found = {name: 0 for name in _SUMS}
    for item in batching.adapters.values():
        for name in _SUMS:
            found[name] += getattr(item, name)
    found["new_tokens"] += batching.unfinished_tokens
    return found


def _cut(found: Status, base: str, limit: int | None, match: str) -> int:
    """Keep the busiest adapters whose names match; returns how many names do, the base's among them."""
    registered = {adapter.name: adapter for adapter in found.adapters}
    traffic = found.batching.adapters if found.batching else {}
    idle, sought = AdapterTraffic(), match.casefold()

    def rank(name: str) -> tuple[Any, ...]:
        item, adapter = traffic.get(name, idle), registered.get(name)
        return (-(item.running + item.waiting), -item.requests, adapter is None or adapter.slot is None)

    names = [name for name in {BASE: None, **registered, **traffic} if sought in _shown(name, base).casefold()]
    if sought or limit is not None:
        kept = {*sorted(names, key=rank)[:limit], *found.slots}
        found.adapters = [adapter for adapter in found.adapters if adapter.name in kept]
        if found.batching:
            found.batching.adapters = {name: item for name, item in traffic.items() if name in kept}
    return len(names)


def _shown(name: str, base: str) -> str:
    return base if name == BASE else name
