"""Classification heads per row: saved by each adapter, of other widths, and of several layers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from fidelity.bed import CLASSIFIERS, LABELS, assert_own_columns, batch, enabled, kinds, logits, reference, wanted
from oracle import relative_error
from transformers import PreTrainedModel

from hf_multilora import disable_multilora

CASES = [(family, kind) for family in CLASSIFIERS for kind in kinds(family)]


@pytest.fixture(scope="module", params=CLASSIFIERS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Iterator[PreTrainedModel]:
    model = enabled(family, kinds(family))
    yield model
    disable_multilora(model)


def rows(family: str) -> list[str | None]:
    names = list(kinds(family))
    return [None, *names[:7], None, *names[7:], None]


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_the_references_differ_from_the_base(family: str) -> None:
    names = rows(family)
    inputs = batch(family, names, side="right")
    base = wanted(family, [None] * len(names), inputs, logits)
    for name, own, plain in zip(names, wanted(family, names, inputs, logits), base, strict=True):
        if name is not None:
            width = min(own.shape[-1], plain.shape[-1])
            assert relative_error(own[..., :width], plain[..., :width]) > 0.03, name


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_alone(family: str, kind: str) -> None:
    model = enabled(family, [kind])
    names = [None, kind, None, kind]
    inputs = batch(family, names, side="right")
    got = logits(model, inputs, adapter_ids=names)
    for row, (name, want) in enumerate(zip(names, wanted(family, names, inputs, logits), strict=True)):
        assert_own_columns(got[row], want, name, f"{family} row {row}")


@pytest.mark.parametrize("side", ["right", None])
def test_all_kinds_in_one_batch(family: str, model: PreTrainedModel, side: str | None) -> None:
    """Heads of two, three and five labels: each row has its own, and -inf in the columns of the others."""
    names = rows(family)
    inputs = batch(family, names, side=side)
    got = logits(model, inputs, adapter_ids=names)
    assert got.shape[-1] == 5
    for row, (name, want) in enumerate(zip(names, wanted(family, names, inputs, logits), strict=True)):
        assert_own_columns(got[row], want, name, f"{family} row {row}")


def test_a_narrower_head_alone(family: str, model: PreTrainedModel) -> None:
    """Two labels beside the base's three."""
    names = ["two_labels", None]
    inputs = batch(family, names, side=None)
    got = logits(model, inputs, adapter_ids=names)
    assert got.shape[-1] == LABELS
    for row, want in enumerate(wanted(family, names, inputs, logits)):
        assert_own_columns(got[row], want, names[row], family)
    assert (got.softmax(-1)[0, ..., 2:] == 0).all()


def test_a_wider_head_leaves_the_base_as_it_is(family: str, model: PreTrainedModel) -> None:
    names = ["five_labels", None]
    inputs = batch(family, names, side=None)
    logits(model, inputs, adapter_ids=names)
    got = logits(model, inputs)
    assert torch.equal(got, logits(reference(family, None), inputs))
    assert model.config.num_labels == LABELS


def test_uniform_ids(family: str, model: PreTrainedModel) -> None:
    """One id for all rows: exactly the adapter's own width."""
    inputs = batch(family, ["five_labels"] * 3, side="right")
    got = logits(model, inputs, adapter_ids="five_labels")
    want = logits(reference(family, "five_labels"), inputs)
    for row in range(3):
        assert_own_columns(got[row], want[row], "five_labels", family)
    assert not (got == -math.inf).any()
