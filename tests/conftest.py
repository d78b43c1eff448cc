"""Shared by all tests: threads, Triton's interpreter, and tests that need a GPU or the demo's base model."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
MANAGED = {"continuous", "generate_command", "server"}  # folders whose tests start and stop managers

# Files whose tests take long: they come first, so that no process ends with one of them while others wait.
LONG = {"test_wheel.py", "test_examples.py", "test_ray_data.py", "test_kernels_compile.py", "test_demo.py"}

# Tiny models gain nothing from threads, and two processes with two threads each on two cores take ten times as long;
# so do processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# Triton reads this when a kernel is decorated, so it must be set before any module with kernels is imported.
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# oneDNN's kernels for AMX let a NaN of one row into the row before it where the width is no multiple of 32 (bf16, 80
# columns, say), in any nn.Linear. Read at its first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# No test asks a hub for anything by accident: what needs a network is the demo's model, and that comes another way.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: one more than cores, since many tests wait for a process of their own."""
    return (os.cpu_count() or 1) + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="only every N-th test, from the I-th on; for several processes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if shard := config.getoption("--shard"):
        first, of = map(int, shard.split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % of != first])
        items[:] = items[first::of]
    items.sort(key=lambda item: item.path.name not in LONG)
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What has been imported by now, a million objects, stays: no collection of garbage need go through it. Of those
    that go through all the others there are fewer: compilers make many objects that stay for a while."""
    gc.freeze()
    gc.set_threshold(700, 10, 100)


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "needs a CUDA device" in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} GPU tests skipped: needs a CUDA device", yellow=True)


@pytest.fixture(scope="session", autouse=True)
def _messages_reach_caplog() -> None:
    """transformers' logger, which the package's are below, hands on what it is told only where CI is set."""
    from transformers.utils import logging

    logging.enable_propagation()


@pytest.fixture(autouse=True)
def _same_verbosity() -> Iterator[None]:
    """What a test, or a command that it calls, makes of transformers' verbosity ends with it."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo's base model; downloads and converts it on first use.

    Without a network the tests that ask for it are skipped, except in CI: there that is a failure.
    """
    from hf_multilora.demo.model import DemoModelError, demo_model_path

    try:
        return demo_model_path()
    except DemoModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the demo's base model is not available: {error}")


def _managed(item: pytest.Item | None) -> bool:
    return item is not None and not MANAGED.isdisjoint(item.path.parts)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Managers of continuous batching collect garbage when they stop: what is there before such a test is left out."""
    if _managed(item):
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last of them, the collector looks at everything once, and then again only at what is new."""
    if _managed(item) and not _managed(nextitem):
        gc.unfreeze()
        gc.collect()
        gc.freeze()
