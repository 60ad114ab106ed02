"""The rotating rules, one behaviour at a time. A worker of 1,000 tokens pauses above 950 tokens.

One that waits alone may fill it so far; where others wait too, programs are let in up to 883.
"""

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


def held_for_long(*, other: int) -> Rotation:
    """H has had its time to grow: ``large`` and ``other`` run on one worker of 1,000, ``small`` of 300 waits since 301.

    Of 1,200 tokens 300 wait, and 100 a second may be computed: H = 300 / (100 * 0.5 * (1 + 300 / 1200)) = 4.8 s.
    """
    rules = rotation(1000)
    turn(rules, "large", 900 - other, 0)
    turn(rules, "small", 300, 0)
    assert turn(rules, "other", other, 0) == ()
    assert rules.tick(1) == ()
    assert rules.tick(299) == ()
    assert rules.completed("small", 300, 300) == (Pause("small", A), Release("other", A))
    assert turn(rules, "small", 300, 301) == ()
    return rules


def test_two_idle_sessions_that_do_not_fit_together_take_turns_at_once() -> None:
    """The classic rules let each turn wait the whole resume timeout: both are below the threshold for ever."""
    rules = rotation(1024)
    turn(rules, "s", 511, 0, ends=1)
    assert turn(rules, "t", 511, 2) == (Pause("s", A), Release("t", A))
    assert turn(rules, "s", 511, 3) == ()
    assert rules.completed("t", 511, 4) == (Pause("t", A), Resume("s", A, forced=False), Release("s", A))


def test_a_waiter_takes_its_turn_from_the_smaller_half_when_it_has_waited_for_the_hold_time() -> None:
    rules = held_for_long(other=400)
    assert rules.completed("other", 400, 305.7) == ()
    assert rules.tick(305.79) == ()
    assert rules.tick(305.81) == (Pause("other", A), Resume("small", A, forced=False), Release("small", A))


def test_the_larger_half_keeps_its_place_for_half_as_long_again() -> None:
    rules = held_for_long(other=400)
    assert rules.completed("large", 500, 302) == ()
    assert rules.tick(306) == ()
    assert rules.tick(308.19) == ()
    assert rules.tick(308.21) == (Pause("large", A), Resume("small", A, forced=False), Release("small", A))


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
    turn(rules, "s", 500, 0)
    assert turn(rules, "large", 500, 1) == ()
    assert turn(rules, "small", 300, 2) == ()
    assert used(rules) == {"a/0": 500}


def test_who_waits_alone_fills_a_worker_to_its_threshold() -> None:
    rules = rotation(1000)
    turn(rules, "s", 500, 0)
    assert turn(rules, "t", 450, 1) == (Release("t", A),)


def test_where_others_wait_room_to_grow_is_left() -> None:
    rules = rotation(1000, 100)
    turn(rules, "s", 500, 0)
    assert rules.arrive("r", "pinned", 200, 1, pinned=B) == ()
    assert turn(rules, "t", 384, 2) == ()
    assert turn(rules, "u", 383, 3) == ()
    assert rules.aborted("t", 4) == (Release("u", A),)


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
    turn(rules, "s", 500, 0)
    assert turn(rules, "large", 500, 1) == ()
    assert turn(rules, "small", 300, 2) == ()
    assert rules.aborted("large", 3) == (Release("small", A),)


def test_a_final_turn_frees_the_place_as_it_begins() -> None:
    rules = held_for_long(other=400)
    assert rules.completed("other", 400, 302) == ()
    assert rules.arrive("last", "other", 1, 303, final=True) == (
        Release("last", A),
        Resume("small", A, forced=False),
        Release("small", A),
    )


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


def test_a_larger_budget_holds_for_less() -> None:
    assert first_swap(hold_budget=0.25) == pytest.approx(9.6, abs=0.1)
    assert first_swap(hold_budget=0.5) == pytest.approx(4.8, abs=0.1)


def first_swap(*, hold_budget: float) -> float:
    """Seconds that ``small`` waits for an idle program of its size, after a queue that was there for long."""
    rules = rotation(1000, hold_budget=hold_budget)
    turn(rules, "large", 600, 0)
    turn(rules, "small", 300, 0)
    assert turn(rules, "other", 300, 0) == ()
    for second in range(1, 1000):
        assert rules.tick(second) == ()
    rules.completed("small", 300, 1000)
    turn(rules, "small", 300, 1000)
    rules.completed("other", 300, 1000)
    return next(wait / 10 for wait in range(1, 150) if rules.tick(1000 + wait / 10))


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
