"""What status() says about the number of slots after requests have waited for one."""

from __future__ import annotations

from continuous.cb_bed import batch, enabled, prompt


def test_requests_that_waited_for_a_slot_speak_for_more():
    names = {f"a{i}": i for i in range(4)}
    model = enabled(names, max_loras=2)
    batch(model, [prompt(6, i) for i in range(2)], 4, adapter_ids=["a0", "a1"])
    assert model.multilora.status().suggested_max_loras is None
    batch(model, [prompt(6, i) for i in range(4)], 4, adapter_ids=list(names))
    assert model.multilora.status().suggested_max_loras == 4
