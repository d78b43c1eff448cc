"""BatchTextStreamer: what it says of each row is that row's text, as it would be said alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from enabled import enabled
from models import PAD, VOCAB, prompts
from oracle import Id, alone, rows_of
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextStreamer

from hf_multilora import BatchTextStreamer
from hf_multilora.errors import SlotError

IDS: list[Id] = ["r8", None, "r3", "r64"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return enabled("llama")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Words of one to three letters; every fifth begins without a space, so that words are final late."""
    words = {(f"w{n}" if n % 5 else f"##{n}"): n for n in range(1, VOCAB)}
    inner = Tokenizer(WordLevel({"<pad>": PAD, **words}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece(prefix="##")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", padding_side="left")


class Collected(TextStreamer):
    """What transformers' own streamer says of one row."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, skip_prompt: bool) -> None:
        super().__init__(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text


def said_alone(tokenizer: PreTrainedTokenizerFast, row: torch.Tensor, prompt: int, skip_prompt: bool) -> str:
    streamer = Collected(tokenizer, skip_prompt)
    streamer.put(row[None, :prompt])
    for token in row[prompt:]:
        streamer.put(token[None])
    streamer.end()
    return streamer.text


def streamer_of(tokenizer: PreTrainedTokenizerFast, **options: Any) -> BatchTextStreamer:
    return BatchTextStreamer(tokenizer, skip_special_tokens=True, **options)


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_text_of_every_row(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, skip_prompt: bool) -> None:
    said: dict[int, str] = dict.fromkeys(range(len(IDS)), "")
    ended: list[int] = []

    def on_text(row: int, text: str, end: bool) -> None:
        assert row not in ended
        said[row] += text
        if end:
            ended.append(row)

    streamer = streamer_of(tokenizer, skip_prompt=skip_prompt, on_text=on_text)
    inputs = prompts(len(IDS), seed=50)
    out = model.generate(**inputs, **OPTIONS, streamer=streamer, adapter_ids=IDS)
    assert torch.equal(out, rows_of("llama", IDS, lambda ref: ref.generate(**inputs, **OPTIONS)))
    assert sorted(ended) == list(range(len(IDS)))
    for row in range(len(IDS)):
        assert said[row] == said_alone(tokenizer, out[row], inputs["input_ids"].shape[1], skip_prompt), row


def test_iterating_in_another_thread(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    streamer = streamer_of(tokenizer, skip_prompt=True, timeout=60)
    inputs = prompts(len(IDS), seed=51)
    said = [""] * len(IDS)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: model.generate(**inputs, **OPTIONS, streamer=streamer, adapter_ids=IDS))
        for row, text in streamer:
            said[row] += text
        out = future.result(60)
    for row in range(len(IDS)):
        assert said[row] == said_alone(tokenizer, out[row], inputs["input_ids"].shape[1], True), row


def test_rows_that_end_early(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """After its end a row is padded until the last one has ended: padding is no text."""
    inputs = prompts(len(IDS), seed=52)
    start = inputs["input_ids"].shape[1]
    free = rows_of("llama", IDS, lambda ref: ref.generate(**inputs, **OPTIONS))
    eos = free[0, start + 2].item()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        pad_token="<pad>",
        eos_token=tokenizer.convert_ids_to_tokens(eos),
        padding_side="left",
    )
    said = [""] * len(IDS)
    order: list[int] = []

    def on_text(row: int, text: str, end: bool) -> None:
        said[row] += text
        order.extend([row] if end else [])

    streamer = streamer_of(tokenizer, skip_prompt=True, on_text=on_text)
    out = model.generate(**inputs, **OPTIONS, eos_token_id=eos, streamer=streamer, adapter_ids=IDS)
    assert sorted(order) == list(range(len(IDS)))
    lengths = [(row[start:] == eos).nonzero()[0].item() if eos in row[start:] else 99 for row in out]
    assert len(set(lengths)) > 1, "all rows end alike: choose another prompt"
    assert [lengths[row] for row in order] == sorted(lengths)
    for row in range(len(IDS)):
        tokens = [token for token in out[row, start:].tolist() if token not in (eos, PAD)]
        assert said[row].split() == tokenizer.decode(tokens).split(), row


def test_one_row(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    said = []
    streamer = streamer_of(tokenizer, skip_prompt=True, on_text=lambda row, text, end: said.append((row, text)))
    inputs = prompts(1, seed=53)
    out = model.generate(**inputs, **OPTIONS, streamer=streamer, adapter_ids="r16")
    assert torch.equal(out, alone("llama", "r16").generate(**inputs, **OPTIONS))
    assert {row for row, _ in said} == {0}
    assert "".join(text for _, text in said) == said_alone(tokenizer, out[0], inputs["input_ids"].shape[1], True)


def test_waves_are_refused_before_anything_is_said(tokenizer: PreTrainedTokenizerFast) -> None:
    said: list[str] = []
    streamer = streamer_of(tokenizer, on_text=lambda row, text, end: said.append(text))
    with pytest.raises(SlotError, match="max_loras"):
        enabled("llama", max_loras=2).generate(
            **prompts(len(IDS)), **OPTIONS, streamer=streamer, adapter_ids=["r1", "r3", "r8", None]
        )
    assert not said
