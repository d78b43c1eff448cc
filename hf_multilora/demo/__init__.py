"""The demo: a real small model and three real adapters, answered in one mixed batch. Needs the `demo` extra."""

from __future__ import annotations

from pathlib import Path

ADAPTERS = Path(__file__).parent / "adapters"
"""Folder of the adapters that ship with the package; each sub-folder is a PEFT checkpoint."""

ADAPTER_NAMES = ("sentiment", "pirate", "json")
