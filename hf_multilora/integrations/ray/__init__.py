"""Ray: files of prompts through Ray Data, an endpoint of several replicas through Ray Serve. Needs the `ray` extra.

    from hf_multilora.integrations.ray import MultiLoraPredictor, unanswered   # Ray Data
    from hf_multilora.integrations.ray import serve_app                        # Ray Serve

Importing this package imports neither Ray nor torch; its names are looked up when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazily

if TYPE_CHECKING:
    from .app import serve_app
    from .predictor import MultiLoraPredictor
    from .resume import unanswered

__all__ = ["MultiLoraPredictor", "serve_app", "unanswered"]
__getattr__ = lazily(__name__, {"MultiLoraPredictor": "predictor", "serve_app": "app", "unanswered": "resume"})
