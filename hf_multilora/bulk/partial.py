"""Answers of a run that has not ended, beside where they are to go: what is there need not be made again.

The file's first line holds what the answers depend on; each other line is one answer, in the order in which they came.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from ..errors import ConfigError
from .lines import Line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FORMAT = "hf-multilora generate 1"

Answer = dict[str, Any]


class Partial:
    """A context that appends answers, and sorts them in the end.

    Args:
        output: where they are to go.
        options: that all answers depend on, by name.
        hashes: of what else they depend on.
        versions: of the adapters as they are. What an adapter answered that has changed since does not count.
        last: number of the input's last line.
        overwrite: drop the output, and answers of other options.

    Attributes:
        path: of the file.
        kept: answers of an earlier run.
        count: answers that are there.

    Raises:
        ConfigError: an output that exists, or answers of other options, and overwrite is False.
    """

    def __init__(
        self,
        output: Path,
        options: dict[str, Any],
        hashes: dict[str, str],
        versions: Collection[str],
        last: int,
        overwrite: bool,
    ) -> None:
        self.output, self.path = output, output.with_name(f"{output.name}.partial")
        self._head = {"format": _FORMAT, "options": options, "hashes": hashes}
        self._at = array("q", bytes(8 * (last + 1)))  # line -> where its answer begins; 0: there is none
        self._end = 0  # of what is whole
        self._file: BinaryIO | None = None
        self._seen = _state(self.path)
        if self._seen is not None:
            self._read(versions, overwrite)
        if not self._end and output.exists() and not overwrite:
            raise ConfigError(f"{output} exists. Choose another --output, or --overwrite it.")
        self.kept = self.count = sum(1 for at in self._at if at)

    def __enter__(self) -> Partial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __contains__(self, line: int) -> bool:
        """Whether a line need not be answered."""
        return self._at[line] != 0

    def add(self, line: int, version: str, answer: Answer) -> None:
        """Keep an answer, whatever becomes of this process. `version`: of its adapter."""
        if self._file is None:
            self._file = self._open()
        raw = _encode({"line": line, "version": version, "answer": answer})
        self._file.write(raw)
        self._file.flush()
        self.count += self._at[line] == 0
        self._at[line], self._end = self._end, self._end + len(raw)

    def finish(self, lines: Iterable[Line]) -> list[int]:
        """Write the output: each line's fields with its answer, in their order.

        Lines that have failed stay in the partial file too, so that the same command tries them again.

        Args:
            lines: all of them, each with an answer.

        Returns:
            Numbers of the lines that have failed.
        """
        failed = []
        beside = self.output.with_name(f".{self.output.name}.{os.getpid()}")
        answers = self._file or self._open()
        try:
            with beside.open("wb") as sorted_file:
                for line in lines:
                    answers.seek(self._at[line.number])
                    record = _decode(answers.readline())
                    if record is None or record.get("line") != line.number:
                        raise ConfigError(
                            f"{self.path} has changed while it was written: another run of this command?"
                        )
                    answer = record["answer"]
                    sorted_file.write(_encode({**line.fields, **answer}))
                    if "error" in answer:
                        failed.append(line.number)
                sorted_file.flush()
                os.fsync(sorted_file.fileno())
            os.replace(beside, self.output)
        finally:
            beside.unlink(missing_ok=True)
            self._close()
        if not failed:
            self.path.unlink(missing_ok=True)
        return failed

    def _read(self, versions: Collection[str], overwrite: bool) -> None:
        """Find the answers that are there, up to the first that is not whole."""
        with self.path.open("rb") as file:
            raw = file.readline()
            head, end = _decode(raw), len(raw)
            if head is None or head.get("format") != _FORMAT:
                if overwrite:
                    return
                raise ConfigError(
                    f"{self.path} was not written by this command. Move it away, choose another --output, or "
                    "--overwrite it."
                )
            for raw in file:
                record = _decode(raw)
                if record is None:
                    break
                if head == self._head and "error" not in record["answer"] and record["version"] in versions:
                    self._at[record["line"]] = end
                end += len(raw)
        if head == self._head:
            self._end = end
        elif end > len(_encode(head)) and not overwrite:
            raise ConfigError(
                f"{self.path} holds answers of another run: {_differences(head, self._head)}. Give what that run was "
                "given to go on with it, choose another --output, or drop its answers with --overwrite."
            )

    def _open(self) -> BinaryIO:
        """The file, ready for the next answer. Raises: ConfigError where another run has it, or has changed it."""
        if self.path.exists():
            with self.path.open("rb") as there:
                if not _locked(there):
                    raise ConfigError(
                        f"{self.path} is being written by another run of this command. Wait for its end."
                    )
        if _state(self.path) != self._seen:
            raise ConfigError(
                f"{self.path} has changed since this run began: another run of this command has written it. Begin "
                "again, and its answers count."
            )
        if not self._end:
            raw = _encode(self._head)
            beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            beside.write_bytes(raw)
            os.replace(beside, self.path)  # so that there is none without its first line
            self._end = len(raw)
        file = self.path.open("r+b")
        if not _locked(file):
            file.close()
            raise ConfigError(f"{self.path} is being written by another run of this command. Wait for its end.")
        file.truncate(self._end)
        file.seek(self._end)
        return file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _state(path: Path) -> tuple[int, ...] | None:
    """What changes with a file; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _locked(file: BinaryIO) -> bool:
    """Keep others from writing to a file until it is closed; False where somebody else does so already."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return True


def _differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    changed = [name for name, value in here["hashes"].items() if there["hashes"].get(name) != value]
    said = [f"{name} has changed" for name in changed]
    for name, value in here["options"].items():
        before = there["options"].get(name)
        if before != value:
            said.append(f"{name} was {before!r} and is {value!r}")
    return ", ".join(said)


def _encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def _decode(raw: bytes) -> dict[str, Any] | None:
    """A line of the file; None where it is not whole."""
    try:
        value = json.loads(raw) if raw.endswith(b"\n") else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
