"""transformers' text-generation pipeline, with an adapter for each prompt.

    pipe = pipeline("text-generation", model, tokenizer=tokenizer, pipeline_class=MultiLoraTextGenerationPipeline)
    pipe(["How many users?", "Write a poem."], adapter_ids=["sql", "poet"], batch_size=2)

transformers' own class cuts prompts into batches, but hands the same `adapter_ids` to each of them: right for one id,
wrong for a list. This one lets each id travel with its prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers import TextGenerationPipeline

from ..errors import ModelError, RoutingError
from ..generation.ids import one_of, to_keys
from ..generation.mixin import MultiLoraMixin


class MultiLoraTextGenerationPipeline(TextGenerationPipeline):
    """A text-generation pipeline over an enabled model.

    Args (of the constructor, or of a call, which goes first), beside those of transformers' class:
        adapter_ids: one id (a name, None for the base, or a mix `{"a": 0.7, "b": 0.3}`) for all prompts, or a list
            with one for each prompt. For a generator of prompts, any list or iterator of as many ids.
        adapter_names: PEFT's spelling of the same.

    Results come in the order of the prompts, whatever `batch_size` is. Beams and return sequences keep their prompt's
    adapter. A batch that names more adapters than there are slots runs in waves.

    Raises:
        ModelError: the model is not enabled.
        RoutingError: a list of another length than the prompts, or an id of a wrong type; before anything is
            generated, but for generators.
        AdapterNotFoundError, SlotError: see `generate`.
    """

    _multilora_ids_per_prompt = True  # what generate() looks for, where it is given a list by a pipeline

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.model, MultiLoraMixin):
            raise ModelError(f"{type(self).__name__} needs an enabled model: call enable_multilora(model) first.")

    def _sanitize_parameters(
        self, *args: Any, adapter_ids: Any = None, adapter_names: Any = None, **kwargs: Any
    ) -> Any:
        preprocess, forward, postprocess = super()._sanitize_parameters(*args, **kwargs)
        ids = one_of(adapter_ids, adapter_names)
        return preprocess, forward if ids is None else {**forward, "adapter_ids": ids}, postprocess

    def run_single(self, inputs: Any, preprocess_params: Any, forward_params: Any, postprocess_params: Any) -> Any:
        if _is_list(forward_params.get("adapter_ids")):
            to_keys(forward_params["adapter_ids"], 1)  # raises where there are more ids than the one prompt
        return super().run_single(inputs, preprocess_params, forward_params, postprocess_params)

    def get_iterator(
        self, inputs: Any, num_workers: int, batch_size: int, preprocess_params: Any, forward_params: Any,
        postprocess_params: Any,
    ) -> Any:  # fmt: skip
        ids = forward_params.get("adapter_ids")
        if _is_list(ids):
            forward_params = {name: value for name, value in forward_params.items() if name != "adapter_ids"}
            inputs = _Paired(inputs, ids) if hasattr(inputs, "__len__") else _paired(inputs, ids)
        return super().get_iterator(
            inputs, num_workers, batch_size, preprocess_params, forward_params, postprocess_params
        )

    def preprocess(self, prompt_text: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if not isinstance(prompt_text, _Prompt):
            return super().preprocess(prompt_text, *args, **kwargs)
        inputs = super().preprocess(prompt_text.text, *args, **kwargs)
        inputs["adapter_id"] = _Id(prompt_text.adapter_id)
        return inputs

    def _forward(self, model_inputs: Any, **generate_kwargs: Any) -> Any:  # type: ignore[override]
        own = model_inputs.pop("adapter_id", None)  # of one prompt, or of each prompt of a batch
        if own is not None:
            generate_kwargs["adapter_ids"] = [each.adapter_id for each in (own if isinstance(own, list) else [own])]
        return super()._forward(model_inputs, **generate_kwargs)


class _Prompt:
    """A prompt and its adapter id, on the way to `preprocess`."""

    def __init__(self, text: Any, adapter_id: Any) -> None:
        self.text, self.adapter_id = text, adapter_id


class _Id:
    """An id in a batch; a class, for a pipeline looks into dictionaries (which mixes are) for tensors."""

    def __init__(self, adapter_id: Any) -> None:
        self.adapter_id = adapter_id


class _Paired:
    """Prompts (a list, or a data set with a length), each with its id.

    Raises:
        RoutingError: more or fewer ids than prompts, or an id of a wrong type.
    """

    def __init__(self, prompts: Any, ids: Any) -> None:
        self._prompts, self._ids = prompts, list(ids)
        if len(self._ids) != len(prompts):
            raise RoutingError(
                f"adapter_ids has {len(self._ids)} ids, but there are {len(prompts)} prompts. Pass one for each "
                "prompt, or one id for all of them."
            )
        to_keys(self._ids, None)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, i: int) -> _Prompt:
        return _Prompt(self._prompts[i], self._ids[i])


def _paired(prompts: Iterable[Any], ids: Iterable[Any]) -> Iterator[_Prompt]:
    try:
        for text, adapter_id in zip(prompts, ids, strict=True):
            yield _Prompt(text, adapter_id)
    except ValueError as error:
        if "zip()" not in str(error):
            raise
        raise RoutingError("adapter_ids has another length than the prompts. Pass one for each prompt.") from error


def _is_list(ids: Any) -> bool:
    return isinstance(ids, (Sequence, Iterator)) and not isinstance(ids, (str, Mapping))
