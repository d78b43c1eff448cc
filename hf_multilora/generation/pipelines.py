"""transformers' pipelines: a list of ids that one of them hands to each of its batches is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from ..errors import RoutingError


def refuse_repeated(arguments: Mapping[str, Any], caller: FrameType) -> None:
    """Refuse a list of ids that a pipeline passes to generate().

    A pipeline cuts its prompts into batches and gives all of them the same arguments. Where the list happens to be as
    long as a batch, every batch would be answered through the adapters of the first; nothing but the caller tells.

    Args:
        arguments: of generate(), by name.
        caller: the frame that calls generate().

    Raises:
        RoutingError: the caller is a pipeline that does not give each prompt its own id.
    """
    given = (arguments.get("adapter_ids"), arguments.get("adapter_names"))
    if all(ids is None or isinstance(ids, (str, Mapping)) for ids in given):
        return
    if caller.f_code.co_name != "_forward":  # of a pipeline; to look into another frame keeps its variables alive
        return
    base = sys.modules.get("transformers.pipelines.base")
    pipeline = caller.f_locals.get("self") if base is not None else None
    if base is None or not isinstance(pipeline, base.Pipeline) or hasattr(pipeline, "_multilora_ids_per_prompt"):
        return
    raise RoutingError(
        f"A {type(pipeline).__name__} hands the same adapter_ids to each of its batches, so that it takes one id for "
        "all prompts, not a list. With pipeline(..., pipeline_class=hf_multilora.integrations.pipeline."
        "MultiLoraTextGenerationPipeline) each prompt has its own."
    )
