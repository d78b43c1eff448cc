"""One exception tree. A message says what is wrong, where, the closest names, and the next step."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MultiLoraError(Exception):
    """Base of every error that hf_multilora raises on purpose."""


class ConfigError(MultiLoraError, ValueError):
    """An option of `enable_multilora` or `MultiLoraConfig` that cannot be honoured."""


class ModelError(MultiLoraError, RuntimeError):
    """The model cannot be enabled, or was changed afterwards in a way that slots cannot follow."""


class AdapterNotFoundError(MultiLoraError, KeyError):
    """A name that is not registered and cannot be loaded on demand."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class AdapterExistsError(MultiLoraError, ValueError):
    """A name that is registered already, loaded again without `reload=True`."""


class AdapterFormatError(MultiLoraError, ValueError):
    """A checkpoint that is damaged, foreign, or not what its config says."""


class AdapterMatchError(AdapterFormatError):
    """Tensors of a checkpoint that do not fit the model: no such module, wrong shape, left over."""


class UnsupportedAdapterError(MultiLoraError, NotImplementedError):
    """A checkpoint whose mathematics is understood but not served, refused by name."""


class SlotError(MultiLoraError, RuntimeError):
    """Not enough slots, bytes or host memory for what was asked."""


class RoutingError(MultiLoraError, ValueError):
    """Adapter ids that do not fit the rows of the batch, or a shape that cannot be mapped to rows."""


class CacheMismatchError(MultiLoraError, ValueError):
    """A KV cache that another adapter, or an older generation of this one, has written."""


def closest(name: str, known: Iterable[str], n: int = 3) -> str:
    """Return " Closest: 'a', 'b'." for the names most like `name`, or an empty string."""
    found = difflib.get_close_matches(name, list(known), n=n, cutoff=0.4)
    return f" Closest: {', '.join(map(repr, found))}." if found else ""
