"""An OpenAI-compatible server over continuous batching: `model` names the adapter. Needs the `serve` extra.

Importing this package imports neither FastAPI nor torch; its names are looked up when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app
    from .engine import Engine
    from .settings import Settings

__all__ = ["Engine", "Settings", "create_app"]
_HOMES = {"create_app": "app", "Engine": "engine", "Settings": "settings"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
