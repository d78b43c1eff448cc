"""A callback for transformers' Trainer, and for TRL's, which are subclasses of it: compares the checkpoints of a run.

compare = CompareCheckpoints(prompts=["The bicycle arrived late."], references=["NEGATIVE"], max_new_tokens=4)
Trainer(model=peft_model, callbacks=[compare], ...).train()
compare.result   # a table: every prompt through every checkpoint
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..api import disable_multilora, enable_multilora
from ..errors import ConfigError
from ..generation.mixin import MultiLoraMixin
from ..peft_model import is_peft_model
from .compare import Comparison, compare_checkpoints, run_checkpoints

_SLOTS = 8


class CompareCheckpoints(TrainerCallback):
    """Answers every prompt through every checkpoint of the run, all in one batch.

    The PeftModel in training is lent for that: its layers are taken out, its base serves the checkpoints from their
    folders, and the very same layers come back, with every module's mode. Nothing of the training changes: no weight,
    no optimizer state, and no random number unless you ask for sampling. Or give another model, enabled, and the one
    in training is left alone.

    Args:
        prompts, references, max_new_tokens, batch_size, generate_options: see `compare_checkpoints`.
        when: "end" (of training) or "save" (whenever a checkpoint was saved, all that are there by then).
        tokenizer: None: the Trainer's `processing_class`.
        model: an enabled model of the same base, in eval mode; None: the one in training.
        max_loras: slots for the checkpoints (of the model in training; more checkpoints run in waves).

    Attributes:
        comparisons: one for each time, in order. `result` is the last one.

    Raises (when training begins):
        ConfigError: no tokenizer; a model that is no PeftModel; weights sharded by FSDP or DeepSpeed.
        ModelError, UnsupportedAdapterError: the model cannot be lent; see `enable_multilora`.
    """

    def __init__(
        self,
        prompts: Sequence[str | Sequence[Mapping[str, str]]],
        references: Sequence[str] | None = None,
        *,
        when: str = "end",
        tokenizer: Any = None,
        model: Any = None,
        max_loras: int = _SLOTS,
        max_new_tokens: int = 32,
        batch_size: int | None = None,
        **generate_options: Any,
    ) -> None:
        if when not in ("end", "save"):
            raise ConfigError(f"when={when!r}: expected 'end' or 'save'.")
        self.comparisons: list[Comparison] = []
        self._when, self._tokenizer, self._model, self._max_loras = when, tokenizer, model, max_loras
        self._what: dict[str, Any] = {"prompts": prompts, "references": references, "max_new_tokens": max_new_tokens}
        self._what |= {"batch_size": batch_size, **generate_options}
        self._saved: list[int] = []

    @property
    def result(self) -> Comparison | None:
        """The last comparison; None before the first."""
        return self.comparisons[-1] if self.comparisons else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find out now what would go wrong when the first hours of training are done."""
        if self._tokens(kwargs) is None:
            raise ConfigError(
                "CompareCheckpoints needs a tokenizer: pass tokenizer=, or processing_class= to the Trainer."
            )
        if self._model is None and (args.fsdp or args.deepspeed):
            raise ConfigError(
                "CompareCheckpoints cannot lend a model whose weights are sharded over processes. Pass model=, an "
                "enabled one, or call compare_checkpoints afterwards."
            )
        resumed = Path(args.output_dir).is_dir() and state.global_step > 0
        known = run_checkpoints(args.output_dir) if resumed else {}
        self._saved = [step for step in known if step <= state.global_step]
        if state.is_world_process_zero:
            with self._serving(kwargs["model"]):
                pass

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved.append(state.global_step)
        if self._when == "save":
            self._compare(args, state, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._when == "end" and self._saved:
            self._compare(args, state, kwargs)

    def _compare(self, args: Any, state: Any, event: Mapping[str, Any]) -> None:
        if not state.is_world_process_zero:
            return
        # Not what an earlier run has left there, nor what save_total_limit has removed.
        folders = [folder for step, folder in run_checkpoints(args.output_dir).items() if step in self._saved]
        with self._serving(event["model"]) as model:
            self.comparisons.append(compare_checkpoints(model, self._tokens(event), folders, **self._what))

    def _tokens(self, event: Mapping[str, Any]) -> Any:
        return self._tokenizer if self._tokenizer is not None else event.get("processing_class")

    @contextmanager
    def _serving(self, trained: Any) -> Iterator[Any]:
        if self._model is not None:
            if not isinstance(self._model, MultiLoraMixin):
                raise ConfigError("CompareCheckpoints: model= is not enabled. Call enable_multilora(model) first.")
            yield self._model
            return
        if not is_peft_model(trained):
            raise ConfigError(
                f"CompareCheckpoints compares adapters, and a {type(trained).__name__} is trained here. Train a "
                "PeftModel, or pass model=, an enabled model of the same base."
            )
        modes = {module: module.training for module in trained.modules()}
        trained.eval()
        try:
            model = enable_multilora(trained, max_loras=self._max_loras, max_lora_rank=_rank(trained))
            try:
                yield model
            finally:
                disable_multilora(model)
        finally:
            for module, mode in modes.items():
                module.training = mode


def _rank(peft_model: Any) -> int:
    """The largest; 1 where there is none, for what has no ranks is refused by name later."""
    found = [1]
    for config in peft_model.peft_config.values():
        found += [getattr(config, "r", None) or 1, *(getattr(config, "rank_pattern", None) or {}).values()]
    return max(found)
