"""One pass of lm-evaluation-harness over many adapters gives what the harness says of each alone.

Skipped where lm_eval is not installed: pip install -c constraints.txt -e '.[lm-eval]'
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from enabled import Calls
from tiny_files import build, tokenizer, version
from transformers import PreTrainedModel

from hf_multilora import enable_multilora
from hf_multilora.errors import ConfigError, ModelError

try:
    import lm_eval
except ImportError:
    lm_eval = None

needs = pytest.mark.skipif(lm_eval is None, reason="needs lm_eval, the extra lm-eval")
IDS = {"one": "one", "base": None, "two": "two", "mix": {"one": 0.5, "two": 0.5}}
DOCS = [
    {"question": "the sky is", "choices": [" blue", " green", " r"], "label": 0},
    {"question": "a cat says", "choices": [" meow", " w", " moo"], "label": 1},
    {"question": "two and two", "choices": [" x", " y", " z"], "label": 2},
    {"question": "go", "choices": [" on", " off", " up"], "label": 0},
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = enable_multilora(build(), max_loras=2, max_lora_rank=16)
    for name, number in (("one", 1), ("two", 2)):
        tensors, config = version(number)
        model.multilora.load(tensors, name, config=config)
    return model


@pytest.fixture(scope="module")
def tok() -> Any:
    found = tokenizer()
    found.pad_token = found.eos_token
    return found


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A multiple choice, a rolling likelihood and a text to generate, from a file."""
    data = tmp_path_factory.mktemp("data") / "docs.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCS)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data), "train": str(data)}},
        "test_split": "test",
        "fewshot_split": "train",
    }
    mean = {"aggregation": "mean", "higher_is_better": True}
    return [
        {
            **common, "task": "choose", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}", "doc_to_target": "label", "target_delimiter": "",
            "metric_list": [{"metric": "acc", **mean}],
        },
        {
            **common, "task": "roll", "output_type": "loglikelihood_rolling", "doc_to_text": "",
            "doc_to_target": "{{question}} {{choices}} " + "and so on " * 10,
            "metric_list": [{"metric": "byte_perplexity"}],
        },
        {
            **common, "task": "write", "output_type": "generate_until", "doc_to_text": "{{question}}",
            "doc_to_target": "{{choices[label]}}", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
            "metric_list": [{"metric": "exact_match", **mean}],
        },
    ]  # fmt: skip


class Through:
    """The model as the harness would see it with one adapter only."""

    def __init__(self, model: PreTrainedModel, adapter_id: Any) -> None:
        self._model, self._id = model, adapter_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, adapter_ids=self._id, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.generate(*args, adapter_ids=self._id, **kwargs)


def answers(result: dict[str, Any]) -> dict[str, list[Any]]:
    """Each task's raw answers, in the order of its documents."""
    return {task: [sample["resps"] for sample in samples] for task, samples in result["samples"].items()}


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel, tok: Any, tasks: Any) -> dict[str, Any]:
    """What the harness says of each adapter, by its own class and one adapter at a time."""
    from lm_eval.models.huggingface import HFLM

    found = {}
    for name, adapter_id in IDS.items():
        # lm_eval 0.4.13 with its logits_cache sums windows of a rolling likelihood wrongly in batches of 3.
        one = HFLM(
            pretrained=Through(model, adapter_id), tokenizer=tok, backend="causal", batch_size=3, max_length=64,
            logits_cache=False,
        )  # fmt: skip
        found[name] = lm_eval.simple_evaluate(model=one, tasks=tasks, num_fewshot=1, bootstrap_iters=0)
    assert len({str(answers(result)["roll"]) for result in found.values()}) == len(IDS), "they answer differently"
    return found


@needs
@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_each_adapter_gets_what_the_harness_says_of_it_alone(
    model: PreTrainedModel, tok: Any, tasks: Any, alone: dict[str, Any], batch_size: int
) -> None:
    from hf_multilora.integrations.lm_eval import MultiLoraLM

    lm = MultiLoraLM(model, tok, IDS, batch_size=batch_size, max_length=64)
    found = lm.evaluate(tasks, num_fewshot=1, bootstrap_iters=0)
    assert list(found) == list(IDS)
    for name, expected in alone.items():
        ours, theirs = answers(found[name]), answers(expected)
        assert ours["write"] == theirs["write"]
        for kind in ("choose", "roll"):
            assert flat(ours[kind]) == pytest.approx(flat(theirs[kind]), rel=1e-4)
        for task in ("choose", "roll", "write"):
            mine, other = numbers(found[name]["results"][task]), numbers(expected["results"][task])
            assert mine and mine == pytest.approx(other, rel=1e-4)


def numbers(result: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in result.items() if isinstance(value, (int, float))}


def flat(value: Any) -> list[float]:
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in flat(part)]
    return [float(value)]


@needs
def test_one_pass(model: PreTrainedModel, tok: Any, tasks: Any) -> None:
    """All adapters' rows share batches: as few forwards as their rows together need."""
    from hf_multilora.integrations.lm_eval import MultiLoraLM

    lm = MultiLoraLM(model, tok, ["one", "two"], batch_size=64, max_length=64)
    with Calls(model) as calls:
        lm.evaluate(tasks[:1], bootstrap_iters=0, limit=2)
    assert len(calls) == 1
    assert calls.rows == [2 * 6]  # two adapters, two documents of three choices


@needs
def test_alone_and_not_alone(model: PreTrainedModel, tok: Any, tasks: Any) -> None:
    from hf_multilora.integrations.lm_eval import MultiLoraLM

    one = MultiLoraLM(model, tok, "one", max_length=64)
    plain = lm_eval.simple_evaluate(model=one, tasks=tasks[:1], bootstrap_iters=0)
    assert answers(plain) == answers(one.evaluate(tasks[:1], bootstrap_iters=0)["one"])
    several = MultiLoraLM(model, tok, ["one", None], max_length=64)
    with pytest.raises(ModelError, match="evaluate"):
        lm_eval.simple_evaluate(model=several, tasks=tasks[:1])


@needs
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"adapters": []}, ConfigError, "empty"),
        ({"adapters": ["one", "one"]}, ConfigError, "twice"),
        ({"batch_size": "auto"}, ConfigError, "batch_size"),
        ({"model": None}, ModelError, "enable_multilora"),
    ],
)
def test_arguments(model: PreTrainedModel, tok: Any, change: Any, error: type[Exception], words: str) -> None:
    from hf_multilora.integrations.lm_eval import MultiLoraLM

    with pytest.raises(error, match=words):
        MultiLoraLM(**{"model": model, "tokenizer": tok, "adapters": ["one"], **change})


@needs
def test_options_that_would_mix_answers_up(model: PreTrainedModel, tok: Any, tasks: Any) -> None:
    from hf_multilora.integrations.lm_eval import MultiLoraLM

    with pytest.raises(ConfigError, match="use_cache"):
        MultiLoraLM(model, tok, ["one"]).evaluate(tasks, use_cache="file")


def test_without_the_harness_the_error_names_the_extra(tmp_path: Path) -> None:
    """Whether it is installed or not: a package of that name that cannot be imported comes first."""
    (tmp_path / "lm_eval.py").write_text("raise ImportError('no', name='lm_eval')")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import hf_multilora.integrations.lm_eval"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "needs lm_eval: pip install 'hf-multilora[lm-eval]'" in done.stderr
