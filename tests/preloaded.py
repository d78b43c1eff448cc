"""Runs scripts as `python SCRIPT` does, each in a process of its own, which begins with the large imports done.

Importing torch, transformers and PEFT takes longer than what most scripts do. multiprocessing's fork server imports
them once for all tests of this process; for each script it forks. Where there is none, Python is started anew.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
MODULES = ["hf_multilora", "hf_multilora.demo", "peft", "transformers.pipelines"]


class Forked:
    """A script's process, with what tests need of Popen's."""

    def __init__(self, script: Path, env: dict[str, str], err: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(MODULES)
        self._script = str(script)
        reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=_become, args=(self._script, env, writer, err))
        self._process.start()
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace")
        reader.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float) -> str:
        """What it has yet to print, once it has ended; it is killed where that takes longer than `timeout` seconds."""
        late = threading.Event()
        timer = threading.Timer(timeout, lambda: (late.set(), self.kill()))
        timer.start()
        try:
            said = self.stdout.read()
            self._process.join()
        finally:
            timer.cancel()
        if late.is_set():
            raise subprocess.TimeoutExpired(self._script, timeout, said)
        return said

    def kill(self) -> None:
        self._process.kill()


def run(script: Path, env: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """What it printed and how it ended."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        command = [sys.executable, str(script)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    with tempfile.TemporaryDirectory() as folder:
        err = Path(folder, "err")
        process = Forked(script, env, err)
        try:
            said = process.communicate(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess([str(script)], process.returncode, said, err.read_text())


def _become(script: str, env: dict[str, str], writer: Any, err: Path) -> None:
    """Be the process of a script, to its end."""
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(writer.fileno(), 1)
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    writer.close()
    import torch

    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    sys.argv = [script]
    own = [path for path in sys.path if TESTS not in (Path(path), *Path(path).parents)]  # not those of the tests
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(Path(script).parent), *given, *own]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
