"""What tests of the page need: requests that stand still, a stubbed status, and how to read what a browser shows."""

from __future__ import annotations

import copy
import itertools
import json
import re
import threading
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

from server_bed import WAIT_S, Running, until

TEXT = "/v1/completions"
LONG = {"model": "a", "prompt": "Tell", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
_SEEN_MS = 20_000


@contextmanager
def held(server: Running, steps: int):
    """Requests stand still after so many steps, until the block ends."""
    processor, go, done = server.engine._manager.batch_processor, threading.Event(), itertools.count()
    step = processor._generation_step

    def slowly(*args):
        if next(done) >= steps:
            go.wait(WAIT_S)
        return step(*args)

    processor._generation_step = slowly
    try:
        yield
    finally:
        go.set()
        processor._generation_step = step
        until(server.idle)


@contextmanager
def asking(server: Running, steps: int, **body):
    """A request that stands still after so many steps."""
    thread = threading.Thread(target=server.post, args=(TEXT, {**LONG, **body}))
    with held(server, steps):
        thread.start()
        yield
    thread.join(WAIT_S)


def status_of(server: Running, **query) -> dict:
    return server.get("/v1/status", params=query).json()


def sees(page, selector: str, text: str | re.Pattern[str]) -> None:
    """Wait until an element has this text."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_have_text(text, timeout=_SEEN_MS)


def row(page, name: str) -> list[str]:
    """The cells of an adapter's row."""
    rows = page.locator("#adapters tr").filter(has=page.get_by_text(name, exact=True))
    return rows.locator("th, td").all_inner_texts()


class Stub:
    """Answers /v1/status in a page from `status`, on a clock that the test moves; None: the connection fails."""

    def __init__(self, page, server: Running) -> None:
        self.status: dict | None = copy.deepcopy(status_of(server))
        self.queries: list[dict[str, list[str]]] = []
        self._page = page
        page.clock.install()
        page.route("**/v1/status*", self._answer)
        page.goto(f"{server.root}/")

    def _answer(self, route) -> None:
        self.queries.append(parse_qs(urlsplit(route.request.url).query))
        if self.status is None:
            route.abort()
        else:
            route.fulfill(body=json.dumps(self.status), content_type="application/json")

    def turn(self, seconds: float = 1.0, tokens: int = 0, answers: int = 0) -> None:
        """One second later; the server has done this since."""
        if self.status is not None:
            self.status["uptime_s"] += seconds
            self.status["sums"]["new_tokens"] += tokens
            self.status["sums"]["finished"] += answers
        asked = len(self.queries)
        self._page.clock.run_for(1000)
        until(lambda: self._page.evaluate("0") or len(self.queries) > asked)  # evaluating lets the route answer
