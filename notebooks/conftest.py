"""Notebooks run as tests: `pytest --nbmake notebooks`. They use the demo's base model, and one thread each."""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = ["*.py"]  # to look for doctests in the scripts would run them


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path.suffix != ".ipynb":
        return
    from hf_multilora.demo.model import DemoModelError, demo_model_path

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the kernel, which shares its cores with other tests
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        demo_model_path()
    except DemoModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the demo's base model is not available: {error}")
