"""What agents will do is settled by the seed alone."""

from itertools import islice

from thunderagent_sim.agent_script import Between, LoadShape, ScriptedSession, first_turn_after_seconds, sessions
from thunderagent_sim.tokens import count, pack


def first(agent: int, number: int = 3, *, seed: int = 1, shape: LoadShape | None = None) -> list[ScriptedSession]:
    return list(islice(sessions(shape or LoadShape(), seed, agent), number))


def test_the_same_seed_gives_the_same_sessions() -> None:
    assert first(4) == first(4)
    assert first(4) != first(4, seed=2)


def test_a_session_does_not_depend_on_how_far_an_agent_gets() -> None:
    assert first(4, 1) == first(4, 3)[:1]


def test_sessions_have_names_and_contents_of_their_own() -> None:
    (one, two), (other,) = first(0, 2), first(11, 1)
    assert [one.id, two.id, other.id] == ["agent-00.1", "agent-00.2", "agent-11.1"]
    assert len({one.turns[0].prompt, two.turns[0].prompt, other.turns[0].prompt}) == 3


def test_a_prompt_has_as_many_tokens_as_it_says() -> None:
    for turn in first(0)[0].turns:
        assert count(pack(turn.prompt)) == turn.prompt_tokens


def test_the_first_turn_is_the_large_one_and_all_sizes_are_within_the_shape() -> None:
    shape = LoadShape(
        opening_tokens=Between(50, 60),
        tool_output_tokens=Between(5, 9),
        answer_tokens=Between(3, 4),
        turns=Between(2, 5),
        tool_seconds=Between(0.5, 1.5),
    )
    for session in first(0, 50, shape=shape):
        assert 2 <= len(session.turns) <= 5
        opening, *later = session.turns
        assert 50 <= opening.prompt_tokens <= 60
        assert all(5 <= turn.prompt_tokens <= 9 for turn in later)
        assert all(3 <= turn.answer_tokens <= 4 and 0.5 <= turn.tool_seconds <= 1.5 for turn in session.turns)


def test_agents_begin_one_after_the_other_within_the_time_given() -> None:
    shape = LoadShape(first_turn_within_seconds=2.0)
    starts = [first_turn_after_seconds(shape, 1, agent) for agent in range(12)]
    assert len(set(starts)) == 12
    assert all(0 <= start <= 2 for start in starts)
