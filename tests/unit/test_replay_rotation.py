"""Replay under the rotating rules: traces that tell one rule each give their decisions to the letter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thunderagent_epp.replay import replay

CASES = Path(__file__).parents[1] / "cases" / "rotation"
NAMES = sorted(path.name.removesuffix(".expected.jsonl") for path in CASES.glob("*.expected.jsonl"))


def test_every_case_is_here() -> None:
    assert len(NAMES) == 6


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_gives_its_decisions(name: str) -> None:
    trace = (CASES / f"{name}.jsonl").read_text().splitlines()
    expected = (CASES / f"{name}.expected.jsonl").read_text().splitlines()
    assert list(replay(trace)) == expected


def test_no_turn_of_two_alternating_sessions_waits_for_a_second() -> None:
    trace = (CASES / "two_alternating_sessions_do_not_wait.jsonl").read_text().splitlines()
    arrived = {event["request"]: event["t"] for event in map(json.loads, trace) if event["event"] == "arrive"}
    released = {line["request"]: line["t"] for line in map(json.loads, replay(trace)) if line["decision"] == "release"}
    assert len(arrived) == 6
    assert released == arrived
