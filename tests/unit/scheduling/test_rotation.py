"""The rotating rules, one behaviour at a time. A worker of 1,000 tokens lets programs in up to 850, pauses at 950."""

from __future__ import annotations

from typing import Any

import pytest

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Worker, WorkerRank
from thunderagent_epp.scheduling.decisions import Decision, Pause, Reject, Release, Resume
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.rotation import Rotation

A, B = WorkerRank("a"), WorkerRank("b")


def rotation(*capacities: int | None, **parameters: Any) -> Rotation:
    """Workers a, b, … of these capacities; a prefill of 100 tokens a second of which rotation may cost half."""
    workers = tuple(
        Worker(WorkerRank(name), capacity_tokens=capacity) for name, capacity in zip("abcd", capacities, strict=False)
    )
    given = {"policy": "Rotation", "buffer_per_program": 0, "hold_budget": 0.5, "prefill_tokens_per_second": 100.0}
    return Rotation(AdmissionPolicy.from_parameters(given | parameters), CapacitySnapshot(workers))


def turn(rules: Rotation, session: str, tokens: int, now: float, ends: float | None = None) -> tuple[Decision, ...]:
    """A turn whose request is named as its session; with ``ends`` it is over by then."""
    decisions = rules.arrive(session, session, tokens, now)
    if ends is not None:
        assert Release(session, A) in decisions or Release(session, B) in decisions
        assert rules.completed(session, tokens, ends) == ()
    return decisions


def used(rules: Rotation) -> dict[str, int]:
    return dict(rules.dump().used)


def test_a_program_that_fits_goes_at_once_and_stays_where_it_is() -> None:
    rules = rotation(1000, 1000)
    assert turn(rules, "s", 300, 0, ends=1) == (Release("s", A),)
    assert turn(rules, "t", 100, 1) == (Release("t", B),)
    assert turn(rules, "s", 400, 2) == (Release("s", A),)
    assert used(rules) == {"a/0": 400, "b/0": 100}


def test_two_idle_sessions_that_do_not_fit_together_take_turns_within_the_hold_time() -> None:
    """The classic rules let each turn wait the whole resume timeout: both are below the threshold for ever."""
    rules = rotation(1000)
    turn(rules, "s", 500, 0, ends=1)
    # 500 waiting tokens at 100 tokens a second, half of which is for rotation: 10 s.
    assert turn(rules, "t", 500, 2) == ()
    assert rules.tick(11.9) == ()
    assert rules.tick(12) == (Pause("s", A), Release("t", A))
    assert rules.completed("t", 500, 13) == ()
    assert turn(rules, "s", 500, 14) == ()
    assert rules.tick(24) == (Pause("t", A), Resume("s", A, forced=False), Release("s", A))


def test_a_program_idle_for_long_makes_room_at_once() -> None:
    rules = rotation(1000)
    turn(rules, "s", 500, 0, ends=1)
    assert turn(rules, "t", 500, 21) == (Pause("s", A), Release("t", A))


def test_nobody_yields_in_the_middle_of_a_turn_but_as_it_ends() -> None:
    rules = rotation(1000)
    turn(rules, "s", 800, 0)
    assert turn(rules, "t", 800, 1) == ()
    assert rules.tick(100) == ()
    assert rules.completed("s", 800, 101) == (Pause("s", A), Release("t", A))


def test_the_longest_waiter_goes_first_whatever_its_size() -> None:
    rules = rotation(1000)
    turn(rules, "s", 800, 0)
    assert turn(rules, "large", 700, 1) == ()
    assert turn(rules, "small", 100, 2) == ()
    assert rules.tick(100) == ()
    assert rules.completed("s", 800, 101) == (Pause("s", A), Release("large", A), Release("small", A))


def test_room_that_a_waiter_has_reserved_is_not_given_to_a_later_one() -> None:
    rules = rotation(1000)
    turn(rules, "s", 400, 0)
    assert turn(rules, "large", 500, 1) == ()
    assert turn(rules, "small", 400, 2) == ()
    assert used(rules) == {"a/0": 400}


def test_a_later_one_goes_first_where_that_takes_nothing_from_the_waiter() -> None:
    rules = rotation(1000, 500)
    turn(rules, "s", 700, 0)
    assert turn(rules, "large", 700, 1) == ()
    assert turn(rules, "small", 300, 2) == (Release("small", B),)


def test_a_program_larger_than_the_room_of_any_worker_gets_one_to_itself() -> None:
    rules = rotation(1000)
    turn(rules, "s", 100, 0, ends=1)
    assert turn(rules, "huge", 1500, 30) == (Pause("s", A), Release("huge", A))


def test_pressure_pauses_the_smallest_idle_programs_until_it_is_gone() -> None:
    rules = rotation(1000)
    turn(rules, "small", 100, 0, ends=1)
    turn(rules, "other", 200, 0, ends=1)
    turn(rules, "large", 500, 0)
    rules.progress("large", 700)
    assert rules.tick(2) == (Pause("small", A),)
    assert used(rules) == {"a/0": 900}


def test_turns_of_one_session_overlap_each_charged_for_what_it_adds() -> None:
    rules = rotation(1000)
    turn(rules, "s", 300, 0, ends=1)
    assert rules.arrive("r1", "s", 350, 2) == (Release("r1", A),)
    assert rules.arrive("r2", "s", 320, 2) == (Release("r2", A),)
    assert used(rules) == {"a/0": 370}
    assert rules.completed("r1", 360, 3) == ()
    assert rules.dump().programs["s"].status == "reasoning"
    assert used(rules) == {"a/0": 360}
    assert rules.completed("r2", 330, 4) == ()
    assert rules.dump().programs["s"].status == "acting"
    assert used(rules) == {"a/0": 330}


def test_overlapping_turns_of_a_waiting_program_go_together() -> None:
    rules = rotation(1000)
    turn(rules, "s", 800, 0)
    assert rules.arrive("r1", "t", 300, 1) == ()
    assert rules.arrive("r2", "t", 300, 2) == ()
    assert rules.tick(50) == ()
    assert rules.completed("s", 800, 51) == (Pause("s", A), Release("r1", A), Release("r2", A))
    assert used(rules) == {"a/0": 600}


def test_an_aborted_turn_leaves_the_program_as_it_was() -> None:
    rules = rotation(1000)
    turn(rules, "s", 300, 0, ends=1)
    before = rules.dump()
    rules.arrive("r", "s", 400, 2)
    rules.aborted("r", 3)
    assert rules.dump() == before
    rules.arrive("r", "new", 400, 4)
    rules.aborted("r", 5)
    assert rules.dump() == before


def test_an_aborted_waiter_frees_what_it_reserved() -> None:
    rules = rotation(1000)
    turn(rules, "s", 400, 0)
    assert turn(rules, "large", 500, 1) == ()
    assert turn(rules, "small", 400, 2) == ()
    assert rules.aborted("large", 3) == (Release("small", A),)


def test_a_final_turn_frees_the_place_as_it_begins() -> None:
    rules = rotation(1000)
    turn(rules, "s", 500, 0, ends=1)
    assert turn(rules, "t", 500, 2) == ()
    assert rules.arrive("last", "s", 1, 3, final=True) == (Release("last", A), Release("t", A))


def test_a_final_turn_beside_others_ends_the_program_with_the_last_of_them() -> None:
    rules = rotation(1000)
    turn(rules, "s", 500, 0)
    assert rules.arrive("last", "s", 500, 1, final=True) == (Release("last", A),)
    rules.completed("last", 510, 2)
    assert used(rules) == {"a/0": 510}
    rules.completed("s", 510, 3)
    assert rules.dump().programs == {}


def test_a_worker_that_vanishes_frees_its_programs() -> None:
    rules = rotation(1000, 1000)
    turn(rules, "s", 500, 0, ends=1)
    rules.snapshot(CapacitySnapshot((Worker(B, capacity_tokens=1000),)))
    assert turn(rules, "s", 500, 2) == (Resume("s", B, forced=False), Release("s", B))


def test_unknown_capacity_holds_nobody() -> None:
    rules = rotation(None)
    assert turn(rules, "s", 10**9, 0) == (Release("s", None),)


def test_capacity_that_becomes_unknown_releases_who_waits() -> None:
    rules = rotation(1000)
    turn(rules, "s", 800, 0)
    assert turn(rules, "t", 800, 1) == ()
    rules.snapshot(CapacitySnapshot((Worker(A),)))
    assert rules.tick(2) == (Release("t", None),)


def test_a_pinned_program_waits_for_its_worker() -> None:
    rules = rotation(1000, 1000)
    turn(rules, "s", 800, 0)
    assert rules.arrive("r", "t", 300, 1, pinned=A) == ()
    assert rules.tick(50) == ()
    assert rules.completed("s", 800, 51) == (Pause("s", A), Release("r", A))


def test_a_hold_is_bounded_by_the_budget_at_the_present_load() -> None:
    rules = rotation(1000, hold_budget=0.25)
    turn(rules, "s", 800, 0, ends=1)
    turn(rules, "t", 400, 2)
    turn(rules, "u", 600, 2)
    # 1,000 waiting tokens at 100 a second, a quarter of it for rotation: 40 s. But s is long gone by then.
    assert rules.tick(20.9) == ()
    assert rules.tick(21) == (Pause("s", A), Release("t", A))


@pytest.mark.parametrize(
    ("given", "reason"),
    [(("r", "s"), "duplicate_request"), (("q", "t"), "request_limit")],
)
def test_limits_refuse_before_anything_changes(given: tuple[str, str], reason: str) -> None:
    rules = rotation(1000, max_tracked_requests=1)
    rules.arrive("r", "s", 100, 0)
    before = rules.dump()
    assert rules.arrive(*given, 100, 1) == (Reject(given[0], reason),)  # type: ignore[arg-type]
    assert rules.dump() == before


def test_the_sweep_comes_once_a_second_or_sooner() -> None:
    assert rotation(1000).interval_seconds == 1.0
    assert rotation(1000, scheduler_interval_seconds=0.5).interval_seconds == 0.5
