"""How a manager ends: with its model disabled, from before that, or by an error of a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from continuous.cb_bed import answer, assert_answer, batch, batching, enabled, greedy, prompt
from continuous.cb_run import WAIT_S, Results, assert_serves, running
from models import FAMILIES

from hf_multilora import ModelError, MultiLoraError, disable_multilora
from hf_multilora.layers import LoraLayer

pytestmark = pytest.mark.timeout(120)

VERSIONS = {"sql": 0, "poet": 1, "law": 2}
INPUTS = [prompt(5 + 3 * i, seed=i) for i in range(6)]


def test_disable_with_a_running_manager() -> None:
    model, bare = enabled(VERSIONS), FAMILIES["llama"].build()
    with running(model) as manager:
        for _ in range(2):
            with pytest.raises(ModelError, match="continuous|manager"):
                disable_multilora(model)
            assert_serves(manager, VERSIONS)
    disable_multilora(model)
    assert type(model) is type(bare)
    for name, weight in bare.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    for output, tokens in zip(batch(model, INPUTS), INPUTS, strict=True):
        assert output.generated_tokens == answer(tokens, None, 8), "the native continuous batching"


def test_a_disable_that_fails_leaves_managers_as_they_are() -> None:
    model = enabled(VERSIONS)
    batch(model, INPUTS[:1], adapter_ids="sql", persistent_manager=True)
    manager, head = model._cached_continuous_batching_manager, model.lm_head
    model.lm_head = torch.nn.Identity()
    with pytest.raises(ModelError, match="lm_head has been replaced"):
        disable_multilora(model)
    model.lm_head = head
    assert model._cached_continuous_batching_manager is manager
    output = batch(model, INPUTS[:1], adapter_ids="sql", persistent_manager=True)[0]
    assert_answer(output, 0, 8)
    disable_multilora(model)
    assert not hasattr(model, "_cached_continuous_batching_manager")
    with pytest.raises(ModelError, match="disabled"):
        manager.start()


@pytest.mark.parametrize("used", [False, True], ids=["never started", "stopped"])
def test_a_manager_from_before_disable_serves_nothing(used: bool) -> None:
    """It belongs to what was undone, and does not bring any of it back."""
    model = enabled(VERSIONS)
    manager = model.init_continuous_batching(generation_config=greedy(), continuous_batching_config=batching())
    if used:
        manager.start()
        assert_serves(manager, VERSIONS)
        manager.stop(timeout=WAIT_S)
    disable_multilora(model)
    try:
        manager.start()
        assert Results(manager).wait(manager.add_request(INPUTS[0], adapter_id="sql"))[0].error
    except MultiLoraError as error:
        assert "disabled" in str(error) or "enabled" in str(error)
    finally:
        if manager.is_running():
            manager.stop(timeout=WAIT_S, hard_stop=True)
    assert not [path for path, module in model.named_modules() if isinstance(module, LoraLayer)]
    assert batch(model, INPUTS[:1])[0].generated_tokens == answer(INPUTS[0], None, 8)


def test_an_error_of_the_forward_holds_nothing() -> None:
    """What transformers cannot go on after: every request fails, no slot stays taken, the next manager works."""

    model = enabled(VERSIONS)

    def broken(*_: Any) -> None:
        raise RuntimeError("out of something")

    hook = model.register_forward_pre_hook(broken)
    outputs = batch(model, INPUTS, adapter_ids="sql", warmup=False)
    hook.remove()
    assert all("out of something" in output.error for output in outputs) and len(outputs) == len(INPUTS)
    assert all(adapter.in_use == 0 for adapter in model.multilora.status().adapters)
    assert_answer(batch(model, INPUTS[:1], adapter_ids="poet")[0], 1, 8)
