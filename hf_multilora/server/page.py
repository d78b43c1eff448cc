"""The page at `/`: one file that shows what /v1/status says. It carries no data, so it needs no key."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse


def router() -> APIRouter:
    """The endpoint; no part of the API's description."""
    routes = APIRouter()
    text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(text),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    @routes.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=headers)

    return routes


def policy(text: str) -> str:
    """A Content-Security-Policy that admits the page's own script and style, its icon, and requests to this server.

    Names of adapters come from clients: should one ever become markup, nothing of it runs or is fetched.
    """
    hashes = {tag: re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("script", "style")}
    allowed = {tag: " ".join(f"'{_hash(part)}'" for part in parts) for tag, parts in hashes.items()}
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
