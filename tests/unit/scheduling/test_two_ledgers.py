"""Admission over two pools: a turn goes when both ledgers let it, and leaves nothing behind in either."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Role, Worker, WorkerRank
from thunderagent_epp.scheduling.classifier import Classifier
from thunderagent_epp.scheduling.decisions import Decision, Pause, Reason, Reject, Release, Resume
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.program import Lifecycle, Status
from thunderagent_epp.scheduling.rotation import Rotation
from thunderagent_epp.scheduling.two_ledgers import TwoLedgers

P, Q, D, E = (WorkerRank(name) for name in "pqde")
ROLES = {P: Role.PREFILL, Q: Role.PREFILL, D: Role.DECODE, E: Role.DECODE}


def workers(**capacities: int | None) -> CapacitySnapshot:
    return CapacitySnapshot(
        tuple(
            Worker(WorkerRank(name), capacity_tokens=capacity, role=ROLES[WorkerRank(name)])
            for name, capacity in capacities.items()
        )
    )


def ledgers(
    capacity: CapacitySnapshot,
    *,
    retain_decode: bool,
    rules: type[Classifier] | type[Rotation] = Classifier,
    **parameters: Any,
) -> TwoLedgers:
    policy = AdmissionPolicy.from_parameters({"buffer_per_program": 0} | parameters)
    two = TwoLedgers(rules(policy), rules(policy), retain_decode=retain_decode)
    two.snapshot(capacity)
    return two


def prefill_bound(**capacities: int | None) -> TwoLedgers:
    """Retention in the prefill pool."""
    return ledgers(workers(**capacities), retain_decode=False)


def bound_in_both(**capacities: int | None) -> TwoLedgers:
    return ledgers(workers(**capacities), retain_decode=True)


def go(two: TwoLedgers, request: str, session: str, tokens: int, now: float = 0) -> None:
    """A turn that is released at once and goes where both ledgers wish."""
    (release,) = two.arrive(request, session, tokens, now)
    sent(two, release)


def sent(two: TwoLedgers, release: Decision) -> None:
    assert isinstance(release, Release)
    assert release.worker is not None
    two.sent(release.request, release.worker)
    prefill = two.prefill_target(release.request)
    assert prefill is not None
    two.prefilled(release.request, prefill)


# Retention in the prefill pool


def test_a_program_is_charged_on_its_prefill_worker_between_turns_and_on_decode_while_it_runs() -> None:
    two = prefill_bound(p=1000, d=1000)
    go(two, "r1", "s", 300)
    assert (two.used(P), two.used(D)) == (300, 300)
    two.progress("r1", 350)
    assert (two.used(P), two.used(D)) == (350, 350)
    assert two.completed("r1", 400, 1) == ()
    assert (two.used(P), two.used(D)) == (400, 0)
    assert two.dump().programs["s"].worker == "p"


def test_a_program_returns_to_its_prefill_worker_and_decodes_where_there_is_room() -> None:
    two = prefill_bound(p=1000, q=1000, d=1000, e=1000)
    go(two, "r1", "s", 300)
    assert two.prefill_target("r1") == P
    two.completed("r1", 300, 1)
    assert two.arrive("r2", "t", 900, 2) == (Release("r2", D),)
    assert two.arrive("r3", "s", 350, 3) == (Release("r3", E),)
    assert two.prefill_target("r3") == P


def test_a_turn_waits_for_room_on_a_decode_worker_and_only_while_others_run() -> None:
    two = prefill_bound(p=10_000, d=1000)
    go(two, "r1", "s", 800)
    assert two.arrive("r2", "t", 800, 1) == ()
    assert (two.waiting, two.tracked) == (1, 2)
    assert two.lifecycle("t") is Lifecycle.PAUSED
    two.completed("r1", 800, 2)
    assert two.tick(5) == (Resume("t", D, False), Release("r2", D))
    assert (two.used(P), two.used(D)) == (1600, 800)


def test_a_turn_waits_for_room_in_the_prefill_pool_and_touches_no_decode_ledger() -> None:
    two = prefill_bound(p=1000, d=10_000)
    go(two, "r1", "s", 800)
    assert two.arrive("r2", "t", 800, 1) == ()
    assert two.used(D) == 800
    assert two.dump().waiting == ("r2",)


def test_an_idle_program_is_paused_where_its_prefill_worker_is_full() -> None:
    two = prefill_bound(p=1000, d=10_000)
    go(two, "r1", "s", 300)
    two.completed("r1", 300, 1)
    go(two, "r2", "t", 600, 1)
    two.progress("r2", 700)
    assert two.tick(5) == (Pause("s", P),)
    assert two.census[Status.ACTING, Lifecycle.PAUSED] == 1


def test_running_turns_of_a_full_decode_worker_are_not_marked() -> None:
    two = prefill_bound(p=10_000, d=1000)
    go(two, "r1", "s", 500)
    two.progress("r1", 990)
    assert two.tick(5) == ()


def test_without_prefill_workers_a_turn_goes_by_the_decode_pool_alone() -> None:
    two = prefill_bound(d=1000)
    assert two.arrive("r1", "s", 800, 0) == (Release("r1", D),)
    assert two.prefill_target("r1") is None
    assert two.arrive("r2", "t", 800, 0) == ()


# Retention in both pools


def test_a_program_is_charged_in_both_pools_between_turns() -> None:
    two = bound_in_both(p=1000, d=1000)
    go(two, "r1", "s", 300)
    two.completed("r1", 400, 1)
    assert (two.used(P), two.used(D)) == (400, 400)
    assert two.dump().used == {"d/0": 400, "p/0": 400}
    assert two.dump().programs["s"].worker == "d"
    go(two, "r2", "s", 450, 2)


@pytest.mark.parametrize("capacities", [{"p": 1000, "d": 10_000}, {"p": 10_000, "d": 1000}])
def test_the_tighter_pool_holds_a_new_program(capacities: dict[str, int]) -> None:
    two = bound_in_both(**capacities)
    go(two, "r1", "s", 600)
    two.completed("r1", 600, 1)
    assert two.arrive("r2", "t", 600, 2) == ()
    assert two.waiting == 1


@pytest.mark.parametrize(
    ("capacities", "pool"), [({"p": 1000, "d": 10_000}, P), ({"p": 10_000, "d": 1000}, D)], ids=["prefill", "decode"]
)
def test_the_tighter_pool_pauses_and_its_program_waits_until_it_is_resumed(
    capacities: dict[str, int], pool: WorkerRank
) -> None:
    two = bound_in_both(**capacities)
    go(two, "r1", "s", 300)
    two.completed("r1", 300, 1)
    go(two, "r2", "t", 600, 1)
    two.progress("r2", 700)
    assert two.tick(5) == (Pause("s", pool),)
    assert two.lifecycle("s") is Lifecycle.PAUSED
    assert two.dump().programs["s"].worker is None
    assert two.census == {
        (Status.ACTING, Lifecycle.PAUSED): 1,
        (Status.REASONING, Lifecycle.ACTIVE): 1,
        **{pair: 0 for pair in two.census if two.census[pair] == 0},
    }
    assert two.arrive("r3", "s", 320, 6) == ()
    two.aborted("r2", 7)
    assert two.tick(10) == (Resume("s", pool, False), Release("r3", D))


def test_a_client_that_leaves_while_held_by_the_second_ledger_leaves_nothing_in_the_first() -> None:
    two = bound_in_both(p=10_000, d=1000)
    go(two, "r1", "s", 800)
    assert two.arrive("r2", "t", 800, 1) == ()
    assert two.used(P) == 1600
    assert two.aborted("r2", 2) == ()
    assert (two.used(P), two.used(D)) == (800, 800)
    assert two.lifecycle("t") is None


def test_the_next_turn_of_a_session_goes_when_the_one_before_has_ended() -> None:
    two = bound_in_both(p=1000, d=1000)
    go(two, "r1", "s", 300)
    assert two.arrive("r2", "s", 320, 1) == ()
    assert two.completed("r1", 310, 2) == (Release("r2", D),)
    assert two.prefill_target("r2") == P


def test_a_final_turn_frees_both_pools_as_it_begins() -> None:
    two = bound_in_both(p=1000, d=1000)
    go(two, "r1", "s", 300)
    two.completed("r1", 300, 1)
    assert two.arrive("r2", "s", 320, 2, final=True) == (Release("r2", D),)
    assert two.prefill_target("r2") == P
    assert (two.used(P), two.used(D)) == (0, 0)


# At the edges


def test_a_request_is_rejected_by_the_first_ledger_and_unknown_to_the_second() -> None:
    two = ledgers(workers(p=1000, d=1000), retain_decode=True, max_tracked_requests=1)
    go(two, "r1", "s", 10)
    assert two.arrive("r1", "s", 10, 0) == (Reject("r1", Reason.DUPLICATE_REQUEST),)
    assert two.arrive("r2", "t", 10, 0) == (Reject("r2", Reason.REQUEST_LIMIT),)
    assert two.tracked == 1


def test_a_turn_let_in_before_a_limit_was_lowered_goes_all_the_same() -> None:
    two = bound_in_both(p=1000, d=1000)
    go(two, "r1", "s", 10)
    go(two, "r2", "t", 10)
    assert two.arrive("r3", "t", 10, 0) == ()
    policy = AdmissionPolicy.from_parameters({"buffer_per_program": 0, "max_tracked_requests": 1})
    two.configure(policy)
    assert two.completed("r2", 10, 1) == (Release("r3", None),)
    two.sent("r3", D)
    two.progress("r3", 20)
    assert two.completed("r3", 20, 2) == ()
    assert (two.tracked, two.waiting) == (1, 0)


def test_events_of_untracked_requests_change_nothing() -> None:
    two = bound_in_both(p=1000, d=1000)
    two.sent("r", D)
    two.prefilled("r", P)
    two.progress("r", 5)
    assert (two.completed("r", 5, 0), two.aborted("r", 0)) == ((), ())
    assert two.prefill_target("r") is None


def test_a_completion_before_the_release_counts_as_an_abort() -> None:
    two = bound_in_both(p=10_000, d=1000)
    go(two, "r1", "s", 800)
    two.arrive("r2", "t", 800, 1)
    assert two.completed("r2", 800, 2) == ()
    assert two.lifecycle("t") is None


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "progress", "complete", "abort", "tick"]), st.integers(0, 5), st.integers(1, 9)
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(
    events=EVENTS,
    retain=st.booleans(),
    rules=st.sampled_from([Classifier, Rotation]),
    prefill=st.integers(500, 2500),
    decode=st.integers(500, 2500),
)
def test_every_turn_that_fits_goes_in_the_end_and_nothing_stays_charged(
    events: list[tuple[str, int, int]],
    retain: bool,
    rules: type[Classifier] | type[Rotation],
    prefill: int,
    decode: int,
) -> None:
    """Invariants: a request is released once; only running turns are charged on decode workers that retain nothing;
    once what runs has ended, ticks release all that waits; once all has ended and is retired, no charge is left."""
    two = ledgers(workers(p=prefill, q=prefill, d=decode, e=decode), retain_decode=retain, rules=rules)
    now = 0.0
    waiting: dict[str, None] = {}
    running: dict[str, None] = {}

    def carry_out(decisions: tuple[Decision, ...]) -> None:
        for decision in decisions:
            if isinstance(decision, Release):
                del waiting[decision.request]
                running[decision.request] = None
                two.sent(decision.request, decision.worker or D)
                two.prefilled(decision.request, two.prefill_target(decision.request) or P)

    for number, (kind, which, size) in enumerate(events):
        now += 1
        if kind == "arrive":
            waiting[f"r{number}"] = None
            carry_out(two.arrive(f"r{number}", f"s{which}", size * 40, now))
        elif kind == "tick":
            carry_out(two.tick(now))
        elif kind == "abort" and waiting:
            request = list(waiting)[which % len(waiting)]
            del waiting[request]
            carry_out(two.aborted(request, now))
        elif running:
            request = list(running)[which % len(running)]
            if kind == "progress":
                two.progress(request, size * 41)
                continue
            del running[request]
            carry_out(two.completed(request, size * 41, now) if kind == "complete" else two.aborted(request, now))
        assert (two.tracked, two.waiting) == (len(waiting) + len(running), len(waiting))
        assert set(two.dump().waiting) == set(waiting)
        if not retain and not running:
            assert two.used(D) == two.used(E) == 0

    for _ in range(200):
        if not waiting and not running:
            break
        now += 5
        while running:
            request, _ = running.popitem()
            carry_out(two.completed(request, None, now))
        carry_out(two.tick(now))
    assert not waiting
    two.tick(now + 1800)
    assert [two.used(worker) for worker in (P, Q, D, E)] == [0, 0, 0, 0]
    assert two.dump().programs == {}
