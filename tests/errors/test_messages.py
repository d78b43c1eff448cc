"""All messages as a set: each says what is wrong, where, the closest names, and the next step.

`pytest tests/errors --snapshot-update` writes messages.md anew; read what has changed there before it is committed.
"""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, Bed, Case
from server_cases import SERVER_CASES, answers
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

import hf_multilora
from hf_multilora import MultiLoraError


class Markdown(SingleFileSnapshotExtension):
    """One page that people read."""

    _write_mode = WriteMode.TEXT
    file_extension = "md"


def raised(case: Case, folder: Path) -> MultiLoraError:
    with pytest.raises(MultiLoraError) as caught:
        case.do(Bed(folder))
    return caught.value


def plain(message: str, folder: Path) -> str:
    """Without what changes from run to run."""
    message = message.replace(str(folder), "ADAPTERS")
    order: dict[str, str] = {}
    return re.sub(r"generation \d+", lambda found: order.setdefault(found[0], f"generation {len(order) + 1}"), message)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[MultiLoraError, str]]:
    """Title of each case -> the error, and its message."""
    found = {}
    for case in CASES:
        folder = tmp_path_factory.mktemp("bed")
        error = raised(case, folder)
        found[case.title] = (error, plain(str(error), folder))
    return found


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Title of each of the server's cases -> status and error."""
    return answers(tmp_path_factory.mktemp("served"))


def test_the_set(errors: Any, refusals: Any, snapshot: SnapshotAssertion) -> None:
    lines = ["# Error messages", "", "Written by `pytest tests/errors --snapshot-update`; not by hand."]
    for case in CASES:
        error, message = errors[case.title]
        lines += ["", f"## {case.title}", "", f"`{type(error).__name__}`", "", f"> {message}"]
    lines += ["", "# The server's answers"]
    for title, answer in refusals.items():
        lines += ["", f"## {title}", "", f"`{answer['status']}`, `{answer['code']}`", "", f"> {answer['message']}"]
    assert "\n".join([*lines, ""]) == snapshot(extension_class=Markdown, name="messages")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_message_says_where_what_is_close_and_what_next(case: Case, errors: Any) -> None:
    _, message = errors[case.title]
    for part in filter(None, (case.where, case.closest, case.step)):
        assert part in message
    if case.closest:
        assert "Closest" in message
    assert message[-1] in ".)?" and message[0] in string.ascii_letters + string.digits + "'_[", message
    assert "  " not in message and "None None" not in message and "object at 0x" not in message


@pytest.mark.parametrize("title", SERVER_CASES)
def test_the_server_says_where_and_what_next(title: str, refusals: Any) -> None:
    case, answer = SERVER_CASES[title], refusals[title]
    assert answer["status"] == case.status
    for part in filter(None, (case.where, case.step)):
        assert part in answer["message"]


def test_every_class_of_error_is_there(errors: Any) -> None:
    public = {name for name in hf_multilora.__all__ if name.endswith("Error")} - {"MultiLoraError"}
    assert {type(error).__name__ for error, _ in errors.values()} == public
