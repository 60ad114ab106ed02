"""Replay: the shared traces give their decisions to the letter, and a bad line is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from thunderagent_epp.cli import app
from thunderagent_epp.replay import TraceError, replay

CASES = Path(__file__).parents[1] / "cases" / "replay"
NAMES = sorted(path.name.removesuffix(".expected.jsonl") for path in CASES.glob("*.expected.jsonl"))


def test_every_case_is_here() -> None:
    assert len(NAMES) == 27


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_gives_its_decisions(name: str) -> None:
    trace = (CASES / f"{name}.jsonl").read_text().splitlines()
    expected = (CASES / f"{name}.expected.jsonl").read_text().splitlines()
    assert list(replay(trace)) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[", "line 1: not a JSON object: Input data was truncated"),
        ("[]", "line 1: not a JSON object"),
        pytest.param("[" * 100_000, "line 1: nested too deeply", id="deep"),
        ("{}", "line 1: event: is required: one of policy, snapshot, arrive, sent, progress, completed, aborted, "
         "tick, dump"),
        ('{"event":["tick"]}', "line 1: event: must be one of policy, snapshot, arrive, sent, progress, completed, "
         "aborted, tick, dump, not a list"),
        ('{"event":"tick","t":1,"t":2}', "line 1: t: is there twice"),
        ('{"event":"snapshot","workers":[{"worker":"a","rank":0,"rank":1}]}', "line 1: rank: is there twice"),
        ('{"event":"tick","foo":1}', "line 1: foo: unknown field"),
        ('{"event":"tick","t":"now"}', "line 1: t: must be a number of seconds, not 'now'"),
        ('{"event":"policy"}', "line 1: parameters: is required"),
        ('{"event":"policy","parameters":{"foo":1}}', "line 1: parameters.foo: unknown field"),
        ('{"event":"policy","parameters":{"pauseTarget":0.5}}',
         "line 1: parameters.pauseTarget: unknown field; did you mean pause_target?"),
        ('{"event":"policy","policy":"Clasic"}', "line 1: policy: must be Disabled, Classic or Rotation, not 'Clasic'"),
        ('{"event":"policy","parameters":{"pause_threshold":1.5}}',
         "line 1: parameters.pause_threshold: must be between 0 and 1, not 1.5"),
        ('{"event":"policy","parameters":{"pause_threshold":0.5}}',
         "line 1: parameters.pause_target: must not be above the pause threshold: 0.8 > 0.5 (0.8 is the default)"),
        ('{"event":"policy","parameters":{"resume_hysteresis":0.96}}',
         "line 1: parameters.resume_hysteresis: must not be above the pause threshold: 0.96 > 0.95"),
        ('{"event":"policy","parameters":{"resume_timeout_seconds":0}}',
         "line 1: parameters.resume_timeout_seconds: must be above 0, not 0"),
        ('{"event":"policy","parameters":{"buffer_per_program":true}}',
         "line 1: parameters.buffer_per_program: must be a whole number, not true"),
        ('{"event":"snapshot","workers":[{"worker":"a"},{"worker":"a","rank":0}]}',
         "line 1: workers: two workers share a name and rank"),
        ('{"event":"snapshot","workers":[{"worker":"a","rank":"0"}]}',
         "line 1: workers[0].rank: must be a whole number, not '0'"),
        ('{"event":"arrive","request":"r","session":"s","input_tokens":-1}',
         "line 1: input_tokens: must be at least 0, not -1"),
        ('{"event":"arrive","request":"r","session":"s","input_tokens":1,"pinned":{"rank":0}}',
         "line 1: pinned.worker: is required"),
        ('{"event":"arrive","request":"r","session":"s","input_tokens":1,"pinned":"a"}',
         "line 1: pinned: must be a mapping of fields, not 'a'"),
        ('{"event":"arrive","request":"","session":"s","input_tokens":1}', "line 1: request: must not be empty"),
        ('{"event":"arrive","request":"r","session":"s","input_tokens":1,"final":1}',
         "line 1: final: must be true or false, not 1"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_its_field(line: str, message: str) -> None:
    with pytest.raises(TraceError) as error:
        list(replay([line]))
    assert str(error.value) == message


def test_a_policy_must_come_first() -> None:
    with pytest.raises(TraceError, match="line 3: event: a policy must come before all other events"):
        list(replay(['{"event":"tick","t":1}', "", '{"event":"policy","parameters":{}}']))


def test_what_came_before_a_bad_line_is_printed() -> None:
    decisions = replay(['{"event":"dump","t":7}', "nonsense"])
    assert next(decisions) == ('{"decision": "state", "programs": {}, "t": 7, "tracked": 0, "used": {}, "waiting": []}')
    with pytest.raises(TraceError, match="line 2"):
        next(decisions)


def test_the_command_reads_standard_input_and_exits_2_on_a_bad_line() -> None:
    result = CliRunner().invoke(app, ["replay", "-"], input='{"event":"dump"}\n{"event":"nap"}\n')
    assert result.exit_code == 2
    assert result.stdout == '{"decision": "state", "programs": {}, "t": 0, "tracked": 0, "used": {}, "waiting": []}\n'
    assert result.stderr.startswith("thunderagent: standard input: line 2: event: must be one of")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "none.jsonl")])
    assert result.exit_code == 2
    assert result.stderr == f"thunderagent: {tmp_path / 'none.jsonl'}: No such file or directory\n"


def test_a_line_nested_too_deeply_is_named_and_not_a_traceback() -> None:
    result = CliRunner().invoke(app, ["replay", "-"], input='{"event":"tick"}\n' + "[" * 100_000 + "\n")
    assert result.exit_code == 2
    assert result.stderr == "thunderagent: standard input: line 2: nested too deeply\n"
