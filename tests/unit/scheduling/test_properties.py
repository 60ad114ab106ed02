"""What holds of the classifier whatever happens, looked for with random traces.

By default few traces are tried, always the same. ``THUNDERAGENT_PROPERTY_EXAMPLES=20000 pytest …`` tries as many
new ones.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import hypothesis
import pytest
from hypothesis import given, settings
from slow_model import SlowModel
from strategies import Event, traces

from thunderagent_epp.scheduling.capacity import CapacitySnapshot, Worker, WorkerRank
from thunderagent_epp.scheduling.classifier import Classifier
from thunderagent_epp.scheduling.decisions import Decision, Pause, Reject, Release, Resume, State
from thunderagent_epp.scheduling.policy import AdmissionPolicy

EXAMPLES = int(os.environ.get("THUNDERAGENT_PROPERTY_EXAMPLES", "0"))


def bounded(examples: int) -> settings:
    """So many examples, always the same ones, unless the environment asks for another number of new ones."""
    return settings(
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        max_examples=EXAMPLES or examples,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


pytestmark = pytest.mark.timeout(120 + EXAMPLES // 10)


class Run:
    """The real classifier, played a trace."""

    def __init__(self, policy: Event) -> None:
        self.policy = AdmissionPolicy.from_parameters(policy["parameters"])
        self.classifier = Classifier(self.policy)

    def play(self, event: Event) -> Sequence[Decision]:
        classifier, now = self.classifier, event.get("t", 0)
        match event["event"]:
            case "snapshot":
                classifier.snapshot(_snapshot(event))
            case "arrive":
                pinned = event.get("pinned")
                return classifier.arrive(
                    event["request"],
                    event["session"],
                    event["input_tokens"],
                    now,
                    final=event["final"],
                    pinned=pinned and WorkerRank(pinned["worker"], pinned["rank"]),
                )
            case "sent":
                classifier.sent(event["request"], WorkerRank(event["worker"], event["rank"]))
            case "progress":
                classifier.progress(event["request"], event["context_tokens"])
            case "completed":
                return classifier.completed(event["request"], event.get("context_tokens"), now)
            case "aborted":
                return classifier.aborted(event["request"], now)
            case "tick":
                return classifier.tick(now)
        return ()


def _snapshot(event: Event) -> CapacitySnapshot:
    return CapacitySnapshot(
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


def as_line(decision: Decision | State, now: float) -> dict[str, Any]:
    """A decision as replay prints it."""
    line = asdict(decision) | {"decision": type(decision).__name__.lower(), "t": now}
    if isinstance(decision, State):
        return line | {"waiting": list(decision.waiting)}
    if "worker" in line:
        name, rank = line["worker"] or (None, None)
        line |= {"worker": name, "rank": rank}
    return line


@bounded(1200)
@given(traces())
def test_the_classifier_decides_as_the_slow_model_does(trace: list[Event]) -> None:
    policy, *events = trace
    run, model = Run(policy), SlowModel()
    model.play(policy)
    for number, event in enumerate(events, start=2):
        now = event.get("t", 0)
        decisions = [as_line(decision, now) for decision in run.play(event)]
        assert decisions == model.play(event), f"line {number}: {event}"
        (expected,) = model.play({"event": "dump", "t": now})
        assert as_line(run.classifier.dump(), now) == expected, f"after line {number}: {event}"


@bounded(200)
@given(traces())
def test_the_ledger_equals_the_recomputed_sum_after_every_event(trace: list[Event]) -> None:
    policy, *events = trace
    run = Run(policy)
    weight, buffer = run.policy.acting_token_weight, run.policy.buffer_per_program
    for event in events:
        run.play(event)
        state = run.classifier.dump()
        sums: dict[str, int] = {}
        for program in state.programs.values():
            if program.worker is not None:
                share = weight if program.status == "acting" else 1
                worker = f"{program.worker}/{program.rank}"
                sums[worker] = sums.get(worker, 0) + math.floor(program.tokens * share) + buffer
        assert dict(state.used) == {worker: tokens for worker, tokens in sums.items() if tokens}


@bounded(200)
@given(traces())
def test_no_program_is_paused_and_charged(trace: list[Event]) -> None:
    policy, *events = trace
    run = Run(policy)
    for event in events:
        run.play(event)
        for program in run.classifier.dump().programs.values():
            assert program.lifecycle == "active" or (program.worker is None and not program.marked)
            assert program.status == "reasoning" or not program.marked


@dataclass
class Client:
    """Follows the requests from the outside: which were tracked, which are running, which have ended."""

    waiting: dict[str, str] = field(default_factory=dict)
    """Sessions by request."""
    running: dict[str, str] = field(default_factory=dict)

    def sees(self, event: Event, decisions: Sequence[Decision]) -> None:
        request = event.get("request", "")
        if event["event"] in ("completed", "aborted"):
            self.waiting.pop(request, None)
            self.running.pop(request, None)
        rejected = any(isinstance(decision, Reject) for decision in decisions)
        if event["event"] == "arrive" and not rejected:
            assert request not in self.waiting | self.running, "two registrations of one id"
            self.waiting[request] = event["session"]
        for decision in decisions:
            if isinstance(decision, Release):
                assert decision.request in self.waiting, "released twice, or after its end"
                session = self.waiting.pop(decision.request)
                assert session not in self.running.values(), "two requests of one session run"
                self.running[decision.request] = session


@bounded(200)
@given(traces())
def test_a_session_runs_one_request_and_each_ends_at_most_once(trace: list[Event]) -> None:
    policy, *events = trace
    run, client = Run(policy), Client()
    for event in events:
        client.sees(event, run.play(event))
        state = run.classifier.dump()
        assert list(state.waiting) == sorted(client.waiting)
        assert state.tracked == len(client.waiting) + len(client.running)


@bounded(200)
@given(traces())
def test_what_a_tick_pauses_stays_paused_until_the_next(trace: list[Event]) -> None:
    policy, *events = trace
    run = Run(policy)
    for event in events:
        paused: set[str] = set()
        for decision in run.play(event):
            if isinstance(decision, Pause):
                paused.add(decision.session)
            if isinstance(decision, Resume):
                assert not paused, "a program is resumed after one is paused"
        programs = run.classifier.dump().programs
        assert all(programs[session].lifecycle == "paused" for session in paused)


@bounded(200)
@given(traces())
def test_events_of_untracked_requests_change_nothing(trace: list[Event]) -> None:
    policy, *events = trace
    run, client = Run(policy), Client()
    for event in events:
        known = client.waiting | client.running
        untracked = event["event"] in ("sent", "progress", "completed", "aborted") and event["request"] not in known
        before = run.classifier.dump()
        decisions = run.play(event)
        client.sees(event, decisions)
        if untracked:
            assert not decisions
            assert run.classifier.dump() == before


def test_replay_prints_the_same_under_any_hash_seed_and_what_the_slow_model_decides() -> None:
    collected: list[list[Event]] = []

    @settings(bounded(60), max_examples=60)
    @given(traces(replayable=True))
    def collect(trace: list[Event]) -> None:
        collected.append([*trace, {"event": "dump"}])

    collect()
    program = (
        "import json, sys\n"
        "from thunderagent_epp.replay import replay\n"
        "for trace in json.load(sys.stdin):\n"
        "    print(*replay(json.dumps(event) for event in trace), sep='\\n')\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps(collected),
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    models = [(SlowModel(), trace) for trace in collected]
    expected = [decision for model, trace in models for event in trace for decision in model.play(event)]
    assert [json.loads(line) for line in outputs[0].splitlines()] == expected
