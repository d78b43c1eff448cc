"""Messages and progress bars obey transformers' switches."""

from __future__ import annotations

import io
import logging as standard
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tiny_files import build, write_adapter
from transformers.utils import logging

import hf_multilora
from hf_multilora import enable_multilora, terminal

PACKAGE = Path(hf_multilora.__file__).parent


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield
    logging.set_verbosity(verbosity)
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()


@pytest.fixture
def heard() -> Iterator[io.StringIO]:
    """What a handler of transformers' gets."""
    text = io.StringIO()
    handler = standard.StreamHandler(text)
    logging.add_handler(handler)
    yield text
    logging.remove_handler(handler)


@pytest.mark.parametrize(
    "name", ["hf_multilora.generation.words", "hf_multilora.server.app", "hf_multilora.new.module"]
)
def test_verbosity(name: str, heard: io.StringIO) -> None:
    logger = standard.getLogger(name)
    logging.set_verbosity_error()
    logger.warning("hidden")
    logging.set_verbosity_warning()
    logger.info("hidden as well")
    logger.warning("seen")
    logging.set_verbosity_info()
    logger.info("seen, too")
    assert heard.getvalue().splitlines() == ["seen", "seen, too"]


def test_a_level_of_its_own_counts(heard: io.StringIO) -> None:
    own = standard.getLogger("hf_multilora")
    own.setLevel("ERROR")
    try:
        standard.getLogger("hf_multilora.memory.store").warning("hidden")
    finally:
        own.setLevel(standard.NOTSET)
    standard.getLogger("hf_multilora.memory.store").warning("seen")
    assert heard.getvalue() == "seen\n"


SAID = """
import logging, sys
from pathlib import Path
from tiny_files import build, write_adapter
from hf_multilora import enable_multilora
model = enable_multilora(build(), max_loras=1, max_lora_rank=16)
model.load_adapter(write_adapter(Path(sys.argv[1]), 1), adapter_name="a")
logging.getLogger("hf_multilora").error("an error is said")
"""


def test_the_environment_variable(tmp_path: Path) -> None:
    """In a process of its own, where transformers reads it."""
    paths = os.pathsep.join([str(Path(__file__).parent), str(PACKAGE.parent)])
    env = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", SAID, str(tmp_path)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "an error is said" in done.stderr and "does not activate it" not in done.stderr


@pytest.mark.parametrize("shown", [True, False])
def test_the_bar_of_load_many(shown: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    model = enable_multilora(build(), max_loras=1, max_lora_rank=16)
    model.multilora.load_many({name: write_adapter(tmp_path / name, 1) for name in "ab"})
    assert ("Loading adapters" in capsys.readouterr().err) == shown


@pytest.mark.parametrize("shown", [True, False])
def test_the_command_line_s_bar(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(terminal, "notes", Console(file=text, force_terminal=True, width=100))
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    with terminal.progress() as show:
        show("Reading", 1, 2)
    assert ("Reading" in text.getvalue()) == shown


def test_nothing_warns_by_other_ways() -> None:
    """`print` is for what a command was asked for; `warnings.warn` has other switches."""
    printing = {"terminal.py", "cli.py", "results.py", "app.py", "registered.py"}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "warnings.warn(" not in text, path
        assert path.name in printing or " print(" not in text, path
