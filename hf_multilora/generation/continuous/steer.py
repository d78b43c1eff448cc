"""How transformers' own objects are steered: by a class that derives from theirs, and stands in front of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def steer(thing: Any, make: Callable[[Any], Any], **attributes: Any) -> None:
    """Give an object a class that derives from its own."""
    thing.__dict__.update(attributes)
    thing.__class__ = make(type(thing))
