"""Load, generate, pin, evict, reload and unload in any order, against a model of them that fits one page."""

from __future__ import annotations

import torch
from enabled import enabled
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from models import prompts
from oracle import Id, adapters, alone, relative_error
from transformers import PreTrainedModel

from hf_multilora.errors import AdapterExistsError, AdapterNotFoundError, SlotError

SLOTS, HOST = 2, 3
NAMES = ["a", "b", "c", "d", "e"]
SOURCES = ["r1", "r3", "r8", "r16", "r33", "r64"]
ROWS = 4
MIX_WEIGHTS = (0.6, -0.3)

names = st.sampled_from(NAMES)
sources = st.sampled_from(SOURCES)


@torch.no_grad()
def answer(source: str | None, row: int) -> torch.Tensor:
    """The logits of one row under one source, from PEFT; computed once per source."""
    if source not in _answers:
        _answers[source] = alone("llama", source)(**prompts(ROWS)).logits
    return _answers[source][row]


_answers: dict[str | None, torch.Tensor] = {}


class Adapters(RuleBasedStateMachine):
    """`loaded` is the whole truth about the registered names: which source each one stands for, and its generation."""

    model: PreTrainedModel

    @initialize()
    def start(self) -> None:
        self.model = enabled("llama", [], max_loras=SLOTS, max_cpu_loras=HOST)
        self.loaded: dict[str, str] = {}
        self.generations: dict[str, int] = {}
        self.highest = -1
        self.pinned: set[str] = set()
        for name, source in zip(NAMES[:-1], SOURCES, strict=False):
            self.load(name, source, reload=False)

    def load(self, name: str, source: str, reload: bool) -> None:
        report = self.model.load_adapter(adapters()[source], adapter_name=name, reload=reload)
        assert report.generation > self.highest, "a generation that was used before"
        self.highest = self.generations[name] = report.generation
        self.loaded[name] = source

    @rule(name=names, source=sources)
    def load_new(self, name: str, source: str) -> None:
        if name in self.loaded:
            try:
                self.model.load_adapter(adapters()[source], adapter_name=name)
            except AdapterExistsError:
                return
            raise AssertionError(f"{name} was loaded twice")
        self.load(name, source, reload=False)

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), source=sources)
    def reload(self, data: st.DataObject, source: str) -> None:
        self.load(data.draw(st.sampled_from(sorted(self.loaded))), source, reload=True)

    @rule(name=names)
    def unload(self, name: str) -> None:
        try:
            self.model.multilora.unload(name)
        except AdapterNotFoundError:
            assert name not in self.loaded
            return
        assert self.loaded.pop(name)
        self.pinned.discard(name)

    @rule(name=names)
    def pin(self, name: str) -> None:
        try:
            self.model.multilora.pin(name)
        except AdapterNotFoundError:
            assert name not in self.loaded
        except SlotError:
            assert len(self.pinned) == SLOTS and name not in self.pinned
        else:
            assert name in self.loaded
            self.pinned.add(name)
            assert len(self.pinned) <= SLOTS

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pinned)))
        self.model.multilora.unpin(name)
        self.pinned.discard(name)

    @precondition(lambda self: self.loaded)
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        self.model.multilora.prefetch([data.draw(st.sampled_from(sorted(self.loaded)))])

    def batch(self, data: st.DataObject) -> tuple[list[str | None], set[str]]:
        """Ids for every row, mostly names that are loaded, and the names among them."""
        known = st.sampled_from([None, *sorted(self.loaded)])
        drawn = data.draw(st.lists(known, min_size=ROWS, max_size=ROWS))
        if data.draw(st.integers(0, 9)) == 0:
            drawn[0] = data.draw(names)
        return drawn, {name for name in drawn if name is not None}

    @rule(data=st.data())
    def forward(self, data: st.DataObject) -> None:
        batch, wanted = self.batch(data)
        try:
            with torch.no_grad():
                got = self.model(**prompts(ROWS), adapter_ids=batch).logits
        except AdapterNotFoundError:
            assert wanted - set(self.loaded)
        except SlotError:
            assert not self.fits(wanted)
        else:
            assert self.fits(wanted) and wanted <= set(self.loaded)
            for row, name in enumerate(batch):
                want = answer(name and self.loaded[name], row)
                assert relative_error(got[row], want) <= 1e-5, (row, name)

    def fits(self, wanted: set[str]) -> bool:
        return len(wanted | self.pinned) <= SLOTS

    @rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        """Waves: only names that are unknown, or pins on every slot, can be in the way."""
        batch, wanted = self.batch(data)
        try:
            got = self.model.generate(**prompts(ROWS), max_new_tokens=1, do_sample=False, adapter_ids=batch)[:, -1]
        except AdapterNotFoundError:
            assert wanted - set(self.loaded)
        except SlotError:
            assert len(self.pinned) == SLOTS and wanted - self.pinned
        else:
            assert wanted <= set(self.loaded)
            for row, name in enumerate(batch):
                assert got[row] == answer(name and self.loaded[name], row)[-1].argmax(), (row, name)

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), second=names, base=st.booleans())
    def mix(self, data: st.DataObject, second: str, base: bool) -> None:
        """A composed slot, made of whatever its parts are now."""
        first = data.draw(st.sampled_from(sorted(self.loaded)))
        parts = {first: MIX_WEIGHTS[0], second: MIX_WEIGHTS[1]}
        ids: list[Id] = [parts, None, parts, None if base else parts]
        try:
            with torch.no_grad():
                got = self.model(**prompts(ROWS), adapter_ids=ids).logits
        except AdapterNotFoundError:
            assert set(parts) - set(self.loaded)
            return
        except SlotError:
            assert len(self.pinned) == SLOTS
            return
        assert set(parts) <= set(self.loaded)
        weights: dict[str, float] = {}
        for name, weight in parts.items():
            source = self.loaded[name]
            weights[source] = weights.get(source, 0.0) + weight
        reference = mix_answer(tuple(sorted(weights.items())))
        for row, adapter in enumerate(ids):
            want = answer(None, row) if adapter is None else reference[row]
            assert relative_error(got[row], want) <= 1e-5, (row, adapter)

    @invariant()
    def status_agrees(self) -> None:
        if not hasattr(self, "loaded"):
            return
        status = self.model.multilora.status()
        assert {adapter.name for adapter in status.adapters} == set(self.loaded)
        assert {a.name: a.generation for a in status.adapters} == {n: self.generations[n] for n in self.loaded}
        assert {adapter.name for adapter in status.adapters if adapter.pinned} == self.pinned
        assert all(adapter.in_use == 0 for adapter in status.adapters)
        slots = [adapter.slot for adapter in status.adapters if adapter.slot is not None]
        assert len(slots) == len(set(slots)) and all(0 <= slot < SLOTS for slot in slots)
        assert all(adapter.slot is not None for adapter in status.adapters if adapter.pinned)
        for adapter in status.adapters:
            if adapter.slot is not None:
                assert status.slots[adapter.slot] == adapter.name


@torch.no_grad()
def mix_answer(weights: tuple[tuple[str, float], ...]) -> torch.Tensor:
    """What PEFT gives for a mix of sources. It takes use_rslora from the first, so one without it is put there."""
    if weights not in _mixes:
        _mixes[weights] = alone("llama", {"r1": 0.0, **dict(weights)})(**prompts(ROWS)).logits
    return _mixes[weights]


_mixes: dict[tuple[tuple[str, float], ...], torch.Tensor] = {}

TestAdapters = Adapters.TestCase
TestAdapters.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
