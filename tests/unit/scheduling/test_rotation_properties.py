"""What holds of the rotating rules whatever happens, looked for with the random traces of the classic ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Event, traces

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Worker, WorkerRank
from thunderagent_epp.scheduling.decisions import Decision, Pause, Reject, Release, Resume
from thunderagent_epp.scheduling.policy import AdmissionPolicy
from thunderagent_epp.scheduling.rotation import Rotation

EXAMPLES = int(os.environ.get("THUNDERAGENT_PROPERTY_EXAMPLES", "0"))

pytestmark = pytest.mark.timeout(120 + EXAMPLES // 10)


def bounded(examples: int) -> settings:
    """So many examples, always the same ones, unless the environment asks for another number of new ones."""
    return settings(
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        max_examples=EXAMPLES or examples,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def rotating(policy: Event) -> Rotation:
    given_parameters: dict[str, Any] = policy["parameters"]
    return Rotation(AdmissionPolicy.from_parameters(given_parameters | {"policy": "Rotation"}))


def play(rules: Rotation, event: Event) -> Sequence[Decision]:
    now = event.get("t", 0)
    match event["event"]:
        case "snapshot":
            rules.snapshot(
                CapacitySnapshot(
                    tuple(
                        Worker(
                            WorkerRank(worker["worker"], worker["rank"]),
                            capacity_tokens=worker["capacity_tokens"],
                            live=worker["live"],
                            incarnation=worker.get("incarnation", ""),
                        )
                        for worker in event["workers"]
                    ),
                    liveness_known=event.get("liveness_known", True),
                )
            )
        case "arrive":
            pinned = event.get("pinned")
            place = None if pinned is None else WorkerRank(pinned["worker"], pinned["rank"])
            return rules.arrive(
                event["request"], event["session"], event["input_tokens"], now, final=event["final"], pinned=place
            )
        case "sent":
            rules.sent(event["request"], WorkerRank(event["worker"], event["rank"]))
        case "progress":
            rules.progress(event["request"], event["context_tokens"])
        case "completed":
            return rules.completed(event["request"], event.get("context_tokens"), now)
        case "aborted":
            return rules.aborted(event["request"], now)
        case "tick":
            return rules.tick(now)
    return ()


@bounded(60)
@given(traces())
def test_the_ledger_equals_the_recomputed_sum_after_every_event(trace: list[Event]) -> None:
    policy, *events = trace
    rules, buffer = rotating(policy), policy["parameters"]["buffer_per_program"]
    for event in events:
        play(rules, event)
        state = rules.dump()
        sums: dict[str, int] = {}
        for program in state.programs.values():
            if program.worker is not None:
                worker = f"{program.worker}/{program.rank}"
                sums[worker] = sums.get(worker, 0) + program.tokens + buffer
        assert dict(state.used) == {worker: tokens for worker, tokens in sums.items() if tokens}


@bounded(60)
@given(traces())
def test_no_program_is_paused_and_charged_or_marked(trace: list[Event]) -> None:
    policy, *events = trace
    rules = rotating(policy)
    for event in events:
        play(rules, event)
        for program in rules.dump().programs.values():
            assert program.lifecycle == "active" or program.worker is None
            assert not program.marked


@bounded(60)
@given(traces())
def test_every_request_is_released_once_and_ends_at_most_once(trace: list[Event]) -> None:
    policy, *events = trace
    rules = rotating(policy)
    waiting: set[str] = set()
    running: set[str] = set()
    for event in events:
        request = event.get("request", "")
        known = request in waiting | running
        before = rules.dump()
        decisions = play(rules, event)
        if event["event"] in ("sent", "progress", "completed", "aborted") and not known:
            assert not decisions
            assert rules.dump() == before
        if event["event"] in ("completed", "aborted"):
            waiting.discard(request)
            running.discard(request)
        if event["event"] == "arrive" and not any(isinstance(decision, Reject) for decision in decisions):
            assert not known
            waiting.add(request)
        for decision in decisions:
            if isinstance(decision, Release):
                assert decision.request in waiting
                waiting.remove(decision.request)
                running.add(decision.request)
        state = rules.dump()
        assert list(state.waiting) == sorted(waiting)
        assert state.tracked == len(waiting) + len(running)


@bounded(60)
@given(traces())
def test_nothing_is_cut_in_the_middle_of_a_turn(trace: list[Event]) -> None:
    policy, *events = trace
    rules = rotating(policy)
    for event in events:
        before = rules.dump().programs
        for decision in play(rules, event):
            if isinstance(decision, Pause) and event["event"] not in ("completed", "aborted"):
                assert before[decision.session].status == "acting"


@bounded(40)
@given(
    st.lists(st.integers(1, 1200), min_size=2, max_size=8),
    st.lists(st.integers(500, 1500), min_size=1, max_size=3),
    st.floats(0.05, 1.0),
)
def test_nobody_waits_for_ever(sizes: list[int], capacities: list[int], budget: float) -> None:
    """Every turn ends a second after it was sent, and the next one comes a second later: each waiter has its turn.

    It waits at most for those before it, of whom one at least is brought in by every ``1.5 * H`` and two seconds.
    """
    parameters = {"policy": "Rotation", "buffer_per_program": 0, "hold_budget": budget}
    rules = Rotation(
        AdmissionPolicy.from_parameters(parameters | {"prefill_tokens_per_second": 1000.0}),
        CapacitySnapshot(
            tuple(Worker(WorkerRank(f"w{number}"), capacity_tokens=size) for number, size in enumerate(capacities))
        ),
    )
    sessions = [f"s{number}" for number in range(len(sizes))]
    patience = len(sizes) * (1.5 * sum(sizes) / (len(capacities) * 1000.0 * budget) + 4)
    arrived = dict.fromkeys(sessions, 0.0)
    running: set[str] = set()
    due = list(sessions)
    for second in range(300):
        decisions: list[Decision] = []
        for session in due:
            arrived[session] = second
            size = sizes[sessions.index(session)]
            decisions += rules.arrive(session, session, size, second)
        due = sorted(running)
        for session in due:
            running.remove(session)
            decisions += rules.completed(session, None, second + 0.25)
        decisions += rules.tick(second + 0.5)
        for decision in decisions:
            if isinstance(decision, Release):
                assert second - arrived.pop(decision.request) <= patience
                running.add(decision.request)
            assert not (isinstance(decision, Resume) and decision.forced)
    assert all(300 - since <= patience for since in arrived.values())


def test_replay_prints_the_same_under_any_hash_seed() -> None:
    collected: list[list[Event]] = []

    @settings(bounded(30), max_examples=30)
    @given(traces(replayable=True))
    def collect(trace: list[Event]) -> None:
        policy, *events = trace
        collected.append([policy | {"policy": "Rotation"}, *events, {"event": "dump"}])

    collect()
    program = (
        "import json, sys\n"
        "from thunderagent_epp.replay import replay\n"
        "for trace in json.load(sys.stdin):\n"
        "    print(*replay(json.dumps(event) for event in trace), sep='\\n')\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps(collected),
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    (output,) = outputs
    assert output.count('"decision": "state"') == len(collected)
