"""One job: from a file of prompts to a file of answers, and on from where it was interrupted."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ..api import enable_multilora
from ..base_model import check_dtype, load_base, load_tokenizer
from ..config import MultiLoraConfig
from ..errors import ConfigError, ModelError
from ..report import abridge, count, describe
from .adapters import Adapters, model_version
from .answers import Sampling, answering
from .lines import Lines
from .partial import Partial
from .prompts import check_template

Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class Job:
    """What is to be done.

    Args:
        model: folder or hub id.
        source: file of prompts (see `lines`); "-" is stdin.
        output: file of answers.
        adapters: folder whose sub-folders are adapters.
        overwrite: replace an output that exists, and answers of other settings.
        dtype, device, offline: see `load_base`.
        slots: options of enable_multilora.
        batching: see `answers`.
    """

    model: str
    source: str
    output: Path
    adapters: Path | None = None
    overwrite: bool = False
    sampling: Sampling = Sampling()
    dtype: str = "auto"
    device: str | None = None
    offline: bool = False
    slots: dict[str, Any] = field(default_factory=dict)
    batching: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """What was done.

    Args:
        requests: lines of the input.
        resumed: those of them that an earlier run had answered.
        failed: numbers of the lines without an answer.
        new_tokens: of this run.
        seconds: that it took, without loading the model.
    """

    requests: int
    resumed: int
    failed: list[int]
    new_tokens: int
    seconds: float
    output: str

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "failed": len(self.failed), "tokens_per_s": round(self.tokens_per_s, 1)}

    def __str__(self) -> str:
        rows = [
            ("tokens", f"{self.new_tokens} new, {self.tokens_per_s:.1f} a second"),
            ("time", f"{self.seconds:.1f} s"),
        ]
        if self.resumed:
            rows.append(("resumed", f"{count(self.resumed, 'line')} of an earlier run"))
        if self.failed:
            lines = abridge([str(number) for number in self.failed])
            rows.append(("failed", f'{count(len(self.failed), "line")}: {lines}. Their "error" says why.'))
            rows.append(("", "The same command tries them again, and keeps the others."))
        return describe(f"{count(self.requests, 'line')}: {self.output}", rows)


def run(job: Job, progress: Progress) -> Summary:
    """Do a job.

    Args:
        progress: called with what is being done, how far, of how much (0: nobody knows), and a note.

    Raises:
        ConfigError: the input, the output or an option cannot be served; nothing was loaded or written.
        ModelError: the model cannot be loaded, or generation ended.
        KeyboardInterrupt: with a message that says what is kept.
    """
    check_dtype(job.dtype)
    MultiLoraConfig(**job.slots)
    _check_output(job)
    adapters = Adapters(job.adapters, job.offline)
    with _opened(job.source) as file:
        lines = Lines(file, "<stdin>" if job.source == "-" else job.source, adapters.find)
        depends = _options(job), {"the input": lines.sha256, "the model's folder": model_version(job.model)}
        with Partial(job.output, *depends, adapters.versions(), lines.last, job.overwrite) as partial:
            began, new = time.perf_counter(), 0
            try:
                if partial.count < lines.count:
                    began, new = _answer(job, lines, adapters, partial, progress)
                failed = partial.finish(lines)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"{partial.count} of {count(lines.count, 'line')} answered. The same command goes on from there "
                    f"({partial.path})."
                ) from None
    seconds = round(time.perf_counter() - began, 3)
    return Summary(lines.count, partial.kept, failed, new, seconds, str(job.output))


def _check_output(job: Job) -> None:
    """Raises: ConfigError for a place where no answers can be put."""
    if not job.output.parent.is_dir():
        raise ConfigError(f"--output {job.output}: there is no folder {job.output.parent}.")
    if job.output.exists() and not job.output.is_file():
        raise ConfigError(f"--output {job.output}: no file.")
    if job.output.exists() and job.source != "-" and Path(job.source).exists() and job.output.samefile(job.source):
        raise ConfigError(f"--output {job.output} is the input. Choose another.")


def _options(job: Job) -> dict[str, Any]:
    """Those that all answers depend on."""
    folder = Path(job.model)
    name = str(folder.resolve()) if folder.is_dir() else job.model
    return {"model": name, "dtype": job.dtype, **asdict(job.sampling)}


@contextmanager
def _opened(source: str) -> Iterator[BinaryIO]:
    """The input, seekable. Raises: ConfigError where there is none."""
    with ExitStack() as stack:
        try:
            given = sys.stdin.buffer if source == "-" else stack.enter_context(open(source, "rb"))
        except OSError as error:
            raise ConfigError(f"{source} cannot be read: {error.strerror}.") from error
        if given.seekable():
            yield given
        else:
            copy = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(given, copy)
            yield copy


def _answer(job: Job, lines: Lines, adapters: Adapters, partial: Partial, progress: Progress) -> tuple[float, int]:
    """Answer the lines that are left. Returns `time.perf_counter()` of the beginning, and the number of new tokens."""
    progress("Loading the base model", 0, 0, "")
    tokenizer = load_tokenizer(job.model, job.offline)
    if job.sampling.chat or lines.chats:
        check_template(tokenizer, job.model)
    model = enable_multilora(load_base(job.model, job.dtype, job.device, job.offline), **job.slots)
    began, new = time.perf_counter(), 0
    left = (line for line in lines if line.number not in partial)
    with answering(model, tokenizer, job.sampling, job.batching) as thread:
        try:
            for line, answer in thread.answers(left, adapters.find):
                partial.add(line.number, adapters.find(line.adapter).version, answer)
                new += answer.get("tokens", 0)
                rate = new / (time.perf_counter() - began)
                loaded = count(len(model.multilora.store.names()), "adapter")
                note = f"{partial.count}/{lines.count}, {rate:,.0f} tokens/s, {loaded}"
                progress("Answering", partial.count, lines.count, note)
        except ModelError as error:
            raise ModelError(f"{error} Answers so far are kept: the same command goes on from there.") from error
    return began, new
