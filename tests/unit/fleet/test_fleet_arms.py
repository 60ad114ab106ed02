from __future__ import annotations

import pytest
from fleet_turns import small_pods, turn

from thunderagent_epp.scheduling.decisions import Pause, Resume
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_sim.fleet.arms import Affinity, Dispatch, LeastLoaded, Observed, PrefixScorer, ProgramAware


def send(arm, one, now: float = 0.0) -> int | None:
    """Let a turn arrive; the pod it is sent to, which then has it in its queue."""
    dispatches = list(arm.arrive(one, now))
    if not dispatches:
        return None
    ((sent, pod),) = dispatches
    assert sent is one
    deliver(arm, dispatches)
    return pod


def deliver(arm, dispatches) -> list[Dispatch]:
    for one, pod in dispatches:
        one.pod = pod
        arm.test_engines[pod].submit(one)
    return list(dispatches)


def made(make, pods: int = 2, capacity_tokens: int = 1000, **options):
    engines = small_pods(pods, capacity_tokens)
    arm = make(engines, **options)
    arm.test_engines = engines
    return arm


def classic(**options):
    policy = AdmissionPolicy.from_parameters({"policy": "Classic", "buffer_per_program": 0})
    return made(lambda engines, **more: ProgramAware(engines, policy, **more), **options)


def test_load_takes_the_pod_with_the_fewest_turns():
    arm = made(LeastLoaded, pods=3)
    assert [send(arm, turn(name, 100, 10)) for name in "abcd"] == [0, 1, 2, 0]


def test_affinity_stays_with_the_pod_of_the_last_turn():
    arm = made(Affinity)
    assert send(arm, turn("a", 100, 10)) == 0
    assert send(arm, turn("b", 100, 10)) == 1
    assert send(arm, turn("a", 200, 10, number=2)) == 0
    assert send(arm, turn("a", 300, 10, number=3)) == 0


def test_affinity_forgets_a_session_with_its_last_turn():
    arm = made(Affinity)
    last = turn("a", 100, 10, last=True)
    send(arm, last)
    arm.ended(last, 1.0)
    assert send(arm, turn("a", 100, 10)) == 1


def test_prefix_prefers_the_pod_that_had_the_session():
    arm = made(PrefixScorer)
    assert send(arm, turn("a", 100, 10)) == 0
    arm.test_engines[0].settle(0.0)
    arm.test_engines[0].finish()
    # prefix 3 · 110/200 against what pod 0 holds more of its cache, 2 · 10 %
    assert send(arm, turn("a", 200, 10, number=2, shared=110)) == 0


def test_prefix_sends_a_new_session_where_the_cache_is_emptier():
    arm = made(PrefixScorer)
    send(arm, turn("a", 100, 10))
    arm.test_engines[0].settle(0.0)
    assert send(arm, turn("b", 100, 10)) == 1


def test_prefix_leaves_a_session_whose_pod_has_the_longest_queue_and_the_fuller_cache():
    arm = made(PrefixScorer)
    first = turn("a", 600, 10)
    assert send(arm, first) == 0
    arm.test_engines[0].settle(0.0)
    arm.test_engines[0].submit(turn("x", 600, 10))
    # 3 · 600/1000 + 2 · 0 + 2 · 40 % against 0 + 2 · 1 + 2 · 100 %
    assert send(arm, turn("a", 1000, 10, number=2, shared=600)) == 1


def test_prefix_believes_in_what_it_sent_last_up_to_the_size_of_the_cache():
    arm = made(PrefixScorer, pods=1)
    for name in "abc":
        send(arm, turn(name, 400, 10))
    assert list(arm._indices[0]) == ["b", "c"]


@pytest.mark.parametrize("make", [LeastLoaded, Affinity, PrefixScorer])
def test_a_router_sends_nothing_to_a_pod_that_is_lost(make):
    arm = made(make)
    one = turn("a", 100, 10)
    assert send(arm, one) == 0
    arm.lost([one], 0, 5.0)
    assert send(arm, turn("a", 200, 10, number=2)) == 1
    assert send(arm, turn("b", 200, 10)) == 1
    arm.returned(0)
    assert send(arm, turn("c", 200, 10)) == 0


def test_a_program_that_fits_nowhere_is_held_until_one_gives_up_its_place():
    decisions: list[Observed] = []
    arm = classic(pods=1, observe=decisions.append)
    first = turn("a", 600, 300)
    assert send(arm, first) == 0
    second = turn("b", 500, 10)
    assert send(arm, second) is None
    assert list(arm.ended(first, 10.0)) == []
    assert list(arm.tick(10.0)) == []
    grown = turn("a", 950, 10, number=2, shared=900)
    assert send(arm, grown, 11.0) == 0
    assert list(arm.ended(grown, 12.0)) == []
    assert [type(one.decision) for one in decisions] == []
    assert list(arm.tick(15.0)) == []
    assert [(type(one.decision), one.pod, one.time) for one in decisions] == [(Pause, 0, 15.0)]
    assert deliver(arm, arm.tick(20.0)) == [Dispatch(second, 0)]
    assert [type(one.decision) for one in decisions] == [Pause, Resume]


def test_the_ledger_is_charged_what_the_turns_context_is():
    arm = classic()
    one = turn("a", 600, 50)
    send(arm, one)
    assert arm.charged_tokens(0) == 600
    arm.ended(one, 3.0)
    assert arm.charged_tokens(0) == 650


def test_a_ledger_that_is_short_is_told_of_a_share():
    arm = classic(ledger_share=0.9)
    send(arm, turn("a", 600, 50))
    assert arm.charged_tokens(0) == 540


def test_an_answers_progress_is_told_before_each_tick():
    arm = classic()
    one = turn("a", 90, 200)
    send(arm, one)
    engine = arm.test_engines[0]
    engine.settle(0.0)
    now = engine.next_event
    engine.finish()
    engine.settle(now)
    arm.tick(engine.next_event)
    assert arm.charged_tokens(0) == 90 + 200


def test_a_session_says_which_turn_is_its_last_only_where_ends_are_announced():
    silent, announced = classic(), classic(announce_ends=True)
    for arm, charged in ((silent, 100), (announced, 0)):
        send(arm, turn("a", 100, 10, last=True))
        assert arm.charged_tokens(0) == charged


def test_disabled_admission_holds_nothing_and_goes_by_load():
    policy = AdmissionPolicy.from_parameters({"policy": "Disabled"})
    arm = made(lambda engines: ProgramAware(engines, policy))
    assert arm.tick_seconds is None
    assert [send(arm, turn(name, 900, 10)) for name in "abc"] == [0, 1, 0]
    assert arm.charged_tokens(0) == 0


def test_a_lost_pods_programs_find_a_place_elsewhere():
    arm = classic()
    one = turn("a", 400, 10)
    assert send(arm, one) == 0
    arm.lost([one], 0, 5.0)
    again = turn("a", 400, 10, number=1)
    assert send(arm, again, 5.0) == 1
    assert (arm.charged_tokens(0), arm.charged_tokens(1)) == (0, 400)


def test_more_requests_than_a_policy_tracks_stop_the_run():
    policy = AdmissionPolicy.from_parameters({"policy": "Classic", "max_tracked_requests": 1})
    arm = made(lambda engines: ProgramAware(engines, policy))
    send(arm, turn("a", 100, 10))
    with pytest.raises(RuntimeError, match="max_tracked_requests"):
        send(arm, turn("b", 100, 10))
