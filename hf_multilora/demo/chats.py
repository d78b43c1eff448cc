"""Prompts as chats of one padded batch, and what is answered to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def chat(tokenizer: Any, prompts: Sequence[str]) -> Any:
    """`input_ids` and `attention_mask` [prompts, tokens], each prompt as the first message of a chat, padded left."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)


def answers(tokenizer: Any, inputs: Any, out: Any) -> list[str]:
    """The new text of each row of generate()'s output."""
    new = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in new]
