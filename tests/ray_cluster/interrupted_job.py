"""The job in a process of its own, slowly, so that it can be killed in the middle: FILES ROWS OUT as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray_bed import run_job

from hf_multilora.integrations.ray import MultiLoraPredictor


class Slow(MultiLoraPredictor):
    def __call__(self, batch: Any) -> Any:
        time.sleep(0.3)
        return super().__call__(batch)


if __name__ == "__main__":
    address, files, asked, out = json.loads(sys.argv[1])
    ray.init(address=address, log_to_driver=False)
    run_job(files, asked, Path(out), Slow)
