"""Ranks of a tensor-parallel model, each a process: they play a scene of `scenes`, and what they found is JSON.

On GPUs they talk by NCCL, a GPU for each. Where there are fewer GPUs, all share the first one and talk by gloo.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
WAIT_S = 240


def start(
    scene: str, *arguments: str, ranks: int = 2, device: str = "cpu", file: str = "scenes.py"
) -> list[subprocess.Popen[str]]:
    """Start the ranks; they end by themselves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = device == "cuda" and torch.cuda.device_count() >= ranks
    processes = []
    for rank in range(ranks):
        local = rank if own or device == "cpu" else 0
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(ranks)}
        env["TP_BACKEND"] = "nccl" if own else "gloo"
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "TP_DEVICE": device}
        env["PYTHONPATH"] = os.pathsep.join(
            [str(HERE), str(HERE.parent), *env.get("PYTHONPATH", "").split(os.pathsep)]
        )
        command = [sys.executable, str(HERE / file), scene, *arguments]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return processes


def play(
    scene: str, *arguments: str, ranks: int = 2, device: str = "cpu", file: str = "scenes.py"
) -> list[dict[str, Any]]:
    """What each rank found; fails where one of them does."""
    with tempfile.TemporaryDirectory() as folder:
        processes = start(scene, *arguments, folder, ranks=ranks, device=device, file=file)
        try:
            said = [process.communicate(timeout=WAIT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, process in enumerate(processes):
            assert process.returncode == 0, f"rank {rank}: {process.returncode}\n{said[rank][-4000:]}"
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
