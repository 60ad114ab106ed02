from __future__ import annotations

from math import inf

import pytest
from fleet_turns import SERVICE, run_until_idle, turn
from hypothesis import given
from hypothesis import strategies as st

from thunderagent_sim.fleet.engine import Engine


def test_a_prompt_is_computed_in_steps_of_the_token_budget():
    engine = Engine(SERVICE)
    engine.submit(turn("a", prompt=150, output=3))
    engine.settle(0.0)
    # 10 ms + 100 tokens of 1 ms + 100 tokens at a mean position of 50 at 1 µs
    assert engine.next_event == pytest.approx(0.115)
    engine.finish()
    engine.settle(0.115)
    # 10 ms + 50 tokens of 1 ms + 50 tokens at a mean position of 125 at 1 µs
    assert engine.next_event == pytest.approx(0.115 + 0.06625)


def test_the_first_token_is_there_when_the_prompt_is_computed():
    engine = Engine(SERVICE)
    one = turn("a", prompt=100, output=3)
    engine.submit(one)
    engine.settle(0.0)
    first, ended = engine.finish()
    assert (first, ended) == ([one], [])
    assert one.first_token == pytest.approx(0.115)
    assert engine.generated(one.first_token) == 1


def test_a_stretch_of_decoding_steps_is_one_event():
    engine = Engine(SERVICE)
    engine.submit(turn("a", prompt=100, output=3))
    engine.settle(0.0)
    engine.finish()
    engine.settle(0.115)
    # two steps of 12 ms and of 100 and 101 tokens of context at 10 µs
    assert engine.next_event == pytest.approx(0.115 + 0.012 + 0.001 + 0.012 + 0.00101)
    _, ended = engine.finish()
    assert [one.id for one in ended] == ["a-1"]
    engine.settle(0.2)
    assert engine.next_event == inf


def test_an_answer_of_one_token_ends_with_its_prompt():
    engine = Engine(SERVICE)
    one = turn("a", prompt=100, output=1)
    engine.submit(one)
    engine.settle(0.0)
    assert engine.finish() == ([one], [one])
    assert engine.cache.pinned == 0


def test_a_slow_pod_takes_longer_for_every_step():
    engine = Engine(SERVICE, slowness=2.0)
    engine.submit(turn("a", prompt=100, output=1))
    engine.settle(0.0)
    assert engine.next_event == pytest.approx(0.23)


def test_a_turn_that_arrives_in_a_stretch_is_scheduled_when_the_present_step_ends():
    engine = Engine(SERVICE)
    engine.submit(turn("a", prompt=100, output=1001))
    engine.settle(0.0)
    engine.finish()
    engine.settle(0.115)
    engine.submit(turn("b", prompt=100, output=2))
    engine.settle(0.115 + 0.02)
    # the second step, of 100 and of 101 tokens of context
    assert engine.next_event == pytest.approx(0.115 + 0.013 + 0.01301)
    now = engine.next_event
    engine.finish()
    engine.settle(now)
    # one decode of 102 tokens and, beside its token, 99 of the prompt
    assert engine.next_event - now == pytest.approx(0.01 + 0.002 + 0.00102 + 0.099 + 99 * 49.5 * 1e-6)


def test_tokens_in_the_middle_of_a_stretch_are_counted_in_whole_steps():
    engine = Engine(SERVICE)
    one = turn("a", prompt=100, output=1001)
    engine.submit(one)
    engine.settle(0.0)
    engine.finish()
    engine.settle(0.115)
    # each step takes a little more than 13 ms, the tenth ends after 0.13045 s
    assert engine.generated(0.115 + 0.1304) == 1 + 9
    assert engine.generated(0.115 + 0.1305) == 1 + 10
    assert engine.generated_of(one, 0.115 + 0.1305) == 1 + 10


def test_what_is_cached_is_not_computed_again():
    engine = Engine(SERVICE)
    engine.submit(turn("a", prompt=100, output=21))
    run_until_idle(engine)
    following = turn("a", prompt=150, output=1, number=2, shared=121)
    engine.submit(following)
    engine.settle(1.0)
    # 120 tokens have been computed, 12 blocks of them are found, 30 are left at a mean position of 135
    assert engine.next_event == pytest.approx(1.0 + 0.01 + 0.03 + 30 * 135 * 1e-6)
    engine.finish()
    assert following.cached_tokens == 120


def test_turns_are_scheduled_in_the_order_in_which_they_came():
    engine = Engine(SERVICE.model_copy(update={"blocks": 20}))
    engine.submit(turn("a", prompt=100, output=5))
    engine.submit(turn("large", prompt=150, output=5))
    engine.submit(turn("small", prompt=20, output=5))
    ends = [session for _, session in run_until_idle(engine)]
    assert ends == ["a-1", "large-1", "small-1"]


def test_no_more_turns_run_at_once_than_the_engine_takes():
    engine = Engine(SERVICE.model_copy(update={"max_num_seqs": 2}))
    for name in "abc":
        engine.submit(turn(name, prompt=10, output=50))
    engine.settle(0.0)
    assert (engine.running, engine.waiting) == (2, 1)


def test_the_turn_scheduled_last_gives_way_when_decoding_needs_its_blocks():
    engine = Engine(SERVICE.model_copy(update={"blocks": 20}))
    old, young = turn("old", prompt=95, output=50), turn("young", prompt=95, output=50)
    engine.submit(old)
    engine.submit(young)
    assert [session for _, session in run_until_idle(engine)] == ["old-1", "young-1"]
    assert engine.preemptions == 1
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert engine.generated(inf) == 100
    assert engine.cache.pinned == 0


def test_a_preempted_turn_counts_as_hit_only_what_it_found_at_first():
    engine = Engine(SERVICE.model_copy(update={"blocks": 20}))
    young = turn("young", prompt=95, output=50)
    engine.submit(turn("old", prompt=95, output=50))
    engine.submit(young)
    run_until_idle(engine)
    assert young.cached_tokens == 0


def test_a_pod_that_is_lost_gives_back_its_turns_as_they_were_before():
    engine = Engine(SERVICE)
    one, other = turn("a", prompt=100, output=50), turn("b", prompt=100, output=50)
    engine.submit(one)
    engine.settle(0.0)
    engine.finish()
    engine.submit(other)
    engine.settle(0.115)
    assert engine.fail() == [one, other]
    assert engine.next_event == inf
    assert (one.generated, one.cached_tokens, one.lease) == (0, None, None)
    assert (engine.cache.pinned, engine.cache.cached, engine.running, engine.waiting) == (0, 0, 0, 0)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=25),
    st.integers(25, 80),
)
def test_every_token_asked_for_is_generated_and_every_prompt_token_computed_or_found(turns, blocks):
    engine = Engine(SERVICE.model_copy(update={"blocks": blocks}))
    submitted = []
    for index, (session, prompt, output) in enumerate(turns):
        one = turn(f"s{session}-{index}", prompt, output)
        submitted.append(one)
        engine.submit(one)
    ends = run_until_idle(engine)
    assert len(ends) == len(turns)
    assert engine.generated(inf) == sum(output for _, _, output in turns)
    assert all(one.generated == one.plan.output_tokens for one in submitted)
    if not engine.preemptions:
        found = sum(one.cached_tokens or 0 for one in submitted)
        assert engine.prefilled_tokens + found == sum(prompt for _, prompt, _ in turns)
    assert engine.cache.pinned == 0
    assert engine.cache.cached + engine.cache.empty == blocks
