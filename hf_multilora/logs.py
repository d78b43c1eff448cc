"""Messages of this package go where transformers' go, and obey its switches: verbosity, handlers, their format."""

from __future__ import annotations

from logging import getLogger

from transformers.utils import logging


def follow_transformers() -> None:
    """Hang the logger `hf_multilora`, and with it those of all modules, below the one of transformers.

    Otherwise `transformers.utils.logging.set_verbosity_error()` and TRANSFORMERS_VERBOSITY would mean nothing to it.
    A level or a handler that a user gives to `hf_multilora` itself counts as everywhere.
    """
    logging.get_logger("transformers")  # its handler and its level are set when it is first asked for
    getLogger("hf_multilora").parent = getLogger("transformers")
