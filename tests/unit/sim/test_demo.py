"""How the demo divides its time, counts turns and sets up its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thunderagent_epp.feed.policy_file import parse_policy_file
from thunderagent_epp.scheduling.topology import Disaggregation, Handoff, RetentionPool
from thunderagent_sim.agent_script import LoadShape
from thunderagent_sim.agents import Agents
from thunderagent_sim.demo import BASELINE, PROGRAM_AWARE, PhaseResult, load_seconds, percentile, summarize, time_left
from thunderagent_sim.gateway import (
    DISAGGREGATED_WORKERS,
    PickerPorts,
    policy_yaml,
    read_picker_ports,
    read_worker_url,
)
from thunderagent_sim.observation import Observation, WorkerObservation

WORKER = WorkerObservation("worker-1", 1000, 0, 0, 0, queried_tokens=10, hit_tokens=0)
NOTHING = Observation((WORKER,), {}, held=0, holds=0, pauses=0, resumes=0)
WORKER_URLS = {"worker-1": "http://127.0.0.1:8001", "worker-2": "http://127.0.0.1:8002"}


def agents(*, took: list[float], running_for: list[float]) -> Agents:
    """Agents with these turns answered, and these running, at second 100."""
    some = Agents("http://gateway", "m", LoadShape(), seed=1, clock=lambda: 100.0)
    some.turn_seconds += took
    for agent, seconds in zip(some.agents, running_for, strict=False):
        agent.turn_began = 100.0 - seconds
    return some


def test_the_load_gets_what_two_starts_and_some_spare_time_leave() -> None:
    assert load_seconds(55.0, start_seconds=2.0) == 24.0
    assert load_seconds(10.0, start_seconds=9.0) == 1.0


def test_the_second_phase_is_as_long_as_the_first_unless_there_is_no_time_left_for_that() -> None:
    assert time_left(24.0, 25.0) == 24.0
    assert time_left(24.0, 20.5) == 20.5
    assert time_left(24.0, -3.0) == 1.0


@pytest.mark.parametrize(("percent", "value"), [(50, 2.0), (75, 3.0), (76, 4.0), (99, 4.0), (100, 4.0), (1, 1.0)])
def test_percentiles_are_by_nearest_rank(percent: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == value


def test_no_turn_has_no_percentile() -> None:
    assert percentile([], 50) is None


def test_a_turn_that_is_still_running_counts_with_the_time_it_has_taken() -> None:
    result = summarize(agents(took=[1.0, 1.5, 2.0], running_for=[9.0, 8.0]), NOTHING, NOTHING, 20.0)
    assert (result.turns, result.unfinished) == (3, 2)
    assert (result.turn_seconds_p50, result.turn_seconds_p99) == (2.0, 9.0)


def test_only_what_happened_in_the_phase_counts() -> None:
    after = Observation(
        (replace(WORKER, queried_tokens=2010, hit_tokens=1500),), {}, held=2, holds=9, pauses=4, resumes=3
    )
    result = summarize(agents(took=[1.0], running_for=[]), replace(NOTHING, holds=1), after, 20.0)
    assert (result.holds, result.pauses, result.resumes, result.held_at_end) == (8, 4, 3, 2)
    assert result.hit_rate == 0.75


def test_a_failed_turn_is_told_with_its_reason() -> None:
    some = agents(took=[], running_for=[])
    some.failures += ["HTTP 503", "HTTP 429"]
    result = summarize(some, NOTHING, NOTHING, 20.0)
    assert (result.failed, result.first_failure) == (2, "HTTP 503")
    assert (result.hit_rate, result.turn_seconds_p50) == (None, None)


def test_the_json_has_the_keys_that_are_promised() -> None:
    result = PhaseResult(68, 0, 9, 8, 3, 0.77, 1.2, 11.2, unfinished=10, held_at_end=6, load_seconds=20.0)
    assert result.as_json() == {
        "turns": 68,
        "failed": 0,
        "holds": 9,
        "pauses": 8,
        "resumes": 3,
        "hit_rate": 0.77,
        "turn_seconds_p50": 1.2,
        "turn_seconds_p99": 11.2,
    }


@pytest.mark.parametrize(("phase", "policy"), [(PROGRAM_AWARE, "Classic"), (BASELINE, "Disabled")])
def test_the_picker_is_given_a_policy_file_it_understands(phase, policy) -> None:
    parsed = parse_policy_file(policy_yaml(phase.admission, WORKER_URLS).encode(), "policy.yaml")
    assert parsed.admission.policy == policy
    assert [(worker.name, worker.endpoints(), worker.capacity_tokens) for worker in parsed.workers] == [
        ("worker-1", ["127.0.0.1:8001"], 20480),
        ("worker-2", ["127.0.0.1:8002"], 20480),
    ]


def test_disaggregated_the_picker_is_told_roles_and_where_programs_are_retained() -> None:
    urls = {name: f"http://127.0.0.1:{port}" for port, name in enumerate(DISAGGREGATED_WORKERS, start=8001)}
    parsed = parse_policy_file(policy_yaml({}, urls, DISAGGREGATED_WORKERS).encode(), "policy.yaml")
    assert [(worker.name, worker.role) for worker in parsed.workers] == [
        ("prefill-1", "prefill"),
        ("prefill-2", "prefill"),
        ("decode-1", "decode"),
        ("decode-2", "decode"),
    ]
    assert parsed.snapshot(1).disaggregation == Disaggregation(RetentionPool.BOTH, Handoff.LLM_D)


def test_the_picker_and_the_workers_tell_their_ports_in_their_logs() -> None:
    line = '{"time":"now","event":"listening","grpc_port":1,"health_port":2,"http_port":3}'
    assert read_picker_ports(line) == PickerPorts(grpc_port=1, http_port=3)
    assert read_picker_ports('{"event":"policy file in force"}') is None
    assert read_picker_ports("Traceback (most recent call last):") is None
    announced = "simulated worker listening on http://127.0.0.1:4711 (model m, 3200 tokens of KV cache)"
    assert read_worker_url(announced) == "http://127.0.0.1:4711"
    assert read_worker_url("anything else") is None
