"""BatchTextStreamer: what it says of every row is the row's text, in pieces, in a mixed batch."""

from __future__ import annotations

import threading
from queue import Empty

import pytest
import torch
from enabled import enabled
from models import prompts

from hf_multilora import BatchTextStreamer

IDS = ["r8", None, "r3"]


class Words:
    """Every token is a word of its own."""

    def __init__(self, eos: int) -> None:
        self.eos_token_id = eos

    def decode(self, ids: int | list[int], **kwargs: object) -> str:
        return "".join(f" w{i}" for i in ([ids] if isinstance(ids, int) else ids))


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_rows_of_a_mixed_batch(skip_prompt: bool) -> None:
    model, inputs = enabled("llama", ["r8", "r3"]), prompts(3)
    options = {"max_new_tokens": 9, "do_sample": False, "adapter_ids": IDS}
    plain = model.generate(**inputs, **options)
    width = inputs["input_ids"].shape[1]
    eos = int(plain[0, width + 4])  # the first row ends early, and is padded from there
    want = model.generate(**inputs, **options, eos_token_id=eos, pad_token_id=0)
    streamer = BatchTextStreamer(Words(eos), skip_prompt=skip_prompt, timeout=60)
    thread = threading.Thread(
        target=model.generate,
        kwargs={**inputs, **options, "eos_token_id": eos, "pad_token_id": 0, "streamer": streamer},
    )
    thread.start()
    texts = ["", "", ""]
    pieces = 0
    for row, text in streamer:
        texts[row] += text
        pieces += 1
    thread.join()
    for row in range(3):
        tokens = want[row, width if skip_prompt else 0 :].tolist()
        if eos in tokens[0 if skip_prompt else width :]:
            start = 0 if skip_prompt else width
            tokens = tokens[: tokens.index(eos, start) + 1]
        assert texts[row] == Words(eos).decode(tokens), row
    assert pieces > 3


def test_ends_are_told_once() -> None:
    model, ended = enabled("llama", ["r8", "r3"]), []
    streamer = BatchTextStreamer(Words(-1), on_text=lambda row, text, end: ended.append(row) if end else None)
    model.generate(**prompts(3), max_new_tokens=4, do_sample=False, adapter_ids=IDS, streamer=streamer)
    assert sorted(ended) == [0, 1, 2]


def test_waiting_ends() -> None:
    streamer = BatchTextStreamer(Words(-1), timeout=0.01)
    streamer.put(torch.tensor([[1, 2]]))
    next(iter(streamer))
    with pytest.raises(Empty):
        list(streamer)
