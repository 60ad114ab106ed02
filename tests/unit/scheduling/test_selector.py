"""Placement by target, else by cost."""

from __future__ import annotations

import pytest

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Worker, WorkerRank
from thunderagent_epp.scheduling.selector import Selector, Target

A0, A1, B0 = WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0)


@pytest.fixture
def selector() -> Selector:
    return Selector(CapacitySnapshot((Worker(B0), Worker(A1), Worker(A0))))


def test_the_smallest_worker_wins_a_tie(selector: Selector) -> None:
    assert selector.pick() == A0


def test_a_request_in_prefill_costs_its_tokens(selector: Selector) -> None:
    selector.started("r1", A0, 1)
    assert selector.cost(A0) == 1
    assert selector.pick() == A1


def test_a_request_in_decode_costs_its_blocks(selector: Selector) -> None:
    selector.started("r1", A0, 17)
    selector.responding("r1")
    assert selector.cost(A0) == 32
    selector.progress("r1", 32)
    assert selector.cost(A0) == 32
    selector.progress("r1", 33)
    assert selector.cost(A0) == 48


def test_progress_never_shrinks(selector: Selector) -> None:
    selector.started("r1", A0, 100)
    selector.progress("r1", 50)
    assert selector.cost(A0) == 100


def test_an_ended_request_costs_nothing(selector: Selector) -> None:
    selector.started("r1", A0, 17)
    selector.responding("r1")
    selector.ended("r1")
    selector.ended("r1")
    assert selector.cost(A0) == 0
    assert selector.pick() == A0


def test_a_request_costs_where_it_was_really_served(selector: Selector) -> None:
    selector.started("r1", A0, 16)
    selector.responding("r1", B0)
    assert (selector.cost(A0), selector.cost(B0)) == (0, 16)


def test_the_target_is_taken_whatever_it_costs(selector: Selector) -> None:
    selector.started("r1", B0, 1000)
    assert selector.pick(B0) == B0


def test_a_target_without_rank_takes_its_cheapest_rank(selector: Selector) -> None:
    selector.started("r1", A0, 10)
    assert selector.pick(Target("a", None)) == A1


def test_a_target_outside_the_subset_is_overruled(selector: Selector) -> None:
    assert selector.pick(A0, {B0, A1}) == A1


def test_a_target_that_is_not_live_is_overruled(selector: Selector) -> None:
    selector.snapshot(CapacitySnapshot((Worker(A0, live=False), Worker(B0))))
    assert selector.pick(A0) == B0


def test_the_cheapest_of_a_subset_is_taken(selector: Selector) -> None:
    selector.started("r1", A1, 10)
    assert selector.pick(None, {A1, B0}) == B0


@pytest.mark.parametrize("subset", [set(), {WorkerRank("unknown")}])
def test_nothing_eligible_is_no_endpoint(selector: Selector, subset: set[WorkerRank]) -> None:
    assert selector.pick(None, subset) is None


def test_no_live_worker_is_no_endpoint() -> None:
    assert Selector().pick() is None


def test_the_load_of_a_worker_survives_its_absence(selector: Selector) -> None:
    selector.started("r1", A0, 10)
    selector.snapshot(CapacitySnapshot((Worker(B0),)))
    selector.ended("r1")
    selector.snapshot(CapacitySnapshot((Worker(A0), Worker(B0))))
    assert selector.cost(A0) == 0
    assert selector.pick() == A0
