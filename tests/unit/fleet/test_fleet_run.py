from __future__ import annotations

from itertools import pairwise

import pytest
from fleet_turns import SERVICE

from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_sim.fleet.arms import ROUTERS, Affinity, LeastLoaded, ProgramAware
from thunderagent_sim.fleet.measures import measure
from thunderagent_sim.fleet.recorded import Recorded
from thunderagent_sim.fleet.run import Fleet, Loss, Scenario
from thunderagent_sim.fleet.turns import PlannedTurn
from thunderagent_sim.fleet.workload import CodingAgents

ROTATION = AdmissionPolicy.from_parameters({"policy": "Rotation"})
CLASSIC = AdmissionPolicy.from_parameters({"policy": "Classic"})


def rotation(engines):
    return ProgramAware(engines, ROTATION)


def classic(engines):
    return ProgramAware(engines, CLASSIC)


ARMS = {**ROUTERS, "rotation": rotation, "classic": classic}


def short(sessions_per_pod: int = 24, **changes) -> Scenario:
    return Scenario(sessions_per_pod, **{"pods": 2, "minutes": 4.0, "warmup_minutes": 1.0} | changes)


def one_session(*turns: PlannedTurn):
    """Every seat runs this session over and over, and begins with its first turn."""

    class Always(Recorded):
        def session(self, random):
            random.random()
            return turns

    return Always([turns])


def tiny(minutes: float = 1.0, **changes) -> Scenario:
    options = {"pods": 1, "minutes": minutes, "warmup_minutes": 0.0, "service": SERVICE}
    return Scenario(1, **options | changes)


@pytest.mark.parametrize("arm", ARMS)
def test_every_generated_token_belongs_to_a_turn(arm):
    run = Fleet(short(warmup_minutes=0.0), CodingAgents(), ARMS[arm]).run()
    assert run.output_tokens == sum(turn.generated for turn in run.turns) > 0
    for turn in run.turns:
        if turn.finished is not None:
            assert turn.generated == turn.plan.output_tokens


@pytest.mark.parametrize("arm", ARMS)
def test_each_turn_goes_through_its_stations_in_order(arm):
    run = Fleet(short(), CodingAgents(), ARMS[arm]).run()
    for turn in run.turns:
        stations = [turn.arrived, turn.released, turn.first_token, turn.finished]
        reached = [time for time in stations if time is not None]
        assert stations == reached + [None] * (4 - len(reached))
        assert reached == sorted(reached)


def test_turns_of_a_session_follow_one_another_but_for_those_that_overlap():
    run = Fleet(short(), CodingAgents(), ROUTERS["prefix"]).run()
    sessions = {}
    for turn in run.turns:
        sessions.setdefault(turn.session, []).append(turn)
    overlapping = 0
    for turns in sessions.values():
        for before, after in pairwise(turns):
            if after.plan.overlaps:
                assert after.arrived == before.first_token
                overlapping += 1
            else:
                assert before.finished is not None
                assert after.arrived >= before.finished + after.plan.gap_seconds - 1e-9
    assert overlapping > 0


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    first, again, other = (measure(Fleet(short(seed=seed), CodingAgents(), rotation).run()) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_all_arms_meet_the_same_sessions():
    runs = [Fleet(short(), CodingAgents(), ARMS[arm]).run() for arm in ("load", "rotation")]
    plans = [{turn.id: turn.plan for turn in run.turns} for run in runs]
    both = plans[0].keys() & plans[1].keys()
    assert len(both) > 100
    assert all(plans[0][turn] == plans[1][turn] for turn in both)


def test_a_seat_begins_its_next_turn_after_the_gap_and_its_next_session_at_once():
    workload = one_session(PlannedTurn(100, 0, 1), PlannedTurn(110, 101, 1, gap_seconds=4.0, last=True))
    run = Fleet(tiny(), workload, LeastLoaded).run()
    # the prompt of 100 tokens takes 0.115 s; of the next one, 10 of 110 are left at a mean position of 105
    end = 4.115 + 0.01 + 0.01 + 10 * 105 * 1e-6
    begun = [turn for turn in run.turns if turn.number == 1]
    second = next(turn for turn in run.turns if turn.number == 2 and turn.session == begun[0].session)
    assert second.arrived == pytest.approx(begun[0].finished + 4.0)
    assert second.finished - begun[0].arrived == pytest.approx(end)
    assert begun[1].arrived == second.finished


def test_a_prompt_shorter_than_the_context_before_it_cuts_the_cache():
    workload = one_session(PlannedTurn(100, 0, 21), PlannedTurn(60, 60, 1), PlannedTurn(130, 61, 1, last=True))
    run = Fleet(tiny(), workload, LeastLoaded).run()
    third = next(turn for turn in run.turns if turn.number == 3)
    assert third.cached_tokens == 60


def test_a_slow_pod_serves_less():
    run = Fleet(short(8, slowness={1: 4.0}), CodingAgents(), Affinity).run()
    served = [sum(turn.generated for turn in run.turns if turn.pod == pod) for pod in (0, 1)]
    assert served[1] < served[0] / 2


@pytest.mark.parametrize("arm", ARMS)
def test_the_turns_of_a_lost_pod_are_sent_again(arm):
    scenario = short(8, losses=(Loss(pod=1, at_seconds=120.0, for_seconds=30.0),))
    run = Fleet(scenario, CodingAgents(), ARMS[arm]).run()
    again = [turn for turn in run.turns if turn.attempts == 2]
    assert again
    assert all(turn.released is None or turn.released >= 120 for turn in again)
    assert not [turn for turn in run.turns if turn.pod == 1 and 120 < (turn.released or 0) < 150]
    assert [turn for turn in run.turns if turn.pod == 1 and (turn.released or 0) >= 150]


def test_between_two_bursts_no_turn_but_an_overlapping_one_begins():
    run = Fleet(short(8, burst_seconds=20.0), CodingAgents(), ROUTERS["load"]).run()
    for turn in run.turns:
        if not turn.plan.overlaps and turn.arrived >= 30:
            assert turn.arrived % 20 == 0


def test_pods_are_sampled_over_time():
    run = Fleet(short(), CodingAgents(), rotation).run()
    assert [sample.time for sample in run.samples][:3] == [0, 5, 10]
    last = run.samples[-1]
    assert len(last.held) == len(last.cached) == len(last.charged) == 2
    assert all(held > 0 for held in last.held)
    assert all(charged > 0 for charged in last.charged)


def test_few_sessions_run_through_rotation_without_a_hold():
    measured = measure(Fleet(short(8), CodingAgents(), rotation).run())
    assert measured.longest_hold <= 1


@pytest.mark.parametrize(("arm", "output_tokens", "turns"), [("prefix", 251_164, 477), ("classic", 258_300, 489)])
def test_a_run_is_the_same_on_every_machine(arm, output_tokens, turns):
    scenario = short(24, seed=7, minutes=6.0, warmup_minutes=2.0)
    run = Fleet(scenario, CodingAgents(), ARMS[arm]).run()
    assert (run.output_tokens, len(run.turns)) == (output_tokens, turns)
