"""Of all tests: how many processes run them, and which modules are read for doctests."""

import os
from importlib.util import find_spec

# Modules of optional integrations, where what they need is installed.
collect_ignore = [] if find_spec("lm_eval") else ["hf_multilora/integrations/lm_eval.py"]


def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: one more than cores, since many tests wait for a process of their own."""
    return (os.cpu_count() or 1) + 1
