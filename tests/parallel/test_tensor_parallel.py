"""Two ranks answer as one process does, whatever an adapter trained; what they do not share, they say."""

from __future__ import annotations

import time

import pytest
from ranks import play, start

TOLERANCE = 1e-5


def check(found: dict, halved: dict[str, tuple[int, int]]) -> None:
    """What a rank found in a `mixed` scene; `halved`: (in, out) of layers as it should hold them."""
    assert found["refused"] == {} and found["undone"]
    assert len(found["errors"]) > 10 and max(found["errors"].values()) < TOLERANCE, found["errors"]
    assert min(found["told"].values()) > 0.1, "each adapter changes something"
    assert found["alike"] and found["waves"] and found["again"], "tokens of generate()"
    for path, widths in halved.items():
        assert tuple(found["layers"][f"model.layers.0.{path}"]) == widths


LLAMA = {
    "self_attn.q_proj": (48, 24), "self_attn.k_proj": (48, 12), "self_attn.o_proj": (24, 48),
    "mlp.up_proj": (48, 40), "mlp.down_proj": (40, 48),
}  # fmt: skip


def test_llama_over_two_ranks() -> None:
    for found in play("mixed+compiled+gradients+refusals+disagreement", "llama"):
        check(found["mixed"], LLAMA)
        assert found["compiled"]["error"] < TOLERANCE and found["gradients"]["error"] < TOLERANCE
        assert "o_proj" in found["refusals"]["saved"] and "ranks" in found["refusals"]["saved"]
        said = found["disagreement"]["said"]
        assert set(said) == {"name", "content", "ids", "unknown"}
        for what in ("name", "content", "ids"):
            assert "do not agree" in said[what], said
        assert found["disagreement"]["good"], "the ranks go on after it"


def test_packed_layers_over_two_ranks() -> None:
    """Phi-3 by its own plan, which gathers what it has packed, and by one that leaves it split."""
    for found in play("mixed+packed", "phi3"):
        check(found["mixed"], {"self_attn.o_proj": (24, 48), "mlp.down_proj": (40, 48)})
        check(found["packed"], {"mlp.gate_up_proj": (48, 40), "mlp.down_proj": (40, 48)})


def test_a_killed_rank_is_an_error_and_no_endless_wait(tmp_path) -> None:
    first, second = start("killed", "llama", str(tmp_path))
    try:
        for line in second.stdout:
            if line.strip() == "ready":
                break
        else:
            pytest.fail("rank 1 did not begin")
        time.sleep(0.5)
        second.kill()
        said, _ = first.communicate(timeout=60)
    finally:
        first.kill()
        second.kill()
    assert first.returncode not in (0, None) and "Error" in said, said[-2000:]


@pytest.mark.gpu
def test_ranks_on_gpus() -> None:
    """Our kernels on the parts of layers. On one GPU both ranks share it."""
    for found in play("mixed+compiled+disagreement", "llama", device="cuda"):
        check(found["mixed"], LLAMA)
        assert found["compiled"]["error"] < TOLERANCE


@pytest.mark.gpu
def test_packed_layers_on_gpus() -> None:
    for found in play("mixed+packed", "phi3", device="cuda"):
        check(found["mixed"], {"self_attn.o_proj": (24, 48), "mlp.down_proj": (40, 48)})
        check(found["packed"], {"mlp.gate_up_proj": (48, 40), "mlp.down_proj": (40, 48)})
