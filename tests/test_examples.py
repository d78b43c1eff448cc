"""Every example runs as it is, in a process of its own, and is listed in the examples' README."""

from __future__ import annotations

import os
from pathlib import Path

import preloaded
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "common.py")

EXPECTED = {  # what the answers of the demo's adapters, or the models' own figures, must contain
    "mixed_batch.py": [
        "NEGATIVE",
        "Me brother has a house an' a boat. Arrr!",
        '{"answer": "The capital of Germany is',
    ],
    "weighted_mixes.py": ["Arrr!", '{"answer":', "pirate*0.8"],
    "static_cache.py": ["Avast! Th' lad found th' barnacled map. Arrr!", "The capital of France is Paris."],
    "more_adapters_than_slots.py": ["POSITIVE", "Arrr!", '{"answer":', "2 of 2 slots in use"],
    "continuous_batching.py": [
        "Me brother has a house an' a boat. Arrr!",
        "POSITIVE",
        '{"answer": "The house and the boat are both in the house."}',
        "0 requests running on 0 slots",
    ],
    "prefetch_and_pin.py": ["Avast! Th' lad found th' barnacled map. Arrr!", "NEGATIVE"],
    "use_context.py": ["Arrr!", "The capital of France is Paris.", '{"answer": "The capital of France is Paris."}'],
    "seq2seq.py": ["summary", "bare"],
    "accelerate_split.py": [
        "0 sentiment | NEGATIVE",
        "0 pirate | Me brother has a house an' a boat. Arrr!",
        '{"answer": "The capital of Germany is',
        "0 None | The capital of Germany is Berlin.",
    ],
    "ray_data.py": [
        "sentiment | NEGATIVE",
        "pirate | Me brother has a house an' a boat. Arrr!",
        "no adapter 'no-such-adapter'",
        "0 rows left",
    ],
    "ray_serve.py": [
        "Me brother has a house an' a boat. Arrr!  (there before: false)",
        "Me brother has a house an' a boat. Arrr!  (there before: true)",
        "The capital of Germany is Berlin.",
    ],
    "from_peft_model.py": ["LlamaForCausalLM ['first', 'second']", "PEFT as before: True"],
}


def needs_model(name: str) -> list[pytest.MarkDecorator]:
    text = (EXAMPLES / name).read_text()
    return [pytest.mark.demo_model] if "base_model()" in text or "demo_model_path()" in text else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_model(name)) for name in SCRIPTS])
def test_example(name, request):
    if request.node.get_closest_marker("demo_model"):
        request.getfixturevalue("demo_model")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if name.startswith("ray_"):
        pytest.importorskip("ray")
        env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # as in ray_cluster
    done = preloaded.run(EXAMPLES / name, env, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    for text in EXPECTED[name]:
        assert text in done.stdout


def test_every_example_is_listed_and_expected():
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in listed for name in SCRIPTS)
    assert set(SCRIPTS) == set(EXPECTED)
