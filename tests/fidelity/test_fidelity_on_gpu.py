"""All kinds of adapters in one batch on a GPU, in fp32, against PEFT with each of them alone on the CPU.

`HF_MULTILORA_GPU_TESTS_ON=cpu` runs the same on a CPU, to debug the tests themselves.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator

import pytest
import torch
from fidelity.bed import VOCAB, assert_own_columns, batch, enabled, kinds, known, logits, reference, wanted
from oracle import TOLERANCE, relative_error

DEVICE = os.environ.get("HF_MULTILORA_GPU_TESTS_ON", "cuda")
pytestmark = [pytest.mark.gpu] if DEVICE.startswith("cuda") else []


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "phi3"])
def test_all_kinds_in_one_batch(family: str) -> None:
    """Enabled on the CPU and moved: slots, saved tensors and vectors move along."""
    names: list[str | None] = []
    for name in kinds(family):
        names += [name, None]
    model = enabled(family, [name for name in names if name is not None]).to(DEVICE)
    inputs = batch(family, names)
    moved = {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    got = logits(model, moved, adapter_ids=names).cpu()
    # A device rounds its products otherwise than a CPU: rows of the base are compared with the bare model there.
    bare = logits(copy.deepcopy(reference(family, None)).to(DEVICE), known(moved, VOCAB)).cpu()
    for row, want in enumerate(wanted(family, names, inputs, logits)):
        if names[row] is None:
            assert relative_error(bare[row], want) <= TOLERANCE
            want = bare[row]
        assert_own_columns(got[row], want, names[row], f"{family} row {row}")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(**moved, **options, adapter_ids=names).cpu()
    on_cpu = enabled(family, [name for name in names if name is not None])
    assert torch.equal(tokens, on_cpu.generate(**inputs, **options, adapter_ids=names))
