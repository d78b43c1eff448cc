"""Ray: files of prompts through Ray Data, an endpoint of several replicas through Ray Serve. Needs the `ray` extra.

    from hf_multilora.integrations.ray import MultiLoraPredictor, unanswered   # Ray Data
    from hf_multilora.integrations.ray import serve_app                        # Ray Serve

Importing this package imports neither Ray nor torch; its names are looked up when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import serve_app
    from .predictor import MultiLoraPredictor
    from .resume import unanswered

__all__ = ["MultiLoraPredictor", "serve_app", "unanswered"]
_HOMES = {"MultiLoraPredictor": "predictor", "serve_app": "app", "unanswered": "resume"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
