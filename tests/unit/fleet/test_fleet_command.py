from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from thunderagent_sim.fleet.command import simulate

SMALL = ("--pods", "1", "--sessions-per-pod", "3", "--minutes", "11")


def run(*arguments: str):
    app = typer.Typer()
    app.command()(simulate)
    return CliRunner().invoke(app, arguments)


def test_json_is_one_object_by_arm_and_sessions():
    result = run(
        "--pods", "1", "--sessions-per-pod", "3,2", "--minutes", "11", "--arm", "prefix", "--arm", "load", "--json"
    )
    assert result.exit_code == 0
    arms = json.loads(result.stdout)["arms"]
    assert list(arms) == ["prefix", "load"]
    assert list(arms["prefix"]) == ["2", "3"]
    assert list(arms["prefix"]["2"]) == [
        "output_tokens_per_second",
        "hit_rate",
        "ttft_p50",
        "ttft_p99",
        "turns",
        "holds",
        "hold_p99",
        "longest_hold",
    ]
    assert arms["prefix"]["3"]["turns"] > 0


def test_a_table_compares_with_the_default_router():
    result = run(*SMALL)
    assert result.exit_code == 0
    assert "coding-agents on 1 simulated pods, minutes 10–11, seed 1" in result.stdout
    assert "1.00×" in result.stdout
    assert "rotation" in result.stdout


def test_out_keeps_results_and_plots(tmp_path):
    out = tmp_path / "a" / "study"
    result = run(*SMALL, "--arm", "prefix", "--arm", "rotation", "--out", str(out))
    assert result.exit_code == 0
    results = json.loads((out / "results.json").read_bytes())
    assert results["pods"] == 1
    assert results["engine"]["block_size"] == 16
    assert set(results["arms"]["rotation"]["3"]) >= {"ttft_p90", "fairness", "preemptions"}
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == ["prefix", "rotation"]
    assert {path.name for path in out.glob("*.png")} >= {
        "throughput.png",
        "front.png",
        "first_token.png",
        "timeline.png",
    }


def test_a_policy_file_is_an_arm_under_its_name(tmp_path):
    policy = tmp_path / "mine.yaml"
    policy.write_text("admission:\n  policy: Classic\n  pauseThreshold: 0.9\n")
    result = run(*SMALL, "--arm", str(policy), "--json")
    assert list(json.loads(result.stdout)["arms"]) == ["mine"]


def test_recorded_sessions_can_be_replayed(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"turn":0,"prompt":5000,"output":200}\n{"turn":1,"prompt":6000,"output":300,"gap":1}\n')
    result = run(*SMALL, "--workload", str(trace), "--arm", "load", "--json")
    assert json.loads(result.stdout)["arms"]["load"]["3"]["turns"] > 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--minutes", "10"), "--minutes: must be above 10, the minutes of warm-up, not 10"),
        (("--minutes", "nan"), "--minutes: must be above 10, the minutes of warm-up, not nan"),
        (("--sessions-per-pod", "4,x"), "--sessions-per-pod: must be whole numbers from 1 to 10000"),
        (("--sessions-per-pod", "0"), "--sessions-per-pod: must be whole numbers from 1 to 10000"),
        (
            ("--arm", "best"),
            "--arm: best is neither a policy file nor one of load, affinity, prefix, ",
        ),
        (("--workload", "none.jsonl"), "--workload: none.jsonl is neither a file nor one of coding-agents,"),
        (("--engine", "none.yaml"), "--engine: none.yaml is neither a file nor fitted"),
        (("--sessions-per-pod", "2000"), "--arm: rotation: maxTrackedRequests 10000 is too few for 8000 sessions"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"thunderagent: {message}")


@pytest.mark.parametrize(
    ("option", "name", "text", "message"),
    [
        ("--workload", "w.jsonl", '{"turn":0,"prompt":1}\n', "w.jsonl:1: output: is required"),
        ("--engine", "e.yaml", "blocks: 0\n", "e.yaml:1: blocks: must be above 0, not 0"),
        ("--arm", "p.yaml", "admission:\n  pauseThreshold: 2\n", "p.yaml:2: admission.pauseThreshold: must be between"),
        ("--arm", "p.yaml", "admission:\n  maxHold: 10s\n", "p.yaml: admission.maxHold: is not simulated"),
        ("--arm", "p.yaml", "[", "p.yaml:2: is not valid YAML"),
        ("--engine", "e.yaml", "blocks: 1000\n", "--workload: coding-agents: a context can have 200,000 tokens, and"),
    ],
)
def test_a_bad_file_is_named_with_line_and_field(tmp_path, monkeypatch, option, name, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    result = run(option, name)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"thunderagent: {message}")


def test_a_directory_that_cannot_be_made_is_said_before_the_run(tmp_path):
    taken = tmp_path / "file"
    taken.write_text("")
    result = run("--out", str(taken))
    assert result.exit_code == 2
    assert result.stderr == f"thunderagent: --out: {taken}: File exists\n"


def test_hash_order_has_no_say(tmp_path):
    engine = tmp_path / "engine.yaml"
    engine.write_text("blocks: 20000\n")
    command = [sys.executable, "-m", "thunderagent_epp.cli", "simulate", "--pods", "2", "--sessions-per-pod", "7"]
    command += ["--minutes", "12", "--arm", "prefix", "--arm", "rotation", "--engine", str(engine), "--json"]
    outputs = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        outputs.append(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0])["arms"]["rotation"]["7"]["holds"] > 0
