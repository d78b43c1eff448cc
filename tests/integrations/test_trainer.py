"""Checkpoints of one run, compared in one batch: at the end of training, while it goes on, and on their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from tiny_files import build, tokenizer
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from hf_multilora import enable_multilora
from hf_multilora.errors import ConfigError, ModelError, MultiLoraError
from hf_multilora.integrations.compare import compare_checkpoints, run_checkpoints
from hf_multilora.integrations.trainer import CompareCheckpoints

TEXTS = ["the cat sat down", "a dog ran off", "one two three", "so it goes on"]
PROMPTS, REFERENCES = ["the cat", "a dog", "so"], [" sat down", " ran off", " it goes on"]


@pytest.fixture(scope="module")
def tok() -> PreTrainedTokenizerFast:
    found = tokenizer()
    found.pad_token = found.eos_token
    return found


def train(tok: Any, folder: Path, *callbacks: Any, steps: int = 6, model: Any = None, **options: Any) -> Any:
    """The trained model; a checkpoint every second step."""
    torch.manual_seed(0)
    if model is None:
        lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
        model = get_peft_model(build(), lora)
    rows = [{"input_ids": (ids := tok(text)["input_ids"]), "labels": ids} for text in TEXTS for _ in range(6)]

    def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in batch)
        return {
            name: torch.tensor([row[name] + [pad] * (longest - len(row[name])) for row in batch])
            for name, pad in (("input_ids", tok.pad_token_id), ("labels", -100))
        }

    common = {"max_steps": steps, "save_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 0.02, "seed": 0}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    arguments = TrainingArguments(output_dir=str(folder), **{**common, **quiet, **options})
    Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=collate, processing_class=tok,
        callbacks=list(callbacks),
    ).train()  # fmt: skip
    return model


@pytest.fixture(scope="module")
def run(tok: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompareCheckpoints, PeftModel]:
    folder = tmp_path_factory.mktemp("run")
    compare = CompareCheckpoints(PROMPTS, REFERENCES, max_new_tokens=5, max_loras=2)
    return folder, compare, train(tok, folder, compare)


def by_peft(tok: Any, folder: Path | None, prompt: str, reference: str) -> tuple[str, float]:
    """A checkpoint's answer and loss, by PEFT alone."""
    model = build() if folder is None else PeftModel.from_pretrained(build(), folder).eval()
    tokens, wanted = tok(prompt)["input_ids"], tok(reference, add_special_tokens=False)["input_ids"]
    out = model.generate(input_ids=torch.tensor([tokens]), max_new_tokens=5, do_sample=False)
    labels = torch.tensor([[-100] * len(tokens) + wanted])
    with torch.no_grad():
        loss = model(input_ids=torch.tensor([tokens + wanted]), labels=labels).loss
    return tok.decode(out[0, len(tokens) :], skip_special_tokens=True), float(loss)


def test_checkpoints_at_the_end_are_what_peft_says(run: Any, tok: Any) -> None:
    folder, compare, _ = run
    (found,) = compare.comparisons
    assert found.checkpoints == ["base", "checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert found.steps == [0, 2, 4, 6]
    for i, name in enumerate(found.checkpoints):
        for j, (prompt, reference) in enumerate(zip(PROMPTS, REFERENCES, strict=True)):
            text, loss = by_peft(tok, None if i == 0 else folder / name, prompt, reference)
            assert found.answers[i][j] == text
            assert found.losses[i][j] == pytest.approx(loss, rel=1e-4)
    assert found.best == "checkpoint-6" and found.mean_losses["checkpoint-6"] < found.mean_losses["base"] - 0.3


def test_training_goes_on_as_if_nobody_had_looked(run: Any, tok: Any, tmp_path: Path) -> None:
    """Dropout, optimizer, order of the data: with a look at each save, the same weights at the end."""
    compare = CompareCheckpoints(PROMPTS, REFERENCES, when="save", max_new_tokens=5, batch_size=4)
    looked = train(tok, tmp_path, compare)
    _, at_end, model = run
    assert [found.checkpoints[-1] for found in compare.comparisons] == [f"checkpoint-{step}" for step in (2, 4, 6)]
    assert compare.result.answers == at_end.result.answers  # max_loras and batch_size change no answer
    assert torch.tensor(compare.result.losses) == pytest.approx(torch.tensor(at_end.result.losses), rel=1e-4)
    weights, others = dict(model.named_parameters()), dict(looked.named_parameters())
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name
        assert weight.requires_grad == ("lora_" in name) == others[name].requires_grad
    assert looked.training and any(type(m).__name__ == "Dropout" and m.training for m in looked.modules())


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"bf16": True}], ids=lambda o: next(iter(o)))
def test_checkpointing_and_mixed_precision_survive(tok: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    looked = train(tok, tmp_path / "a", CompareCheckpoints(PROMPTS[:1], when="save", max_new_tokens=2), **options)
    plain = train(tok, tmp_path / "b", **options)
    for (name, weight), other in zip(looked.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight, other), name


def test_an_enabled_model_of_ones_own(run: Any, tok: Any, tmp_path: Path) -> None:
    served = enable_multilora(build(), max_loras=4)
    compare = CompareCheckpoints(PROMPTS, REFERENCES, model=served, max_new_tokens=5)
    train(tok, tmp_path, compare)
    assert compare.result.answers == run[1].result.answers
    assert served.multilora.adapters == {}


def test_what_an_earlier_run_left_is_not_compared(run: Any, tok: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").symlink_to(run[0] / "checkpoint-6")
    compare = CompareCheckpoints(PROMPTS, max_new_tokens=2)
    train(tok, tmp_path, compare, steps=4, save_total_limit=1)
    assert compare.result.checkpoints == ["base", "checkpoint-4"]
    assert compare.result.losses is None and compare.result.best is None


def test_what_cannot_be_lent_is_said_when_training_begins(tok: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PeftModel"):
        train(tok, tmp_path, CompareCheckpoints(PROMPTS), model=build())
    with pytest.raises(ConfigError, match="not enabled"):
        train(tok, tmp_path, CompareCheckpoints(PROMPTS, model=build()))
    other = get_peft_model(build(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(MultiLoraError, match="IA3"):
        train(tok, tmp_path, CompareCheckpoints(PROMPTS), model=other)
    with pytest.raises(ConfigError, match="'end' or 'save'"):
        CompareCheckpoints(PROMPTS, when="sometimes")
    assert not list(tmp_path.glob("checkpoint-*"))


def test_an_enabled_model_is_not_trained(tok: Any, tmp_path: Path, run: Any) -> None:
    """model.train() itself does nothing yet; a forward under an adapter says what to do, and eval() undoes it."""
    model = enable_multilora(build(), max_loras=1)
    model.multilora.load(run[0] / "checkpoint-2", "a")
    inputs = tok("the", return_tensors="pt")
    before = model(**inputs, adapter_ids="a").logits
    model.train()
    with pytest.raises(ModelError, match=r"model\.eval\(\)"):
        model(**inputs, adapter_ids="a")
    with pytest.raises(ModelError, match=r"model\.eval\(\)"):
        compare_checkpoints(model, tok, run[0], PROMPTS)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()  # the base itself can still be trained
    model.eval()
    assert torch.equal(model(**inputs, adapter_ids="a").logits, before)


def test_folders_chats_and_what_is_there_before(run: Any, tok: Any, tmp_path: Path) -> None:
    folder = run[0]
    model = enable_multilora(build(), max_loras=2)
    two = folder / "checkpoint-2"
    model.multilora.load(two, str(two))
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    found = compare_checkpoints(
        model, tok, [two, folder / "checkpoint-6"], chats, include_base=False, max_new_tokens=5
    )
    assert found.prompts == PROMPTS and found.checkpoints == ["checkpoint-2", "checkpoint-6"]
    text = tok.apply_chat_template(chats[1], tokenize=False, add_generation_prompt=True)
    assert found.answers[1][1] == by_peft(tok, folder / "checkpoint-6", text, " ran")[0]
    assert set(model.multilora.adapters) == {str(two)}
    assert json.loads(json.dumps(found.to_dict()))["steps"] == [2, 6]
    (tmp_path / "other").symlink_to(folder)
    both = compare_checkpoints(model, tok, [two, tmp_path / "other" / "checkpoint-2"], PROMPTS[:1], max_new_tokens=1)
    assert both.checkpoints == ["base", f"{folder.name}/checkpoint-2", "other/checkpoint-2"]
    assert both.steps == [0, 2, 2]
    assert found.answers[1][1].strip() in str(found) and "<table" in found._repr_html_()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"prompts": []}, ConfigError, "at least one"),
        ({"prompts": "the cat"}, ConfigError, "list"),
        ({"references": ["x"]}, ConfigError, "1 references for 3"),
        ({"checkpoints": []}, ConfigError, "empty"),
        ({"checkpoints": "nowhere"}, ConfigError, "no checkpoint-"),
        ({"model": None}, ModelError, "enable_multilora"),
    ],
)
def test_arguments_that_make_no_sense(run: Any, tok: Any, change: dict, error: type[Exception], words: str) -> None:
    model = enable_multilora(build(), max_loras=1)
    common = {"model": model, "tokenizer": tok, "checkpoints": run[0], "prompts": PROMPTS}
    with pytest.raises(error, match=words):
        compare_checkpoints(**{**common, **change})


def test_nothing_stays_of_a_checkpoint_that_cannot_be_loaded(run: Any, tok: Any, tmp_path: Path) -> None:
    broken = tmp_path / "checkpoint-9"
    broken.mkdir()
    (broken / "adapter_config.json").write_text((run[0] / "checkpoint-2" / "adapter_config.json").read_text())
    model = enable_multilora(build(), max_loras=1)
    with pytest.raises(Exception, match="checkpoint-9"):
        compare_checkpoints(model, tok, [run[0] / "checkpoint-2", broken], PROMPTS)
    assert model.multilora.adapters == {}


def test_checkpoint_folders_load_as_they_are(run: Any) -> None:
    """With the optimizer's state and the Trainer's own files in them."""
    for step, folder in run_checkpoints(run[0]).items():
        assert {"optimizer.pt", "trainer_state.json"} <= {file.name for file in folder.iterdir()}
        report = enable_multilora(build(), max_loras=1).load_adapter(str(folder), adapter_name=f"step-{step}")
        assert report.rank == 4 and len(report.modules) == 4


def test_trl(tok: Any, tmp_path: Path) -> None:
    """SFTTrainer makes the PeftModel itself."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    compare = CompareCheckpoints(PROMPTS, REFERENCES, max_new_tokens=4)
    arguments = SFTConfig(
        output_dir=str(tmp_path), max_steps=2, save_steps=1, per_device_train_batch_size=2, report_to=[],
        disable_tqdm=True, use_cpu=True, bf16=False, max_length=32,
    )  # fmt: skip
    SFTTrainer(
        model=build(), args=arguments, train_dataset=Dataset.from_list([{"text": text} for text in TEXTS]),
        processing_class=tok, peft_config=LoraConfig(r=2, target_modules=["q_proj"]), callbacks=[compare],
    ).train()  # fmt: skip
    assert compare.result.checkpoints == ["base", "checkpoint-1", "checkpoint-2"]
    assert len(compare.result.losses[2]) == 3
