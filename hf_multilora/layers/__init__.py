"""Wrappers around base layers; importing this package registers those that ship with it."""

from . import embedding, linear, saved
from .base import LoraLayer
from .registry import register_layer, wrapper_for

__all__ = ["LoraLayer", "embedding", "linear", "saved", "register_layer", "wrapper_for"]
