"""Outputs of a step leave while the device computes the next one.

Whoever takes them (a server's event loop above all) runs Python; let go at once, it would take the interpreter from
the generation thread just when that is to prepare the next batch and the device waits for it.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def held_back(own: Any) -> Any:
    class Router(own):
        """In front of OutputRouter. Outputs are held in the generation thread, which gives them out in their order."""

        _held: list[Any]

        def deliver_batch(self, outputs: list[Any]) -> None:
            self._held += outputs

        def deliver(self, output: Any) -> None:
            self.release()
            super().deliver(output)

        def release(self) -> None:
            """Give out what is held."""
            held, self._held = self._held, []
            if held:
                super().deliver_batch(held)

    return Router
