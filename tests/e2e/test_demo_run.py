"""``thunderagent demo`` as a user runs it: real Envoy, real picker, real processes, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the demo's parts in /proc")

PROGRAM = "import typer; from thunderagent_sim.demo_command import demo; typer.run(demo)"


@contextlib.contextmanager
def running_demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def children(pid: int) -> dict[str, int]:
    """The process ids of the demo's parts, by a word of their command line."""
    parts = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
        parts[next(word for word in ("simulate-worker", " epp ", "envoy") if word in command).strip()] = int(child)
    return parts


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def wait_for(stream, text: str) -> None:
    assert stream is not None
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"ended without saying {text!r}")


def test_the_policy_keeps_more_of_the_contexts_cached_than_the_baseline() -> None:
    with running_demo("--json", "--seconds", "26") as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    result = json.loads(output)
    assert list(result) == ["policy", "baseline"]
    for numbers in result.values():
        assert numbers["failed"] == 0, errors
        assert numbers["turns"] > 0
        assert 0 < numbers["turn_seconds_p50"] <= numbers["turn_seconds_p99"]
    assert result["policy"]["hit_rate"] > result["baseline"]["hit_rate"]
    assert [result["baseline"][name] for name in ("holds", "pauses", "resumes")] == [0, 0, 0]


def test_disaggregated_turns_are_answered_by_prefill_and_decode_workers_together() -> None:
    with running_demo("--json", "--seconds", "30", "--disaggregated") as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    for numbers in json.loads(output).values():
        assert numbers["failed"] == 0, errors
        assert numbers["turns"] > 0
        # Looked up by the prefill workers alone: nobody else computes prompts.
        assert numbers["hit_rate"] is not None


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_gateway_it_serves_answers_the_curl_line_it_prints_until_ctrl_c() -> None:
    with running_demo("--serve") as process:
        assert process.stdout is not None
        wait_for(process.stdout, "The gateway is at http://127.0.0.1:")
        process.stdout.readline()
        curl = shlex.split(process.stdout.readline())
        parts = children(process.pid)
        assert set(parts) == {"simulate-worker", "epp", "envoy"}
        sent = subprocess.run([*curl, "--silent", "--show-error", "--fail"], capture_output=True, check=True)
        answer = json.loads(sent.stdout)
        assert answer["object"] == "chat.completion"
        process.stdout.readline()
        label, state = process.stdout.readline().split()
        assert label == "state"
        with urllib.request.urlopen(state) as response:
            assert list(json.load(response)["programs"]) == ["mine"]
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
        assert all(ended(part) for part in parts.values())


@pytest.mark.parametrize(("part", "called"), [("epp", "picker"), ("envoy", "Envoy"), ("simulate-worker", "worker-2")])
def test_a_part_that_dies_ends_the_demo_with_its_name(part: str, called: str) -> None:
    with running_demo("--json") as process:
        wait_for(process.stderr, "program-aware: first request answered")
        parts = children(process.pid)
        os.kill(parts[part], signal.SIGKILL)
        output, errors = process.communicate()
    assert process.returncode == 1
    assert output == ""
    assert errors.splitlines()[-1].startswith(f"thunderagent demo: {called} was killed (SIGKILL)")
    assert all(ended(each) for each in parts.values())


def test_ctrl_c_ends_everything() -> None:
    with running_demo() as process:
        wait_for(process.stdout, "program-aware: first request answered")
        parts = children(process.pid)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
    assert process.returncode == 130
    assert (output, errors) == ("interrupted\n", "")
    assert all(ended(each) for each in parts.values())
