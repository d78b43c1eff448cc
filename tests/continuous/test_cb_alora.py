"""aLoRA: its part before the invocation is the base's, and is shared with it; what comes after is its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from continuous.cb_bed import batch, batching, prompt
from continuous.cb_run import Results, counted, running, several
from continuous.test_cb_kinds import tokens_of
from fidelity import bed
from models import VOCAB
from oracle import workspace
from peft import PeftModel
from transformers.generation.continuous_batching.requests import RequestState

pytestmark = pytest.mark.timeout(120)

PAGE, NEW = 4, 8
NAMES = ["alora", "alora_single", "plain"]  # alora_single is invoked by token 5
HEAD = [20 + (7 * token) % (VOCAB - 20) for token in prompt(18, seed=1)]  # without a token that invokes
TAIL = [30, 41, 52, 63, 74]
INVOKED = HEAD + bed.INVOCATION + TAIL


def want(name: str | None, tokens: list[int], new: int = NEW) -> list[int]:
    return tokens_of(bed.reference("llama", name), tokens, new)


@pytest.fixture
def model() -> Any:
    return bed.enabled("llama", NAMES)


class Asking:
    """One request after the other; what each took over from the prefix cache."""

    def __init__(self, manager: Any) -> None:
        self.manager, self.results = manager, Results(manager)

    def __call__(self, name: str | None, tokens: list[int]) -> int:
        before = self.manager.status().prefix_tokens
        output = self.results.wait(self.manager.add_request(tokens, adapter_id=name))[0]
        assert output.error is None and output.generated_tokens == want(name, tokens), name
        return self.manager.status().prefix_tokens - before


@pytest.fixture
def ask(model: Any) -> Iterator[Asking]:
    with running(model, batching(PAGE, num_blocks=128)) as manager:
        yield Asking(manager)


def test_the_adapters_are_told_apart() -> None:
    single = [*HEAD, 5, *TAIL]
    assert want("alora", INVOKED) != want(None, INVOKED) and want("alora_single", single) != want(None, single)
    assert want("plain", INVOKED) not in (want(None, INVOKED), want("alora", INVOKED))


@pytest.mark.parametrize("budget", [3, 5, 48])
def test_where_it_is_invoked(model: Any, budget: int) -> None:
    """At any place of the prompt, with chunks that end before, in and after the invocation; the last one counts."""
    starts = [0, 1, 4, 7, 11, len(HEAD)]
    inputs = [HEAD[:start] + bed.INVOCATION + TAIL[: 1 + i] for i, start in enumerate(starts)]
    inputs += [INVOKED + INVOKED[9:], HEAD, HEAD + bed.INVOCATION[:2], INVOKED, INVOKED]
    names: list[str | None] = ["alora"] * (len(inputs) - 2) + [None, "plain"]
    outputs = batch(model, inputs, NEW, batching(PAGE, max_batch_tokens=budget), adapter_ids=names)
    for name, tokens, output in zip(names, inputs, outputs, strict=True):
        assert output.error is None and output.generated_tokens == want(name, tokens), (name, tokens)
    assert outputs[7].generated_tokens == want(None, HEAD), "without an invocation it is the base"


def test_what_the_base_read_is_taken_over(ask: Asking) -> None:
    assert ask(None, INVOKED) == 0
    assert ask("alora", INVOKED) == 16, "the whole pages before the invocation, and no others"
    assert ask("alora", INVOKED) == 24, "its own"
    assert ask(None, INVOKED) == 24, "and the base's"


def test_what_it_read_before_its_invocation_is_the_base_s(ask: Asking) -> None:
    assert ask("alora", INVOKED) == 0
    assert ask(None, INVOKED) == 16
    assert ask("alora_single", [*HEAD, 5, *TAIL]) == 16, "another aLoRA's, too"
    assert ask("plain", INVOKED) == 0, "but no other kind's"
    assert ask("plain", INVOKED) == 24


def test_a_second_invocation_in_the_same_page(ask: Asking) -> None:
    """The same tokens, of which other ones are the adapter's: the last invocation counts."""
    page = [*bed.INVOCATION, bed.INVOCATION[0]]
    first, second = HEAD[:PAGE] + page + TAIL, HEAD[:PAGE] + page + bed.INVOCATION[1:] + TAIL
    assert ask("alora", first) == 0
    assert ask("alora", second) == PAGE
    assert ask("alora", second) == 3 * PAGE and ask("alora", first) == 3 * PAGE


def test_without_an_invocation_all_of_it_is_the_base_s(ask: Asking) -> None:
    assert ask(None, HEAD) == 0
    assert ask("alora", HEAD) == 16
    assert ask("alora_single", [*HEAD, *TAIL]) >= 16


def test_at_once(model: Any) -> None:
    """Blocks that are completed in one batch: those before the invocation may be merged, those after it not."""
    names = ["alora", None, "plain"] * 4
    outputs = batch(model, [INVOKED] * len(names), 20, batching(PAGE, num_blocks=256), adapter_ids=names)
    for name, output in zip(names, outputs, strict=True):
        assert output.error is None and output.generated_tokens == want(name, INVOKED, 20), name


def test_a_reload_leaves_the_base_s_part(ask: Asking) -> None:
    assert ask("alora", INVOKED) == 0
    ask.manager.model.multilora.reload("alora")
    assert ask("alora", INVOKED) == 16


@pytest.mark.parametrize("each", [1, 3])
def test_memory_pressure_and_return_sequences(model: Any, each: int) -> None:
    names = ["alora", None, "alora", "plain", "alora"]
    inputs = [INVOKED[i:] for i in range(len(names))]
    config = batching(PAGE, num_blocks=24, safety_margin=0.0)
    with counted(RequestState, "create_equivalent_initial_request") as resets:
        outputs = several(model, inputs, each, 24, config, names)
    assert resets, "the cache is too large for what this tests"
    assert len(outputs) == each * len(names)
    for i, output in enumerate(outputs):
        name, tokens = names[i // each], inputs[i // each]
        assert output.error is None and output.generated_tokens == want(name, tokens, 24), (name, i)


def test_only_the_prompt_invokes() -> None:
    """An invocation that the model writes does nothing, also where the request begins again with what it wrote."""
    written = want(None, HEAD, 24)
    kind = bed.Kind({**bed.kinds("llama")["alora"].options, "alora_invocation_tokens": written[4:6]})
    assert all(HEAD[i : i + 2] != written[4:6] for i in range(len(HEAD)))
    folder = bed.save(bed.train("llama", kind, 77), workspace() / "continuous" / "written", kind)
    invoked = HEAD + written[4:6]
    reference = bed.quietly(PeftModel.from_pretrained, bed.build("llama"), folder).eval()
    assert tokens_of(reference, invoked) != want(None, invoked)
    model = bed.enabled("llama")
    model.load_adapter(folder, adapter_name="written")
    config = batching(PAGE, num_blocks=22, safety_margin=0.0, allow_block_sharing=False)
    with counted(RequestState, "create_equivalent_initial_request") as resets:
        outputs = batch(model, [HEAD, HEAD, invoked], 24, config, adapter_ids="written")
    begun = [state.initial_tokens[: len(HEAD) + 6] for state in resets]
    assert HEAD + written[:6] in begun, "no request began again with an invocation that it wrote"
    for output in outputs[:2]:
        assert output.error is None and output.generated_tokens == written
    assert outputs[2].generated_tokens == tokens_of(reference, invoked, 24)
