from __future__ import annotations

from random import Random

import pytest

from thunderagent_sim.fleet.recorded import WorkloadError, load_workload, read_workload
from thunderagent_sim.fleet.turns import PlannedTurn


def read(*lines: str):
    return read_workload([line.encode() + b"\n" for line in lines], "trace.jsonl")


def test_a_session_is_its_turns_in_order():
    workload = read(
        '{"turn":0,"prompt":1000,"output":50}',
        '{"turn":1,"prompt":1200,"output":70,"gap":2.5}',
    )
    assert workload.session(Random(1)) == [
        PlannedTurn(1000, 0, 50),
        PlannedTurn(1200, 1050, 70, gap_seconds=2.5, last=True),
    ]


def test_turn_0_begins_another_session_where_sessions_have_no_names():
    workload = read('{"turn":0,"prompt":10,"output":1}', '{"turn":0,"prompt":20,"output":1}')
    drawn = {workload.session(Random(seed))[0].prompt_tokens for seed in range(20)}
    assert drawn == {10, 20}


def test_named_sessions_may_be_mixed():
    workload = read(
        '{"session":"a","turn":0,"prompt":10,"output":1}',
        '{"session":"b","turn":0,"prompt":20,"output":1}',
        '{"session":"a","turn":1,"prompt":30,"output":1}',
    )
    drawn = {tuple(turn.prompt_tokens for turn in workload.session(Random(seed))) for seed in range(20)}
    assert drawn == {(10, 30), (20,)}


def test_a_shorter_prompt_shares_all_of_itself():
    workload = read('{"turn":0,"prompt":1000,"output":50}', '{"turn":1,"prompt":400,"output":50}')
    assert workload.session(Random(1))[1].shared_tokens == 400


def test_a_gap_below_0_overlaps_the_turn_before():
    workload = read('{"turn":0,"prompt":1000,"output":50}', '{"turn":1,"prompt":1100,"output":50,"gap":-3}')
    following = workload.session(Random(1))[1]
    assert following.overlaps
    assert (following.shared_tokens, following.gap_seconds) == (1000, 0.0)


def test_the_largest_context_is_that_of_prompt_and_answer():
    workload = read('{"turn":0,"prompt":1000,"output":50}', '{"turn":0,"prompt":900,"output":500}')
    assert workload.largest_context_tokens == 1400


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "trace.jsonl:2: not a JSON object: "),
        ("[1]", "trace.jsonl:2: not a JSON object"),
        pytest.param("[" * 100_000, "trace.jsonl:2: nested too deeply", id="deep"),
        ('{"turn":1,"output":1}', "trace.jsonl:2: prompt: is required"),
        ('{"turn":1,"prompt":0,"output":1}', "trace.jsonl:2: prompt: must be above 0, not 0"),
        ('{"turn":1,"prompt":"5","output":1}', "trace.jsonl:2: prompt: must be a whole number, not '5'"),
        ('{"turn":1,"prompt":5,"output":-1}', "trace.jsonl:2: output: must be above 0, not -1"),
        ('{"turn":1,"prompt":5,"output":1,"gap":"x"}', "trace.jsonl:2: gap: must be a number, not 'x'"),
        ('{"turn":1,"prompt":5,"output":1,"gapp":1}', "trace.jsonl:2: gapp: unknown field; did you mean gap?"),
        ('{"turn":2,"prompt":5,"output":1}', "trace.jsonl:2: turn: must be 1, the session's next, not 2"),
    ],
)
def test_a_bad_line_is_named_with_its_field(line, message):
    with pytest.raises(WorkloadError) as error:
        read('{"turn":0,"prompt":10,"output":1}', line)
    assert str(error.value).startswith(message)


def test_a_file_without_turns_is_refused():
    with pytest.raises(WorkloadError, match=r"trace\.jsonl:1: is empty"):
        read("", "")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(WorkloadError, match=r"none\.jsonl: cannot be read: No such file"):
        load_workload(tmp_path / "none.jsonl")
