"""Runs scripts as `python SCRIPT` does, each in a process of its own, which begins with the large imports done.

Importing torch, transformers and PEFT takes longer than what most scripts do. A server process imports them once; for
each script it forks. Where there is no fork, Python is started anew.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

MODULES = ("hf_multilora", "hf_multilora.demo", "peft", "transformers.pipelines")


class Preloaded:
    """A server of scripts; end it with `close`.

    Args:
        env: environment of the scripts.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self._env, self._server = env, None
        if hasattr(os, "fork"):
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._server = subprocess.Popen([sys.executable, __file__], env=env, text=True, bufsize=1, **pipes)

    def run(self, script: Path, timeout: float) -> subprocess.CompletedProcess[str]:
        """What it printed and how it ended; the server ends with a script that takes longer than `timeout` seconds."""
        if self._server is None:
            command = [sys.executable, str(script)]
            return subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=timeout)
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            assert self._server.stdin is not None and self._server.stdout is not None
            asked = {"script": str(script), "out": str(out), "err": str(err), "timeout": timeout}
            self._server.stdin.write(json.dumps(asked) + "\n")
            code = self._server.stdout.readline()
            said = [file.read_text() if file.exists() else "" for file in (out, err)]
            assert code, f"{script.name} took more than {timeout} s, or ended the process that it was forked from"
            return subprocess.CompletedProcess([str(script)], int(code), *said)

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.communicate()


def serve() -> None:
    """For each line with a script, fork, and print how it ended."""
    import importlib
    import signal

    sys.path.pop(0)  # of this file
    for name in MODULES:
        importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(asked)
        signal.signal(signal.SIGALRM, lambda *_, pid=child: (os.kill(pid, signal.SIGKILL), os._exit(1)))
        signal.alarm(int(asked["timeout"]))
        _, status = os.waitpid(child, 0)
        signal.alarm(0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(asked: dict[str, Any]) -> None:
    """Be the process of a script, to its end."""
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [asked["script"]]
    sys.path.insert(0, str(Path(asked["script"]).parent))
    code = 0
    try:
        runpy.run_path(asked["script"], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        import threading

        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
