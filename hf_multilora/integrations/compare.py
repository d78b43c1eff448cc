"""The checkpoints of one training run, side by side: every prompt through each of them, in one batch.

model = enable_multilora(AutoModelForCausalLM.from_pretrained(base))
compare_checkpoints(model, tokenizer, "run", prompts=["The bicycle arrived late."], references=["NEGATIVE"])
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..display import Shown, Table
from ..errors import AdapterNotFoundError, ConfigError, ModelError
from ..generation.mixin import MultiLoraMixin
from ..report import count

BASE = "base"


@dataclass(repr=False)
class Comparison(Shown):
    """Answers, and where references were given losses, of each checkpoint; the base model comes first where asked for.

    Attributes:
        checkpoints: their names: "base", "checkpoint-10", ...; where there are several runs, "run/checkpoint-10" or
            the whole path.
        steps: the number in each name, 0 for the base, None where there is none.
        prompts: as text (chats as their last message).
        answers: `[checkpoint][prompt]`.
        losses: `[checkpoint][prompt]`, nats a token of the reference after the prompt; None without references.
    """

    checkpoints: list[str]
    steps: list[int | None]
    prompts: list[str]
    answers: list[list[str]]
    losses: list[list[float]] | None = None

    @property
    def mean_losses(self) -> dict[str, float]:
        """Mean over the prompts for each checkpoint; empty without references."""
        losses = self.losses or []
        return {name: sum(row) / len(row) for name, row in zip(self.checkpoints, losses, strict=False)}

    @property
    def best(self) -> str | None:
        """The checkpoint with the lowest mean loss; None without references."""
        means = self.mean_losses
        return min(means, key=means.__getitem__) if means else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _title(self) -> str:
        best = f", lowest loss: {self.best}" if self.best else ""
        return f"{count(len(self.checkpoints), 'checkpoint')}, {count(len(self.prompts), 'prompt')}{best}"

    def _tables(self) -> list[Table]:
        rows = [(prompt, *(answers[i].strip() for answers in self.answers)) for i, prompt in enumerate(self.prompts)]
        if self.losses is not None:
            rows.append(("mean loss", *(f"{loss:.3f}" for loss in self.mean_losses.values())))
        return [Table(self._title(), ("prompt", *self.checkpoints), rows)]


def _names(ids: Sequence[str | None]) -> list[str]:
    """As much of each path's end as tells them apart.

    Example:
        >>> _names([None, "a/run/checkpoint-1", "a/run/checkpoint-2"])
        ['base', 'checkpoint-1', 'checkpoint-2']
        >>> _names(["a/run/checkpoint-1", "b/run/checkpoint-1"])
        ['a/run/checkpoint-1', 'b/run/checkpoint-1']
    """
    for parts in (1, 2, 0):
        names = [BASE if name is None else os.path.join(*Path(name).parts[-parts:]) for name in ids]
        if len(set(names)) == len(names):
            break
    return names


def run_checkpoints(run: str | os.PathLike[str]) -> dict[int, Path]:
    """The `checkpoint-STEP` folders of a Trainer's output folder by their steps, the smallest first.

    Raises:
        ConfigError: there is none with an adapter in it.
    """
    found = {}
    for folder in Path(run).glob("checkpoint-*"):
        step = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if step and (folder / "adapter_config.json").is_file():
            found[int(step[1])] = folder
    if not found:
        raise ConfigError(f"{os.fspath(run)!r} holds no checkpoint-* folder with an adapter_config.json.")
    return dict(sorted(found.items()))


def compare_checkpoints(
    model: Any,
    tokenizer: Any,
    checkpoints: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    references: Sequence[str] | None = None,
    *,
    include_base: bool = True,
    max_new_tokens: int = 32,
    batch_size: int | None = None,
    **generate_options: Any,
) -> Comparison:
    """Answer every prompt through every checkpoint, all rows in one batch (in waves where the slots are fewer).

    Checkpoints are registered under their paths for the time of this call; what was registered before stays.

    Args:
        model: an enabled decoder-only model.
        tokenizer: of the model; sides of padding are chosen here.
        checkpoints: a Trainer's output folder, all of whose `checkpoint-*` are taken; or a list of adapter folders.
        prompts: texts, or chats (lists of messages), which the tokenizer's template makes a text of.
        references: the answer wanted for each prompt; gives losses.
        include_base: also answer through the base model.
        batch_size: the most rows of a batch (None: no limit).
        generate_options: for generate(), greedy if nothing else is said.

    Raises:
        ModelError: the model is not enabled, or in training mode.
        ConfigError: no prompts, no checkpoints, or another number of references.
        AdapterFormatError, AdapterMatchError, ...: a checkpoint that cannot be loaded; see `load`.
    """
    folders = _folders(checkpoints)
    _check(model, prompts, references)
    handle = model.multilora
    ids: list[str | None] = [*([None] if include_base else []), *(os.fspath(folder) for folder in folders)]
    mine = [name for name in ids if name is not None and name not in handle.adapters]
    try:
        for name in mine:
            handle.load(name)
        rows = _Rows(model, tokenizer, prompts, batch_size)
        answers = rows.answers(ids, {"max_new_tokens": max_new_tokens, "do_sample": False, **generate_options})
        losses = rows.losses(ids, references) if references is not None else None
    finally:
        for name in mine:
            with suppress(AdapterNotFoundError):  # where loading it has failed
                handle.unload(name)
    names = _names(ids)
    steps = [0 if name is None else _step(name) for name in ids]
    shown = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
    return Comparison(names, steps, shown, answers, losses)


def _folders(checkpoints: Any) -> list[Path]:
    if isinstance(checkpoints, (str, os.PathLike)):
        return list(run_checkpoints(checkpoints).values())
    folders = [Path(folder) for folder in checkpoints]
    if not folders:
        raise ConfigError("checkpoints is an empty list. Pass adapter folders, or a Trainer's output folder.")
    return folders


def _check(model: Any, prompts: Sequence[Any], references: Sequence[str] | None) -> None:
    if not isinstance(model, MultiLoraMixin):
        raise ModelError("compare_checkpoints needs an enabled model: call enable_multilora(model) first.")
    if model.training:  # type: ignore[attr-defined]
        raise ModelError("The model is in training mode; adapters serve inference only. Call model.eval() first.")
    if isinstance(prompts, str) or not prompts:
        raise ConfigError("prompts is a list of texts or chats, with at least one.")
    if references is not None and len(references) != len(prompts):
        raise ConfigError(f"There are {len(references)} references for {len(prompts)} prompts. Pass one for each.")


def _step(name: str) -> int | None:
    found = re.fullmatch(r"checkpoint-(\d+)", Path(name).name)
    return int(found[1]) if found else None


class _Rows:
    """Every prompt under every id, cut into batches."""

    def __init__(self, model: Any, tokenizer: Any, prompts: Sequence[Any], batch_size: int | None) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.tokens = [self._tokens(prompt) for prompt in prompts]

    def answers(self, ids: Sequence[str | None], options: dict[str, Any]) -> list[list[str]]:
        """Texts [id][prompt]."""
        rows = [(name, tokens) for name in ids for tokens in self.tokens]
        size = self.batch_size or len(rows)
        texts: list[str] = []
        for start in range(0, len(rows), size):
            names, tokens = zip(*rows[start : start + size], strict=True)
            inputs = self._padded(tokens)
            out = self.model.generate(**inputs, adapter_ids=list(names), **options)
            new = out[:, inputs["input_ids"].shape[1] :]
            texts += self.tokenizer.batch_decode(new, skip_special_tokens=True)
        n = len(self.tokens)
        return [texts[i * n : (i + 1) * n] for i in range(len(ids))]

    @torch.no_grad()
    def losses(self, ids: Sequence[str | None], references: Sequence[str]) -> list[list[float]]:
        """Nats a token [id][prompt]. A plain forward runs no waves: a batch names as many ids as there are slots."""
        wanted = [list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in references]
        pairs = list(zip(self.tokens, wanted, strict=True))
        slots = max(1, self.model.multilora.config.max_loras - len(self.model.multilora.store.pinned()))
        found: list[float] = []
        for first in range(0, len(ids), slots):
            rows = [(name, *pair) for name in ids[first : first + slots] for pair in pairs]
            size = self.batch_size or len(rows)
            for start in range(0, len(rows), size):
                found += self._batch_losses(rows[start : start + size])
        n = len(pairs)
        return [found[i * n : (i + 1) * n] for i in range(len(ids))]

    def _batch_losses(self, rows: Sequence[tuple[str | None, list[int], list[int]]]) -> list[float]:
        inputs = self._padded([prompt + reference for _, prompt, reference in rows])
        taken = inspect.signature(self.model.forward).parameters
        few: dict[str, Any] = {}
        if "logits_to_keep" in taken:
            few["logits_to_keep"] = max(len(reference) for _, _, reference in rows) + 1
        if "position_ids" in taken:
            few["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        logits = self.model(**inputs, **few, adapter_ids=[name for name, _, _ in rows], use_cache=False).logits
        losses = []
        for row, (_, _, reference) in zip(logits, rows, strict=True):
            target = torch.tensor(reference, device=row.device)
            losses.append(float(torch.nn.functional.cross_entropy(row[-len(reference) - 1 : -1].float(), target)))
        return losses

    def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _padded(self, rows: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask` [rows, tokens], padded on the left (no tokenizer's setting is touched)."""
        length = max(map(len, rows))
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        ids = torch.tensor([[pad or 0] * (length - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
        return {"input_ids": ids.to(self.model.device), "attention_mask": mask.to(self.model.device)}
