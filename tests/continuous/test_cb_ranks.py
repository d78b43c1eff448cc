"""What ranks tell each other, without other ranks; tests/parallel has them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from continuous.cb_bed import enabled, folder

from hf_multilora import ModelError
from hf_multilora.generation.continuous.ranks import Ranks, with_ranks
from hf_multilora.generation.continuous.requests import Carrier
from hf_multilora.generation.continuous.seats import Seats
from hf_multilora.parallel import number_of

NONE = number_of("the step")


@pytest.fixture
def talk(monkeypatch):
    """Ranks, and what the other one says in each reduction; `said` is what this one has."""
    theirs, said = [], []

    def reduce(values, op, group):
        said.append(values.tolist())
        answer = theirs.pop(0)
        if isinstance(answer, Exception):
            raise answer
        values.copy_(torch.maximum(values, torch.tensor(answer)))

    monkeypatch.setattr(dist, "all_reduce", reduce)
    return Ranks(SimpleNamespace(cpu_comm_group=None, tp_group=None)), theirs, said


def test_what_has_come_in_and_how_soon_to_stop_is_the_most_of_any_rank(talk):
    ranks, theirs, said = talk
    theirs += [[0, 1, 0, 0, NONE, -NONE]]
    assert ranks.exchange("the step", (), 3, 0, 1) == [3, 1, 1]
    assert len(said) == 1


@pytest.mark.parametrize("theirs_first", [number_of("the next batch", 1), NONE])
def test_other_facts_raise_and_nobody_waits_any_more(talk, theirs_first):
    ranks, theirs, said = talk
    theirs += [[0, 0, 0, 0, theirs_first, -theirs_first]]
    with pytest.raises(ModelError, match="do not agree about the next batch"):
        ranks.exchange("the next batch", [2])
    assert ranks.exchange("the step", ()) == [0, 2, 0] and len(said) == 1
    ranks.begin()
    theirs += [[0, 0, 0, 0, NONE, -NONE]]
    assert ranks.exchange("the step", ()) == [0, 0, 0]


def test_a_rank_that_failed_is_heard_of_in_whatever_comes_next(talk):
    ranks, theirs, _ = talk
    theirs += [[0, 2, 0, 1, NONE, -NONE]]
    with pytest.raises(ModelError, match="Another rank"):
        ranks.agree([], 0)


def test_a_rank_that_fails_says_so_and_hears_no_complaint(talk):
    ranks, theirs, said = talk
    ranks.failed = True
    other = number_of("the next batch", 0)
    theirs += [[0, 0, 0, 0, other, -other]]
    assert ranks.exchange("the step", (), 0, 2) == [0, 2, 0]
    assert said[0][3] == 1


def test_a_hard_stop_is_no_error(talk):
    ranks, theirs, _ = talk
    theirs += [[0, 2, 0, 0, NONE, -NONE]]
    assert ranks.exchange("the step", ()) == [0, 2, 0]


@pytest.mark.parametrize("failed", [False, True])
def test_a_rank_that_is_gone(talk, failed):
    ranks, theirs, _ = talk
    ranks.failed = failed
    theirs += [RuntimeError("Connection closed by peer")]
    if failed:
        assert ranks.exchange("the step", ()) == [0, 2, 0]
        return
    with pytest.raises(ModelError, match="has ended, or does not answer: Connection closed"):
        ranks.exchange("the step", ())


@pytest.mark.parametrize("numbers", [2, 3])
def test_the_helper_returns_as_many_numbers_as_its_transformers_knows(talk, numbers):
    ranks, theirs, _ = talk
    helper = with_ranks(SimpleNamespace)(_cpu_int_acc=[0] * numbers, _ranks=ranks)
    theirs += [[0, 1, 0, 0, NONE, -NONE]]
    assert helper.tp_all_reduce_state(4, 0) == (4, 1, 0)[:numbers]


def test_arrivals_are_those_of_the_rank_that_took_the_request():
    later = Carrier("a")
    earlier = Carrier((("a", 0.5), ("b", 1.0)), arrived=later.arrived - 7)
    first, second = pickle.loads(pickle.dumps([earlier, later]))
    assert (first.arrived, second.arrived) == (earlier.arrived, later.arrived)
    assert (first.key, second.key) == (earlier.key, "a") and first.loading == []


def test_seats_over_ranks_read_nothing_for_which_there_is_no_slot():
    model = enabled({"pinned": 0}, max_loras=2, max_cpu_loras=2)
    handle, store = model.multilora, model.multilora.store
    handle.pin("pinned")
    for number, name in ((1, "a"), (2, "b")):
        handle.load(folder(number), name)
    seats = Seats(store, lambda *_: None, None)
    assert (seat := seats.take("a")) is not None and seat.identity == tuple(store.entry("a").tag)
    reads = store.status().registered.misses
    assert seats.take("b") is None and store.status().registered.misses == reads
    assert seats.take("pinned") is not None, "it needs no other slot"
    seats.wait_for("b")
    seats.leave(())
    assert seats.take("b") is not None
    seats.leave(())
