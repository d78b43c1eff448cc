"""An OpenAI-compatible server over continuous batching: `model` names the adapter. Needs the `serve` extra.

Importing this package imports neither FastAPI nor torch; its names are looked up when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazily

if TYPE_CHECKING:
    from .app import create_app
    from .engine import Engine
    from .settings import Settings

__all__ = ["Engine", "Settings", "create_app"]
__getattr__ = lazily(__name__, {"create_app": "app", "Engine": "engine", "Settings": "settings"})
