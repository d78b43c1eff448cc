"""More adapters than slots: generate() runs in waves, everything else says what to raise; two levels of LRU below."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from enabled import Calls, enabled, in_use, resident
from models import FAMILIES, PAD, prompts
from oracle import MIX, Id, adapters, alone, relative_error, rows_of
from transformers import DynamicCache, PreTrainedModel
from transformers.generation import BaseStreamer

from hf_multilora import enable_multilora
from hf_multilora.errors import AdapterNotFoundError, MultiLoraError, SlotError
from hf_multilora.generation.waves import plan_waves

IDS: list[Id] = ["r1", "r3", None, "r8", "r16", MIX, "r33", "r1", None, "r64"]  # 7 slots
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def wide() -> PreTrainedModel:
    """A slot for each."""
    return enabled("llama", max_loras=7)


@pytest.fixture(params=[1, 2, 3, 6])
def narrow(request: pytest.FixtureRequest) -> PreTrainedModel:
    return enabled("llama", max_loras=request.param)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Any, rows: int = 3) -> torch.Tensor:
    return model(**prompts(rows), adapter_ids=ids).logits


def assert_answers(model: PreTrainedModel, name: str, reference: str | None = None) -> None:
    want = logits_of(reference or name)
    assert relative_error(logits(model, name), want) <= 1e-5, name


@torch.no_grad()
def logits_of(adapter: Id, rows: int = 3) -> torch.Tensor:
    return alone("llama", adapter)(**prompts(rows)).logits


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"guidance_scale": 1.5},
        {"cache_implementation": "static"},
        {"use_cache": False},
    ],
    ids=str,
)
def test_waves_come_back_in_order(narrow: PreTrainedModel, options: dict[str, Any]) -> None:
    inputs = prompts(len(IDS), seed=30)
    options = {**GREEDY, **options}
    with Calls(narrow) as calls:
        got = narrow.generate(**inputs, **options, adapter_ids=IDS)
    want = rows_of("llama", IDS, lambda ref: ref.generate(**inputs, **options), options.get("num_return_sequences", 1))
    assert torch.equal(got, want)
    assert max(calls.rows) < len(IDS) * options.get("num_beams", 1)
    assert in_use(narrow) == 0


def test_as_many_slots_as_needed_is_one_batch(wide: PreTrainedModel) -> None:
    with Calls(wide) as calls:
        wide.generate(**prompts(len(IDS)), **GREEDY, adapter_ids=IDS)
    assert calls.rows == [len(IDS)] * 5


def test_base_rows_take_no_slot() -> None:
    model = enabled("llama", ["r8"], max_loras=1)
    ids = [None, "r8", "__base__", "r8", None]
    with Calls(model) as calls:
        model.generate(**prompts(5), **GREEDY, adapter_ids=ids)
    assert calls.rows == [5] * 5


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_between_waves(narrow: PreTrainedModel, side: str) -> None:
    """Waves of different lengths: rows that ended early are padded to the longest of the whole batch."""
    inputs = prompts(len(IDS), seed=31, side=side)
    free = rows_of("llama", IDS, lambda ref: ref.generate(**inputs, do_sample=False, max_new_tokens=8))
    eos = [free[0, 13].item(), free[3, 14].item(), free[6, 12].item(), free[2, 12].item(), free[9, 15].item()]
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": eos, "pad_token_id": PAD}
    want = [alone("llama", adapter).generate(**inputs, **options)[row] for row, adapter in enumerate(IDS)]
    ends = [next((at + 1 for at in range(12, len(row)) if row[at] in eos), len(row)) for row in want]
    assert len(set(ends)) > 2, "all rows end alike: choose other prompts"
    got = narrow.generate(**inputs, **options, adapter_ids=IDS)
    assert got.shape == (len(IDS), max(ends))
    for row in range(len(IDS)):
        assert torch.equal(got[row, : ends[row]], want[row][: ends[row]]), IDS[row]
        assert (got[row, ends[row] :] == PAD).all()


@pytest.mark.parametrize("beams", [1, 2])
def test_dict_results(narrow: PreTrainedModel, beams: int) -> None:
    """Their scores and caches are those of one batch: an error that says what to raise max_loras to."""
    inputs = prompts(len(IDS), seed=32)
    options = {**GREEDY, "num_beams": beams, "return_dict_in_generate": True, "output_scores": True}
    with pytest.raises(SlotError, match="return_dict_in_generate .* max_loras=7"):
        narrow.generate(**inputs, **options, adapter_ids=IDS)


def test_seeded_sampling_repeats(narrow: PreTrainedModel) -> None:
    def sample() -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return narrow.generate(**prompts(len(IDS)), do_sample=True, max_new_tokens=5, adapter_ids=IDS)

    assert torch.equal(sample(), sample())


def test_waves_of_an_encoder_decoder() -> None:
    model = enabled("t5", max_loras=2)
    inputs = prompts(len(IDS), seed=33, side="right")
    for beams in (1, 3):
        options = {**GREEDY, "num_beams": beams}
        got = model.generate(**inputs, **options, adapter_ids=IDS)
        assert torch.equal(got, rows_of("t5", IDS, lambda ref, options=options: ref.generate(**inputs, **options)))


def test_waves_with_inputs_per_row(narrow: PreTrainedModel) -> None:
    """Everything with a row per prompt is split with the rows."""
    mask = prompts(len(IDS), seed=34)["attention_mask"]
    embeds = torch.randn(*mask.shape, narrow.config.hidden_size, generator=torch.Generator().manual_seed(35))
    inputs = {"inputs_embeds": embeds, "attention_mask": mask}
    got = narrow.generate(**inputs, **GREEDY, adapter_ids=IDS)
    assert torch.equal(got, rows_of("llama", IDS, lambda ref: ref.generate(**inputs, **GREEDY)))
    inputs, negative = prompts(len(IDS), seed=36), prompts(len(IDS), seed=37, length=7)
    options = {
        **GREEDY,
        "guidance_scale": 1.5,
        "negative_prompt_ids": negative["input_ids"],
        "negative_prompt_attention_mask": negative["attention_mask"],
    }
    got = narrow.generate(**inputs, **options, adapter_ids=IDS)
    assert torch.equal(got, rows_of("llama", IDS, lambda ref: ref.generate(**inputs, **options)))


def test_positional_prompt_and_no_mask(narrow: PreTrainedModel) -> None:
    ids = prompts(len(IDS), seed=38)["input_ids"]
    got = narrow.generate(ids, **GREEDY, adapter_ids=IDS)
    assert torch.equal(got, rows_of("llama", IDS, lambda ref: ref.generate(ids, **GREEDY)))


def test_what_counts_rows_sees_the_callers_rows(narrow: PreTrainedModel) -> None:
    """prefix_allowed_tokens_fn is told the prompt's number, which waves would change: an error."""
    inputs = prompts(len(IDS), seed=40)

    def allowed(row: int, tokens: torch.Tensor) -> list[int]:
        return list(range(10 * row + 1, 10 * row + 8))

    options = {**GREEDY, "prefix_allowed_tokens_fn": allowed}
    with pytest.raises(SlotError, match="prefix_allowed_tokens_fn .* max_loras=7"):
        narrow.generate(**inputs, **options, adapter_ids=IDS)


class Silent(BaseStreamer):
    def __init__(self) -> None:
        self.calls = 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1

    def end(self) -> None:
        self.calls += 1


def test_what_runs_no_waves_raises(narrow: PreTrainedModel) -> None:
    """A plain forward, use(), a cache passed in, a streamer: nothing runs, and the message says what to raise."""
    cache, streamer = DynamicCache(config=narrow.config), Silent()

    def use() -> None:
        with narrow.multilora.use(IDS):
            narrow.generate(**prompts(len(IDS)), **GREEDY)

    calls = [
        lambda: logits(narrow, IDS, len(IDS)),
        lambda: narrow.generate(**prompts(len(IDS)), **GREEDY, streamer=streamer, adapter_ids=IDS),
        lambda: narrow.generate(**prompts(len(IDS)), **GREEDY, past_key_values=cache, adapter_ids=IDS),
        use,
    ]
    for call in calls:
        with Calls(narrow) as forwards, pytest.raises(SlotError, match="max_loras") as raised:
            call()
        assert "7" in str(raised.value)
        assert len(forwards) == 0
        assert in_use(narrow) == 0
    assert streamer.calls == 0


def test_waves_next_to_a_pin() -> None:
    """A pinned slot is not for others: the waves are smaller, the result is the same."""
    model = enabled("llama", max_loras=2)
    model.multilora.pin("r64")
    inputs = prompts(len(IDS), seed=39)
    got = model.generate(**inputs, **GREEDY, adapter_ids=IDS)
    assert torch.equal(got, rows_of("llama", IDS, lambda ref: ref.generate(**inputs, **GREEDY)))
    assert "r64" in resident(model)


def test_least_recently_used_leaves() -> None:
    model = enabled("llama", ["r1", "r3", "r8"], max_loras=2)
    for name in ("r1", "r3", "r1", "r8"):
        assert_answers(model, name)
    assert resident(model) == {"r1", "r8"}
    status = model.multilora.status()
    assert (status.resident.misses, status.resident.hits, status.resident.evictions) == (3, 1, 1)
    assert status.resident.nbytes > 0 and status.resident.ms > 0
    assert sorted(name for name in status.slots if name) == ["r1", "r8"]
    assert_answers(model, "r3")
    assert resident(model) == {"r8", "r3"}


def test_a_batch_evicts_nothing_that_it_uses() -> None:
    model = enabled("llama", ["r1", "r3", "r8", "r16"], max_loras=3)
    for batch in (["r1", "r3", "r8"], ["r16", "r8", "r1"], ["r3", "r16", "r1"], ["r8", "r8", "r3"]):
        got = logits(model, batch)
        for row, name in enumerate(batch):
            assert relative_error(got[row], logits_of(name)[row]) <= 1e-5, batch


def test_host_memory_is_read_again() -> None:
    model = enabled("llama", ["r1", "r3", "r8", "r16"], max_loras=1, max_cpu_loras=2)
    first = {adapter.name: adapter.generation for adapter in model.multilora.status().adapters}
    for name in ("r1", "r3", "r8", "r16", "r1"):
        assert_answers(model, name)
    status = model.multilora.status()
    assert status.registered.evictions >= 2
    assert status.registered.misses >= 1
    assert {a.name: a.generation for a in status.adapters if a.name in first} == {
        name: first[name] for name in (a.name for a in status.adapters)
    }, "read again unchanged: the same generation"


def test_files_that_changed_while_evicted_raise_the_generation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    model = enabled("llama", ["r1", "r3"], max_loras=1, max_cpu_loras=1)
    folder = shutil.copytree(adapters()["r8"], tmp_path / "adapter")
    before = model.load_adapter(folder, adapter_name="mine").generation
    assert_answers(model, "mine", "r8")
    assert_answers(model, "r1")
    shutil.copytree(adapters()["r16"], folder, dirs_exist_ok=True)
    assert_answers(model, "mine", "r16")
    said = [*caplog.messages, *(str(warning.message) for warning in recwarn)]
    assert any("mine" in message and "changed" in message for message in said), said
    after = next(a.generation for a in model.multilora.status().adapters if a.name == "mine")
    assert after > before


def test_files_that_vanished_while_evicted(tmp_path: Path) -> None:
    model = enabled("llama", ["r1"], max_loras=1, max_cpu_loras=1)
    folder = shutil.copytree(adapters()["r8"], tmp_path / "adapter")
    model.load_adapter(folder, adapter_name="mine")
    assert_answers(model, "r1")
    shutil.rmtree(folder)
    with pytest.raises(MultiLoraError, match="mine|adapter"):
        logits(model, "mine")
    assert in_use(model) == 0
    assert_answers(model, "r1")


def test_pin() -> None:
    model = enabled("llama", ["r1", "r3", "r8"], max_loras=2, max_cpu_loras=2)
    model.multilora.pin("r1")
    assert "r1" in resident(model)
    for name in ("r3", "r8", "r3"):
        assert_answers(model, name)
        assert "r1" in resident(model)
    assert next(a.pinned for a in model.multilora.status().adapters if a.name == "r1")
    model.multilora.pin("r3")
    with pytest.raises(SlotError, match="pin"):
        logits(model, "r8")
    with pytest.raises(SlotError, match="pin"):
        model.generate(**prompts(3), **GREEDY, adapter_ids=["r1", "r8", "r3"])
    with pytest.raises(SlotError, match="pin"):
        model.multilora.pin("r8")
    assert_answers(model, "r1")
    model.multilora.unpin("r1")
    assert_answers(model, "r8")
    assert resident(model) == {"r3", "r8"}
    with pytest.raises(AdapterNotFoundError):
        model.multilora.pin("nosuch")


def test_pins_follow_a_reload() -> None:
    model = enabled("llama", ["r1", "r3"], max_loras=2)
    model.multilora.pin("r1")
    model.load_adapter(adapters()["r8"], adapter_name="r1", reload=True)
    assert_answers(model, "r3")
    assert_answers(model, "r1", "r8")
    assert next(a.pinned for a in model.multilora.status().adapters if a.name == "r1")


def test_prefetch() -> None:
    model = enabled("llama", ["r1", "r3", "r8"], max_loras=2)
    model.multilora.prefetch(["r1", "r3"])
    assert resident(model) == {"r1", "r3"}
    before = model.multilora.status().resident.misses
    for name in ("r1", "r3"):
        assert_answers(model, name)
    assert model.multilora.status().resident.misses == before
    model.multilora.prefetch(["r8"])
    for name in ("r8", "r1", "r3"):
        assert_answers(model, name)


def test_a_smaller_adapter_in_a_larger_ones_slot() -> None:
    """Nothing of the slot's last adapter may show: fewer modules, lower ranks, no embedding, no head."""
    model = enabled("llama", max_loras=1)
    for name in ("r64", "r1", "r64", "r33", "r64", "r16", "r3", "r1"):
        assert_answers(model, name)


def test_unload_frees() -> None:
    model = enabled("llama", ["r1", "r3"], max_loras=1)
    assert_answers(model, "r1")
    model.multilora.unload("r1")
    assert model.multilora.status().slots == [None]
    assert_answers(model, "r3")
    assert model.multilora.status().resident.evictions == 0


def test_generations_never_restart() -> None:
    model = enabled("llama", ["r1"])
    seen = [model.multilora.status().adapters[0].generation]
    for _ in range(3):
        model.multilora.unload("r1")
        seen.append(model.load_adapter(adapters()["r1"], adapter_name="r1").generation)
        seen.append(model.load_adapter(adapters()["r1"], adapter_name="r1", reload=True).generation)
    other = enabled("llama", ["r1"])
    seen.append(other.multilora.status().adapters[0].generation)
    assert seen == sorted(set(seen))


def test_on_demand_is_part_of_the_same_caches() -> None:
    """Ids that are folders are loaded at first use, take slots and leave them as any other."""
    model = enable_multilora(FAMILIES["llama"].build(), max_loras=2, max_lora_rank=64)
    names = ["r1", "r3", "r8", "r16"]
    ids = [str(adapters()[name]) for name in names]
    got = model.generate(**prompts(4), **GREEDY, adapter_ids=ids)
    assert torch.equal(got, rows_of("llama", names, lambda ref: ref.generate(**prompts(4), **GREEDY)))
    assert {adapter.name for adapter in model.multilora.status().adapters} == set(ids)
    misses = model.multilora.status().registered.misses
    model.generate(**prompts(4), **GREEDY, adapter_ids=ids)
    assert model.multilora.status().registered.misses == misses


def test_the_next_wave_is_read_while_one_runs() -> None:
    """Files of the second wave, dropped from host memory, are read before the first wave has ended."""
    names: list[Id] = ["r1", "r3", "r8", "r16"]
    model = enabled("llama", names, max_loras=2, max_cpu_loras=2)  # type: ignore[arg-type]
    handle = model.multilora
    assert [handle.store.entry(name).packed is None for name in names] == [True, True, False, False]
    both = ["r8", "r16", "r1", "r3"]
    seen: list[bool] = []

    def forward(*_: Any) -> None:
        if not seen:
            end = time.monotonic() + 20
            while any(handle.store.entry(name).packed is None for name in ("r1", "r3")) and time.monotonic() < end:
                time.sleep(0.005)
        seen.append(all(handle.store.entry(name).packed is not None for name in ("r1", "r3")))

    hook = model.register_forward_pre_hook(forward)
    before = handle.status().registered.misses
    got = model.generate(**prompts(4), **GREEDY, adapter_ids=both)
    hook.remove()
    assert torch.equal(got, rows_of("llama", both, lambda ref: ref.generate(**prompts(4), **GREEDY)))
    assert all(seen) and len(seen) == 10
    assert handle.status().registered.misses == before, "the second wave did not have to wait for its files"
    assert in_use(model) == 0
    assert sum(handle.store.entry(name).packed is not None for name in names) == 2


def test_free_slots_get_the_next_waves_adapters() -> None:
    """Five adapters, four slots: three and two, so that one of the two is copied while the three decode."""
    names: list[Id] = ["r1", "r3", "r8", "r16", "r64"]
    model = enabled("llama", names, max_loras=4)  # type: ignore[arg-type]
    seen: list[set[str]] = []
    hook = model.register_forward_pre_hook(lambda *_: seen.append(resident(model)))
    got = model.generate(**prompts(5), **GREEDY, adapter_ids=names)
    hook.remove()
    assert torch.equal(got, rows_of("llama", names, lambda ref: ref.generate(**prompts(5), **GREEDY)))
    assert seen[0] == {"r1", "r3", "r8", "r16"} and {"r16", "r64"} <= seen[-1]
    status = model.multilora.status().resident
    assert (status.misses, status.hits, status.evictions) == (4, 1, 1)
    assert in_use(model) == 0


def test_a_wave_that_fails_keeps_nothing() -> None:
    names: list[Id] = ["r1", "r3", "r8", "r16"]
    model = enabled("llama", names, max_loras=2, max_cpu_loras=2)  # type: ignore[arg-type]

    def forward(*_: Any) -> None:
        raise RuntimeError("stop")

    hook = model.register_forward_pre_hook(forward)
    with pytest.raises(RuntimeError, match="stop"):
        model.generate(**prompts(4), **GREEDY, adapter_ids=names)
    hook.remove()
    store = model.multilora.store
    assert not any(entry.holders for entry in store._registry)
    assert in_use(model) == 0
    got = model.generate(**prompts(4), **GREEDY, adapter_ids=names)
    assert torch.equal(got, rows_of("llama", names, lambda ref: ref.generate(**prompts(4), **GREEDY)))


def test_waves_of_mixes() -> None:
    """The parts of a mix are read ahead, too."""
    ids: list[Id] = ["r1", MIX, "r16", None]
    model = enabled("llama", max_loras=1, max_cpu_loras=1)
    got = model.generate(**prompts(4), **GREEDY, adapter_ids=ids)
    assert torch.equal(got, rows_of("llama", ids, lambda ref: ref.generate(**prompts(4), **GREEDY)))
    assert in_use(model) == 0


@pytest.mark.parametrize(
    "count, slots, sizes",
    [
        (1, 1, [1]),
        (5, 4, [3, 2]),
        (9, 4, [3, 3, 3]),
        (16, 8, [8, 8]),
        (12, 8, [6, 6]),
        (4, 1, [1] * 4),
        (7, 3, [3, 3, 1]),
    ],
)
def test_as_few_waves_as_can_be(count: int, slots: int, sizes: list[int]) -> None:
    keys = [f"a{i}" for i in range(count)]
    waves = plan_waves([*keys, None, *keys], slots)
    assert [len({([*keys, None, *keys])[row] for row in wave} - {None}) for wave in waves] == sizes
    assert sorted(row for wave in waves for row in wave) == list(range(2 * count + 1))
