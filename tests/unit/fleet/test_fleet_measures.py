from __future__ import annotations

import pytest
from fleet_turns import turn

from thunderagent_sim.fleet.measures import holds, jain, measure, percentile, times_to_first_token
from thunderagent_sim.fleet.run import Run, Scenario


def ran(*turns, output_tokens: int = 0, sessions: int = 1) -> Run:
    """A run counted from second 100 to second 200."""
    scenario = Scenario(sessions, pods=1, minutes=200 / 60, warmup_minutes=100 / 60)
    return Run(scenario, list(turns), 100.0, 200.0, output_tokens, preemptions=0, samples=[])


def stamped(arrived, released, first_token, finished=None, *, prompt=100, output=11, cached=0, seat=0):
    one = turn("a", prompt, output, arrived=arrived, seat=seat)
    one.released, one.first_token, one.finished, one.cached_tokens = released, first_token, finished, cached
    one.generated = 0 if first_token is None else output
    return one


def test_throughput_is_what_was_generated_while_it_counted():
    assert measure(ran(output_tokens=5000)).output_tokens_per_second == 50


def test_time_to_first_token_includes_the_hold():
    assert list(times_to_first_token(ran(stamped(110.0, 140.0, 141.5)))) == [31.5]


def test_a_turn_without_a_first_token_counts_at_its_age():
    run = ran(stamped(150.0, None, None), stamped(50.0, 120.0, None))
    assert list(times_to_first_token(run)) == [50, 150]


def test_a_first_token_before_the_warm_up_ended_does_not_count():
    assert list(times_to_first_token(ran(stamped(90.0, 90.0, 99.0), stamped(90.0, 90.0, 101.0)))) == [11]


def test_a_hold_lasts_from_arrival_to_release_and_one_that_did_not_end_to_the_end():
    run = ran(stamped(110.0, 140.0, 141.5), stamped(180.0, None, None), stamped(120.0, 120.0, 121.0))
    assert [hold.seconds for hold in holds(run)] == [30, 20]
    measured = measure(run)
    assert (measured.holds, measured.hold_p99, measured.longest_hold) == (2, 30, 30)


def test_a_hold_that_ended_before_the_warm_up_did_does_not_count():
    assert list(holds(ran(stamped(10.0, 90.0, 91.0)))) == []


def test_the_hit_rate_weighs_turns_by_their_prompts():
    run = ran(stamped(110.0, 110.0, 111.0, prompt=100, cached=100), stamped(110.0, 110.0, 111.0, prompt=300))
    assert measure(run).hit_rate == 0.25


def test_turns_are_those_that_ended_while_it_counted():
    run = ran(stamped(90.0, 90.0, 91.0, 99.0), stamped(90.0, 90.0, 91.0, 120.0), stamped(150.0, 150.0, 160.0))
    assert measure(run).turns == 1


def test_the_time_between_tokens_leaves_the_first_token_out():
    assert measure(ran(stamped(110.0, 110.0, 120.0, 130.0, output=11))).inter_token_seconds == 1.0


def test_fairness_counts_an_answer_that_began_before_in_proportion():
    run = ran(
        stamped(50.0, 50.0, 50.0, 150.0, output=20, seat=0),
        stamped(110.0, 110.0, 110.0, 150.0, output=10, seat=1),
        sessions=2,
    )
    assert measure(run).fairness == pytest.approx(1.0)


def test_jain_is_1_for_equal_shares_and_1_of_n_for_one_that_has_all():
    assert jain([3.0, 3.0, 3.0]) == 1
    assert jain([5.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([]) == 1


@pytest.mark.parametrize(("percent", "value"), [(50, 2), (75, 3), (76, 4), (99, 4), (100, 4)])
def test_percentiles_are_of_the_nearest_rank(percent, value):
    assert percentile([1, 2, 3, 4], percent) == value


def test_a_run_without_turns_has_measures():
    measured = measure(ran())
    assert (measured.ttft_p99, measured.hit_rate, measured.turns, measured.longest_hold) == (0, 0, 0, 0)
