from __future__ import annotations

from random import Random
from statistics import mean, quantiles

import pytest

from thunderagent_sim.fleet.quantiles import Quantiles
from thunderagent_sim.fleet.workload import CodingAgents, mid_session

# fleet.md, Workload: turns of a session, share of its requests, mean prompt, mean output
TABLE = (
    (0, 1, 5449, 26760, 363),
    (2, 4, 7562, 47276, 684),
    (5, 9, 10515, 57355, 730),
    (10, 19, 11656, 67557, 773),
    (20, 10**6, 8320, 90509, 819),
)


@pytest.fixture(scope="module")
def sessions():
    random = Random("table")
    return [CodingAgents().session(random) for _ in range(4000)]


@pytest.fixture(scope="module")
def turns(sessions):
    return [turn for session in sessions for turn in session]


@pytest.mark.parametrize(("first", "last", "requests", "prompt", "output"), TABLE)
def test_sessions_have_the_turns_prompts_and_answers_of_the_table(sessions, first, last, requests, prompt, output):
    drawn = [turn for session in sessions for turn in session[first : last + 1]]
    assert len(drawn) / len(sessions) == pytest.approx(requests / (5449 / 2), rel=0.06)
    assert mean(turn.prompt_tokens for turn in drawn) == pytest.approx(prompt, rel=0.04)
    assert mean(turn.output_tokens for turn in drawn) == pytest.approx(output, rel=0.06)


def test_prompts_are_spread_as_in_the_trace(turns):
    tenths = quantiles((turn.prompt_tokens for turn in turns), n=10)
    assert 51_000 <= tenths[4] <= 59_000
    assert 77_000 <= tenths[8] <= 102_000
    assert max(turn.context_tokens for turn in turns) <= 200_000


def test_the_median_answer_is_half_the_mean_one(turns):
    assert quantiles((turn.output_tokens for turn in turns), n=2)[0] == pytest.approx(350, rel=0.05)


def test_gaps_are_short_for_most_turns_and_never_long(sessions):
    gaps = [turn.gap_seconds for session in sessions for turn in session[1:]]
    tenths = quantiles(gaps, n=10)
    assert tenths[4] == pytest.approx(0.31, rel=0.05)
    assert tenths[8] == pytest.approx(9.8, rel=0.02)
    assert max(gaps) <= 10


def test_most_of_a_prompt_is_an_old_prefix(turns):
    shared = sum(turn.shared_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns)
    assert 0.93 <= shared <= 0.96


def test_some_turns_overlap_the_one_before(turns):
    assert 0.06 <= mean(turn.overlaps for turn in turns) <= 0.08


def test_each_prompt_extends_the_context_before_it(sessions):
    for session in sessions[:200]:
        context = 0
        for turn in session:
            if not turn.overlaps:
                assert turn.shared_tokens == context
                context = turn.context_tokens
            assert turn.shared_tokens < turn.prompt_tokens


def test_only_the_last_turn_of_a_session_is_its_last(sessions):
    assert all([turn.last for turn in session] == [False] * (len(session) - 1) + [True] for session in sessions)


def test_nothing_overlaps_where_turns_are_serial():
    random = Random(1)
    assert not any(turn.overlaps for _ in range(50) for turn in CodingAgents(overlap=0.0).session(random))


def test_the_same_seed_draws_the_same_sessions():
    assert CodingAgents().session(Random("5/0")) == CodingAgents().session(Random("5/0"))
    assert CodingAgents().session(Random("5/0")) != CodingAgents().session(Random("5/1"))


def test_a_seat_begins_within_a_session_as_large_as_those_that_go_on():
    begun = [mid_session(CodingAgents(), Random(f"start/{seed}"))[0] for seed in range(400)]
    assert 52_000 <= mean(turn.prompt_tokens for turn in begun) <= 68_000


def test_quantiles_are_linear_between_their_points():
    drawn = Quantiles((0, 0.0), (0.5, 10.0), (1, 110.0))
    assert [drawn.of(share) for share in (0, 0.25, 0.5, 0.75, 1)] == [0, 5, 10, 60, 110]
    assert drawn.mean == pytest.approx(2.5 + 30)


@pytest.mark.parametrize(
    "points", [((0, 1.0),), ((0.1, 1.0), (1, 2.0)), ((0, 2.0), (1, 1.0)), ((0, 1.0), (0, 2.0), (1, 3.0))]
)
def test_quantiles_that_do_not_rise_from_0_to_1_are_refused(points):
    with pytest.raises(ValueError, match="quantiles"):
        Quantiles(*points)
