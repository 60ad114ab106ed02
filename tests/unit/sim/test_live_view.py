"""What a person gets to see."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from thunderagent_sim.agents import Agent, AgentState
from thunderagent_sim.demo import BASELINE, PROGRAM_AWARE, Moment, Phase, PhaseResult
from thunderagent_sim.live_view import LiveScreen, PlainLines, activity, result_table, save_screenshot, screen
from thunderagent_sim.observation import Observation, ProgramObservation, WorkerObservation

WORKERS = (
    WorkerObservation("worker-1", 1000, 620, 300, requests=2, queried_tokens=400, hit_tokens=300),
    WorkerObservation("worker-2", 1000, 0, 0, requests=0, queried_tokens=0, hit_tokens=0),
)
PROGRAMS = {"agent-00.1": ProgramObservation("worker-1", False), "agent-01.1": ProgramObservation(None, True)}
AGENTS = (
    Agent(0, "agent-00.1", 3, 8, 1400, AgentState.ANSWERING, since=98.5),
    Agent(1, "agent-01.1", 1, 9, 800, AgentState.WAITING, since=90.0),
    Agent(2, since=100.0),
)
RESULTS = {
    PROGRAM_AWARE: PhaseResult(68, 0, 9, 8, 3, 0.77, 1.234, 11.2, 10, 6, 20.0),
    BASELINE: PhaseResult(33, 0, 0, 0, 0, 0.051, 5.53, 7.2, 12, 0, 20.0),
}


def moment(phase: Phase = PROGRAM_AWARE, seconds_left: float = 9.0) -> Moment:
    return Moment(
        phase=phase,
        seconds_left=seconds_left,
        agents=AGENTS,
        turns=42,
        failed=0,
        now=100.0,
        observation=Observation(WORKERS, PROGRAMS, held=1, holds=5, pauses=2, resumes=4),
        hit_rate=0.75,
        earlier={} if phase is PROGRAM_AWARE else {PROGRAM_AWARE: RESULTS[PROGRAM_AWARE]},
    )


def lines(drawn: RenderableType, width: int = 92) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(drawn)
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_workers_show_what_is_charged_to_them_and_their_hit_rate() -> None:
    shown = lines(screen(moment()))
    assert any(line.endswith("620/1,000 charged 2 running hits 75 %") for line in shown)
    assert any(line.endswith("0/1,000 charged 0 running hits -") for line in shown)


def test_workers_of_the_baseline_which_charges_nothing_show_what_they_use() -> None:
    assert any("300/1,000 in use" in line for line in lines(screen(moment(BASELINE))))


def test_sessions_show_their_turn_context_worker_and_state() -> None:
    shown = lines(screen(moment()))
    assert any(line.startswith("agent-00.1 3/8") and line.endswith("1,400 worker-1 answering 1.5 s") for line in shown)
    assert any(line.startswith("agent-01.1 1/9") and line.endswith("800 - held 10.0 s") for line in shown)
    assert any(line.startswith("agent-02") and line.endswith("0 - starting 0.0 s") for line in shown)


def test_the_screen_says_which_phase_it_is_and_what_came_of_the_one_before() -> None:
    shown = lines(screen(moment(BASELINE, 9.4)))
    assert shown[0] == "baseline (2 of 2) 9 s left"
    assert shown[-1] == ("program-aware: 68 turns, hit rate 77 %, turn time p50 1.23 s, p99 11.20 s")
    assert shown[-2] == "42 turns, 5 holds (1 now), 2 pauses, 4 resumes, cache hit rate 75 %"


def test_the_screen_fits_a_terminal_of_80_by_24() -> None:
    twelve = tuple(Agent(number, f"agent-{number:02}.1", 12, 14, 10_000) for number in range(12))
    shown = lines(screen(Moment(**{**_fields(moment(BASELINE)), "agents": twelve})), width=80)
    assert len(shown) <= 24


def _fields(moment: Moment) -> dict:
    return {name: getattr(moment, name) for name in Moment.__slots__}


@pytest.mark.parametrize(
    ("state", "paused", "shown"),
    [
        (AgentState.WAITING, False, "prefill"),
        (AgentState.WAITING, True, "held"),
        (AgentState.TOOL, False, "tool"),
        (AgentState.TOOL, True, "paused"),
        (AgentState.ANSWERING, False, "answering"),
    ],
)
def test_a_session_is_held_or_paused_when_the_picker_says_so(state: AgentState, paused: bool, shown: str) -> None:
    assert activity(Agent(0, state=state), ProgramObservation(None, paused)) == shown


def test_a_session_the_picker_does_not_know_is_not_held() -> None:
    assert activity(Agent(0, state=AgentState.WAITING), None) == "prefill"


def test_the_table_sets_both_side_by_side_and_says_what_it_counts() -> None:
    shown = lines(result_table(RESULTS, seed=1))
    assert shown[:9] == [
        "program-aware baseline",
        "turns 68 33",
        "holds 9 0",
        "pauses 8 0",
        "resumes 3 0",
        "cache hit rate 77 % 5 %",
        "turn time p50 1.23 s 5.53 s",
        "turn time p99 11.20 s 7.20 s",
        "unfinished 10 (6 held) 12 (0 held)",
    ]
    assert "unfinished turns with the time they had taken" in " ".join(shown[9:])


def test_failed_turns_are_in_the_table_with_a_reason() -> None:
    broken = PhaseResult(0, 3, 0, 0, 0, None, None, None, 0, 0, 20.0, first_failure="HTTP 503: no_endpoints")
    shown = lines(result_table({PROGRAM_AWARE: broken}, seed=1))
    assert "failed 3" in shown
    assert "turn time p50 -" in shown
    assert shown[-1] == "program-aware: a turn failed: HTTP 503: no_endpoints"


def test_without_a_terminal_a_line_comes_every_five_seconds() -> None:
    console = Console(file=io.StringIO(), width=200)
    view = PlainLines(console)
    view.starting(PROGRAM_AWARE)
    view.ready(PROGRAM_AWARE, 2.345, 20.0)
    for left in (20.0, 15.1, 14.9, 14.0, 9.9):
        view.show(moment(seconds_left=left))
    view.finished(PROGRAM_AWARE, RESULTS[PROGRAM_AWARE])
    assert isinstance(console.file, io.StringIO)
    totals = "42 turns, 5 holds (1 now), 2 pauses, 4 resumes, cache hit rate 75 %"
    assert console.file.getvalue().splitlines() == [
        "program-aware: starting Envoy, the picker and its workers",
        "program-aware: first request answered after 2.3 s; agents work for 20 s",
        f"program-aware: 15 s left, {totals}",
        f"program-aware: 10 s left, {totals}",
        "program-aware: 68 turns, cache hit rate 77 %",
    ]


def test_the_live_screen_keeps_the_middle_of_the_program_aware_phase_for_a_screenshot(tmp_path: Path) -> None:
    with LiveScreen(Console(file=io.StringIO(), force_terminal=True)) as live:
        live.starting(PROGRAM_AWARE)
        live.ready(PROGRAM_AWARE, 2.0, 20.0)
        for left in (19.0, 11.0, 2.0):
            live.show(moment(seconds_left=left))
        live.show(moment(BASELINE, 15.0))
    assert live.middle is not None
    assert lines(live.middle)[0] == "program-aware (1 of 2) 11 s left"
    save_screenshot(tmp_path / "demo.svg", live.middle, result_table(RESULTS, seed=1))
    assert "thunderagent" in (tmp_path / "demo.svg").read_text()
