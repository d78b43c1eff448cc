"""The KV cache knows which adapter and which generation of it wrote each row; going on under another one raises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from enabled import enabled, in_use
from models import FAMILIES, cache_argument, prompts
from oracle import MIX, Id, adapters
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, StaticCache

from hf_multilora.errors import CacheMismatchError, MultiLoraError

ROWS = 3
IDS: list[Id] = ["r8", None, MIX]
CACHE = cache_argument(LlamaForCausalLM)


@pytest.fixture
def model() -> PreTrainedModel:
    return enabled("llama", ["r8", "r3", "r1"])


def tokens(rows: int = ROWS, seed: int = 0) -> torch.Tensor:
    return prompts(rows, side=None, seed=seed)["input_ids"]


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Any, rows: int = ROWS) -> Any:
    """The cache after all but the last token of `tokens(rows)` under these ids."""
    out = model(tokens(rows)[:, :-1], use_cache=True, adapter_ids=ids)
    return getattr(out, CACHE)


@torch.no_grad()
def go_on(model: PreTrainedModel, cache: Any, ids: Any, rows: int = ROWS) -> torch.Tensor:
    """The logits of the last token on top of `cache`, under these ids."""
    return model(tokens(rows)[:, -1:], **{CACHE: cache}, adapter_ids=ids).logits[:, -1]


@torch.no_grad()
def one_shot(model: PreTrainedModel, ids: Any, rows: int = ROWS) -> torch.Tensor:
    return model(tokens(rows), adapter_ids=ids).logits[:, -1]


def assert_goes_on(model: PreTrainedModel, cache: Any, ids: Any, rows: int = ROWS) -> None:
    torch.testing.assert_close(go_on(model, cache, ids, rows), one_shot(model, ids, rows), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ids", ["r8", None, MIX, IDS], ids=str)
def test_the_same_adapter_goes_on(model: PreTrainedModel, ids: Any) -> None:
    assert_goes_on(model, prefill(model, ids), ids)


def test_the_same_adapter_however_it_is_spelled(model: PreTrainedModel) -> None:
    assert_goes_on(model, prefill(model, "r8"), ["r8"] * ROWS)
    assert_goes_on(model, prefill(model, [None] * ROWS), "__base__")
    with model.multilora.use("r8"):
        cache = getattr(model(tokens()[:, :-1], use_cache=True), CACHE)
    model.set_adapter("r8")
    with torch.no_grad():
        got = model(tokens()[:, -1:], **{CACHE: cache}).logits[:, -1]
    torch.testing.assert_close(got, one_shot(model, "r8"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("r8", "r3"),
        ("r8", None),
        (None, "r8"),
        ("r8", MIX),
        (MIX, {"r3": 0.7, "r8": -0.3}),
        (IDS, [None, "r8", MIX]),
        (IDS, ["r8", "r8", MIX]),
        (IDS, [*IDS[:2], "r3"]),
    ],
    ids=str,
)
def test_another_adapter_raises(model: PreTrainedModel, first: Any, second: Any) -> None:
    cache = prefill(model, first)
    length = cache.get_seq_length()
    with pytest.raises(CacheMismatchError):
        go_on(model, cache, second)
    assert cache.get_seq_length() == length, "something ran before the error"
    assert in_use(model) == 0
    assert_goes_on(model, cache, first)


def test_the_message_names_the_row_and_both_adapters(model: PreTrainedModel) -> None:
    cache = prefill(model, ["r8", None, "r3"])
    with pytest.raises(CacheMismatchError) as raised:
        go_on(model, cache, ["r8", None, "r1"])
    for word in ("2", "r3", "r1"):
        assert word in str(raised.value), str(raised.value)


def reload_same_files(model: PreTrainedModel) -> None:
    model.multilora.reload("r8")


def reload_other_files(model: PreTrainedModel) -> None:
    model.load_adapter(adapters()["r16"], adapter_name="r8", reload=True)


def unload_and_load(model: PreTrainedModel) -> None:
    model.multilora.unload("r8")
    model.load_adapter(adapters()["r8"], adapter_name="r8")


@pytest.mark.parametrize("change", [reload_same_files, reload_other_files, unload_and_load])
@pytest.mark.parametrize("ids", ["r8", MIX, ["r3", None, "r8"]], ids=str)
def test_an_older_generation_raises(model: PreTrainedModel, change: Callable[..., None], ids: Any) -> None:
    cache = prefill(model, ids)
    change(model)
    with pytest.raises(CacheMismatchError):
        go_on(model, cache, ids)
    assert_goes_on(model, prefill(model, ids), ids)


def test_rows_of_others_survive_a_reload(model: PreTrainedModel) -> None:
    cache = prefill(model, ["r3", None, "r1"])
    reload_other_files(model)
    assert_goes_on(model, cache, ["r3", None, "r1"])


def test_eviction_is_not_a_change() -> None:
    """Out of its slot and in again, the adapter is the same."""
    model = enabled("llama", ["r8", "r3"], max_loras=1)
    cache = prefill(model, "r8")
    one_shot(model, "r3")
    assert_goes_on(model, cache, "r8")


def select(cache: Any) -> Any:
    cache.batch_select_indices(torch.tensor([2, 0]))
    return cache


def reorder(cache: Any) -> Any:
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    return cache


def repeat(cache: Any) -> Any:
    cache.batch_repeat_interleave(2)
    return cache


def rows_of_tokens(order: list[int]) -> torch.Tensor:
    return tokens()[order]


@pytest.mark.parametrize(
    ("change", "order"),
    [(select, [2, 0]), (reorder, [2, 0, 1]), (repeat, [0, 0, 1, 1, 2, 2]), (copy.deepcopy, [0, 1, 2])],
    ids=["select", "reorder", "repeat", "deepcopy"],
)
def test_the_tag_follows(model: PreTrainedModel, change: Callable[[Any], Any], order: list[int]) -> None:
    """After each change of its rows the cache asks for the rows' own adapters, and for no others."""
    cache = change(prefill(model, IDS))
    right = [IDS[row] for row in order]
    for wrong in ([right[-1], *right[:-1]], [None] * len(order), ["r8"] * len(order)):
        with pytest.raises(CacheMismatchError), torch.no_grad():
            model(rows_of_tokens(order)[:, -1:], **{CACHE: copy.deepcopy(cache)}, adapter_ids=wrong)
    with torch.no_grad():
        got = model(rows_of_tokens(order)[:, -1:], **{CACHE: cache}, adapter_ids=right).logits[:, -1]
        want = model(rows_of_tokens(order), adapter_ids=right).logits[:, -1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_crop(model: PreTrainedModel) -> None:
    cache = prefill(model, IDS)
    cache.crop(-6)  # of 11
    with pytest.raises(CacheMismatchError):
        go_on(model, copy.deepcopy(cache), [None, "r8", MIX])
    with torch.no_grad():
        got = model(tokens()[:, 5:], **{CACHE: cache}, adapter_ids=IDS).logits[:, -1]
    torch.testing.assert_close(got, one_shot(model, IDS), rtol=1e-4, atol=1e-5)


def test_a_copy_has_a_tag_of_its_own(model: PreTrainedModel) -> None:
    cache = prefill(model, IDS)
    other = reorder(copy.deepcopy(cache))
    assert_goes_on(model, cache, IDS)
    with pytest.raises(CacheMismatchError):
        go_on(model, other, IDS)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_of_the_users(model: PreTrainedModel, kind: str) -> None:
    """An empty cache belongs to nobody; its first forward gives it to the rows' adapters."""
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=32)
    with torch.no_grad():
        model(tokens()[:, :-1], **{CACHE: cache}, adapter_ids=IDS)
    with pytest.raises(CacheMismatchError):
        go_on(model, cache, [None, "r8", MIX])
    assert_goes_on(model, cache, IDS)


def test_a_cache_that_was_emptied_belongs_to_nobody(model: PreTrainedModel) -> None:
    cache = StaticCache(model.config, max_cache_len=32)
    with torch.no_grad():
        model(tokens()[:, :-1], **{CACHE: cache}, adapter_ids="r8")
        cache.reset()
        model(tokens()[:, :-1], **{CACHE: cache}, adapter_ids="r3")
    assert_goes_on(model, cache, "r3")


def test_a_cache_that_was_emptied_may_become_the_bases(model: PreTrainedModel) -> None:
    cache = StaticCache(model.config, max_cache_len=32)
    with torch.no_grad():
        model(tokens()[:, :-1], **{CACHE: cache}, adapter_ids="r8")
        cache.reset()
        model(tokens()[:, :-1], **{CACHE: cache})
    with pytest.raises(CacheMismatchError):
        go_on(model, cache, "r8")
    assert_goes_on(model, cache, None)


def test_caches_in_tuples_have_their_tags(model: PreTrainedModel) -> None:
    given = {"use_cache": True, "return_dict": False}
    with torch.no_grad():
        outputs = {ids: model(tokens()[:, :-1], adapter_ids=ids, **given) for ids in ("r8", None)}
    assert all(isinstance(output, tuple) and len(output) == 2 for output in outputs.values())
    for ids, other in (("r8", None), ("r8", "r3"), (None, "r8")):
        with pytest.raises(CacheMismatchError):
            go_on(model, outputs[ids][1], other)
    for ids, output in outputs.items():
        assert_goes_on(model, output[1], ids)


def test_a_cache_of_the_bare_model_is_the_bases(model: PreTrainedModel) -> None:
    with torch.no_grad():
        cache = getattr(FAMILIES["llama"].build()(tokens()[:, :-1], use_cache=True), CACHE)
    with pytest.raises(CacheMismatchError):
        go_on(model, cache, "r8")
    assert_goes_on(model, cache, None)


def generate(model: PreTrainedModel, ids: Any, tokens: torch.Tensor, new: int = 3, **options: Any) -> Any:
    return model.generate(
        tokens, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, adapter_ids=ids, **options
    )


@pytest.mark.parametrize("ids", ["r8", None, IDS], ids=str)
def test_generate_goes_on(model: PreTrainedModel, ids: Any) -> None:
    """A chat: the second turn on the first one's cache gives what one long call gives."""
    whole = generate(model, ids, tokens(), new=7).sequences
    first = generate(model, ids, tokens(), new=3)
    second = generate(model, ids, first.sequences, new=4, **{CACHE: getattr(first, CACHE)}).sequences
    assert torch.equal(second, whole)


@pytest.mark.parametrize("wrong", ["r3", None, ["r8", "r8", "r3"]], ids=str)
def test_generate_under_another_adapter_raises(model: PreTrainedModel, wrong: Any) -> None:
    first = generate(model, "r8", tokens())
    with pytest.raises(CacheMismatchError):
        generate(model, wrong, first.sequences, **{CACHE: getattr(first, CACHE)})
    base = generate(model, None, tokens())
    with pytest.raises(CacheMismatchError):
        generate(model, "r8", base.sequences, **{CACHE: getattr(base, CACHE)})


def test_generate_after_a_reload_raises(model: PreTrainedModel) -> None:
    first = generate(model, IDS, tokens())
    reload_same_files(model)
    with pytest.raises(CacheMismatchError):
        generate(model, IDS, first.sequences, **{CACHE: getattr(first, CACHE)})


def test_a_shared_prefix_for_many_rows(model: PreTrainedModel) -> None:
    """Prefill once, repeat for several continuations: the usual prompt cache of transformers' documentation."""
    whole = tokens(1).repeat(3, 1)
    cache = prefill(model, "r8", rows=1)
    cache.batch_repeat_interleave(3)
    second = generate(model, ["r8"] * 3, whole, **{CACHE: copy.deepcopy(cache)}).sequences
    assert torch.equal(second, generate(model, "r8", whole).sequences)
    with pytest.raises(CacheMismatchError):
        generate(model, ["r8", "r3", "r8"], whole, **{CACHE: cache})


def test_beams_leave_a_right_tag(model: PreTrainedModel) -> None:
    """After a beam search the cache has a row for each beam, all of their prompt's adapter."""
    out = generate(model, IDS, tokens(), num_beams=2)
    cache = getattr(out, CACHE)
    wrong = [None, None, "r8", "r8", MIX, MIX]
    with pytest.raises(CacheMismatchError), torch.no_grad():
        model(tokens(6)[:, -1:], **{CACHE: cache}, adapter_ids=wrong)


def test_wrong_number_of_rows(model: PreTrainedModel) -> None:
    cache = prefill(model, IDS)
    with pytest.raises((MultiLoraError, ValueError, RuntimeError)), torch.no_grad():
        model(tokens(2)[:, -1:], **{CACHE: cache}, adapter_ids=["r8", None])


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt2"])
def test_other_kinds_of_caches(family: str) -> None:
    """Sliding windows and hybrids carry the tag as well."""
    model = enabled(family, ["r8", "r3", "r1"])
    cache = prefill(model, ["r8", None, "r3"])
    with pytest.raises(CacheMismatchError):
        go_on(model, cache, ["r3", None, "r8"])
    assert_goes_on(model, cache, ["r8", None, "r3"])


def test_encoder_decoder_caches() -> None:
    model = enabled("t5", ["r8", "r3"])
    inputs = prompts(2, side="right")
    start = torch.tensor([[0, 5, 9], [0, 7, 4]])
    with torch.no_grad():
        out = model(**inputs, decoder_input_ids=start, use_cache=True, adapter_ids=["r8", "r3"])
        more = torch.tensor([[11], [12]])
        for wrong in (["r3", "r8"], None):
            with pytest.raises(CacheMismatchError):
                model(**inputs, decoder_input_ids=more, **{CACHE: getattr(out, CACHE)}, adapter_ids=wrong)
        got = model(**inputs, decoder_input_ids=more, **{CACHE: getattr(out, CACHE)}, adapter_ids=["r8", "r3"])
        want = model(**inputs, decoder_input_ids=torch.cat([start, more], 1), adapter_ids=["r8", "r3"])
    torch.testing.assert_close(got.logits[:, -1], want.logits[:, -1], rtol=1e-4, atol=1e-5)
