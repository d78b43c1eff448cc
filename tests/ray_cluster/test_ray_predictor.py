"""The predictor by itself: what Ray calls in each actor. Every answer is generate()'s for that adapter alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_files import alone, chat_prompt, tokenizer

pa = pytest.importorskip("pyarrow")

from ray_bed import NEW, options, write_files  # noqa: E402

from hf_multilora.errors import ConfigError  # noqa: E402
from hf_multilora.integrations.ray import MultiLoraPredictor  # noqa: E402


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    files = write_files(tmp_path_factory.mktemp("files"), 3)
    made = MultiLoraPredictor(**options(files, max_loras=2, max_cpu_loras=2))
    yield made
    made.close()


def text(prompt: str, number: int | None, new: int = NEW) -> str:
    ids = torch.tensor([tokenizer()(prompt)["input_ids"]])
    out = alone(number).generate(ids, do_sample=False, max_new_tokens=new, attention_mask=torch.ones_like(ids))
    return tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_columns_as_ray_gives_them(predictor):
    """Nulls are NaN there, and numbers beside them floats."""
    prompts = np.array(["One", "Two", "Three", "Four"], dtype=object)
    batch = {
        "id": np.arange(4),
        "prompt": prompts,
        "adapter": np.array(["a1", None, "a0", "a2"], dtype=object),
        "max_new_tokens": np.array([np.nan, 3.0, np.nan, 5.0]),
    }
    for _ in range(2):  # the same thread answers one batch after the other
        made = predictor(batch)
        assert list(made) == [*batch, "text", "tokens", "finish_reason", "error"] and made["id"] is batch["id"]
        want = [text("One", 2), text("Two", None, 3), text("Three", 1), text("Four", 3, 5)]
        assert made["text"].to_pylist() == want and made["error"].to_pylist() == [None] * 4
    every = {"prompt": prompts, "adapter": np.full(4, np.nan)}
    made = predictor(every)
    assert made["text"].to_pylist() == [text(prompt, None) for prompt in prompts]
    assert made["adapter"] == pa.nulls(4, pa.string()), "as in blocks that name adapters"


def test_a_row_that_cannot_be_answered_leaves_the_others(predictor):
    asked = [
        {"prompt": "One", "adapter": "a0"},
        {"prompt": "One", "adapter": "a00"},
        {"prompt": ""},
        {"prompt": "x" * 255},
        {"adapter": "a0"},
        {"prompt": "One", "max_new_tokens": 0},
        {"prompt": "One", "adapter": "a1"},
    ]
    table = pa.Table.from_pylist(
        asked, pa.schema({"prompt": "string", "adapter": "string", "max_new_tokens": "int64"})
    )
    made = predictor(table).to_pylist()
    assert [row["error"] is None for row in made] == [True] + [False] * 5 + [True]
    for row, word in zip(made[1:6], ("'a00'", "empty", "255 tokens", "neither", "at least 1"), strict=True):
        assert word in row["error"] and row["text"] is row["tokens"] is row["finish_reason"] is None
    assert [made[0]["text"], made[6]["text"]] == [text("One", 1), text("One", 2)]


def test_types_do_not_depend_on_what_is_there(predictor):
    """Parts of one output are written block by block, and are read as one."""
    fine, failed = (predictor(pa.table({"prompt": [prompt]})) for prompt in ("One", ""))
    assert fine.schema == failed.schema and fine.schema.field("error").type == pa.string()


def test_chats(predictor):
    chat = [{"role": "user", "content": "Who?"}]
    table = pa.table({"messages": [chat, None], "prompt": [None, "Who?"], "adapter": ["a0", None]})
    want = [text(chat_prompt("Who?"), 1), text("Who?", None)]
    assert predictor(table)["text"].to_pylist() == want
    numpy = {
        "messages": np.array([np.array(chat), None], dtype=object),
        "prompt": np.array([None, "Who?"], dtype=object),
    }
    assert predictor(numpy)["text"].to_pylist() == [text(chat_prompt("Who?"), None), text("Who?", None)]


@pytest.mark.parametrize(
    "batch, words",
    [
        ({"prompt": ["a"], "adaptor": ["a0"]}, ("adaptor", "adapter")),
        ({"prompt": ["a"], "text": ["b"]}, ("text", "Rename")),
        ({"promt": ["a"], "adapter": ["a0"]}, ("promt", '"prompt" or "messages"', "'promt'")),
        ([1], ("list", "batch_format")),
    ],
)
def test_batches_that_cannot_be_meant(predictor, batch, words):
    with pytest.raises(ConfigError) as refused:
        predictor(batch)
    assert all(word in str(refused.value) for word in words)


def test_a_batch_that_breaks_off_leaves_nothing_to_the_next(predictor, monkeypatch):
    """Its requests were under way: their answers are not those of the rows that come next."""
    find, asked = predictor._find, 0

    def denied(name):
        nonlocal asked
        asked += 1
        if asked == 4:
            raise PermissionError("no access")
        return find(name)

    with monkeypatch.context() as patch:
        patch.setattr(predictor, "_find", denied)
        with pytest.raises(PermissionError):
            predictor({"prompt": ["One", "Two", "Three", "Four"], "adapter": ["a0", "a1", "a2", "a0"]})
    for _ in range(2):
        made = predictor({"prompt": ["Five", "Six", "Seven"], "adapter": ["a1", None, "a0"]})
        assert made["text"].to_pylist() == [text("Five", 2), text("Six", None), text("Seven", 1)]


def test_half_of_a_character(predictor):
    made = predictor({"prompt": np.array(["One", "\ud800"], dtype=object), "adapter": ["a0", None]})
    assert made["text"].to_pylist() == [text("One", 1), None] and "surrogate" in made["error"][1].as_py()
